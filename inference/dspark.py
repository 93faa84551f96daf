"""DSpark: the draft head. Three window-only layers propose the next tokens from the backbone's streams.

What it computes
    conditioning  main_x = main_norm(main_hidden main_proj), once per committed token, the same for all stages
    context       each stage keeps one window row per committed token: kv_norm(main_x wkv), rotated, FP8 fake quant
    draft         rows [anchor, noise, ...] at the positions after the last committed one; every row sees all context rows of
                  the ring and all rows of the block (no causal mask inside it); stages are ordinary layers otherwise
    heads         base logits from the backbone's vocabulary head; a Markov head adds a bias that depends on the previous
                  token, left to right; a confidence head reads [un-normed hidden ; Markov embedding]
Mirrors
    official: the draft classes of the inference code; DSpark paper. The official repository has this forward only;
    the loop around it (verify, accept, roll back) is decoding.py.
Tests
    tests/test_dspark.py, golden draft traces through `python -m reference.verify`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inference.cache import Cache
from inference.config import LayerPlan, TextConfig
from inference.context import Context
from inference.hyper_connections import collapse, first_pre
from inference.layers import Embedding, Linear, RMSNorm, weight_rows

Choose = Callable[[Tensor], Tensor]  # logits [B, V] float32 -> token ids [B]


@dataclass(frozen=True)
class Draft:
    """One drafting step. G = dspark_block_size; row k judges the token after drafts < k."""

    ids: Tensor  # [B, 1 + G] int64: the anchor, then the drafts
    logits: Tensor  # [B, G, V] float32, Markov bias included
    confidence: Tensor  # [B, G] float32 logits; sigmoid gives the estimated acceptance


class MarkovHead(nn.Module):
    """Low-rank first-order bias: logits of the next token from the previous one alone."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = Linear(config.dspark_markov_rank, config.vocab_size, float32=True)


class ConfidenceHead(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size + config.dspark_markov_rank, 1, float32=True)


def conditioning(streams: Tensor) -> Tensor:
    """Streams that enter a target layer [B, S, C, D] -> their plain mean [B, S, D], dtype of the streams."""
    return streams.mean(-2)


def add_stage_parts(stage: nn.Module, config: TextConfig, plan: LayerPlan) -> None:
    """Give the first stage its input projection and the last stage its heads, under the checkpoint's names."""
    stages = config.num_nextn_predict_layers
    stage_id = plan.layer_id - config.num_hidden_layers
    if stage_id == 0:
        width = len(config.dspark_target_layer_ids) * config.hidden_size
        stage.main_proj = Linear(width, config.hidden_size, quantize_input=True)
        stage.main_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    if stage_id == stages - 1:
        stage.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        stage.markov_head = MarkovHead(config)
        stage.confidence_head = ConfidenceHead(config)


def context_rows(stages: nn.ModuleList, main_hidden: Tensor, context: Context) -> dict[int, Tensor]:
    """Window rows of committed tokens, by layer id of the stage.

    main_hidden [B, S, targets * D], activation dtype -> {layer id: [B, S, K]}. `Cache.commit` writes them.
    """
    context.record("mtp.main_hidden", main_hidden)
    main_x = stages[0].main_norm(stages[0].main_proj(main_hidden, context.numerics))
    context.record("mtp.main_x", main_x)
    rows = {}
    for stage in stages:
        row = stage.attn.window_rows(main_x, stage.attn.frequencies(main_x.device), context)
        context.record(f"{stage.attn.name}.context_kv", row)
        rows[stage.plan.layer_id] = row
    return rows


