"""Compressor: pooling per channel, group borders, positions of rows."""

import numpy as np
import pytest

from reference.oracles import compressor
from reference.oracles.rope import rotate

EPS = 1e-20


def rms(x):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_number_of_rows(ratio):
    x, w = np.random.default_rng(0).normal(size=(13, 6)), np.random.default_rng(1).normal(size=(4, 6))
    for length in range(1, 14):
        rows = compressor.latents(x[:length], w, None if ratio == 1 else w, np.ones(4), ratio, EPS)
        assert rows.shape == (length // ratio, 4)


@pytest.mark.parametrize("ratio", [2, 4])
def test_equal_gates_average_and_a_large_gate_selects(ratio):
    random = np.random.default_rng(ratio)
    x, wkv, wgate = random.normal(size=(2 * ratio, 6)), random.normal(size=(4, 6)), np.zeros((4, 6))
    averaged = compressor.latents(x, wkv, wgate, np.ones(4), ratio, EPS)
    np.testing.assert_allclose(averaged, rms((x @ wkv.T).reshape(2, ratio, 4).mean(axis=1)), rtol=1e-13)
    wgate[2, 0] = 1e6  # channel 2 alone follows the token with the largest x[0]
    values, winner = x @ wkv.T, x.reshape(2, ratio, 6)[:, :, 0].argmax(axis=1)
    expected = values.reshape(2, ratio, 4).mean(axis=1)
    for j in range(2):
        expected[j, 2] = values[j * ratio + winner[j], 2]
    np.testing.assert_allclose(compressor.latents(x, wkv, wgate, np.ones(4), ratio, EPS), rms(expected), rtol=1e-13)


def test_row_is_rotated_at_the_first_position_of_its_group():
    latent, frequencies = np.random.default_rng(5).normal(size=(5, 8)), np.array([1.0, 0.3])
    rows = compressor.rotated_rows(latent, 3, frequencies)
    np.testing.assert_array_equal(rows[4], rotate(latent[4], 12, frequencies))
    assert np.abs(rows[4] - rotate(latent[4], 4, frequencies)).max() > 0.1
