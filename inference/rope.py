"""Rotary position embedding of the text model: frequencies by layer kind, rotate, rotate back.

What it computes
    angle = position * frequency, an official float32 product. The last R channels of a vector are R/2 adjacent pairs:
    (a, b) -> (a cos - b sin, a sin + b cos). `inverse` turns by the negative angle: attention values are the rotated
    keys themselves, so the output is turned back at the query's position.
    Layers of ratio 0: base 10000, no YaRN. Layers of ratio > 0: base 160000 with YaRN. There is no magnitude scale.
Mirrors
    official: `precompute_freqs_cis`, `apply_rotary_emb`; the vision tower has its own, half-split rotation (vision.py).
Leaves out
    The official table of all positions: angles are computed for the positions of a call.
Tests
    tests/test_rope.py
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from inference.config import LayerPlan, TextConfig


@functools.cache  # per layer and device: copying them there anew would stop the host in every layer
def rope_frequencies(config: TextConfig, plan: LayerPlan, device: torch.device | str = "cpu") -> Tensor:
    """[R/2] float32 radians per position for one layer, fastest first."""
    width = config.qk_rope_head_dim
    # Computed on the CPU whatever the device: pow differs in the last bit between devices, and far positions multiply it.
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / (plan.rope_theta ** exponent)
    if plan.use_yarn:
        scaling = config.rope_scaling
        length = scaling.original_max_position_embeddings

        def turning_dim(turns: float) -> float:
            """The (fractional) channel index that makes `turns` turns within the original length."""
            return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(plan.rope_theta))

        low = max(math.floor(turning_dim(scaling.beta_fast)), 0)
        high = min(math.ceil(turning_dim(scaling.beta_slow)), width - 1)
        # official: 0.001 keeps the ramp finite when low = high.
        ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
        smooth = 1 - ramp  # official: in this order of operations; ramp itself would differ in the last bit
        frequencies = frequencies / scaling.factor * (1 - smooth) + frequencies * smooth
    return frequencies.to(device)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * len(frequencies) channels of x; the channels before them pass unchanged.

    x: [B, S, D] or [B, S, H, D], any float dtype; positions: [B, S] int64; frequencies: [R/2] float32.
    Returns a new tensor like x; the rotation is float32 inside.
    """
    width = 2 * frequencies.shape[0]
    assert positions.shape == x.shape[:2], f"positions {tuple(positions.shape)} for x {tuple(x.shape)}"
    angle = positions.to(torch.float32).unsqueeze(-1) * frequencies  # [B, S, R/2], a float32 product (official)
    if x.dim() == 4:
        angle = angle.unsqueeze(2)  # the same angle for all heads
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    fixed, turned = x.split((x.shape[-1] - width, width), dim=-1)
    a, b = turned.to(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((fixed, turned.to(x.dtype)), dim=-1)
