"""How two tensors are compared: numbers for floats, sets for selections.

relative L2 = |a - b| / |b| over finite entries, in float64, b being the expected side. Non-finite entries must be the same ones.
Tests: tests/test_verify.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error of two tensors of one shape; infinity when their non-finite entries differ."""
    a, b = actual.to(torch.float64), expected.to(torch.float64)
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    norm = float(b[finite].norm())
    difference = float((a[finite] - b[finite]).norm())
    return difference / norm if norm > 0 else (0.0 if difference == 0 else math.inf)


def worst_entry(actual: Tensor, expected: Tensor) -> str:
    """Where two tensors differ most, with both values, for messages."""
    a, b = actual.to(torch.float64), expected.to(torch.float64)
    # Equal infinities give NaN in the difference; they agree.
    difference = torch.where(a == b, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))
    flat = int(difference.flatten().argmax()) if a.numel() else 0
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)]
    return f"at {index}: got {a.flatten()[flat].item():.8g}, wanted {b.flatten()[flat].item():.8g}"


def compare_selections(actual: Tensor, expected: Tensor, scores: Tensor | None, tolerance: float) -> tuple[str, str]:
    """Verdict on two selections [..., k] of columns (-1 = none), as sets per row, and a message.

    scores [..., N]: what was selected from. `equal`; `tie`: the sets differ among columns of exactly one score;
    `near-tie`: among columns whose scores differ by less than `tolerance` (absolute); otherwise `different`.
    """
    a, b = actual.flatten(0, -2), expected.flatten(0, -2)
    rows = (a.sort(-1).values != b.sort(-1).values).any(-1).nonzero().flatten().tolist()
    if not rows:
        return "equal", ""
    worst, text = 0.0, ""
    for row in rows:
        left, right = set(a[row].tolist()) - {-1}, set(b[row].tolist()) - {-1}
        position = [int(i) for i in torch.unravel_index(torch.tensor(row), actual.shape[:-1])]
        text = f"row {position}: only here {sorted(left - right)}, only expected {sorted(right - left)}"
        if scores is None or len(left) != len(right):
            return "different", text
        if max(left | right) >= scores.shape[-1]:
            return "different", text
        swapped = scores.reshape(-1, scores.shape[-1])[row][sorted(left ^ right)].to(torch.float64)
        margin = float(swapped.max() - swapped.min())
        if not margin <= tolerance:
            return "different", f"{text}, scores {margin:.3g} apart"
        worst = max(worst, margin)
    return ("tie", text) if worst == 0 else (f"near-tie ({worst:.3g})", text)
