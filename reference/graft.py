"""Module by module: every point of a trace recomputed from the recorded values right before it.

A value that the trace has is used as input; one it lacks is computed from the recorded ones before it. So an error shows at the
point that makes it and nowhere else, and a rounding flip upstream cannot reach a point that is fed the recorded value.
`prefill_points` and `draft_points` yield (point name, computed tensor) in execution order. Decode steps record too little for
that: `steps_as_prompt` makes one prompt of all that a run of steps observed, `drafts_again` repeats drafts from their
conditioning.
Tests: tests/test_verify.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from inference import dspark
from inference.cache import Cache
from inference.context import Context, Shared
from inference.hyper_connections import Mixes, collapse, expand, first_pre
from inference.image_processor import ImageInput
from inference.indexer import candidate_columns, select_columns
from inference.model import Layer, Model
from inference.quant import fake_quant_fp4_e4m3
from inference.rope import rotate

Point = tuple[str, Tensor]
DRAFT_PARTS = ("logits", "confidence", "draft_ids")  # what a decode trace records of a draft, after its conditioning


class Recorded:
    """The recorded points of a trace, as inputs: `use(name, computed)` gives the recorded value if there is one."""

    def __init__(self, points: Mapping[str, Tensor]) -> None:
        self.points = points

    def use(self, name: str, computed: Tensor, limit: int | None = None) -> Tensor:
        """The recorded tensor in the dtype of the computed one, else the computed one. Float dtypes may differ.

        limit: of indices from -1 to limit - 1; others cannot be used, and the comparison of this point tells.
        """
        recorded = self.points.get(name)
        if recorded is None or recorded.shape != computed.shape:
            return computed
        if limit is not None and recorded.numel() and not (-1 <= int(recorded.min()) and int(recorded.max()) < limit):
            return computed
        return recorded.to(computed.dtype)


def prefill_points(model: Model, trace: Recorded, input_ids: Tensor, token_types: Tensor | None,
                   images: list[list[ImageInput]] | None) -> Iterator[Point]:
    """All points of a whole-prompt trace. input_ids [B, S]; token_types [B, S] and images per row for image prompts."""
    text = model.config.text_config
    batch, tokens = input_ids.shape
    image_mask = None if token_types is None else token_types >= 0
    positions = torch.arange(tokens, device=input_ids.device).expand(batch, -1)
    context = Context(model.numerics, positions, (0,) * batch, (tokens,) * batch, image_mask)
    cache = model.new_cache(batch)

    hash_ids = {}
    if model.engram_hash is not None:
        folded = model.engram_hash.fold(input_ids, image_mask)
        for plan in model.plan:
            if plan.engram_slot is not None:
                ids = model.engram_hash.hash_ids(folded, cache.engram_look_back(), plan.engram_slot)
                yield f"{plan.name}.engram.hash_ids", ids
                hash_ids[plan.layer_id] = trace.use(f"{plan.name}.engram.hash_ids", ids,
                                                    text.engram_num_embeddings[plan.engram_slot])

    embedded = model.embed(input_ids, model.numerics)
    if image_mask is not None:
        spans = []
        for number, image in enumerate(image for row in images for image in row):
            suffix = f"#{number}" if number else ""
            features = model.vision(image.patches.to(input_ids.device), image.patch_rows, image.patch_cols, model.numerics)
            yield f"vision.out{suffix}", features
            features = trace.use(f"vision.out{suffix}", features)
            cells = model.aligner(features, image.patch_rows, image.patch_cols, model.numerics)
            yield f"aligner.out{suffix}", cells
            spans.append(model.span_rows(trace.use(f"aligner.out{suffix}", cells), image))
        embedded = embedded.masked_scatter(image_mask.unsqueeze(-1), torch.cat(spans))
    yield "embed", embedded
    embedded = trace.use("embed", embedded)

    streams = embedded.unsqueeze(2).expand(-1, -1, text.hc_mult, -1)
    pre, shared, targets = first_pre(streams), Shared(), []
    for layer in model.layers:
        name = layer.plan.name
        yield f"{name}.in", streams
        streams = trace.use(f"{name}.in", streams)
        if layer.plan.is_draft_target and model.mtp:
            targets.append(dspark.conditioning(streams))
        if layer.engram is not None:
            gate = []
            observed = dataclasses.replace(context, observe=lambda point, value: gate.append(value)
                                           if point.endswith(".gate") else None)
            out = layer.engram(streams, hash_ids[layer.plan.layer_id], observed)
            yield f"{name}.engram.gate", gate[0]
            yield f"{name}.engram.out", out
            streams = trace.use(f"{name}.engram.out", out)
        attention = _AttentionPoints(layer, context, cache, shared, trace)
        streams, pre = yield from _sublayer_points(layer, streams, pre, context, trace, attention.points)
        shared = attention.shared

    hidden = collapse(streams, pre)
    yield "head.collapsed", hidden
    logits = model.head(model.norm(trace.use("head.collapsed", hidden)), model.numerics)
    yield "logits", logits
    if targets:
        yield "mtp.main_hidden", torch.cat(targets, dim=-1)


def draft_points(model: Model, trace: Recorded, anchor: Tensor, cache: Cache, main_hidden: Tensor) -> Iterator[Point]:
    """All points of one drafting step.

    anchor [B]; cache: after the prompt, rings committed; main_hidden [B, 1, targets * D] of the last position, as computed.
    """
    text, size = model.config.text_config, model.config.text_config.dspark_block_size
    starts = torch.tensor(cache.lengths, device=anchor.device)
    last = Context(model.numerics, (starts - 1).unsqueeze(1), tuple(n - 1 for n in cache.lengths), (1,) * len(starts))
    yield "mtp.main_hidden", main_hidden
    main_x = model.mtp[0].main_norm(model.mtp[0].main_proj(trace.use("mtp.main_hidden", main_hidden), model.numerics))
    yield "mtp.main_x", main_x
    main_x = trace.use("mtp.main_x", main_x)

    noise = torch.full((len(starts), size - 1), text.dspark_noise_token_id, device=anchor.device)
    block = torch.cat((anchor.unsqueeze(1), noise), dim=1)
    positions = starts[:, None] + torch.arange(size, device=anchor.device)
    context = Context(model.numerics, positions, cache.lengths, (size,) * len(starts))
    streams = model.embed(block, model.numerics).unsqueeze(2).expand(-1, -1, text.hc_mult, -1)
    pre = first_pre(streams)
    for stage in model.mtp:
        attn, ring = stage.attn, cache.windows[stage.plan.layer_id].rows
        frequencies = attn.frequencies(streams.device)
        row = attn.window_rows(main_x, frequencies, last)
        context_kv = trace.use(f"{attn.name}.context_kv", row)

        def attention(x: Tensor, attn=attn, ring=ring, row=row, context_kv=context_kv, frequencies=frequencies,
                      ) -> Iterator[Point]:
            yield f"{attn.name}.context_kv", row
            yield f"{attn.name}.in", x
            x = trace.use(f"{attn.name}.in", x)
            slot = (starts - 1) % ring.shape[1]
            known = ring.index_put((torch.arange(len(starts), device=slot.device), slot), context_kv[:, 0])
            _, q = attn.query(x, frequencies, context)
            kv = torch.cat((known, attn.window_rows(x, frequencies, context)), dim=1)
            indices = dspark.block_indices(cache.lengths, ring.shape[1], size).to(x.device)
            out = attn.attend(q, kv, indices, frequencies, context)
            yield f"{attn.name}.out_unrotated", out
            out = attn.project(trace.use(f"{attn.name}.out_unrotated", out), context)
            yield f"{attn.name}.out", out
            return trace.use(f"{attn.name}.out", out)

        streams, pre = yield from _sublayer_points(stage, streams, pre, context, trace, attention)
    hidden = collapse(streams, pre)
    yield "mtp.head.collapsed", hidden
    observed: dict[str, Tensor] = {}
    heads = dataclasses.replace(context, observe=observed.__setitem__)
    dspark.draft_heads(model.mtp[-1], model.head, trace.use("mtp.head.collapsed", hidden), anchor, heads,
                       lambda logits: logits.argmax(-1))
    for name in ("mtp.logits", "mtp.confidence", "mtp.draft_ids"):
        yield name, observed[name]


def draft_cache(model: Model, main_hidden: Tensor) -> Cache:
    """A cache after the tokens whose draft conditioning is main_hidden [B, S, targets * D]: all that drafting reads.

    The draft rings are filled from main_hidden; what the backbone keeps is empty.
    """
    batch, tokens = main_hidden.shape[:2]
    positions = torch.arange(tokens, device=main_hidden.device).expand(batch, -1)
    context = Context(model.numerics, positions, (0,) * batch, (tokens,) * batch)
    cache = model.new_cache(batch)
    rows = dspark.context_rows(model.mtp, main_hidden.to(model.numerics.dtype), context)
    rings = {layer: cache.windows[layer].write(row, context.starts, context.counts) for layer, row in rows.items()}
    cache.state = dataclasses.replace(cache.state, windows={**cache.windows, **rings}, lengths=context.counts)
    return cache


def drafts_again(model: Model, points: Mapping[str, Tensor], split: int, tokens: int, gap: float) -> dict[str, Tensor]:
    """Recorded draft points again, each draft from the conditioning recorded before it; left out where that is incomplete.

    points: "prefill.mtp.main_hidden" [B, split, targets * D] and "stepN.mtp.main_hidden" [B, 1, targets * D] up to tokens - 1;
    drafts "stepN.mtp.logits" [B, G, V], "confidence" and "draft_ids" [B, 1 + G], any of them. Anchor and choices are the
    recorded ones (`recorded_choices`), so that one other choice does not change all that follow. Returned as draft_ids are
    those, where their logits are as good as the best up to `gap` in RMS of the logits, else the best.
    """
    calls = ["prefill", *(f"step{step}" for step in range(split, tokens))]
    conditioning: list[Tensor] = []
    drafts: dict[str, Tensor] = {}
    for call in calls:
        if f"{call}.mtp.main_hidden" not in points:
            break
        conditioning.append(points[f"{call}.mtp.main_hidden"])
        recorded = [part for part in DRAFT_PARTS if f"{call}.mtp.{part}" in points]
        ids = recorded_choices(points, call) if recorded else None
        if ids is None:
            continue
        chosen, given = [ids[:, 0]], iter(ids[:, 1:].unbind(1))

        def choose(logits: Tensor, chosen=chosen, given=given) -> Tensor:
            known = next(given)
            short = logits.amax(-1) - logits.gather(-1, known[:, None])[:, 0]
            close = short <= gap * logits.square().mean(-1).sqrt()
            chosen.append(torch.where(close, known, logits.argmax(-1)))
            return known

        draft = model.draft(ids[:, 0], draft_cache(model, torch.cat(conditioning, dim=1)), choose=choose)
        computed = {"logits": draft.logits, "confidence": draft.confidence, "draft_ids": torch.stack(chosen, dim=1)}
        drafts |= {f"{call}.mtp.{part}": computed[part] for part in recorded}
    return drafts


def recorded_choices(points: Mapping[str, Tensor], call: str) -> Tensor | None:
    """Anchor and choices [B, 1 + G] int64 of the draft after `call`: the recorded ones, else the best of recorded logits.

    None if the trace has neither.
    """
    if f"{call}.mtp.draft_ids" in points:
        return points[f"{call}.mtp.draft_ids"].to(torch.int64)
    if f"{call}.logits" in points and f"{call}.mtp.logits" in points:
        return torch.cat((points[f"{call}.logits"].argmax(-1)[:, None], points[f"{call}.mtp.logits"].argmax(-1)), dim=1)
    return None


def steps_as_prompt(calls: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """What calls on consecutive tokens observed, {point: tensor of every call}, as one call on all tokens would have.

    Tensors of all calls are put one after the other along axis 1. Rows over compressed rows (scores, selections) grow from call
    to call: columns that an earlier call did not have are unseen, -inf or -1. Candidates are left out: in one prompt a block
    also has the columns that come later. The selections show them.
    """
    joined = {}
    for point, values in calls.items():
        width, kind = max(value.shape[-1] for value in values), point.rpartition(".")[2]
        if kind == "candidates":
            continue
        if kind in ("scores", "topk"):
            values = [torch.nn.functional.pad(value, (0, width - value.shape[-1]), value=-1 if kind == "topk" else -math.inf)
                      for value in values]
        if all(value.dim() > 1 and value.shape[-1] == width for value in values):
            joined[point] = torch.cat(values, dim=1)
    return joined


def _sublayer_points(layer: Layer, streams: Tensor, pre: Tensor, context: Context, trace: Recorded, attention):
    """Points of one layer's two sub-layers; returns the streams and pre vector for the next layer."""
    name = layer.plan.name

    def mixes_of(kind: str) -> Iterator[Point]:
        computed = layer.mixes(kind, streams)
        for part in ("pre_next", "post", "comb"):
            yield f"{name}.hc_{kind}.{part}", getattr(computed, part)
        return Mixes(*(trace.use(f"{name}.hc_{kind}.{part}", getattr(computed, part))
                       for part in ("pre_next", "post", "comb")))

    mixes = yield from mixes_of("attn")
    y = yield from attention(layer.attn_norm(collapse(streams, pre)))
    streams = expand(streams, y, mixes)
    yield f"{name}.mid", streams
    streams, pre = trace.use(f"{name}.mid", streams), mixes.pre_next
    mixes = yield from mixes_of("ffn")
    x = layer.ffn_norm(collapse(streams, pre))
    yield f"{name}.ffn.in", x
    observed: dict[str, Tensor] = {}
    y = layer.ffn(trace.use(f"{name}.ffn.in", x), dataclasses.replace(context, observe=observed.__setitem__))
    for part in ("expert_ids", "expert_weights", "out"):
        yield f"{name}.ffn.{part}", observed[f"{name}.ffn.{part}"]
    streams = expand(streams, trace.use(f"{name}.ffn.out", y), mixes)
    yield f"{name}.out", streams
    return trace.use(f"{name}.out", streams), mixes.pre_next


