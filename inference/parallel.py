"""Several processes run one model: each holds a part of the weights, and they exchange sums.

    torchrun --nproc-per-node N -m inference.generate ...        CPU: gloo; CUDA: nccl, one GPU per process

What it does
    `split` cuts the weights before they are read: a rank reads its own bytes only. `connect` edits the loaded model from
    outside, by hooks and by replaced attributes; the modules themselves know nothing of ranks. Rank r of N owns
        attention    heads, hence rows of wq_b, attn_sink; output groups, hence rows of wo_a and columns of wo_b: sum
        indexer      heads, hence rows of wq_b and weights_proj: gathered; scores of a part of the keys: gathered
        experts      routed ones r*E/N .. (r+1)*E/N - 1, draft stages too: float32 sum, before the shared expert is added
        vocabulary   rows of embed, head and the Markov tables: rows looked up: sum with zeros; logits: gathered
        Engram       ceil(rows/N) rows of each table, the last rank fewer: sum with zeros
    and holds a copy of all else: norms, wq_a, wkv, compressor, router, shared expert, hyper-connections, vision, caches.
    Sums and gathered values are the same bits on every rank, so all take the same decisions; sampling draws from equal seeds.
How far from one rank
    One rank is bit-equal to the plain model. With more, sums have another order; nothing is rounded more often. Measured as
    relative L2 of a row of logits against one rank (CPU, checkpoints of 13 tiny layers, 2 and 4 ranks, 4 seeds):
        float32       median 9e-7, worst 2.5e-6; with fake quantization a rounding may fall to the other side: worst 5e-4
        native        0 (bit-equal) until a BF16 rounding falls to the other side (with fake quantization in no run, without in
                      3 of 5); from there on 2e-3 to 3e-1, as random weights amplify every change, and greedy text may fork
    ours, for that: wo_b's parts stay float32 until they are summed, and index scores are split by keys. The official code
    rounds parts to BF16 and splits scores by heads; on the same checkpoints that moves the median native row by 0.1 to 0.2.
What it leaves out
    Recorded points inside attention show a rank's own heads. `Generation.save` does not know of ranks. Each MoE waits once
    for the number of pairs that chose its rank's experts.
Mirrors
    official: `ColumnParallelLinear`, `RowParallelLinear`, `ParallelEmbedding`, and the conversion script's cuts.
Tests
    tests/test_parallel.py; `python -m reference.parallel_check` compares N ranks with one on any devices
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from inference import command
from inference.attention import Attention
from inference.cache import Rows
from inference.config import Config
from inference.indexer import Indexer
from inference.layers import Weight, weight_rows
from inference.matching import WeightPlan
from inference.model import Model
from inference.moe import MoE
from inference.shards import DTYPES, StoredTensor, _open

BLOCK = 32  # official: channels that share a scale, in FP8 weights and in quantized inputs; a rank gets whole blocks
OWN_ROWS = ("embed.weight", "head.weight", "attn.wq_b.weight", "attn.wo_a.weight", "attn.attn_sink",
            "attn.indexer.wq_b.weight", "attn.indexer.weights_proj.weight")
OWN_COLUMNS = ("attn.wo_b.weight",)
WAIT = timedelta(seconds=10)  # ours: how long a failed rank waits for rank 0 to report the same failure


# --- processes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The processes that share one model, seen from one of them."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None  # None: all processes

    def span(self, count: int) -> tuple[int, int]:
        """First and last + 1 of this rank's part of `count` things: ceil(count / size) each, the last rank what is left."""
        part = -(-count // self.size)
        return min(self.rank * part, count), min((self.rank + 1) * part, count)

    def summed(self, x: Tensor) -> Tensor:
        """x of all ranks added up in float32; same shape and dtype, the same bits on every rank."""
        total = x.to(torch.float32, copy=True).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(x.dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """x [..., n] of all ranks side by side: [..., size * n], in the order of the ranks."""
        own = x.to(torch.float32).contiguous()  # exact, and every backend knows it
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts, dim=-1).to(x.dtype)


def join() -> Ranks | None:
    """Meet the other processes of a torchrun; None in a process that was started alone.

    Raises ValueError if they do not come. `torch.distributed.destroy_process_group()` parts from them.
    """
    joined = _meet()
    return None if joined is None else joined[0]


def _meet() -> tuple[Ranks, dist.Store] | None:
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    try:
        store, rank, size = next(dist.rendezvous("env://"))
        gpu = torch.cuda.is_available() and dist.is_nccl_available()
        # Tensors say which of the two they need: gloo for those on the CPU, nccl for those on a GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=dist.PrefixStore("model", store), rank=rank,
                                world_size=size)
    except (dist.DistError, ValueError) as error:
        raise ValueError(f"Joining the other processes: {str(error).splitlines()[0]}. Start all of them with "
                         "torchrun.") from None
    return Ranks(rank, size), dist.PrefixStore("errors", store)


