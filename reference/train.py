"""Training the toy model: plain PyTorch on the inference modules themselves.

    python -m reference.train backbone OUT [--minutes M | --steps N] [--from DIR] [...]
    python -m reference.train draft OUT --from DIR [--minutes M | --steps N]
    python -m reference.train plot LOG.jsonl PICTURE.png
    python -m reference.train backbone OUT --smoke          one minute on a CPU: a tiny run of the three phases
    python -m reference.train draft OUT --from DIR --smoke  likewise, of the drafts

What it does, in three phases of the backbone (fractions of the run, ours)
    1. short contexts, attention over all compressed rows; the index learns from the attention
    2. long contexts, still over all rows
    3. long contexts, the real selection: the attention sees what the index chose
    and then, with the backbone frozen, the draft stages.
Loss
    next token, on text positions; answers of questions count more (ours). Index: Kullback-Leibler divergence from the
    attention's distribution over the compressed rows (summed over heads and over the layers that share the selection) to
    the softmax of the index scores; its gradient goes to index weights only. Source of the recipe: the DeepSeek-V3.2 report
    (warm-up over all positions, then sparse training, index input detached); here the target stays the attention over all
    rows in both phases, which a small model affords.
    Experts are balanced by moving the router's biases against the load; there is no auxiliary loss (report).
    Draft: 0.1 cross-entropy + 0.9 L1 distance of the distributions + 1.0 binary cross-entropy of the confidence, position
    k weighted by exp(-(k - 1) / 4), anchors drawn at random (DSpark paper).
Numerics
    native: activations, caches and weights are rounded as in inference, gradients pass straight through.
    Masters and optimizer are float32 (training_weights.py). What runs in another form than inference: training_forms.py.
Several GPUs
    torchrun --nproc-per-node N -m reference.train ...: every rank draws its own batches, gradients are averaged.
How a run ends
    OUT and --log are tried before the first step. Ctrl-C ends a run early and exports the weights as they are (with several
    GPUs nothing is exported). A loss that is not finite ends it with an error; OUT then keeps the checkpoint it had.
Test
    tests/test_train.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import inference
from inference import dspark
from inference.command import INTERRUPTED, Parser, run
from inference.config import Config
from inference.context import Context
from inference.hyper_connections import collapse, first_pre
from inference.image_processor import TEXT, process_image
from inference.indexer import visible_groups
from inference.model import Model, Output
from inference.numerics import Numerics
from inference.tokenizer import Tokenizer, fold_vocabulary
from reference.toyworld.configuration import toy_config
from reference.toyworld.corpus import SHORTEST, Question, episode
from reference.training_forms import picture_rows, table_rows, training_forms
from reference.training_weights import Masters, export, initial_values, parameter_count, read_masters, stored_formats

CHECKPOINT = Path(__file__).parent / "toyworld" / "checkpoint"
KINDS = {"text": 0.7, "chat": 0.17, "picture": 0.13}  # of the rows of a batch; ours
PICTURE_SIZES = ((6, 6), (6, 9), (9, 6))  # patch rows and columns of the pictures of the toy world
PICTURE_SHARE = 768  # ours: one picture of each size per so many tokens has room in a batch
ANSWER_WEIGHT = 4.0  # ours: of a token that answers a question, against 1 of other text
PICTURE_WEIGHT = 12.0  # ours: likewise, about a picture; finding a shape's place is what the model learns last

BIAS_STEP = 2e-3  # ours; report: the bias moves by a constant against the load
INDEX_SHARE = 4  # ours: the index loss is computed on every fourth row of the batch
PHASES = (0.35, 0.5)  # ours: where short contexts and where the selection of all rows end
SMOKE = {"batch_tokens": 512, "short": 128, "long": 256, "report_every": 2, "workers": 0, "anchors": 4}  # ours
SMOKE_STEPS = 6  # ours
LOGGED = {"backbone": ("tokens", "loss", "index"), "draft": ("tokens", "accepted")}  # what `plot` needs of each stage


# --- batches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows of packed episodes. B rows of S tokens."""

    ids: Tensor  # [B, S] int64
    weights: Tensor  # [B, S] float32: what predicting this token counts; 0 for the first, images and padding
    types: Tensor  # [B, S] int64 as model(token_types=) takes
    pictures: tuple[Tensor, ...]  # per size of PICTURE_SIZES: patches [n, P, 3, p, p], filled up with zeros to a fixed n
    order: Tensor  # [rows of all pictures] int64: which of them, size after size, belongs to each span position in turn
    questions: tuple[tuple[int, Question], ...]  # row of the batch, question with positions in that row
    real: Tensor  # [B, S] bool: the position belongs to an episode, not to the padding behind the last one

    def to(self, device: torch.device) -> Batch:
        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return dataclasses.replace(self, ids=move(self.ids), weights=move(self.weights), types=move(self.types),
                                   order=move(self.order), real=move(self.real),
                                   pictures=tuple(map(move, self.pictures)))