class _AttentionPoints:
    """Points of one layer's attention on a whole prompt. `shared` afterwards holds recorded rows and selections."""

    def __init__(self, layer: Layer, context: Context, cache, shared: Shared, trace: Recorded) -> None:
        self.attn, self.plan, self.context = layer.attn, layer.plan, context
        self.cache, self.shared, self.trace = cache, shared, trace

    def points(self, x: Tensor) -> Iterator[Point]:
        attn, plan, context, trace, name = self.attn, self.plan, self.context, self.trace, self.attn.name
        fake_quant = context.numerics.fake_quant
        yield f"{name}.in", x
        x = trace.use(f"{name}.in", x)
        frequencies = attn.frequencies(x.device)
        q_latent, q = attn.query(x, frequencies, context)
        yield f"{name}.q", q
        window_rows = attn.window_rows(x, frequencies, context)
        yield f"{name}.kv_quant", window_rows
        rows = None
        if attn.compressor is not None:
            groups = attn.compressor(x, context, self.cache.tails.get(plan.layer_id))
            finished = groups.counts[0]
            latent = groups.latent[:, :finished]
            yield f"{name}.compressor.latent", latent
            groups = dataclasses.replace(groups, latent=trace.use(f"{name}.compressor.latent", latent))
            rows = rotate(groups.latent, groups.positions(plan.compress_ratio), frequencies)
            rows = fake_quant_fp4_e4m3(rows) if fake_quant else rows
            keys = attn.indexer.keys(groups, frequencies, context)
            self.shared = self.shared.publish("index_keys", plan.layer_id, keys)
        if attn.indexer is not None:
            yield from self._selection(x, q_latent, frequencies)
        if rows is not None:
            yield f"{name}.compressor.kv", rows
            self.shared = self.shared.publish("compressed", plan.layer_id, trace.use(f"{name}.compressor.kv", rows))
        kv, indices = attn.visible_rows(trace.use(f"{name}.kv_quant", window_rows), context, self.cache, self.shared)
        out = attn.attend(trace.use(f"{name}.q", q), kv, indices, frequencies, context)
        yield f"{name}.out_unrotated", out
        out = attn.project(trace.use(f"{name}.out_unrotated", out), context)
        yield f"{name}.out", out
        return trace.use(f"{name}.out", out)

    def _selection(self, x: Tensor, q_latent: Tensor, frequencies: Tensor) -> Iterator[Point]:
        attn, plan, trace, name = self.attn, self.plan, self.trace, self.attn.indexer.name
        config = attn.config
        scores = attn.indexer.scores(x, q_latent, self.shared.index_keys[plan.kv_source], frequencies, self.context)
        yield f"{name}.scores", scores
        scores = trace.use(f"{name}.scores", scores)
        if plan.candidate_role == "publish":
            candidates = candidate_columns(scores, self.context.positions, plan.compress_ratio,
                                           config.candidate_block_size, config.candidate_topk_blocks)
            yield f"{name}.candidates", candidates
            self.shared = self.shared.publish("candidates", plan.layer_id, trace.use(f"{name}.candidates", candidates))
        elif plan.candidate_role == "filter":
            scores = scores.masked_fill(~self.shared.candidates[config.candidate_source_layer_id], float("-inf"))
        selection = select_columns(scores, config.index_topk)
        yield f"{name}.topk", selection
        self.shared = self.shared.publish("selections", plan.layer_id, trace.use(f"{name}.topk", selection, scores.shape[-1]))