def choose_device(device: str | None) -> str:
    """The device of this process: "cuda" (and None, where there is a GPU) means its own GPU, by LOCAL_RANK.

    Raises ValueError if more processes run on this machine than it has GPUs.
    """
    if device not in (None, "cuda") or (device is None and not torch.cuda.is_available()):
        return device or "cpu"
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    processes = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if processes > gpus:
        raise ValueError(f"Choosing the device: {processes} processes on a machine with {gpus} GPUs; wanted one GPU for each. "
                         f"Set --nproc-per-node to at most {gpus}, or use --device cpu.")
    torch.cuda.set_device(local)
    return f"cuda:{local}"


def run(work: Callable[[Ranks | None], int]) -> int:
    """command.run for a program that may run in several processes: rank 0 prints, and a failure is reported once.

    work: gets the ranks, None for a process alone; returns the exit code.
    """
    joined: list[tuple[Ranks, dist.Store] | None] = []
    code = command.run(lambda: joined.append(_meet()) or 0)
    if code:
        return code
    if joined[0] is None:
        return command.run(lambda: work(None))
    ranks, errors = joined[0]
    if ranks.rank == 0:
        code = _exit_code(lambda: work(ranks))
        if code:
            errors.set("reported", str(code))
    else:
        said = io.StringIO()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(said):
            code = _exit_code(lambda: work(ranks))
        if code and not _was_reported(errors):
            print(f"rank {ranks.rank}: {said.getvalue().strip()}", file=sys.stderr)
    if not code:
        dist.destroy_process_group()
    return code


def _exit_code(work: Callable[[], int]) -> int:
    try:
        return command.run(work)
    except SystemExit as stop:  # options that cannot be used, or --help
        return stop.code or 0


def _was_reported(errors: dist.Store) -> bool:
    """Whether rank 0 has failed too: most mistakes are the same on every rank, and its message is enough."""
    try:
        errors.wait(["reported"], WAIT)
    except dist.DistNetworkError:
        return True  # the store has gone with rank 0
    except dist.DistStoreError:
        return False
    return True


# --- before the weights are read: who owns what --------------------------------------------------------------------


def check_world_size(config: Config, size: int) -> None:
    """Raises ValueError naming everything in `config` that `size` ranks cannot share, and the sizes that work."""
    problems = _indivisible(config, size)
    if problems:
        works = [str(n) for n in range(1, config.text_config.o_groups + 1) if not _indivisible(config, n)]
        raise ValueError(f"Splitting the model over {size} processes: {'; '.join(problems)}. Numbers of processes that work "
                         f"with this checkpoint: {', '.join(works) or 'none'}. Set --nproc-per-node to one of them.")


