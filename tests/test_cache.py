"""The memory of a conversation: rings, growing stores, commit of a prefix, sizes."""

from __future__ import annotations

import pytest
import torch

from inference.cache import Cache, RowStore
from inference.config import Config, layer_plan


def test_store_grows_and_keeps_rows() -> None:
    """Amortised growth: the buffer is copied O(log n) times, not once per row."""
    store, expected, buffers = RowStore(2, 3, torch.float32, torch.device("cpu")), [[], []], set()
    for step in range(200):
        rows = torch.randn(2, 1, 3)
        store.stage(rows, [step, step], [1, 1])
        for batch in range(2):
            expected[batch].append(rows[batch, 0])
        buffers.add(store.rows.data_ptr())
    for batch in range(2):
        assert torch.equal(store.rows[batch, :200], torch.stack(expected[batch]))
    assert len(buffers) <= 10


def test_commit_takes_a_prefix(nano, traces_dir) -> None:
    """Rejected tokens leave no trace: the state equals that of a call that never had them."""
    ids = torch.arange(100, 130).unsqueeze(0)
    kept, plain = nano.new_cache(), nano.new_cache()
    nano(ids[:, :19], kept)
    out = nano(ids[:, 19:25], kept, commit=False)
    assert kept.lengths == (19,)
    kept.commit(out.pending, (3,))
    nano(ids[:, :19], plain)
    plain.commit(nano(ids[:, 19:22], plain, commit=False).pending)
    assert kept.lengths == plain.lengths == (22,)
    after = [nano(ids[:, 22:], cache).logits for cache in (kept, plain)]
    assert torch.allclose(*after, atol=1e-5)


def test_commit_refuses_what_does_not_fit(nano) -> None:
    cache = nano.new_cache()
    out = nano(torch.tensor([[1, 2, 3]]), cache, commit=False)
    for counts in ((4,), (-1,), (1, 1)):
        with pytest.raises(ValueError, match="Committing a call"):
            cache.commit(out.pending, counts)
    cache.commit(out.pending)
    with pytest.raises(ValueError, match="Committing a call"):
        cache.commit(out.pending)
    assert cache.lengths == (3,)


def test_released_sizes() -> None:
    """BF16 rows at the released shapes: 3,200 bytes per token of global rows (2.5 rows of 512 + 128 values)."""
    from pathlib import Path

    config = Config.from_file(Path(__file__).parent.parent / "inference/configs/deepseek-v4.1-flash.json")
    cache = Cache(config, layer_plan(config.text_config), 1, torch.bfloat16, "meta")
    assert sorted(cache.compressed) == sorted(cache.index_keys) == [2, 8, 14, 20]
    assert sorted(cache.tails) == [2, 8, 14]
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        Cache(config, layer_plan(config.text_config), 0, torch.bfloat16, "meta")
