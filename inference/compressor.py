"""Compressor: m tokens become one row (source layers only).

What it computes, from the attention input x [S, D]
    m = 1   latent = RMSNorm(x wkv)
    m > 1   v = x wkv, g = x wgate in float32; for the m tokens of a group: weights = softmax of g over the tokens, channel by
            channel; latent = RMSNorm(cast(sum of weight * v))
    The latent is taken before rotation and quantization: the indexer makes its key from it, attention its row.
Groups across calls
    Group j holds tokens j m .. j m + m - 1 and is finished by the call that brings the last of them. The open group's v and g
    are the tail. Groups do not overlap and have no position term (both existed in V4).
Mirrors
    official: class `Compressor`; tech report: compressed sparse attention.
Tests
    tests/test_compressor.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inference.cache import Ring
from inference.config import LayerPlan, TextConfig
from inference.context import Context
from inference.layers import Linear, RMSNorm


@dataclass(frozen=True)
class Groups:
    """Groups that a call finishes. Rows beyond counts[b] are meaningless."""

    latent: Tensor  # [B, G, K] before rotation, activation dtype
    firsts: list[int]  # per batch row: index of the first of them
    counts: list[int]  # per batch row: how many
    tail: tuple[Tensor, Tensor] | None  # v, g [B, S, K] float32 of this call's tokens, for the cache
    first: Tensor  # [B, 1] int64: `firsts`, on the device

    def positions(self, ratio: int) -> Tensor:
        """[B, G] int64: the position of a group is that of its first token, j * ratio."""
        return (self.first + torch.arange(self.latent.shape[1], device=self.latent.device)) * ratio


class Compressor(nn.Module):
    def __init__(self, config: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.ratio = plan.compress_ratio
        pools = self.ratio > 1
        self.wkv = Linear(config.hidden_size, config.head_dim, float32=pools)
        self.wgate = Linear(config.hidden_size, config.head_dim, float32=True) if pools else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context, tail: tuple[Ring, Ring] | None) -> Groups:
        """x [B, S, D] activation dtype; tail: the v and g rings of the cache (None for ratio 1)."""
        numerics, ratio = context.numerics, self.ratio
        firsts = [start // ratio for start in context.starts]
        counts = [end // ratio - first for end, first in zip(context.ends, firsts)]
        first = context.positions[:, :1] // ratio
        if ratio == 1:
            return Groups(self.norm(self.wkv(x, numerics)), firsts, counts, None, first)
        v, g = self.wkv(x, numerics), self.wgate(x, numerics)
        source = _group_tokens(context, ratio)
        width = (-1, -1, v.shape[-1])
        grouped_v, grouped_g = (
            torch.cat((ring.rows, new), dim=1).gather(1, source.unsqueeze(-1).expand(width)).unflatten(1, (-1, ratio))
            for ring, new in zip(tail, (v, g)))  # [B, G, m, K]
        pooled = (torch.softmax(grouped_g, dim=2) * grouped_v).sum(2)
        return Groups(self.norm(pooled.to(numerics.dtype)), firsts, counts, (v, g), first)


def _group_tokens(context: Context, ratio: int) -> Tensor:
    """Where each token of each touched group comes from: an index into [tail (m slots), tokens of this call (S)].

    Returns [B, G * m] int64, group after group. Entries of a group that stays open point somewhere valid; that group's row is
    not used.
    """
    device, tokens = context.positions.device, context.positions.shape[1]
    length = -(-(ratio - 1 + tokens) // ratio) * ratio  # enough groups for the worst offset
    slot = torch.arange(length, device=device)
    new = slot - context.positions[:, :1] % ratio  # [B, L] index among this call's tokens; negative = in the tail
    return torch.where(new < 0, slot % ratio, ratio + new.clamp(0, tokens - 1))
