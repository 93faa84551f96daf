"""Far positions: one layer at position 200,000 and beyond against a naive float64 computation (pitfall 54).

The released shapes at 1,048,576 tokens: `python -m reference.longcontext`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from reference import longcontext


@pytest.fixture(scope="module")
def config(nano_config):
    """The nano shapes with room for a million tokens."""
    text = dataclasses.replace(nano_config.text_config, max_position_embeddings=2**20, index_topk=64, candidate_topk_blocks=100)
    return dataclasses.replace(nano_config, text_config=text)


@pytest.mark.parametrize("layer_id, position, tokens", [(6, 200_000, 40), (2, 200_001, 40), (6, 1_048_575, 1),
                                                        (2, 1_048_574, 1)])
def test_far_positions_equal_float64(config, layer_id, position, tokens) -> None:
    """The last of `tokens` tokens: scores over every key, selection, candidate blocks, attention over window and choice."""
    attention = longcontext.random_layer(config, layer_id)
    cache = longcontext.random_cache(config, attention.plan, position)
    difference = longcontext.compare(attention, cache, tokens)
    assert difference.is_equal, difference
    assert difference.scores < 2e-6 and difference.output < 2e-6  # measured: 6e-7


def test_the_comparison_can_fail(config, monkeypatch) -> None:
    """Angles that are exact instead of float32 products, and a window that is off by one, are both seen."""
    attention = longcontext.random_layer(config, 6)
    cache = longcontext.random_cache(config, attention.plan, 1_000_000)
    rotate, indices = longcontext.rotate, longcontext.Attention.forward.__globals__["window_indices"]
    with monkeypatch.context() as patch:
        patch.setattr(longcontext, "rotate", lambda x, position, frequencies, inverse: rotate(
            x, position + 1, frequencies, inverse=inverse))
        assert not longcontext.compare(attention, cache).is_equal
    with monkeypatch.context() as patch:
        patch.setitem(longcontext.Attention.forward.__globals__, "window_indices",
                      lambda positions, *rest: indices(positions - 1, *rest))
        assert not longcontext.compare(attention, cache).is_equal
    assert longcontext.compare(attention, cache).is_equal


def test_command_on_small_lengths(capsys, tmp_path) -> None:
    assert longcontext.main(["--layer", "3"]) == 3
    assert "owns no compressed rows" in capsys.readouterr().err


def test_memory_of_one_step_stays_within_the_budget(config) -> None:
    """At a million tokens the index keys are decoded in slices: the float32 values of all at once would take 128 MiB."""
    from inference.context import DEFAULT_MEMORY_BUDGET
    from tests.test_decoding_chunks import LargestTensor

    attention = longcontext.random_layer(config, 6)
    cache = longcontext.random_cache(config, attention.plan, 2**20 - 1)
    cache.reserve(2**20 + 8)
    with torch.no_grad(), LargestTensor() as largest:
        longcontext.step(attention, cache)
    assert largest.bytes <= DEFAULT_MEMORY_BUDGET // 4 == 64 * 2**20, f"{largest.operation} gave {largest.shape}"