def draft(stages: nn.ModuleList, embed: Embedding, head: Linear, anchor: Tensor, cache: Cache, context: Context,
          config: TextConfig, choose: Choose) -> Draft:
    """Draft G tokens after `anchor`, the token at position cache.lengths[b] that is in no cache yet.

    anchor [B] int64. The cache is only read: block rows are temporary. `context` supplies numerics and observer.
    """
    size = config.dspark_block_size
    noise = torch.full((anchor.shape[0], size - 1), config.dspark_noise_token_id, device=anchor.device)
    block = torch.cat((anchor.unsqueeze(1), noise), dim=1)
    starts = cache.lengths_on_device()
    positions = starts[:, None] + torch.arange(size, device=anchor.device)
    context = dataclasses.replace(context, positions=positions, starts=cache.lengths, counts=(size,) * len(starts),
                                  image_mask=None)  # drafts are text: bias_vl of the stages is never used
    context.record("mtp.block_ids", block)
    streams = embed(block, context.numerics).unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
    pre = first_pre(streams)

    @functools.cache  # as a rule one copy to the device for all stages
    def visible(held: tuple[int, ...]) -> Tensor:
        return block_indices(context.starts, config.sliding_window, size, held).to(anchor.device)

    for stage in stages:
        streams, pre = _stage(stage, streams, pre, cache, context, visible(cache.window_starts(stage.plan.layer_id)))
    hidden = collapse(streams, pre)
    context.record("mtp.head.collapsed", hidden)
    return draft_heads(stages[-1], head, hidden, anchor, context, choose)


def draft_heads(last: nn.Module, head: Linear, hidden: Tensor, anchor: Tensor, context: Context, choose: Choose) -> Draft:
    """Base logits, then token by token: Markov bias, confidence, choice.

    hidden [B, G, D]: collapsed output of the last stage.
    """
    base_logits = head(last.norm(hidden), context.numerics)
    context.record("mtp.base_logits", base_logits)
    ids, logits, confidence = [anchor], [], []
    for k in range(hidden.shape[1]):
        # float32 from here: the previous token's embedding enters both heads.
        previous = weight_rows(last.markov_head.embed.weight, ids[-1], torch.float32)
        bias = last.markov_head.head(previous, context.numerics)
        logits.append(base_logits[:, k] + bias)
        features = torch.cat((hidden[:, k].to(torch.float32), previous), dim=-1)  # hidden is not normed here
        confidence.append(last.confidence_head.proj(features, context.numerics).squeeze(-1))
        ids.append(choose(logits[-1]))
    result = Draft(torch.stack(ids, 1), torch.stack(logits, 1), torch.stack(confidence, 1))
    context.record("mtp.logits", result.logits)
    context.record("mtp.confidence", result.confidence)
    context.record("mtp.draft_ids", result.ids)
    return result


def _stage(stage: nn.Module, streams: Tensor, pre: Tensor, cache: Cache, context: Context, indices: Tensor,
           ) -> tuple[Tensor, Tensor]:
    """One draft layer: an ordinary layer whose attention sees the whole ring and the whole block."""
    def attention(x: Tensor) -> Tensor:
        attn = stage.attn
        frequencies = attn.frequencies(x.device)
        context.record(f"{attn.name}.in", x)
        _, q = attn.query(x, frequencies, context)
        block_rows = attn.window_rows(x, frequencies, context)
        ring = cache.windows[stage.plan.layer_id].rows
        kv = torch.cat((ring, block_rows), dim=1)
        return attn.project(attn.attend(q, kv, indices, frequencies, context), context)

    return stage.sublayers(streams, pre, attention, context)


def block_indices(starts: tuple[int, ...], window: int, block: int, held: tuple[int, ...] | None = None) -> Tensor:
    """[B, block, window + block] int64: per row the ring slots of the last `window` positions, oldest first, then the block.

    held: per row the first position that the ring has at all (0 by default).
    """
    rows = []
    for start, first in zip(starts, held or (0,) * len(starts)):
        seen = torch.arange(min(start, max(first, start - window)), start)
        absent = torch.full((window - len(seen),), -1, dtype=torch.int64)
        rows.append(torch.cat((seen % window, absent, window + torch.arange(block))))
    return torch.stack(rows).unsqueeze(1).expand(-1, block, -1)
