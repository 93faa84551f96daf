"""How many drafts to verify: the greedy plan, its early stop, and why the plan without the stop changes the text's law."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from reference import scheduler


def theta(lengths, survivals, rates) -> float:
    expected = sum(1 + sum(values[:count]) for values, count in zip(survivals, lengths))
    return expected * rates[sum(lengths)]


def test_survival_is_the_running_product() -> None:
    logits = [2.0, -1.0, 0.5]
    chances = [1 / (1 + math.exp(-logit)) for logit in logits]
    assert scheduler.survival(logits) == pytest.approx([chances[0], chances[0] * chances[1], math.prod(chances)])
    assert scheduler.survival([2.0], [4.0]) == pytest.approx([1 / (1 + math.exp(-0.5))])
    assert scheduler.survival([]) == []


def test_the_plan_is_the_best_one_when_rates_fall_smoothly() -> None:
    """Against all plans. Steps get slower at a growing rate, so throughput rises to one peak and the stop finds it."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        survivals = [scheduler.survival((3 * torch.randn(3, generator=generator)).tolist()) for _ in range(3)]
        cost = float(torch.rand(1, generator=generator)) * 0.5
        rates = [1 / (1 + cost * drafts) for drafts in range(10)]
        plan = scheduler.lengths(survivals, rates)
        best = max(theta(lengths, survivals, rates) for lengths in itertools.product(range(4), repeat=3))
        assert theta(plan, survivals, rates) == pytest.approx(best)
        pairs = scheduler.capacity(survivals, rates)
        assert scheduler.admit(survivals, pairs) == scheduler.lengths(survivals, rates, stop=False)


def test_free_drafts_are_all_sent_and_costly_ones_are_not() -> None:
    survivals = [[0.9, 0.8], [0.5, 0.1]]
    assert scheduler.lengths(survivals, [1.0] * 5) == [2, 2]
    assert scheduler.lengths(survivals, [1.0, 0.3, 0.2, 0.1, 0.1]) == [0, 0]
    assert scheduler.admit(survivals, 3) == [2, 1]
    assert scheduler.admit([[0.5, 0.5], [0.5]], 2) == [1, 1]  # among equals the earlier position first


def counterexample(stop: bool) -> float:
    """Probability of the first symbol in the output (DSpark paper, appendix A), exactly.

    One request, gamma 2; the model's law is (0.7, 0.3), the draft's (0.5, 0.5). c_1 = 0.8 whatever is drawn; c_2 is 0.9 after
    the first symbol and 0 after the second. A draft that is not sent is replaced by a token of the model's own.
    """
    law, guess, rates, output = (0.7, 0.3), (0.5, 0.5), (1.0, 0.5, 0.45), 0.0
    residual = [max(0.0, p - q) for p, q in zip(law, guess)]
    for symbol, second in ((0, 0.9), (1, 0.0)):
        length = scheduler.lengths([[0.8, 0.8 * second]], rates, stop)[0]
        if length == 0:
            output += guess[symbol] * law[0]
        else:
            accept = min(1.0, law[symbol] / guess[symbol])
            output += guess[symbol] * (accept * (symbol == 0) + (1 - accept) * residual[0] / sum(residual))
    return output


def test_counterexample_of_the_paper() -> None:
    rates = (1.0, 0.5, 0.45)
    assert theta([1], [[0.8]], rates) == pytest.approx(0.9) and theta([2], [[0.8, 0.72]], rates) == pytest.approx(1.134)
    assert scheduler.lengths([[0.8, 0.72]], rates) == [0] and scheduler.lengths([[0.8, 0.0]], rates) == [0]
    assert counterexample(stop=True) == pytest.approx(0.7)  # the model's law
    assert scheduler.lengths([[0.8, 0.72]], rates, stop=False) == [2]
    assert counterexample(stop=False) == pytest.approx(0.85)  # not the model's law


def test_a_capacity_of_earlier_steps_keeps_the_law() -> None:
    """The same search is harmless when its confidences cannot know this step's tokens: the number is one for both symbols."""
    earlier = scheduler.capacity([[0.9, 0.8]], (1.0, 0.5, 0.45))
    plans = {tuple(scheduler.admit([[0.8, 0.8 * second]], earlier)) for second in (0.9, 0.0)}
    assert len(plans) == 1


def test_input_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="survivals must fall"):
        scheduler.lengths([[0.5, 0.6]], [1.0] * 3)
    with pytest.raises(ValueError, match="wanted 3 positive entries"):
        scheduler.lengths([[0.6, 0.5]], [1.0, 0.9])
    with pytest.raises(ValueError, match="positive"):
        scheduler.lengths([[0.6, 0.5]], [1.0, 0.9, 0.0])