def _indivisible(config: Config, size: int) -> list[str]:
    """What does not split into `size` parts. Engram rows always do (official: the last part is padded; here it is shorter)."""
    text = config.text_config
    counts = {"attention heads (num_attention_heads)": text.num_attention_heads, "output groups (o_groups)": text.o_groups,
              "routed experts (n_routed_experts)": text.n_routed_experts, "vocabulary entries (vocab_size)": text.vocab_size}
    widths = {"head channels (num_attention_heads * head_dim)": text.num_attention_heads * text.head_dim,
              "output channels (o_groups * o_lora_rank)": text.o_groups * text.o_lora_rank}
    if text.index_source_layer_ids:
        counts["index heads (index_n_heads)"] = text.index_n_heads
        widths["index channels (index_n_heads * index_head_dim)"] = text.index_n_heads * text.index_head_dim
    if text.num_nextn_predict_layers:
        counts["draft experts (dspark_n_routed_experts)"] = text.dspark_n_routed_experts
    problems = [f"{count} {name} do not divide by {size}" for name, count in counts.items() if count % size]
    if not problems:  # a part of a head or group would be no sensible number of channels either
        problems += [f"{count} {name} give {count // size} to each, wanted a multiple of {BLOCK}"
                     for name, count in widths.items() if size > 1 and count // size % BLOCK]
    return problems + [f"{rows} Engram rows are too few for {size}" for rows in text.engram_num_embeddings
                       if Ranks(size - 1, size).span(rows)[0] >= rows]


def split(model: Model, plans: Mapping[str, WeightPlan], ranks: Ranks) -> dict[str, WeightPlan]:
    """Leave this rank its own experts in `model`, still without weights; returns where the own part of each weight is stored.

    plans: by parameter name, of the whole model (matching.py). An expert's name counts from this rank's first one.
    """
    spans = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            spans[f"{name}.experts"] = ranks.span(len(module.experts))
            module.experts = module.experts[slice(*spans[f"{name}.experts"])]
    own = {}
    for name, plan in plans.items():
        expert = re.fullmatch(r"(.+\.ffn\.experts)\.(\d+)(\..+)", name)
        if expert is not None:
            first, last = spans[expert[1]]
            if first <= int(expert[2]) < last:
                name = f"{expert[1]}.{int(expert[2]) - first}{expert[3]}"
                own[name] = dataclasses.replace(plan, name=name)
            continue
        suffixes = (OWN_ROWS, OWN_COLUMNS)
        axis = next((i for i in (0, 1) if any(f".{name}".endswith(f".{suffix}") for suffix in suffixes[i])), None)
        own[name] = plan if axis is None else _own_part(plan, axis, ranks)
    return own


def _own_part(plan: WeightPlan, axis: int, ranks: Ranks) -> WeightPlan:
    """This rank's rows (axis 0) or columns (axis 1) of a weight, companions included."""
    total = plan.shape[axis]
    first, last = ranks.span(total)
    tensors = []
    for stored in plan.tensors:
        if math.prod(stored.shape) == 1 and total > 1:  # a global scale
            tensors.append(stored)
            continue
        # A row or column of a companion, or a word, stands for several of the weight.
        (begin, left), (end, over) = (divmod(border * stored.shape[axis], total) for border in (first, last))
        if left or over:
            raise ValueError(f"Splitting {plan.name} over {ranks.size} processes: {'columns' if axis else 'rows'} {first} to "
                             f"{last} of {total} are no whole blocks of {stored}. Use fewer processes, or the native checkpoint.")
        tensors.append(_stored_columns(stored, begin, end) if axis else _stored_rows(stored, begin, end))
    shape = tuple(last - first if i == axis else length for i, length in enumerate(plan.shape))
    return dataclasses.replace(plan, tensors=tuple(tensors), shape=shape)


def _stored_rows(stored: StoredTensor, first: int, last: int) -> StoredTensor:
    width = stored.size // stored.shape[0]
    return dataclasses.replace(stored, name=f"{stored.name}[{first}:{last}]", shape=(last - first, *stored.shape[1:]),
                               offset=stored.offset + first * width, size=(last - first) * width)


def _stored_columns(stored: StoredTensor, first: int, last: int) -> StoredColumns:
    rows, columns = stored.shape
    pitch = stored.size // rows
    item = DTYPES[stored.dtype].itemsize
    return StoredColumns(f"{stored.name}[:, {first}:{last}]", stored.dtype, (rows, last - first), stored.shard,
                         stored.offset + first * item, rows * (last - first) * item, pitch)


@dataclass(frozen=True)
class StoredColumns(StoredTensor):
    """Some columns of a stored matrix; `offset` is that of the first one in row 0, `pitch` the bytes of a whole row."""

    pitch: int

    def read(self) -> Tensor:
        """[rows, columns], row by row; what lies between is not read."""
        return self.read_rows(torch.arange(self.shape[0]))

    def read_rows(self, index: Tensor) -> Tensor:
        """Rows `index` [n] int64 -> [n, columns]."""
        data = torch.empty(len(index), self.size // self.shape[0], dtype=torch.uint8)
        with _open(self) as file:
            for part, row in zip(data, index.tolist()):
                self._fill(file, part, row * self.pitch)
        return data.view(DTYPES[self.dtype])


# --- after the weights are read: what the ranks exchange -----------------------------------------------------------


def connect(model: Model, ranks: Ranks) -> None:
    """Edit a model that holds this rank's weights so that all ranks together compute what one would."""
    text = model.config.text_config
    for module in list(model.modules()):
        if isinstance(module, Attention):
            # Its own heads and groups are all that this rank's attention knows of.
            module.config = dataclasses.replace(module.config, o_groups=text.o_groups // ranks.size,
                                                num_attention_heads=text.num_attention_heads // ranks.size)
            _sum_products(module.wo_b, ranks)
        elif isinstance(module, Indexer):
            _gather_products(module.wq_b, ranks)
            _gather_products(module.weights_proj, ranks)
            module.score = _gathered_scores(module.score, module.plan.compress_ratio, ranks)
        elif isinstance(module, MoE):
            module.routed = _summed_experts(module.routed, len(module.experts), ranks)
    _own_table(model.embed, text.vocab_size, ranks)
    _gather_products(model.head, ranks)
    for layer in model.layers:
        if layer.engram is not None:
            _own_table(layer.engram.embed, text.engram_num_embeddings[layer.engram.slot], ranks)
    if model.mtp:
        _own_table(model.mtp[-1].markov_head.embed, text.vocab_size, ranks)
        _gather_products(model.mtp[-1].markov_head.head, ranks)


def _gather_products(linear: nn.Module, ranks: Ranks) -> None:
    """linear has some rows of its weight, hence some outputs: take all of them."""
    linear.register_forward_hook(lambda module, inputs, output: ranks.gathered(output))


def _sum_products(linear: nn.Module, ranks: Ranks) -> None:
    """linear has some columns of its weight, hence a part of every output's sum: add the parts, round once."""
    if ranks.size > 1:
        # ours: the official code rounds every part to BF16. Float32 products of BF16 values are exact, only their sum is not.
        linear.register_forward_pre_hook(
            lambda module, inputs: (inputs[0], dataclasses.replace(inputs[1], dtype=torch.float32)))
    linear.register_forward_hook(lambda module, inputs, output: ranks.summed(output).to(inputs[0].dtype))


@dataclass(frozen=True)
class SharedTable:
    """Stands where the whole weight of an `Embedding` would, and looks rows up on the ranks that have them."""

    own: Weight  # rows first .. first + count - 1
    first: int
    count: int
    shape: tuple[int, int]  # of the whole table
    ranks: Ranks

    def rows(self, index: Tensor) -> Tensor:
        """Rows `index` [...] int64 of the whole table -> [..., columns] float32; adding the others' zeros is exact."""
        local = index - self.first
        outside = (local < 0) | (local >= self.count)
        rows = weight_rows(self.own, local.masked_fill(outside, 0), torch.float32)
        return self.ranks.summed(rows.masked_fill(outside.unsqueeze(-1), 0.0))


def _own_table(embedding: nn.Module, rows: int, ranks: Ranks) -> None:
    weight, (first, last) = embedding.weight, ranks.span(rows)
    assert weight.shape[0] == last - first, f"rank {ranks.rank} has {weight.shape[0]} rows, wanted {last - first}"
    del embedding.weight  # no parameter any more
    embedding.weight = SharedTable(weight, first, last - first, (rows, weight.shape[1]), ranks)


def _gathered_scores(score: Callable[..., Tensor], ratio: int, ranks: Ranks) -> Callable[..., Tensor]:
    """Indexer.score for this rank's part of the keys, then all of them side by side.

    ours: the official code has each rank score all keys with its own heads and adds BF16 scores up. Rounded parts make
    other near-ties, hence other selections; split by keys, every score is that of one rank.
    """

    def own_keys(queries: Tensor, weights: Tensor, keys: Tensor | Rows, positions: Tensor, budget: int) -> Tensor:
        keys = Rows.of(keys)
        first, last = ranks.span(keys.count)
        own = dataclasses.replace(keys, stored=keys.stored[:, first:last])
        # What a position sees of columns from `first` on is what one that is `first` groups earlier sees of all.
        scores = score(queries, weights, own, positions - first * ratio, budget)
        part = -(-keys.count // ranks.size)
        scores = F.pad(scores, (0, part - scores.shape[-1]))  # all ranks must send as much
        return ranks.gathered(scores)[..., :keys.count]

    return own_keys


def _summed_experts(routed: Callable[..., Tensor], experts: int, ranks: Ranks) -> Callable[..., Tensor]:
    """MoE.routed for the pairs (token, expert) whose expert this rank has, then the float32 sum over ranks."""
    first = ranks.rank * experts

    def own_experts(tokens: Tensor, ids: Tensor, weights: Tensor, context) -> Tensor:
        own = (ids >= first) & (ids < first + experts)
        pairs = own.flatten().nonzero().squeeze(1)  # by token, then ascending expert: the order of sums of one rank
        parts = tokens.new_zeros(ids.numel(), tokens.shape[1], dtype=torch.float32)
        if len(pairs):
            own_ids, own_weights = ids.flatten()[pairs, None] - first, weights.flatten()[pairs, None]
            y = routed(tokens[pairs // ids.shape[1]], own_ids, own_weights, context)
            parts = parts.index_copy(0, pairs, y)
        total = torch.zeros_like(tokens, dtype=torch.float32)
        for slot in range(ids.shape[1]):
            total = total + parts[slot::ids.shape[1]]
        return ranks.summed(total)

    return own_experts
