"""oQ group fitting: an affine scale and bias per group of weights, chosen for the inputs that the weights will meet.

What it computes, per group of g weights w with importance i (mean square of the input channel they multiply)
    minimize  E = sum_j i_j (w_j - (s q_j + b))^2      q_j = clip(round((w_j - b) / s), 0, 2^bits - 1)
    1. search   both ends of the range as anchor, step times seven factors; the best of the 14 is kept
    2. refit    given the codes, E is quadratic in (s, b); with S0 = sum i, S1 = sum i q, S2 = sum i q^2, T0 = sum i w,
                T1 = sum i q w and D = S0 S2 - S1^2:   s = (S0 T1 - S1 T0) / D,   b = (S2 T0 - S1 T1) / D
                then new codes; repeated, and kept only where E falls
    3. round    s and b to BF16, and new codes for the rounded values
Modes
    refits=0 stops after the search, and the codes belong to the unrounded s and b: what oMLX does.
    A constant importance tells nothing, so oMLX then uses the plain min/max rule (`inference.quant.encode_affine`).
Mirrors
    oMLX 0.7: `_weighted_affine_quantize`, as documented. Refit and final rounding are ours.
Tests
    tests/test_oq.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.quant import AFFINE_BITS, affine_codes, encode_affine, pack_bits

FACTORS = (1.0, 0.5, 0.625, 0.75, 0.875, 1.125, 1.25)  # oMLX; ours: 1 first, so that a tie keeps the plain step
IMPORTANCE_FLOOR = 1e-8  # oMLX
MINIMUM_STEP = 1e-7  # MLX: its eps
DEFAULT_REFITS = 2  # ours: later ones gain little
_CHUNK = 1 << 18  # ours: weights fitted at once; larger ones leave the processor caches and take longer


def fit_affine(values: Tensor, importance: Tensor, bits: int, group: int, refits: int = DEFAULT_REFITS,
               ) -> tuple[Tensor, Tensor, Tensor]:
    """values [R, C] any float dtype, importance [C] -> words [R, C*bits/32] uint32, scales, biases [R, C/group] BF16.

    Raises ValueError for a shape, width or importance that cannot be used.
    """
    rows, columns = values.shape
    if importance.shape != (columns,) or not bool(torch.isfinite(importance).all()) or bool((importance < 0).any()):
        raise ValueError(f"Fitting a weight [{rows}, {columns}]: wanted {columns} finite importances >= 0, got "
                         f"{list(importance.shape)}. Collect the importance matrix again for this checkpoint.")
    if bits not in AFFINE_BITS or columns % group:
        raise ValueError(f"Fitting a weight [{rows}, {columns}]: {bits} bits in groups of {group}; wanted bits among "
                         f"{AFFINE_BITS} and rows that are a multiple of the group.")
    weights = importance.to(torch.float32).clamp_min(IMPORTANCE_FLOOR).unflatten(0, (-1, group))
    parts = [_fit_rows(part, weights, bits, refits) for part in values.split(max(1, _CHUNK // columns))]
    words, scales, biases = (torch.cat(tensors) for tensors in zip(*parts))
    return words, scales, biases


def quantize(values: Tensor, importance: Tensor | None, bits: int, group: int, refits: int = DEFAULT_REFITS,
             ) -> tuple[Tensor, Tensor, Tensor]:
    """`fit_affine`, or MLX's min/max rule where there is no importance. Same result shapes."""
    if importance is None:
        return encode_affine(values, bits, group)
    return fit_affine(values, importance, bits, group, refits)


def is_constant(importance: Tensor) -> bool:
    """True if an importance of any shape says nothing: all its entries are equal."""
    return bool((importance == importance.flatten()[0]).all())


def _fit_rows(values: Tensor, weights: Tensor, bits: int, refits: int) -> tuple[Tensor, Tensor, Tensor]:
    """values [R, C], weights [C/g, g] float32, already floored."""
    grouped = values.to(torch.float32).unflatten(-1, weights.shape)  # [R, C/g, g]
    scale, bias = _search(grouped, weights, bits)
    for _ in range(refits):
        scale, bias = _refit(grouped, weights, scale, bias, bits)
    stored_scale, stored_bias = scale.to(torch.bfloat16), bias.to(torch.bfloat16)
    if refits > 0:
        scale, bias = stored_scale.to(torch.float32), stored_bias.to(torch.float32)
    codes = affine_codes(grouped, scale, bias, bits)
    return pack_bits(codes.flatten(-2), bits), stored_scale, stored_bias


def weighted_error(grouped: Tensor, weights: Tensor, scale: Tensor, bias: Tensor, bits: int) -> Tensor:
    """E of the module docstring: grouped [..., g], weights that broadcast to it, scale, bias [...] -> [...]."""
    codes = affine_codes(grouped, scale, bias, bits).to(torch.float32)
    return _error(grouped, weights, codes, scale, bias)


def _error(grouped: Tensor, weights: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (weights * (grouped - (codes * scale.unsqueeze(-1) + bias.unsqueeze(-1))).square()).sum(-1)


def _search(grouped: Tensor, weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Best of 2 anchors and 7 step factors -> scale, bias [R, C/g] float32."""
    low, high = grouped.amin(-1), grouped.amax(-1)
    step = ((high - low) / (2**bits - 1)).clamp_min(MINIMUM_STEP)
    from_low = low.abs() > high.abs()
    best_error = torch.full_like(step, torch.inf)
    best_scale, best_bias = torch.zeros_like(step), torch.zeros_like(step)
    for preferred in (True, False):  # the end of larger magnitude first: with factor 1 it is the plain min/max rule
        use_low = from_low == preferred
        edge, signed = torch.where(use_low, low, high), torch.where(use_low, step, -step)
        levels = torch.round(edge / signed)
        base = torch.where(levels != 0, edge / levels, signed)
        bias = torch.where(levels != 0, edge, torch.zeros_like(edge))
        for factor in FACTORS:
            scale = base * factor
            error = weighted_error(grouped, weights, scale, bias, bits)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale, best_bias = torch.where(better, scale, best_scale), torch.where(better, bias, best_bias)
    return best_scale, best_bias


def _refit(grouped: Tensor, weights: Tensor, scale: Tensor, bias: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """One least-squares step: scale and bias for the current codes, kept where the error falls with new codes."""
    codes = affine_codes(grouped, scale, bias, bits).to(torch.float32)
    # float64: D is a difference of nearly equal products when the codes of a group lie close together.
    weights64, codes64, grouped64 = weights.to(torch.float64), codes.to(torch.float64), grouped.to(torch.float64)
    s0, s1, s2 = weights64.sum(-1), (weights64 * codes64).sum(-1), (weights64 * codes64.square()).sum(-1)
    t0, t1 = (weights64 * grouped64).sum(-1), (weights64 * codes64 * grouped64).sum(-1)
    determinant = s0 * s2 - s1.square()
    usable = determinant > 0
    divisor = torch.where(usable, determinant, torch.ones_like(determinant))
    new_scale = ((s0 * t1 - s1 * t0) / divisor).to(torch.float32)
    new_bias = ((s2 * t0 - s1 * t1) / divisor).to(torch.float32)
    usable &= (new_scale != 0) & torch.isfinite(new_scale) & torch.isfinite(new_bias)
    new_scale = torch.where(usable, new_scale, scale)
    falls = (weighted_error(grouped, weights, new_scale, new_bias, bits)
             < _error(grouped, weights, codes, scale, bias)) & usable
    return torch.where(falls, new_scale, scale), torch.where(falls, new_bias, bias)
