"""Lagged hyper-connections: C residual streams instead of one.

What they compute, per token (X [C, D] are the streams before a sub-layer)
    mixes     u = (fn flatten(X)) * rsqrt(mean(X^2) + eps_norm), one statistic over all C * D values
    pre[c]    sigmoid(u[c] * scale[0] + base[c]) + eps                    used by the NEXT sub-layer (the lag)
    post[c]   2 sigmoid(u[C + c] * scale[1] + base[C + c])
    comb      Sinkhorn of u[2C + C i + j] * scale[2] + base[...]; comb[i, j] carries stream i to stream j
    collapse  z = sum_c a[c] X[c], with the `pre` of the previous sub-layer (first layer: one-hot on stream 0)
    expand    X'[j] = post[j] y + sum_i comb[i, j] X[i]
Dtypes
    float32 from the flattened streams to the coefficients; collapse and expand cast once to the stream dtype.
Mirrors
    official: `hc_split_sinkhorn` and the `hc_pre`/`hc_post` parts of class `Block`; tech report: hyper-connections.
Tests
    tests/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.config import TextConfig


@dataclass(frozen=True)
class Mixes:
    """Coefficients of one sub-layer, float32."""

    pre_next: Tensor  # [B, S, C], for the collapse of the next sub-layer
    post: Tensor  # [B, S, C]
    comb: Tensor  # [B, S, C, C], source stream first, target stream last


def first_pre(streams: Tensor) -> Tensor:
    """The collapse vector before any sub-layer has run: one-hot on stream 0. streams [B, S, C, D] -> [B, S, C] float32."""
    one_hot = torch.zeros(streams.shape[:-1], dtype=torch.float32, device=streams.device)
    one_hot[..., 0] = 1.0
    return one_hot


def compute_mixes(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: TextConfig) -> Mixes:
    """streams [B, S, C, D]; fn [C (2 + C), C D], base [C (2 + C)], scale [3], float32. Returns `Mixes`."""
    copies = config.hc_mult
    flat = streams.flatten(-2).to(torch.float32)  # stream index slowest
    # official: the norm has no weight and is applied after the projection.
    rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return split_mixes(F.linear(flat, fn) * rms, base, scale, copies, config.hc_sinkhorn_iters, config.hc_eps)


def split_mixes(mixes: Tensor, base: Tensor, scale: Tensor, copies: int, rounds: int, eps: float) -> Mixes:
    """mixes [..., C (2 + C)] float32 -> pre, post, comb (official: hc_split_sinkhorn)."""
    pre, post, comb = mixes.split((copies, copies, copies * copies), dim=-1)
    base_pre, base_post, base_comb = base.split((copies, copies, copies * copies))
    pre = torch.sigmoid(pre * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)  # official: no eps here
    comb = (comb * scale[2] + base_comb).unflatten(-1, (copies, copies))
    return Mixes(pre, post, sinkhorn(comb, rounds, eps))


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """logits [..., C, C] -> nearly doubly stochastic [..., C, C].

    official: softmax over the last axis plus eps and one column division count as the first round; the last step of
    every round is a column step, so column sums are 1 to rounding and row sums only nearly.
    """
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """streams [B, S, C, D], pre [B, S, C] float32 -> [B, S, D], dtype of the streams."""
    return (pre.unsqueeze(-1) * streams.to(torch.float32)).sum(-2).to(streams.dtype)


def expand(streams: Tensor, y: Tensor, mixes: Mixes) -> Tensor:
    """Write the sub-layer output y [B, S, D] back: -> [B, S, C, D], dtype of the streams."""
    written = mixes.post.unsqueeze(-1) * y.to(torch.float32).unsqueeze(-2)
    # The sum runs over the first index of comb, the source stream; the transposed form is a well-known mistake.
    carried = (mixes.comb.unsqueeze(-1) * streams.to(torch.float32).unsqueeze(-2)).sum(-3)
    return (written + carried).to(streams.dtype)
