"""Rotation: golden frequencies, pairing, direction, inverse, and the float32 angle."""

import math

import numpy as np
import pytest

from reference.oracles.rope import rotary_frequencies, rotate

RELEASED = {
    "qk_rope_head_dim": 64, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
}


@pytest.mark.parametrize("ratio, name", [(0, "window_only"), (1, "compressed"), (2, "compressed")])
def test_frequencies_of_the_released_shape(ops, ratio, name):
    np.testing.assert_allclose(rotary_frequencies(RELEASED, ratio), ops[f"rope.freq.{name}"], rtol=1e-14)


def test_adjacent_pairs_turn_and_other_channels_stay():
    vector = np.zeros(8)
    vector[4] = 1.0  # first channel of the rotated part
    vector[0] = 7.0
    expected = [7, 0, 0, 0, math.cos(1), math.sin(1), 0, 0]
    np.testing.assert_allclose(rotate(vector, 1, np.array([1.0, 0.25])), expected, atol=1e-15)


def test_inverse_undoes_and_norm_stays():
    vector, frequencies = np.random.default_rng(0).normal(size=16), rotary_frequencies(RELEASED, 1)[:4]
    rotated = rotate(vector, 300, frequencies)
    assert abs(np.linalg.norm(rotated) - np.linalg.norm(vector)) < 1e-14
    np.testing.assert_allclose(rotate(rotated, 300, frequencies, inverse=True), vector, atol=1e-14)


def test_far_angles_are_float32_products():
    frequency = rotary_frequencies(RELEASED, 1)[1]
    angle = float(np.float32(1_000_001) * np.float32(frequency))
    assert abs(angle - 1_000_001 * frequency) > 1e-3  # the two definitions differ visibly out there
    np.testing.assert_allclose(rotate(np.array([1.0, 0.0]), 1_000_001, np.array([frequency]))[0], math.cos(angle))
