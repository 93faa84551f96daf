"""Hyper-connections: golden Sinkhorn results, directions of comb, other numbers of streams."""

import numpy as np
import pytest

from reference.oracles import hyper_connections


def test_split_mixes_equals_the_golden_values(ops):
    for row, u in enumerate(ops["hc.mixes"]):
        results = hyper_connections.split_mixes(u, ops["hc.base"], ops["hc.scale"], 4, 20, 1e-6)
        for name, value in zip(("pre", "post", "comb"), results):
            np.testing.assert_allclose(value, ops[f"hc.{name}"][row], rtol=2e-6)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_columns_sum_to_one_after_the_last_step(copies):
    random = np.random.default_rng(copies)
    u, base = random.normal(size=(2, copies * (2 + copies)))
    _, _, comb = hyper_connections.split_mixes(u, base, np.ones(3), copies, 20, 1e-6)
    np.testing.assert_allclose(comb.sum(axis=0), 1, atol=2e-6)


def test_expand_carries_source_i_to_target_j():
    streams = np.array([[[1.0], [10.0]]])
    comb = np.array([[[0.0, 1.0], [0.0, 0.0]]])  # stream 0 goes to stream 1, stream 1 nowhere
    result = hyper_connections.expand(np.array([[5.0]]), streams, np.array([[0.0, 2.0]]), comb)
    np.testing.assert_array_equal(result, [[[0.0], [11.0]]])


def test_statistic_runs_over_all_streams():
    """Doubling one stream changes the mixes that do not read it, through the joint mean square."""
    config = {"hc_mult": 2, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-20}
    fn = np.zeros((8, 6))
    fn[0, :3] = 1  # pre[0] reads stream 0 only
    streams = np.ones((1, 2, 3))
    first, _, _ = hyper_connections.mixes(streams, fn, np.zeros(8), np.ones(3), config)
    second, _, _ = hyper_connections.mixes(streams * [[[1], [2]]], fn, np.zeros(8), np.ones(3), config)
    np.testing.assert_allclose(first[0, 0], 1 / (1 + np.exp(-3.0)) + 1e-6)
    np.testing.assert_allclose(second[0, 0], 1 / (1 + np.exp(-3.0 / np.sqrt(2.5))) + 1e-6)


def test_first_round_is_a_column_step_alone():
    """After the released 20 rounds this is invisible, so one round with a large eps has to show it."""
    u = np.random.default_rng(4).normal(size=8)
    _, _, comb = hyper_connections.split_mixes(u, np.zeros(8), np.ones(3), 2, 1, 0.1)
    exponentials = np.exp(u[4:].reshape(2, 2))
    start = exponentials / exponentials.sum(axis=1, keepdims=True) + 0.1
    np.testing.assert_allclose(comb, start / (start.sum(axis=0, keepdims=True) + 0.1), rtol=1e-14)
