"""Sampling: argmax, the law of a draw, top-p, seeds, refused settings."""

from __future__ import annotations

import math

import pytest
import torch

from inference.sampling import Sampling, probabilities, sample

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 0.5]])


def test_temperature_zero_is_argmax_with_the_lowest_id_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert sample(logits, Sampling(0.0), torch.Generator()).tolist() == [1, 0]
    assert torch.equal(probabilities(logits, Sampling(0.0)), torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


def test_draws_follow_the_softmax() -> None:
    """Chi-square of 20,000 draws; the law of another temperature fails it."""
    def statistic(drawn: Sampling, law: Sampling) -> float:
        generator = torch.Generator().manual_seed(1)
        counts = torch.bincount(sample(LOGITS.expand(20_000, -1), drawn, generator), minlength=4)
        expected = probabilities(LOGITS, law)[0] * 20_000
        return float(((counts - expected) ** 2 / expected).sum())

    assert statistic(Sampling(0.7), Sampling(0.7)) < 16.3  # 99.9% point with 3 degrees of freedom
    assert statistic(Sampling(0.7), Sampling(0.8)) > 16.3


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    plain = probabilities(LOGITS, Sampling(1.0))[0]  # descending: ids 2, 1, 3, 0
    for top_p, kept in ((1e-9, {2}), (float(plain[2]), {2}), (float(plain[2]) + 1e-4, {2, 1}), (0.9, {2, 1, 3}), (1.0, {0, 1, 2, 3})):
        filtered = probabilities(LOGITS, Sampling(1.0, top_p))[0]
        assert set(filtered.nonzero().flatten().tolist()) == kept
        assert float(filtered.sum()) == pytest.approx(1.0, abs=1e-6)
        ids = sorted(kept)
        assert torch.allclose(filtered[ids], plain[ids] / plain[ids].sum())


def test_same_seed_same_draws() -> None:
    draws = [sample(LOGITS.expand(50, -1), Sampling(), torch.Generator().manual_seed(seed)).tolist() for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("values", [(-0.1, 1), (math.nan, 1), (math.inf, 1), (1, 0), (1, 1.1), (1, -1), (1, math.nan)])
def test_refused(values) -> None:
    with pytest.raises(ValueError, match="Sampling"):
        Sampling(*values)