def make_batch(seed: int, rows: int, tokens: int, split: str, tokenizer: Tokenizer, config: Config,
               kinds: Sequence[str] | None = None, shares: Sequence[float] = tuple(KINDS.values())) -> Batch:
    """Deterministic in its arguments. kinds: of every row; by default drawn with the shares of the kinds of KINDS."""
    chance = random.Random(f"{split} {seed}")
    ids, weights = torch.full((rows, tokens), config.pad_token_id), torch.zeros(rows, tokens)
    types, real = torch.full((rows, tokens), TEXT), torch.zeros(rows, tokens, dtype=torch.bool)
    questions: list[tuple[int, Question]] = []
    room = max(12, rows * tokens // PICTURE_SHARE)
    patches: dict[tuple[int, int], list[Tensor]] = {size: [] for size in PICTURE_SIZES}
    spans: list[tuple[tuple[int, int], int]] = []  # size and number within the size, in the order of the prompt
    for row in range(rows):
        kind = kinds[row] if kinds else chance.choices(list(KINDS), shares)[0]
        used = 0
        while tokens - used >= SHORTEST:
            own = episode(chance.getrandbits(48), tokens - used, split, tokenizer, kind=kind)
            end = used + len(own.ids)
            images = [process_image(picture, config.vision_config) for picture in own.images]
            if any(len(held) + len(images) > room for held in patches.values()):
                break
            ids[row, used:end] = torch.tensor(own.ids)
            weights[row, used + 1:end] = 1.0
            real[row, used:end] = True
            if own.token_types is not None:
                types[row, used:end] = torch.tensor(own.token_types)
            for image in images:
                size = image.patch_rows, image.patch_cols
                spans.append((size, len(patches[size])))
                patches[size].append(image.patches)
            for question in own.questions:
                moved = dataclasses.replace(question, start=question.start + used, end=question.end + used)
                weights[row, moved.start:moved.end] = PICTURE_WEIGHT if moved.task == "picture" else ANSWER_WEIGHT
                questions.append((row, moved))
            used = end
    weights[types != TEXT] = 0.0
    lengths = {size: _span_length(size, config) for size in PICTURE_SIZES}
    first = {size: room * sum(lengths[other] for other in PICTURE_SIZES[:i]) for i, size in enumerate(PICTURE_SIZES)}
    order = torch.zeros(room * sum(lengths.values()), dtype=torch.int64)
    if spans:
        used_rows = torch.cat([torch.arange(lengths[size]) + first[size] + number * lengths[size] for size, number in spans])
        order[:len(used_rows)] = used_rows
    side = config.vision_config.patch_size
    filled = tuple(torch.stack(held + [torch.zeros(math.prod(size), 3, side, side, dtype=torch.bfloat16)] *
                               (room - len(held))) for size, held in patches.items())
    return Batch(ids, weights, types, filled, order, tuple(questions), real)


def _span_length(size: tuple[int, int], config: Config) -> int:
    rows, cols = (-(-patches // config.vision_config.downsample_ratio) for patches in size)
    return rows * (cols + 1) + 2


class Batches(torch.utils.data.IterableDataset):
    """Endless batches; worker w of n gives numbers w, w + n, ... of one sequence."""

    def __init__(self, seed: int, shape: tuple[int, int], tokenizer_dir: Path, config: Config,
                 shares: Sequence[float]) -> None:
        self.seed, self.shape, self.tokenizer_dir, self.config, self.shares = seed, shape, tokenizer_dir, config, shares

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker else (0, 1)
        tokenizer = Tokenizer.load(self.tokenizer_dir)
        while True:
            yield make_batch(self.seed * 1_000_003 + number, *self.shape, "train", tokenizer, self.config,
                             shares=self.shares)
            number += step


def _one(batches: list[Batch]) -> Batch:
    return batches[0]


def loader(batches: Batches, workers: int) -> Iterator[Batch]:
    return iter(torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=_one, num_workers=workers,
                                            prefetch_factor=4 if workers else None))


# --- forward -------------------------------------------------------------------------------------------------------


def build_model(config: Config, tokenizer: Tokenizer, device: torch.device) -> Model:
    """An empty model in native numerics, all parameters trainable."""
    folded = torch.from_numpy(fold_vocabulary(tokenizer, config.text_config.vocab_size))
    model = Model(config, Numerics.of("native"), folded.to(device)).to(device)
    model.memory_budget = 1 << 60  # whole matrices: slices would only add to the graph
    return model


def forward(model: Model, batch: Batch, observe=None) -> Output:
    """All positions of a batch from the start, nothing kept. Within `training_forms`."""
    parts = [picture_rows(model, patches, *size).flatten(0, 1) for size, patches in zip(PICTURE_SIZES, batch.pictures)]
    rows = [table_rows(torch.cat(parts), batch.order, model.numerics.dtype)] + [None] * (len(batch.ids) - 1)
    cache = model.new_cache(len(batch.ids), kind="bf16")
    return model(batch.ids, cache, token_types=batch.types, image_rows=rows, commit=False, observe=observe)


def next_token_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Weighted mean cross-entropy. logits [B, S, V] float32."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def select(model: Model, everything: bool) -> None:
    """Choose whether queries select all compressed rows or, as configured, the best."""
    text = model.config.text_config
    if everything:
        text = dataclasses.replace(text, index_topk=1 << 20, candidate_topk_blocks=1 << 20)
    for layer in model.layers:
        layer.attn.config = text


class IndexLoss:
    """Observes a forward; `value()` is the index loss of it, and `loads` the tokens of every expert.

    real: [B, S] bool as in Batch. Padding has no load: the biases would move against it, and so against the text.
    """

    def __init__(self, model: Model, real: Tensor) -> None:
        self.model, self.seen = model, {}
        self.loads: dict[str, Tensor] = {}  # "layers.3.ffn" -> tokens of every expert [2, E]: at text, at image positions
        self.real = real.flatten()
        self.kinds: tuple[Tensor, Tensor] | None = None  # [B * S] bool each: text, image positions
        self.layers = {layer.plan.name: layer for layer in model.layers}

    def __call__(self, point: str, value: Tensor) -> None:
        name, _, rest = point.partition(".attn.")
        if rest in ("q", "kv_quant", "compressor.kv"):
            self.seen[point] = value.detach()[::INDEX_SHARE]
        elif rest == "indexer.scores":
            self.seen[point] = value[::INDEX_SHARE]
        elif point.endswith(".ffn.expert_ids"):
            name = point.removesuffix(".expert_ids")
            experts = torch.arange(len(self.model.get_submodule(name).experts), device=value.device)
            chosen = (value.flatten(0, 1).unsqueeze(-1) == experts).sum(1)  # [B * S, E]
            self.loads[name] = torch.stack([(chosen * kind.unsqueeze(-1)).sum(0) for kind in self.kinds])
        elif point == "image_mask":
            image = value.flatten()
            self.kinds = self.real & ~image, self.real & image

    def value(self) -> Tensor:
        """Mean over index layers and positions of KL(attention over compressed rows || softmax of scores)."""
        losses = []
        for layer in self.model.layers:
            if not layer.plan.owns_indexer:
                continue
            scores = self.seen[f"{layer.plan.name}.attn.indexer.scores"].to(torch.float32)
            sharing = [other for other in self.model.layers if other.plan.index_source == layer.plan.layer_id]
            with torch.no_grad():
                target = sum(self._attention(other) for other in sharing)
                mass = target.sum(-1, keepdim=True)
                target = target / mass.clamp_min(1e-9)
            log_index = torch.log_softmax(scores, dim=-1).masked_fill(scores == float("-inf"), 0.0)
            divergence = (target * (target.clamp_min(1e-9).log() - log_index)).sum(-1)
            has_rows = (scores > float("-inf")).any(-1)
            losses.append(torch.where(has_rows, divergence, 0.0).sum() / has_rows.sum())
        return sum(losses) / len(losses)

    def _attention(self, layer: torch.nn.Module) -> Tensor:
        """[b, S, N]: probability of every visible compressed row, summed over heads, if all were selected."""
        config, plan = self.model.config.text_config, layer.plan
        q = self.seen[f"{plan.name}.attn.q"]
        rows = self.seen[f"layers.{plan.kv_source}.attn.compressor.kv"]
        own = self.seen[f"{plan.name}.attn.kv_quant"]
        tokens = q.shape[1]
        positions = torch.arange(tokens, device=q.device)
        visible = visible_groups(positions[None], plan.compress_ratio, rows.shape[1])  # [1, S, N]
        age = positions[:, None] - positions
        window = ((age >= 0) & (age < config.sliding_window))[None]
        keys = torch.cat((rows, own), dim=1)
        logits = torch.einsum("bshk,bnk->bhsn", q, keys).to(torch.float32) * config.head_dim**-0.5
        seen = torch.cat((visible, window), dim=-1)
        logits = logits.masked_fill(~seen.unsqueeze(1), float("-inf"))
        sink = layer.attn.attn_sink.detach().view(1, -1, 1, 1).expand(q.shape[0], -1, tokens, 1)
        probabilities = torch.softmax(torch.cat((logits, sink), dim=-1), dim=-1)
        return probabilities[..., :rows.shape[1]].sum(1)


@torch.no_grad()
def balance(masters: Masters, loads: Mapping[str, Tensor]) -> None:
    """Move the router biases against the load of a batch, text and image positions apart. loads as `IndexLoss.loads`."""
    for name, load in loads.items():
        load = load.to(torch.float32)
        if dist.is_initialized():
            dist.all_reduce(load)
        for bias, own in zip(("bias", "bias_vl"), load):
            masters.values[f"{name}.gate.{bias}"].add_(torch.sign(own.mean() - own), alpha=BIAS_STEP)


# --- draft stages --------------------------------------------------------------------------------------------------


def draft_loss(model: Model, batch: Batch, anchor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the draft stages at places anchor [B, A] int64 of every row, the backbone's forward without gradients.

    Anchor p is a token that the backbone has not processed: context rows are those of positions before p, the block stands
    at p .. p + G - 1, and row k is compared with the backbone's distribution after the true tokens up to p + k.
    """
    text = model.config.text_config
    size, window, width = text.dspark_block_size, text.sliding_window, text.head_dim
    with torch.no_grad():
        output = forward(model, batch)
    count, tokens = batch.ids.shape
    device = batch.ids.device
    whole = Context(model.numerics, positions=torch.arange(tokens, device=device).expand(count, -1), starts=(0,) * count,
                    counts=(tokens,) * count, memory_budget=model.memory_budget)
    rows = dspark.context_rows(model.mtp, output.main_hidden, whole)

    in_block = anchor.unsqueeze(-1) + torch.arange(size, device=device)  # [B, A, G]
    past = anchor.unsqueeze(-1) - window + torch.arange(window, device=device)  # [B, A, W], negative: none
    flat = anchor.numel()
    batch_row = torch.arange(count, device=device).view(-1, 1, 1)
    ids = batch.ids[batch_row, in_block]
    targets, counted = batch.ids[batch_row, in_block + 1], batch.weights[batch_row, in_block + 1] > 0
    counted = counted.to(torch.float32).cumprod(-1)  # what comes after an image or the end teaches nothing
    block = ids.clone()
    block[..., 1:] = text.dspark_noise_token_id
    context = dataclasses.replace(whole, positions=in_block.view(flat, size), starts=(0,) * flat, counts=(size,) * flat)
    index = torch.cat((torch.where(past < 0, -1, torch.arange(window, device=device)).view(flat, 1, window),
                       window + torch.arange(size, device=device).expand(flat, 1, -1)), dim=-1).expand(-1, size, -1)

    streams = model.embed(block.view(flat, size), model.numerics).unsqueeze(2).expand(-1, -1, text.hc_mult, -1)
    pre = first_pre(streams)
    for stage in model.mtp:
        held = rows[stage.plan.layer_id][batch_row, past.clamp_min(0)].view(flat, window, width)

        def attention(x: Tensor) -> Tensor:
            frequencies = stage.attn.frequencies(x.device)
            _, q = stage.attn.query(x, frequencies, context)
            kv = torch.cat((held, stage.attn.window_rows(x, frequencies, context)), dim=1)
            return stage.attn.project(stage.attn.attend(q, kv, index, frequencies, context), context)

        streams, pre = stage.sublayers(streams, pre, attention, context)
    hidden = collapse(streams, pre)

    previous = iter(ids.view(flat, size).unbind(1)[1:])  # teacher forcing: the true token, not the chosen one
    last = ids.view(flat, size)[:, -1]
    made = dspark.draft_heads(model.mtp[-1], model.head, hidden, ids.view(flat, size)[:, 0], context,
                              lambda logits: next(previous, last))
    teacher = torch.softmax(output.logits[batch_row, in_block].view(flat, size, -1), dim=-1)
    own = torch.softmax(made.logits, dim=-1)
    weights = counted.view(flat, size) * torch.exp(-torch.arange(size, device=device) / 4.0)  # DSpark paper: decay 4
    total = weights.sum().clamp_min(1.0)
    entropy = F.cross_entropy(made.logits.flatten(0, 1), targets.flatten(), reduction="none").view(flat, size)
    distance = (own - teacher).abs().sum(-1)
    confidence = F.binary_cross_entropy_with_logits(made.confidence, (1 - 0.5 * distance).detach(), reduction="none")
    loss = ((0.1 * entropy + 0.9 * distance + confidence) * weights).sum() / total
    agree = (made.logits.argmax(-1) == teacher.argmax(-1)).to(torch.float32).cumprod(-1)
    real = counted.view(flat, size)
    return loss, {"accepted": (agree * real).sum() / real[:, 0].sum().clamp_min(1),
                  "distance": (distance * real).sum() / real.sum().clamp_min(1)}


# --- the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    stage: str  # "backbone" or "draft"
    minutes: float | None
    steps: int | None
    batch_tokens: int  # per rank
    short: int  # tokens of a row in phase 1
    long: int
    rate: float  # peak learning rate
    seed: int
    workers: int
    compiled: bool
    anchors: int = 32
    phases: tuple[float, float] = PHASES
    shares: tuple[float, ...] = tuple(KINDS.values())
    warmup: float = 0.03  # ours: fraction of the run
    report_every: int = 50
    checks: int = 2  # test batches of every evaluation


class Clock:
    """How far the run is: of its steps, or of its minutes (then the number of steps depends on the machine).

    Minutes count from the end of the first step, which compiles.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.started, self.step = settings, time.perf_counter(), 0

    def tick(self) -> None:
        self.step += 1
        if self.step == 1:
            self.started = time.perf_counter()

    @property
    def minutes(self) -> float:
        return (time.perf_counter() - self.started) / 60

    def progress(self) -> float:
        """0 .. 1, the same on every rank."""
        if self.settings.steps is not None or self.step == 0:
            return 0.0 if self.step == 0 else min(1.0, self.step / self.settings.steps)
        value = torch.tensor(min(1.0, self.minutes / self.settings.minutes))
        if dist.is_initialized():
            value = value.cuda() if torch.cuda.is_available() else value
            dist.broadcast(value, 0)
        return float(value)


def learning_rate(progress: float, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a fiftieth (ours)."""
    if progress < settings.warmup:
        return settings.rate * max(progress / settings.warmup, 0.01)
    done = (progress - settings.warmup) / (1 - settings.warmup)
    return settings.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_for(masters: Masters, names: Sequence[str]) -> torch.optim.Optimizer:
    """AdamW. Engram tables learn five times as fast and do not decay (report of the Engram paper); vectors do not decay.

    ours: decay 0.05, betas, epsilon.
    """
    groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name in names:
        value = masters.values[name]
        table = name.endswith("engram.embed.weight")
        decay = 0.0 if table or value.dim() < 2 or "hc_" in name or name == "embed.weight" else 0.05
        groups[(5.0 if table else 1.0), decay].append(value)
    return torch.optim.AdamW([{"params": values, "weight_decay": decay, "factor": factor}
                              for (factor, decay), values in groups.items()],
                             betas=(0.9, 0.98), eps=1e-9, fused=next(iter(masters.values.values())).is_cuda)


class Step:
    """One batch: forward, losses, gradients, which end up in `masters` averaged over ranks and clipped to norm 1 (ours)."""

    def __init__(self, model: Model, masters: Masters, settings: Settings) -> None:
        self.model, self.masters, self.settings = model, masters, settings
        self.device, self.drafting = model.norm.weight.device, settings.stage == "draft"
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = list(trained.values())
        self.index = [parameter for name, parameter in trained.items() if ".indexer." in name]
        self.others = [parameter for name, parameter in trained.items() if ".indexer." not in name]
        self.gradient = torch.zeros(sum(p.numel() for p in self.parameters), device=self.device)
        self.parts = [part.view(p.shape) for part, p in
                      zip(self.gradient.split([p.numel() for p in self.parameters]), self.parameters)]
        for name, part in zip(trained, self.parts):
            masters.values[name].grad = part
        self.generator = torch.Generator().manual_seed(settings.seed + (dist.get_rank() if dist.is_initialized() else 0))

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Returns the losses, the loads of the experts, and the norm of the gradient before it is clipped."""
        size = self.model.config.text_config.dspark_block_size
        anchor = torch.randint(1, batch.ids.shape[1] - size - 1, (len(batch.ids), self.settings.anchors),
                               generator=self.generator)
        found = self._compute(batch.to(self.device), anchor.to(self.device))
        if dist.is_initialized():
            dist.all_reduce(self.gradient)
            self.gradient /= dist.get_world_size()
        norm = self.gradient.norm()
        self.gradient *= (1.0 / (norm + 1e-6)).clamp_max(1.0)
        return {**found, "gradient": norm}

    def _compute(self, batch: Batch, anchor: Tensor) -> dict[str, Any]:
        for parameter in self.parameters:
            parameter.grad = None
        self.masters.publish()
        if self.drafting:
            loss, found = draft_loss(self.model, batch, anchor)
            loss.backward()
        else:
            watch = IndexLoss(self.model, batch.real)
            loss = next_token_loss(forward(self.model, batch, watch).logits, batch)
            index_loss = watch.value()
            torch.autograd.backward(index_loss, inputs=self.index, retain_graph=True)
            torch.autograd.backward(loss, inputs=self.others)
            found = {"index": index_loss.detach(), "loads": watch.loads}
        with torch.no_grad():
            reached = [(part, p.grad) for part, p in zip(self.parts, self.parameters) if p.grad is not None]
            self.gradient.zero_()
            torch._foreach_copy_([part for part, _ in reached], [gradient for _, gradient in reached])
        return {"loss": loss.detach(), **found}


def train(model: Model, masters: Masters, clock: Clock, tokenizer_dir: Path, log: Path | None) -> None:
    """Train the parameters of one stage of `model`; masters are changed, and clock counts the steps.

    Raises ValueError for a loss or gradient that is not finite, found at the next report or at the end: asking after every
    step would make the host wait for the device.
    """
    settings = clock.settings
    device, config = model.norm.weight.device, model.config
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    drafting = settings.stage == "draft"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp.") == drafting and not name.endswith(("gate.bias", "gate.bias_vl")))
    optimizer = optimizer_for(masters, [name for name, p in model.named_parameters() if p.requires_grad])
    tokenizer = Tokenizer.load(tokenizer_dir)
    bar = tqdm(total=1.0, desc=settings.stage, disable=rank > 0, mininterval=1.0, bar_format="{l_bar}{bar}| {elapsed}{postfix}")
    tokens_seen = _tokens_before(log, settings.stage)
    shape, batches, last = None, None, (time.perf_counter(), tokens_seen)
    tests: dict[tuple[int, int], list[Batch]] = {}

    with training_forms(model, settings.compiled), contextlib.ExitStack() as stack:
        step, found = Step(model, masters, settings), {}
        stack.callback(bar.close)
        records = stack.enter_context(open(log, "a")) if log is not None and rank == 0 else None
        while (progress := clock.progress()) < 1.0:
            length = settings.short if not drafting and progress < settings.phases[0] else settings.long
            everything = not drafting and progress < settings.phases[1]
            wanted = (max(1, settings.batch_tokens // length), length)
            if wanted != shape:
                shape = wanted
                batches = loader(Batches(settings.seed * 64 + rank * 7 + length, shape, tokenizer_dir, config,
                                         settings.shares), settings.workers)
            select(model, everything)
            found = step(next(batches))
            for group in optimizer.param_groups:
                group["lr"] = group["factor"] * learning_rate(progress, settings)
            optimizer.step()
            balance(masters, found.pop("loads", {}))
            clock.tick()
            tokens_seen += math.prod(shape) * ranks
            if clock.step % settings.report_every == 0 or clock.step == 1:
                record = {"stage": settings.stage, "step": clock.step, "minutes": round(clock.minutes, 3),
                          "progress": round(progress, 4), "tokens": tokens_seen,
                          **{key: round(value, 4) for key, value in _finite(found, clock.step).items()}}
                now = time.perf_counter()
                record["tokens_per_second"] = round((tokens_seen - last[1]) / (now - last[0]))
                last = now, tokens_seen
                if device.type == "cuda":
                    record["memory"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 1)
                if not drafting and clock.step % (5 * settings.report_every) == 0 and rank == 0:
                    masters.publish()
                    if shape not in tests:
                        tests = {shape: [make_batch(number, *shape, "test", tokenizer, config, mixed_kinds(shape[0]))
                                         for number in range(settings.checks)]}
                    record["answers"] = check(model, tests[shape])
                bar.set_postfix_str(" ".join(f"{key}={value}" for key, value in record.items()
                                             if key in ("step", "loss", "index", "accepted", "answers")))
                if records is not None:
                    records.write(json.dumps(record) + "\n")
                    records.flush()
            bar.update(progress - bar.n)
    _finite(found, clock.step)
    select(model, False)
    masters.publish()


def _finite(found: Mapping[str, Tensor], step: int) -> dict[str, float]:
    """Losses and norm of a step as numbers. Raises ValueError if one is not finite."""
    values = {key: float(value.detach()) for key, value in found.items()}
    for key, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"Training: after step {step}, {key} is {value}, wanted a finite number; nothing is exported. "
                             "Try a lower --rate, or another checkpoint for --from.")
    return values


def read_log(log: Path) -> list[dict[str, Any]]:
    """The records of a log, one JSON object a line. Raises ValueError for a file that is no log of this module."""
    def wrong(line: int, what: str) -> ValueError:
        return ValueError(f"Reading the training log {log}: line {line} {what}; wanted one record of a training run. Repair "
                          "or remove the line, or give another file.")

    def number(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    try:
        text = log.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Reading the training log {log}: {error}. Give a file that --log wrote.") from None
    records = []
    for line, content in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(content)
        except ValueError:
            raise wrong(line, "is not JSON, or is cut off") from None
        if not isinstance(record, dict) or record.get("stage") not in LOGGED:
            raise wrong(line, f"has no stage of {', '.join(LOGGED)}")
        for key in LOGGED[record["stage"]]:
            if not number(record.get(key)):
                raise wrong(line, f"has no number {key!r}")
        answers = record.get("answers", {})
        if not isinstance(answers, dict) or not all(map(number, answers.values())):
            raise wrong(line, "has answers that are not a share for each task")
        records.append(record)
    if text and not text.endswith("\n"):
        raise wrong(len(records), "is cut off (it has no line end)")
    return records


def _tokens_before(log: Path | None, stage: str) -> int:
    """Tokens that earlier runs of a stage had seen, by their log, so that a run that goes on counts on."""
    if log is None or not log.exists():
        return 0
    return max((record["tokens"] for record in read_log(log) if record["stage"] == stage), default=0)


def mixed_kinds(rows: int) -> list[str]:
    """Kinds of the rows of a test batch: half text, a quarter chat, a quarter pictures."""
    return [("text", "chat", "text", "picture")[row % 4] for row in range(rows)]


@torch.no_grad()
def check(model: Model, batches: Sequence[Batch]) -> dict[str, float]:
    """Share of questions whose whole answer is predicted, by task; retrieval also beyond the window ("far")."""
    right, asked = defaultdict(int), defaultdict(int)
    for batch in batches:
        batch = batch.to(model.norm.weight.device)
        found = (forward(model, batch).logits.argmax(-1)[:, :-1] == batch.ids[:, 1:]).cpu()
        for row, question in batch.questions:
            hit = bool(found[row, question.start - 1:question.end - 1].all())
            far = question.distance is not None and question.distance > model.config.text_config.sliding_window
            for task in (question.task, *(("far",) if far else ())):
                right[task] += hit
                asked[task] += 1
    return {task: round(right[task] / asked[task], 3) for task in sorted(asked)}


# --- command -------------------------------------------------------------------------------------------------------


def plot(log: Path, picture: Path) -> None:
    """Draw loss, index loss and answers of a log (JSON lines) into a PNG. Raises ValueError for a file that is no log."""
    records = read_log(log)
    if not records:
        raise ValueError(f"Drawing the training log {log}: it is empty, wanted at least one record. Give the file that --log "
                         "of a run wrote.")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    backbone = [r for r in records if r["stage"] == "backbone"]
    draft = [r for r in records if r["stage"] == "draft"]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    axes[0].plot([r["tokens"] / 1e6 for r in backbone], [r["loss"] for r in backbone], label="next token")
    axes[0].plot([r["tokens"] / 1e6 for r in backbone], [r["index"] for r in backbone], label="index")
    axes[0].set(title="Backbone loss", xlabel="million tokens", ylabel="nats", yscale="log")
    axes[0].legend()
    checked = [r for r in backbone if "answers" in r]
    for task in sorted({task for r in checked for task in r["answers"]}):
        own = [r for r in checked if task in r["answers"]]
        axes[1].plot([r["tokens"] / 1e6 for r in own], [r["answers"][task] for r in own], label=task)
    axes[1].set(title="Test questions answered", xlabel="million tokens", ylim=(0, 1.02))
    if checked:
        axes[1].legend(fontsize=8)
    axes[2].plot([r["tokens"] / 1e6 for r in draft], [r["accepted"] for r in draft])
    axes[2].set(title="Drafts that agree with the backbone, of 5", xlabel="million tokens", ylim=(0, 5))
    figure.savefig(picture, dpi=80)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.train", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    stages = {}
    for name in ("backbone", "draft"):
        own = stages[name] = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        own.add_argument("out", type=Path, help="folder for the exported checkpoint")
        own.add_argument("--from", dest="start", type=Path, required=name == "draft", help="checkpoint to go on from")
        own.add_argument("--tokenizer", type=Path, default=CHECKPOINT, help="folder with tokenizer.json")
        length = own.add_mutually_exclusive_group()
        length.add_argument("--minutes", type=float)
        length.add_argument("--steps", type=int)
        own.add_argument("--batch-tokens", type=int, default=65536, help="per rank and step")
        own.add_argument("--short", type=int, default=256)
        own.add_argument("--long", type=int, default=1024)
        own.add_argument("--rate", type=float, default=2e-3)
        own.add_argument("--phases", type=float, nargs=2, default=PHASES)
        own.add_argument("--shares", type=float, nargs=len(KINDS), default=tuple(KINDS.values()), metavar="SHARE",
                         help=f"of the rows of a batch: {', '.join(KINDS)}")
        own.add_argument("--seed", type=int, default=1)
        own.add_argument("--workers", type=int, default=2)
        own.add_argument("--anchors", type=int, default=32, help="draft: anchors per row")
        own.add_argument("--report-every", type=int, default=50)
        own.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        own.add_argument("--compile", action="store_true", help="torch.compile for the many small operations")
        own.add_argument("--log", type=Path, help="JSON lines; appended to")
        own.add_argument("--smoke", action="store_true", help="a few small steps, to see that everything runs: other defaults")
    own = commands.add_parser("plot")
    own.add_argument("log", type=Path)
    own.add_argument("picture", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "plot":
        plot(given.log, given.picture)
        return 0
    if given.smoke:
        stages[given.command].set_defaults(**SMOKE)
        given = parser.parse_args(arguments)  # so that what is given explicitly stays
        if given.minutes is None and given.steps is None:
            given.steps = SMOKE_STEPS
    return _train_command(given)


def _check_numbers(given: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be used."""
    if given.minutes is None and given.steps is None:
        raise ValueError("Training: give --minutes or --steps, or --smoke for a short trial.")
    least = {"steps": 1, "batch_tokens": 1, "short": SHORTEST, "long": SHORTEST, "seed": 0, "workers": 0, "anchors": 1,
             "report_every": 1}
    for name, bound in least.items():
        value = getattr(given, name)
        if value is not None and value < bound:
            raise ValueError(f"Training: --{name.replace('_', '-')} must be at least {bound}, got {value}.")
    if given.seed >= 2**63:  # what a torch generator takes
        raise ValueError(f"Training: --seed must be below 2**63, got {given.seed}.")
    for name in ("minutes", "rate"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"Training: --{name} must be a finite number above 0, got {value}.")
    if not 0 <= given.phases[0] <= given.phases[1] <= 1:
        raise ValueError("Training: --phases must be two fractions of the run, 0 <= first <= second <= 1, got "
                         f"{' '.join(map(str, given.phases))}. The default is {' '.join(map(str, PHASES))}.")
    if not all(0 <= share < math.inf for share in given.shares) or not sum(given.shares):
        raise ValueError("Training: --shares must be finite numbers, none below 0 and one above, got "
                         f"{' '.join(map(str, given.shares))}. The default is {' '.join(map(str, KINDS.values()))}.")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Training: --device {name} is not usable here ({str(error).splitlines()[0]}). Try cpu.") from None
    return device


def _check_writable(out: Path, log: Path | None) -> None:
    """Raises ValueError if the checkpoint or the log could not be written. `train` reads the log."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"Training: the checkpoint cannot be written to {out} ({error.strerror}); wanted a folder that can "
                         "be written to. Give another OUT.") from None
    if log is None:
        return
    try:
        with open(log, "a"):
            pass
    except OSError as error:
        raise ValueError(f"Training: the log cannot be written to {log} ({error.strerror}); wanted a file in a folder that "
                         "exists. Give another --log.") from None


def _train_command(given: argparse.Namespace) -> int:
    _check_numbers(given)
    if "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if given.device.startswith("cuda") else "gloo")
        if given.device.startswith("cuda"):
            given.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(given.device)
    device = _device(given.device)
    if given.start is None:
        tokenizer_dir = given.tokenizer
        tokenizer = Tokenizer.load(tokenizer_dir)
        values = toy_config(tokenizer)
        model = build_model(Config.from_dict(values), tokenizer, device)
        masters_start = initial_values(model, given.seed)
    else:
        tokenizer_dir = given.start
        tokenizer = Tokenizer.load(tokenizer_dir)
        values = json.loads((given.start / "config.json").read_text())
        masters_start = read_masters(inference.load(given.start))
        model = build_model(Config.from_dict(values), tokenizer, device)
    masters = Masters(model, masters_start, stored_formats(values))
    settings = Settings(given.command, given.minutes, given.steps, given.batch_tokens, given.short, given.long, given.rate,
                        given.seed, given.workers, given.compile, given.anchors, tuple(given.phases), tuple(given.shares),
                        report_every=given.report_every)
    longest = model.config.text_config.max_position_embeddings
    for name in ("short", "long"):
        if getattr(given, name) > longest:
            raise ValueError(f"Training: --{name} must be at most {longest}, the context of this model, got "
                             f"{getattr(given, name)}.")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        _check_writable(given.out, given.log)
        print(f"{parameter_count(model):,} parameters on {device}")
    clock, code = Clock(settings), 0
    try:
        train(model, masters, clock, tokenizer_dir, given.log)
    except KeyboardInterrupt:
        if clock.step == 0 or dist.is_initialized():  # nothing is learned yet; other ranks may be a step further
            raise
        print(f"\nstopped after step {clock.step}; writing the weights as they are", file=sys.stderr)
        code = INTERRUPTED
    if first:
        odd = [name for name, value in masters.values.items() if not bool(value.isfinite().all())]
        if odd:
            raise ValueError(f"Training: after step {clock.step}, {len(odd)} of {len(masters.values)} weights are not finite, "
                             f"{odd[0]} among them; nothing is exported. Try a lower --rate.")
        export(masters.values, masters.formats, values, tokenizer_dir / "tokenizer.json", given.out)
        print(f"{given.out}: checkpoint written")
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(run(main))
