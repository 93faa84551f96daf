"""Indexer: which compressed rows a query attends to, in two levels.

What it computes, per query at position p (n(p) = floor((p + 1) / m) groups are visible)
    score[t]     sum over heads of relu(q_h . k[t]) * w_h
    selection    the k best visible columns, ascending, -1 for none
    candidates   (one layer only) the best blocks of columns by their maximum, the block with the newest visible column
                 always among them; later indexers over the same rows may select inside these blocks only
    Order that must hold: visibility, block maximum, pin the newest block, keep blocks, mask, top-k, ascending, -1.
Dtypes
    In BF16 the score is rounded three times (product, weighted product, sum over heads; the sum accumulates in float32). The
    roundings belong to the semantics: they make exact ties common.
Ties
    ours: the lowest column wins (the official order is undefined and differs between devices). NaN counts as -inf; a column
    at -inf is never selected.
Mirrors
    official: class `Indexer`; tech report: two-level index selection.
Tests
    tests/test_indexer.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inference.cache import Rows
from inference.compressor import Groups
from inference.config import LayerPlan, TextConfig
from inference.context import Context, row_slices
from inference.layers import Linear, RMSNorm
from inference.quant import fake_quant_fp4_e8m0
from inference.rope import rotate

# ours: bytes that decoding one channel of a packed row takes for a moment (look-up, float32 product, cast).
BYTES_DECODED = 16
MIN_COLUMNS = 1024  # ours: smaller slices of columns would cost more in overhead than they save


class Indexer(nn.Module):
    def __init__(self, config: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config, self.plan, self.name = config, plan, f"{plan.name}.attn.indexer"
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * width, quantize_input=True)
        self.weights_proj = Linear(config.hidden_size, heads)
        self.wk = Linear(config.head_dim, width) if plan.owns_compressor else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if plan.owns_compressor else None

    def keys(self, groups: Groups, frequencies: Tensor, context: Context) -> Tensor:
        """Index keys of the groups that a call finishes: [B, G, X]. Only where there is a compressor."""
        keys = self.k_norm(self.wk(groups.latent, context.numerics))
        keys = rotate(keys, groups.positions(self.plan.compress_ratio), frequencies)
        return fake_quant_fp4_e8m0(keys) if context.numerics.fake_quant else keys

    def scores(self, x: Tensor, q_latent: Tensor, keys: Tensor | Rows, frequencies: Tensor, context: Context) -> Tensor:
        """x [B, S, D], q_latent [B, S, Q], keys [B, N, X] -> [B, S, N], activation dtype; unseen groups are -inf."""
        queries, weights = self.queries(x, q_latent, frequencies, context)
        return self.score(queries, weights, keys, context.positions, context.memory_budget)

    def queries(self, x: Tensor, q_latent: Tensor, frequencies: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """x [B, S, D], q_latent [B, S, Q] -> rotated queries [B, S, J, X] and head weights [B, S, J]."""
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        queries = self.wq_b(q_latent, context.numerics).unflatten(-1, (heads, width))
        queries = rotate(queries, context.positions, frequencies)
        if context.numerics.fake_quant:
            queries = fake_quant_fp4_e8m0(queries)
        context.record(f"{self.name}.q", queries)
        # The factor is a power of two at the released shapes, so scaling is exact there.
        return queries, self.weights_proj(x, context.numerics) * (width**-0.5 * heads**-0.5)

    def score(self, queries: Tensor, weights: Tensor, keys: Tensor | Rows, positions: Tensor, budget: int) -> Tensor:
        """queries [B, S, J, X], weights [B, S, J], keys [B, N, X], positions [B, S] -> [B, S, N]; unseen groups are -inf.

        Keys are decoded, and products made, for slices of columns and of rows of at most `budget` bytes.
        """
        keys = Rows.of(keys)
        batch, rows, heads, width = queries.shape
        columns = min(keys.count, max(MIN_COLUMNS, budget // (batch * width * BYTES_DECODED)))
        # A slice holds the [heads, columns] products of a row about three times.
        row_bytes = 3 * batch * heads * columns * queries.element_size()
        parts = []
        for first in range(0, keys.count, max(1, columns)):
            some = keys.columns(first, min(first + columns, keys.count))
            parts.append(torch.cat([_weighted_scores(queries[:, part], weights[:, part], some)
                                    for part in row_slices(rows, row_bytes, budget)], dim=1))
        scores = torch.cat(parts, dim=2) if parts else queries.new_zeros(batch, rows, 0)
        visible = visible_groups(positions, self.plan.compress_ratio, keys.count)
        return scores.masked_fill(~visible, float("-inf"))


def _weighted_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """queries [B, S, J, X], weights [B, S, J], keys [B, N, X] -> [B, S, N]."""
    products = torch.relu(torch.einsum("bsjx,bnx->bsjn", queries, keys))
    return (products * weights.unsqueeze(-1)).sum(2, dtype=torch.float32).to(queries.dtype)


def visible_groups(positions: Tensor, ratio: int, groups: int) -> Tensor:
    """positions [B, S] -> [B, S, groups] bool: group j is visible from its last token on, j < floor((p + 1) / ratio)."""
    return torch.arange(groups, device=positions.device) < ((positions + 1) // ratio).unsqueeze(-1)


def top_columns(scores: Tensor, count: int) -> Tensor:
    """The `count` best columns of scores [..., N], lowest column first among equals; as a mask [..., N] bool.

    Columns at -inf or NaN are never in the mask, so a row may have fewer.
    """
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    if count >= scores.shape[-1]:
        return scores > float("-inf")
    last = scores.topk(count).values[..., -1:]  # topk's own tie order is undefined; only the value is used
    above, equal = scores > last, scores == last
    room = count - above.sum(-1, keepdim=True)
    return (above | equal & (equal.cumsum(-1) <= room)) & (scores > float("-inf"))


def select_columns(scores: Tensor, count: int) -> Tensor:
    """scores [..., N] -> [..., min(count, N)] int64: the best columns in ascending order, -1 at the end for none."""
    columns = scores.shape[-1]
    count = min(count, columns)
    mask = top_columns(scores, count)
    index = torch.arange(columns, device=scores.device).expand_as(scores)
    chosen = index.masked_fill(~mask, columns).topk(count, largest=False, sorted=True).values
    return chosen.masked_fill(chosen == columns, -1)


def candidate_columns(scores: Tensor, positions: Tensor, ratio: int, block_size: int, keep: int) -> Tensor:
    """Columns of the kept candidate blocks. scores [B, S, N] with unseen columns at -inf -> [B, S, N] bool."""
    blocks = candidate_blocks(scores, positions, ratio, block_size, keep)
    return block_columns(blocks, block_size, scores.shape[-1])


def block_columns(blocks: Tensor, block_size: int, columns: int) -> Tensor:
    """Block ids [B, S, n], -1 for none -> the columns in them, [B, S, columns] bool."""
    count = -(-columns // block_size)
    kept = torch.zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool, device=blocks.device)  # -1 goes to the last entry
    kept = kept.scatter(-1, blocks.masked_fill(blocks < 0, count), True)[..., :count]
    return kept.repeat_interleave(block_size, dim=-1)[..., :columns]


def candidate_blocks(scores: Tensor, positions: Tensor, ratio: int, block_size: int, keep: int) -> Tensor:
    """Kept candidate blocks. scores [B, S, N] with unseen columns at -inf -> [B, S, min(keep, blocks)] int64 ascending, -1.

    official: the last block is padded with -inf; the block of the newest visible column is kept whatever its score.
    """
    columns = scores.shape[-1]
    blocks = -(-columns // block_size)
    scores = scores.masked_fill(scores.isnan(), float("-inf"))  # a maximum would pass NaN on and drop its whole block
    padded = torch.nn.functional.pad(scores, (0, blocks * block_size - columns), value=float("-inf"))
    block_scores = padded.unflatten(-1, (blocks, block_size)).amax(-1)
    visible = (positions + 1) // ratio
    newest = ((visible - 1) // block_size).clamp_min(0).unsqueeze(-1)  # [B, S, 1]
    pinned = (torch.arange(blocks, device=scores.device) == newest) & (visible > 0).unsqueeze(-1)
    return select_columns(block_scores.masked_fill(pinned, float("inf")), keep)
