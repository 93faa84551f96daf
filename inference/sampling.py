"""From logits to the next token.

    temperature 0   argmax, lowest id first among equals
    otherwise       p = softmax(logits / max(temperature, 1e-5)); top_p keeps the smallest set of most probable tokens whose
                    probabilities sum to at least top_p; one draw
Mirrors official: the sampling of the inference code (Exp(1) race, which is a multinomial draw); it has no top-p, the filter is ours.
Tests: tests/test_sampling.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5  # official


@dataclass(frozen=True)
class Sampling:
    """Settings of a run. Raises ValueError for values without meaning."""

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"Sampling: temperature must be a finite number of at least 0, got {self.temperature}. "
                             "0 means the most probable token.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p must be above 0 and at most 1, got {self.top_p}. 1 means no filter.")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [..., V] float32 -> probabilities [..., V] float32, filtered; one-hot at temperature 0."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(torch.float32)
    weights = torch.softmax(logits.to(torch.float32) / max(sampling.temperature, MIN_TEMPERATURE), dim=-1)
    if sampling.top_p < 1:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        # Mass of the more probable tokens; shifted, not subtracted, so that it is exact and the first token is always kept.
        before = torch.nn.functional.pad(ordered.cumsum(-1)[..., :-1], (1, 0))
        kept = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < sampling.top_p)
        weights = weights.masked_fill(~kept, 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """logits [B, V] -> ids [B] int64. The generator is the only source of randomness."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    weights = probabilities(logits, sampling)
    # official: the largest of p / Exp(1) is a draw from p. Drawn on the CPU, so that a seed means the same everywhere.
    noise = torch.empty(weights.shape, dtype=torch.float32).exponential_(generator=generator).to(weights.device)
    return (weights / noise).argmax(-1)
