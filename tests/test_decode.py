"""Prefill and decode are one function: every split of a prompt gives the same logits, and the memory behaves.

Measured on nano: without fake quantization the largest relative L2 between one-shot prefill and prefill + steps is 8e-7.
With it, one code can fall the other way at a rounding boundary; such a flip is proved, not tolerated (reference/flips.py).
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import inference
from reference.flips import Arbiter, explain
from reference.metrics import relative_l2

BOUND = 2e-5


@pytest.fixture(scope="module")
def prompt(traces_dir) -> torch.Tensor:
    return load_file(traces_dir / "text_prefill.float32.safetensors")["input_ids"]


def split_logits(model, ids: torch.Tensor, split: int, steps: int, observe=None) -> torch.Tensor:
    """Logits of the last prefill row and of `steps` single-token steps after it: [B, 1 + steps, V]."""
    cache = model.new_cache(len(ids))
    logits = [model(ids[:, :split], cache, observe=observe).logits[:, -1:]]
    for position in range(split, min(split + steps, ids.shape[1])):
        logits.append(model(ids[:, position:position + 1], cache, observe=observe).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("length", [13, 45])
def test_every_split_equals_prefill_without_fake_quant(nano_plain, prompt, length) -> None:
    """Pitfalls 12, 9, 8: every split, odd and even, then every remaining token on its own."""
    ids = prompt[:, :length]
    whole = nano_plain(ids, nano_plain.new_cache()).logits
    for split in range(1, length):
        logits = split_logits(nano_plain, ids, split, length if length == 13 or split % 8 == 1 else 5)
        error = relative_l2(logits, whole[:, split - 1:split - 1 + logits.shape[1]])
        assert error < BOUND, f"split {split}: {error:.2g}"


@pytest.mark.parametrize("length", [13, 45])
def test_every_split_equals_prefill_with_fake_quant(nano, prompt, length) -> None:
    """As above with the caches quantized; a difference must be explained by listed rounding flips."""
    ids = prompt[:, :length]
    whole = nano(ids, nano.new_cache()).logits
    flips = {}
    for split in range(1, length):
        steps = length if length == 13 else 3

        def run(arbiter: Arbiter) -> tuple[int, str | None]:
            with arbiter.active():
                logits = split_logits(nano, ids, split, steps, arbiter.observe)
            wrong = [row for row in range(logits.shape[1])
                     if relative_l2(logits[:, row], whole[:, split - 1 + row]) >= BOUND]
            return (wrong[0], f"row {wrong[0]}") if wrong else (logits.shape[1], None)

        if run(Arbiter())[1] is not None:
            left, flips[split] = explain(run)
            assert left is None, f"split {split}: {left} differs even after {flips[split]}"
    print("legitimate flips by split:", {split: [str(flip) for flip in taken] for split, taken in flips.items()})


@pytest.mark.parametrize("chunks", [[13, 1, 17, 14], [1] * 6 + [39], [7, 8, 9, 21], [2, 2, 41], [44, 1], [8, 8, 8, 8, 8, 5]])
def test_chunks_equal_one_shot(nano_plain, prompt, chunks) -> None:
    """Pitfall 12: chunks across window (8) and ratio (2) borders, odd and even."""
    whole = nano_plain(prompt, nano_plain.new_cache()).logits
    cache, parts, start = nano_plain.new_cache(), [], 0
    for size in chunks:
        parts.append(nano_plain(prompt[:, start:start + size], cache).logits)
        start += size
    assert start == prompt.shape[1] and cache.lengths == (start,)
    assert relative_l2(torch.cat(parts, dim=1), whole) < BOUND


def test_step_that_sees_other_keys_differs(nano_dir, prompt) -> None:
    """Pitfall 13: by default a layer scores its own index keys; the named switch reproduces the official slot.

    On steps that leave the ratio-2 group open (even positions) the switch changes the selection, on others it does not.
    """
    own = inference.load(nano_dir, numerics="float32")
    published = inference.load(nano_dir, numerics="float32", as_published_index_keys=True)
    caches = own.new_cache(), published.new_cache()
    prefill = [model(prompt[:, :20], cache).logits for model, cache in zip((own, published), caches)]
    assert torch.equal(*prefill)  # prefill is not affected
    seen: list[dict[str, torch.Tensor]] = [{}, {}]
    changed = {}
    for position in range(20, 24):
        for model, cache, points in zip((own, published), caches, seen):
            model(prompt[:, position:position + 1], cache, observe=points.__setitem__)
        scores = [points["layers.2.attn.indexer.scores"] for points in seen]
        changed[position] = not torch.equal(*scores)
    assert changed == {20: True, 21: False, 22: True, 23: False}


def test_published_keys_are_those_of_the_last_publisher(nano_dir, prompt) -> None:
    """The open step of layer 2 scores against layer 6's keys from the call before (6 is nano's ratio-1 source)."""
    model = inference.load(nano_dir, numerics="float32", as_published_index_keys=True)
    cache, points = model.new_cache(), {}
    model(prompt[:, :20], cache)
    assert cache.published == 6
    keys = cache.index_keys[6].rows[:, :10].clone()
    model(prompt[:, 20:21], cache, observe=points.__setitem__)
    layer = model.layers[2]
    scores = torch.relu(torch.einsum("bsjx,bnx->bsjn", points["layers.2.attn.indexer.q"], keys))
    weights = layer.attn.indexer.weights_proj(points["layers.2.attn.in"], model.numerics) * (32**-0.5 * 8**-0.5)
    expected = (scores * weights.unsqueeze(-1)).sum(2)
    assert relative_l2(points["layers.2.attn.indexer.scores"], expected) < 1e-6


def test_batch_rows_equal_single_rows(nano_plain, traces_dir) -> None:
    """Pitfalls 11, 19: two different prompts together give what each gives alone, in prefill and in steps."""
    ids = load_file(traces_dir / "decode.float32.safetensors")["input_ids"]
    assert len(ids) == 2 and not torch.equal(ids[0], ids[1])
    together = split_logits(nano_plain, ids, 20, 5)
    for row in range(2):
        assert relative_l2(together[row:row + 1], split_logits(nano_plain, ids[row:row + 1], 20, 5)) < BOUND


def test_new_cache_equals_fresh_model(nano, prompt) -> None:
    """Pitfall 22: running A leaves no trace in a later B."""
    fresh = nano(prompt[:, :30], nano.new_cache()).logits
    nano(prompt.flip(1), nano.new_cache())
    assert torch.equal(nano(prompt[:, :30], nano.new_cache()).logits, fresh)


def test_written_rows_never_change(nano, prompt) -> None:
    """Pitfall 9: compressed rows and index keys stay as written, step after step."""
    cache, snapshots = nano.new_cache(), {}
    for position in range(20):
        nano(prompt[:, position:position + 1], cache)
        for source, ratio in cache.ratios.items():
            count = (position + 1) // ratio
            for kind in ("compressed", "index_keys"):
                rows = getattr(cache, kind)[source].rows[:, :count]
                before = snapshots.get((kind, source))
                assert before is None or torch.equal(rows[:, :before.shape[1]], before)
                snapshots[kind, source] = rows.clone()


def test_repeats_bit_for_bit(nano, prompt) -> None:
    """Pitfall 52: on the CPU two runs are bit-equal."""
    assert torch.equal(nano(prompt, nano.new_cache()).logits, nano(prompt, nano.new_cache()).logits)


def test_first_call_of_one_token(nano_plain, prompt) -> None:
    """Pitfall 38: a first call of length 1, then a long one."""
    whole = nano_plain(prompt, nano_plain.new_cache()).logits
    cache = nano_plain.new_cache()
    first = nano_plain(prompt[:, :1], cache).logits
    rest = nano_plain(prompt[:, 1:], cache).logits
    assert relative_l2(torch.cat((first, rest), 1), whole) < BOUND


def test_an_interrupted_call_leaves_the_cache_usable(nano_plain, prompt) -> None:
    cache = nano_plain.new_cache()
    nano_plain(prompt[:, :21], cache)

    def stop(name: str, value: torch.Tensor) -> None:
        if name == "layers.7.mid":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nano_plain(prompt[:, 30:39], cache, observe=stop)  # other tokens than the ones that follow
    assert cache.lengths == (21,)
    resumed = nano_plain(prompt[:, 21:30], cache).logits
    whole = nano_plain(prompt[:, :30], nano_plain.new_cache()).logits[:, 21:]
    assert relative_l2(resumed, whole) < BOUND


def test_positions_far_out(nano_plain) -> None:
    """Pitfall 54: angles are float32 products; far positions rotate by position * frequency, whatever came before."""
    from inference.rope import rope_frequencies, rotate

    frequencies = rope_frequencies(nano_plain.config.text_config, nano_plain.plan[2])
    position = torch.tensor([[200_000]])
    x = torch.randn(1, 1, 64)
    angle = (torch.tensor(200_000.0) * frequencies).to(torch.float64)
    a, b = x[0, 0, 48:].to(torch.float64).unflatten(0, (-1, 2)).unbind(-1)
    expected = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).flatten()
    assert relative_l2(rotate(x, position, frequencies)[0, 0, 48:], expected) < 1e-6
