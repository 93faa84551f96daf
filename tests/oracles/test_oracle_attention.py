"""Attention core: golden float64 results, the sink, and the way back through the rotation."""

import math

import numpy as np

from reference.oracles import attention
from reference.oracles.rope import rotate


def test_core_equals_the_golden_values(ops):
    """Index -1 contributes nothing, a row of -1 alone gives zeros, a duplicate counts twice."""
    q, kv, index, sink = (ops[f"sparse_attn.{name}"] for name in ("q", "kv", "idx", "sink"))
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            rows = kv[b][[int(i) for i in index[b, s] if i >= 0]]
            for h in range(q.shape[2]):
                result = attention.attend(q[b, s, h], rows, sink[h])
                np.testing.assert_allclose(result, ops["sparse_attn.out_float64"][b, s, h], rtol=1e-12, atol=1e-14)


def test_sink_equal_to_the_log_sum_halves_the_output():
    random = np.random.default_rng(0)
    query, rows = random.normal(size=16), random.normal(size=(5, 16))
    log_sum = math.log(np.exp(rows @ query / 4).sum())
    plain = attention.attend(query, rows, -math.inf)
    np.testing.assert_allclose(attention.attend(query, rows, log_sum), plain / 2, rtol=1e-14)
    np.testing.assert_allclose(plain, np.exp(rows @ query / 4 - log_sum) @ rows, rtol=1e-13)


def test_one_row_at_the_query_position_arrives_unrotated():
    random, frequencies = np.random.default_rng(1), np.array([1.0, 0.1])
    value = random.normal(size=8)
    visible = [rotate(value, 41, frequencies)[None]]
    query = random.normal(size=(1, 3, 8))
    out = attention.attend_back_rotated(query, visible, np.full(3, -math.inf), range(41, 42), frequencies)
    np.testing.assert_allclose(out, np.tile(value, (1, 3, 1)), atol=1e-15)


def test_output_groups_are_consecutive_heads():
    """Only the second group's projection is nonzero: only heads 2 and 3 may matter."""
    out, wo_a = np.random.default_rng(2).normal(size=(1, 4, 8)), np.zeros((6, 16))
    wo_a[3:] = np.random.default_rng(3).normal(size=(3, 16))
    result = attention.output_projection(out, wo_a, np.eye(6), groups=2)
    np.testing.assert_allclose(result[0], np.concatenate([np.zeros(3), wo_a[3:] @ out[0, 2:].reshape(-1)]))
