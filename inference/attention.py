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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.cache import Cache
from inference.compressor import Compressor, Groups
from inference.config import LayerPlan, TextConfig
from inference.context import Context, Shared
from inference.indexer import Indexer, candidate_columns, select_columns
from inference.kernel import sparse_attn
from inference.layers import Linear, RMSNorm, dense_weight, empty_parameter
from inference.quant import fake_quant_fp4_e4m3, fake_quant_fp8
from inference.rope import rope_frequencies, rotate


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
        if self.compressor is not None:
            groups, shared = self._compress(x, frequencies, context, cache, shared)
        if self.indexer is not None:
            shared = self._select(x, q_latent, frequencies, context, cache, shared)

        kv, indices = self.visible_rows(window_rows, context, cache, shared)
        context.record(f"{self.name}.all_index", indices)
        out = self.attend(q, kv, indices, frequencies, context)
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

    def visible_rows(self, window_rows: Tensor, context: Context, cache: Cache, shared: Shared) -> tuple[Tensor, Tensor]:
        """Rows that this call's queries may attend to, and for every query which: kv [B, N, K], indices [B, S, k]."""
        ring = cache.windows[self.plan.layer_id].rows
        kv = torch.cat((ring, window_rows), dim=1)
        indices = window_indices(context.positions, context.starts, ring.shape[1])
        if self.plan.kv_source is None:
            return kv, indices
        return _add_selected(kv, indices, shared.compressed[self.plan.kv_source], shared.selections[self.plan.index_source])

    def attend(self, q: Tensor, kv: Tensor, indices: Tensor, frequencies: Tensor, context: Context) -> Tensor:
        """q [B, S, H, K], kv [B, N, K], indices [B, S, k] -> head outputs [B, S, H, K], rotated back."""
        out = sparse_attn(q, kv, self.attn_sink, indices, self.config.head_dim**-0.5, context.memory_budget)
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

    def _compress(self, x: Tensor, frequencies: Tensor, context: Context, cache: Cache, shared: Shared,
                  ) -> tuple[Groups, Shared]:
        """Finish groups, stage their rows and index keys in the cache, publish both."""
        layer_id, name = self.plan.layer_id, f"{self.name}.compressor"
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
        keys = shared.index_keys[plan.kv_source]
        if context.as_published_index_keys:
            keys = _published_keys(keys, plan.kv_source, shared, cache)
        scores = self.indexer.scores(x, q_latent, keys, frequencies, context)
        context.record(f"{name}.scores", scores)
        if plan.candidate_role == "publish":
            candidates = candidate_columns(scores, context.positions, plan.compress_ratio, config.candidate_block_size,
                                           config.candidate_topk_blocks)
            context.record(f"{name}.candidates", candidates)
            shared = shared.publish("candidates", plan.layer_id, candidates)
        elif plan.candidate_role == "filter":
            scores = scores.masked_fill(~shared.candidates[config.candidate_source_layer_id], float("-inf"))
        selection = select_columns(scores, config.index_topk)
        context.record(f"{name}.topk", selection)
        return shared.publish("selections", plan.layer_id, selection)


def window_indices(positions: Tensor, starts: tuple[int, ...], window: int) -> Tensor:
    """Where the window of every query lies in [ring (W slots), rows of this call (S)].

    positions [B, S] -> [B, S, W] int64: ascending positions max(0, p-W+1) .. p first, then -1. Positions before the call are
    in slot position mod W of the ring, the others follow it.
    """
    first = (positions - window + 1).clamp_min(0).unsqueeze(-1)
    seen = first + torch.arange(window, device=positions.device)  # [B, S, W]
    start = torch.tensor(starts, device=positions.device).view(-1, 1, 1)
    index = torch.where(seen < start, seen % window, window + seen - start)
    return index.masked_fill(seen > positions.unsqueeze(-1), -1)


def _add_selected(kv: Tensor, indices: Tensor, compressed: Tensor, selection: Tensor) -> tuple[Tensor, Tensor]:
    """Append the compressed rows to kv [B, M, K] and their columns to indices [B, S, W].

    Few queries read few rows of a long store, so then only the selected rows are copied.
    """
    offset = kv.shape[1]
    batch, queries, count = selection.shape
    if queries * count < compressed.shape[1]:
        flat = selection.clamp_min(0).flatten(1)
        compressed = compressed.gather(1, flat.unsqueeze(-1).expand(-1, -1, kv.shape[-1]))
        column = torch.arange(queries * count, device=kv.device).view(1, queries, count)
    else:
        column = selection
    column = (column + offset).masked_fill(selection < 0, -1)
    return torch.cat((kv, compressed), dim=1), torch.cat((indices, column.expand(batch, -1, -1)), dim=-1)


def _published_keys(own: Tensor, source: int, shared: Shared, cache: Cache) -> Tensor:
    """The keys that the official code scores against (revision dba1be0a), for parity runs only.

    official: one slot holds the index keys of whichever layer published last, and a layer publishes only in a call that
    finishes one of its groups. On a decode step that leaves its group open, a layer therefore reads what another source
    published before. `own` [B, N, X] decides how many columns there are.
    """
    if shared.published in (None, source):
        return own
    columns = own.shape[1]
    other = cache.index_keys[shared.published].rows[:, :columns]
    # The other source may have fewer rows than this one has columns; the official buffer holds zeros there.
    return F.pad(other, (0, 0, 0, columns - other.shape[1]))
