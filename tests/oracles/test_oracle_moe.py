"""Router and experts: clamps, stable softplus, which bias counts where."""

import math

import numpy as np

from reference.oracles import moe


def test_softplus_keeps_small_and_large_logits():
    assert moe.softplus(90.0) == 90.0
    assert math.isclose(moe.softplus(-20.0), 2.0611536203e-9, rel_tol=1e-9)
    assert 0 < moe.softplus(-200.0) < 1e-80


def test_bias_chooses_but_does_not_weigh():
    x, gate = np.array([[1.0]]), np.array([[1.0], [2.0], [3.0]])
    ids, weights, _ = moe.route(x, gate, np.array([[50.0, 0.0, 0.0]]), 2, 1.5)
    score = [math.sqrt(math.log1p(math.exp(logit))) for logit in (1.0, 3.0)]
    np.testing.assert_array_equal(ids, [[0, 2]])
    np.testing.assert_allclose(weights[0], [1.5 * value / sum(score) for value in score], rtol=1e-14)


def test_gate_is_clamped_from_above_only_and_up_on_both_sides():
    one = np.eye(1)

    def run(gate, up):
        return moe.expert(np.array([1.0]), gate * one, one, up * one, 10.0, 1.0)[0]

    def silu(value):
        return value / (1 + math.exp(-value))

    assert math.isclose(run(-20.0, 1.0), silu(-20.0), rel_tol=1e-12)
    assert math.isclose(run(20.0, 1.0), silu(10.0), rel_tol=1e-12)
    assert math.isclose(run(1.0, 20.0), 10 * silu(1.0), rel_tol=1e-12)
    assert math.isclose(run(1.0, -20.0), -10 * silu(1.0), rel_tol=1e-12)
