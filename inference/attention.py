"""Compressed sparse attention (CSA2): a window of recent rows plus selected compressed rows, in one softmax.

What it computes, from x [S, D] (output of attn_norm)
    query     r = q_norm(x wq_a), shared with the indexer; q = r wq_b per head; last R channels rotated. No per-head norm.
    window    kv = kv_norm(x wkv), rotated, FP8 fake quant; every layer has its own. Query p sees max(0, p-W+1) .. p.
    selected  rows of the layer's KV source at the columns of its selection source (none for ratio 0)
    core      one softmax over both kinds, with a learned sink per head; a row is key and value at once
    output    rotate back at the query's position; consecutive heads form G groups, each through its part of wo_a; wo_b
Shared rows
    A source layer publishes compressed rows and index keys (`owns_compressor`) and a selection (`owns_indexer`); later layers
    read them from `Shared` under the source's layer id.
Mirrors
    official: class `Attention`; tech report: compressed sparse attention.
Tests
    tests/test_attention.py, tests/test_decode.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.cache import Cache, Rows
from inference.compressor import Compressor, Groups
from inference.config import LayerPlan, TextConfig
from inference.context import Context, Shared, row_slices
from inference.indexer import BYTES_DECODED, Indexer, block_columns, candidate_blocks, select_columns
from inference.kernel import sparse_attn
from inference.layers import Linear, RMSNorm, dense_weight, empty_parameter
from inference.quant import fake_quant_fp4_e4m3, fake_quant_fp8
from inference.rope import rope_frequencies, rotate

SELECTION_BYTES = 40  # ours: bytes that choosing the best columns takes per score (masks, running counts, sorted copies)


class Attention(nn.Module):
    def __init__(self, config: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config, self.plan, self.name = config, plan, f"{plan.name}.attn"
        heads, width = config.num_attention_heads, config.head_dim
        eps = config.rms_norm_eps
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, quantize_input=True)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.wq_b = Linear(config.q_lora_rank, heads * width, quantize_input=True)
        self.wkv = Linear(config.hidden_size, width, quantize_input=True)
        self.kv_norm = RMSNorm(width, eps)
        # Stored FP8, but the official code runs it as a grouped BF16 product: its input is not quantized.
        self.wo_a = Linear(heads // config.o_groups * width, config.o_groups * config.o_lora_rank)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.hidden_size, quantize_input=True)
        self.attn_sink = empty_parameter(heads, dtype=torch.float32)
        self.compressor = Compressor(config, plan) if plan.owns_compressor else None
        self.indexer = Indexer(config, plan) if plan.owns_indexer else None

    def forward(self, x: Tensor, context: Context, cache: Cache, shared: Shared,
                ) -> tuple[Tensor, Shared, Tensor, Groups | None]:
        """x [B, S, D] -> output [B, S, D], what this layer published, and for the cache: window rows [B, S, K], groups."""
        frequencies = self.frequencies(x.device)
        context.record(f"{self.name}.in", x)
        q_latent, q = self.query(x, frequencies, context)
        window_rows = self.window_rows(x, frequencies, context)
        context.record(f"{self.name}.kv_quant", window_rows)

        groups = None
        if self.compressor is not None and self.plan.layer_id not in shared.compressed:
            groups, shared = self.compress(x, context, cache, shared)
        if self.indexer is not None:
            shared = self._select(x, q_latent, frequencies, context, cache, shared)

        parts = []
        for queries in self._query_slices(context, shared):
            kv, indices = self.visible_rows(window_rows, context, cache, shared, queries)
            context.record(f"{self.name}.all_index", indices)
            parts.append(self._sparse(q[:, queries], kv, indices, context))
        out = self._back_rotated(torch.cat(parts, dim=1), frequencies, context)
        return self.project(out, context), shared, window_rows, groups

    def frequencies(self, device: torch.device) -> Tensor:
        """[R/2] float32, by layer kind."""
        return rope_frequencies(self.config, self.plan, device)

    def query(self, x: Tensor, frequencies: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """x [B, S, D] -> query latent [B, S, Q], rotated queries [B, S, H, K]."""
        q_latent = self.q_norm(self.wq_a(x, context.numerics))
        context.record(f"{self.name}.q_latent", q_latent)
        q = self.wq_b(q_latent, context.numerics).unflatten(-1, (self.config.num_attention_heads, -1))
        q = rotate(q, context.positions, frequencies)
        context.record(f"{self.name}.q", q)
        return q_latent, q

    def window_rows(self, x: Tensor, frequencies: Tensor, context: Context) -> Tensor:
        """x [B, S, D] -> key-value rows [B, S, K], rotated and fake quantized over all channels."""
        rows = self.kv_norm(self.wkv(x, context.numerics))
        context.record(f"{self.name}.kv_pre_rope", rows)
        rows = rotate(rows, context.positions, frequencies)
        context.record(f"{self.name}.kv", rows)
        return fake_quant_fp8(rows) if context.numerics.fake_quant else rows

    def visible_rows(self, window_rows: Tensor, context: Context, cache: Cache, shared: Shared,
                     queries: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Rows that queries of this call (all by default) may attend to, and for every query which.

        window_rows [B, S, K] -> kv [B, N, K], indices [B, n, k] for the n tokens of `queries`.
        """
        ring = cache.windows[self.plan.layer_id].rows
        kv = torch.cat((ring, window_rows), dim=1)
        # The starts as a tensor that is on the device already: a copy there would stop the host.
        indices = window_indices(context.positions[:, queries], context.positions[:, 0], ring.shape[1], context.window_starts)
        if self.plan.kv_source is None:
            return kv, indices
        selection = shared.selections[self.plan.index_source][:, queries]
        return _add_selected(kv, indices, Rows.of(shared.compressed[self.plan.kv_source]), selection)

    def attend(self, q: Tensor, kv: Tensor, indices: Tensor, frequencies: Tensor, context: Context) -> Tensor:
        """q [B, S, H, K], kv [B, N, K], indices [B, S, k] -> head outputs [B, S, H, K], rotated back."""
        return self._back_rotated(self._sparse(q, kv, indices, context), frequencies, context)

    def _query_slices(self, context: Context, shared: Shared) -> Iterator[slice]:
        """Slices of this call's tokens whose gathered compressed rows stay within the memory budget."""
        batch, tokens = context.positions.shape
        if self.plan.kv_source is None or context.observe is not None:
            return iter((slice(0, tokens),))
        row_bytes = BYTES_DECODED * batch * self.config.head_dim
        known, selected = (Rows.of(shared.compressed[self.plan.kv_source]).count,
                           shared.selections[self.plan.index_source].shape[2])
        if known * row_bytes <= context.memory_budget:
            return iter((slice(0, tokens),))  # at worst the whole store is decoded, once
        return row_slices(tokens, selected * row_bytes, context.memory_budget)

    def _sparse(self, q: Tensor, kv: Tensor, indices: Tensor, context: Context) -> Tensor:
        return sparse_attn(q, kv, self.attn_sink, indices, self.config.head_dim**-0.5, context.memory_budget)

    def _back_rotated(self, out: Tensor, frequencies: Tensor, context: Context) -> Tensor:
        context.record(f"{self.name}.out_rotated", out)
        out = rotate(out, context.positions, frequencies, inverse=True)
        context.record(f"{self.name}.out_unrotated", out)
        return out

    def project(self, out: Tensor, context: Context) -> Tensor:
        """Head outputs [B, S, H, K] -> [B, S, D]: per group of consecutive heads through wo_a, then wo_b."""
        grouped = out.unflatten(2, (self.config.o_groups, -1)).flatten(-2)  # [B, S, G, heads per group * K]
        wo_a = dense_weight(self.wo_a.weight, context.numerics.dtype).unflatten(0, (self.config.o_groups, -1))
        grouped = torch.einsum("bsgi,goi->bsgo", grouped, wo_a)
        context.record(f"{self.name}.o_groups", grouped)
        out = self.wo_b(grouped.flatten(-2), context.numerics)
        context.record(f"{self.name}.out", out)
        return out

    def compress(self, x: Tensor, context: Context, cache: Cache, shared: Shared) -> tuple[Groups, Shared]:
        """Finish groups, stage their rows and index keys in the cache, publish both. x [B, S, D]."""
        layer_id, name, frequencies = self.plan.layer_id, f"{self.name}.compressor", self.frequencies(x.device)
        groups = self.compressor(x, context, cache.tails.get(layer_id))
        rows = rotate(groups.latent, groups.positions(self.plan.compress_ratio), frequencies)
        if context.numerics.fake_quant:
            rows = fake_quant_fp4_e4m3(rows)
        keys = self.indexer.keys(groups, frequencies, context)
        finished = max(groups.counts)
        context.record(f"{name}.latent", groups.latent[:, :finished])
        context.record(f"{name}.kv", rows[:, :finished])
        context.record(f"{self.indexer.name}.k", keys[:, :finished])
        rows = cache.compressed[layer_id].stage(rows, groups.firsts, groups.counts)
        keys = cache.index_keys[layer_id].stage(keys, groups.firsts, groups.counts)
        if any(groups.counts):
            shared = dataclasses.replace(shared, published=layer_id)
        return groups, shared.publish("compressed", layer_id, rows).publish("index_keys", layer_id, keys)

    def _select(self, x: Tensor, q_latent: Tensor, frequencies: Tensor, context: Context, cache: Cache,
                shared: Shared) -> Shared:
        """Score the source's index keys and publish this layer's selection (and candidate blocks)."""
        plan, config, name = self.plan, self.config, self.indexer.name
        keys = Rows.of(shared.index_keys[plan.kv_source])
        if context.as_published_index_keys:
            keys = _published_keys(keys, plan.kv_source, shared, cache)
        queries, weights = self.indexer.queries(x, q_latent, frequencies, context)
        batch, tokens = context.positions.shape
        row_bytes = SELECTION_BYTES * batch * keys.count
        budget = context.memory_budget
        selections, candidates = [], []
        for rows in row_slices(tokens, row_bytes, budget) if context.observe is None else (slice(0, tokens),):
            positions = context.positions[:, rows]
            scores = self.indexer.score(queries[:, rows], weights[:, rows], keys, positions, budget)
            context.record(f"{name}.scores", scores)
            if plan.candidate_role == "publish":
                blocks = candidate_blocks(scores, positions, plan.compress_ratio, config.candidate_block_size,
                                          config.candidate_topk_blocks)
                candidates.append(blocks)
                if context.observe is not None:
                    context.record(f"{name}.candidates", block_columns(blocks, config.candidate_block_size, keys.count))
            elif plan.candidate_role == "filter":
                blocks = shared.candidates[config.candidate_source_layer_id][:, rows]
                kept = block_columns(blocks, config.candidate_block_size, keys.count)
                scores = scores.masked_fill(~kept, float("-inf"))
            selections.append(select_columns(scores, config.index_topk))
        if candidates:
            shared = shared.publish("candidates", plan.layer_id, torch.cat(candidates, dim=1))
        selection = torch.cat(selections, dim=1)
        context.record(f"{name}.topk", selection)
        return shared.publish("selections", plan.layer_id, selection)


