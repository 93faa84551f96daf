"""Sparse attention: every query attends to its own list of rows; one row is key and value of all heads.

What it computes, for query row i and head h
    logit[t] = scale * q . kv[index[t]]          index -1 contributes nothing
    out      = sum_t exp(logit[t]) kv[index[t]] / (sum_t exp(logit[t]) + exp(sink[h]))
    A row without any valid index gives exact zeros. An index that occurs twice counts twice.
Order of operations (matters for bits only)
    official: indices in blocks of 64; the running maximum starts at -1e30; natural exponential; with BF16 inputs the
    probabilities are rounded to BF16 relative to the running maximum before the value product, while the denominator sums
    them unrounded; products accumulate in float32; the sink joins the denominator once, at the end.
Mirrors
    official: `sparse_attn` of the official kernel file.
Tests
    tests/test_kernel.py, tests/test_golden_ops.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.context import DEFAULT_MEMORY_BUDGET, row_slices

BLOCK = 64  # official: indices per step of the online softmax
START_MAX = -1e30  # official: finite, so that a block of -1 entries gives exp(-inf) = 0 and no NaN


def sparse_attn(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float,
                memory_budget: int = DEFAULT_MEMORY_BUDGET) -> Tensor:
    """q [B, S, H, K]; kv [B, N, K], same dtype; sink [H] float32; indices [B, S, k] int64, -1 = none.

    Returns [B, S, H, K], dtype of q. Query rows are processed in slices of at most `memory_budget` bytes.
    """
    assert q.shape[0] == kv.shape[0] == indices.shape[0] and q.shape[-1] == kv.shape[-1] and q.shape[1] == indices.shape[1], (
        f"q {tuple(q.shape)}, kv {tuple(kv.shape)}, indices {tuple(indices.shape)}")
    batch, _, heads, width = q.shape
    row_bytes = 4 * batch * (2 * BLOCK * width + heads * (BLOCK * 3 + width * 2))
    parts = [_sparse_attn_rows(q[:, rows], kv, sink, indices[:, rows], scale)
             for rows in row_slices(q.shape[1], row_bytes, memory_budget)]
    return torch.cat(parts, dim=1)


def _sparse_attn_rows(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float) -> Tensor:
    batch, rows, heads, width = q.shape
    wide_q = q.to(torch.float32)
    maximum = torch.full((batch, rows, heads, 1), START_MAX, dtype=torch.float32, device=q.device)
    denominator = torch.zeros_like(maximum)
    out = torch.zeros((batch, rows, heads, width), dtype=torch.float32, device=q.device)
    for block in indices.split(BLOCK, dim=-1):
        present = block >= 0  # [B, S, t]
        flat = block.clamp_min(0).flatten(1).unsqueeze(-1).expand(-1, -1, width)
        gathered = kv.gather(1, flat).unflatten(1, block.shape[1:]).to(torch.float32)  # [B, S, t, K]
        # An absent entry reads row 0; zero it, so that a NaN there cannot leak through 0 * NaN.
        gathered = gathered.masked_fill(~present.unsqueeze(-1), 0.0)
        logits = torch.einsum("bshk,bstk->bsht", wide_q, gathered) * scale
        logits = logits.masked_fill(~present.unsqueeze(2), float("-inf"))
        new_maximum = torch.maximum(maximum, logits.amax(-1, keepdim=True))
        rescale = torch.exp(maximum - new_maximum)
        probabilities = torch.exp(logits - new_maximum)
        denominator = denominator * rescale + probabilities.sum(-1, keepdim=True)
        values = probabilities.to(q.dtype).to(torch.float32)  # official: rounded to BF16 for the value product
        out = out * rescale + torch.einsum("bsht,bstk->bshk", values, gathered)
        maximum = new_maximum
    denominator = denominator + torch.exp(sink.to(torch.float32).view(1, 1, heads, 1) - maximum)
    # Only a row without any valid index and a sink of -inf gets here with 0; official code gives NaN, ours zeros.
    return (out / denominator.masked_fill(denominator == 0, 1.0)).to(q.dtype)