def window_indices(positions: Tensor, starts: Tensor, window: int, window_starts: Tensor | None = None) -> Tensor:
    """Where the window of every query lies in [ring (W slots), rows of this call (S)].

    positions [B, S], starts [B] (first position of the call) -> [B, S, W] int64: ascending positions max(0, p-W+1) .. p first,
    then -1. Positions before the call are in slot position mod W of the ring, the others follow it. window_starts [B]: the
    first position that has a row at all.
    """
    first = (positions - window + 1).clamp_min(0).unsqueeze(-1)
    if window_starts is not None:
        first = torch.maximum(first, window_starts.view(-1, 1, 1))
    seen = first + torch.arange(window, device=positions.device)  # [B, S, W]
    start = starts.view(-1, 1, 1)
    index = torch.where(seen < start, seen % window, window + seen - start)
    return index.masked_fill(seen > positions.unsqueeze(-1), -1)


def _add_selected(kv: Tensor, indices: Tensor, compressed: Rows, selection: Tensor) -> tuple[Tensor, Tensor]:
    """Append the compressed rows to kv [B, M, K] and their columns to indices [B, S, W].

    Few queries read few rows of a long store, so then only the selected rows are decoded.
    """
    offset = kv.shape[1]
    batch, queries, count = selection.shape
    if queries * count < compressed.count:
        rows = compressed.gather(selection.clamp_min(0).flatten(1))
        column = torch.arange(queries * count, device=kv.device).view(1, queries, count)
    else:
        rows, column = compressed.columns(0, compressed.count), selection
    column = (column + offset).masked_fill(selection < 0, -1)
    return torch.cat((kv, rows), dim=1), torch.cat((indices, column.expand(batch, -1, -1)), dim=-1)


def _published_keys(own: Rows, source: int, shared: Shared, cache: Cache) -> Rows:
    """The keys that the official code scores against (revision dba1be0a), for parity runs only.

    official: one slot holds the index keys of whichever layer published last, and a layer publishes only in a call that
    finishes one of its groups. On a decode step that leaves its group open, a layer therefore reads what another source
    published before. `own` [B, N, X] decides how many columns there are.
    """
    if shared.published in (None, source):
        return own
    columns = own.count
    other = cache.index_keys[shared.published].rows[:, :columns]
    # The other source may have fewer rows than this one has columns; the official buffer holds zeros there.
    return Rows.of(F.pad(other, (0, 0, 0, columns - other.shape[1])))
