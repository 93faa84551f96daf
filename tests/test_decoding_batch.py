"""Batches of different lengths: every row is what it would be alone, padding leaves no trace, finished rows stand still.

Measured on nano in float32: rows together and alone differ by at most 8e-7 (products of different height round differently).
"""

from __future__ import annotations

import pytest
import torch

from inference import decoding
from inference.decoding import Settings
from inference.sampling import Sampling
from reference.metrics import relative_l2

FLOOR = 5e-6  # measured: 8e-7 here, 2.4e-6 in test_decoding_chunks.py
LENGTHS = (12, 11, 1, 23, 8)  # around the window (8), odd and even, one token


def prompts(lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 768, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def state_tensors(cache, row: int) -> dict[str, torch.Tensor]:
    """Everything that a row's next call can read, by name."""
    state = cache.state
    tensors = {f"window.{i}": ring.rows[row] for i, ring in state.windows.items()}
    tensors |= {f"tail.{i}.{n}": ring.rows[row] for i, pair in state.tails.items() for n, ring in enumerate(pair)}
    tensors["history"] = cache.engram_look_back()[row]
    for kind in ("compressed", "index_keys"):
        tensors |= {f"{kind}.{i}": store.rows[row, :state.lengths[row] // cache.ratios[i]]
                    for i, store in getattr(cache, kind).items()}
    return tensors


def test_every_row_equals_the_row_alone(nano_plain) -> None:
    """Pitfalls 10, 11, 19: prefill, steps in which rows pause, and a last call of several tokens."""
    rows, steps = prompts(), prompts((9,) * 5, seed=1)
    cache = nano_plain.new_cache(5)
    out = nano_plain(padded(rows, 3), cache, lengths=LENGTHS)
    seen = [[out.logits[b, :len(rows[b])]] for b in range(5)]
    calls = [(1, 1, 1, 1, 1), (1, 0, 1, 0, 1), (0, 0, 0, 1, 0), (3, 1, 0, 2, 6)]
    used = [0] * 5
    for call in calls:
        ids = torch.full((5, max(call)), 7)
        for b, count in enumerate(call):
            ids[b, :count] = torch.tensor(steps[b][used[b]:used[b] + count])
        out = nano_plain(ids, cache, lengths=call)
        for b, count in enumerate(call):
            seen[b].append(out.logits[b, :count])
            used[b] += count
    for b in range(5):
        ids = torch.tensor([rows[b] + steps[b][:used[b]]])
        alone_cache = nano_plain.new_cache()
        alone = nano_plain(ids, alone_cache).logits[0]
        assert relative_l2(torch.cat(seen[b]), alone) < FLOOR, f"row {b}"
        assert cache.lengths[b] == alone_cache.lengths[0]
        for name, tensor in state_tensors(cache, b).items():
            assert torch.allclose(tensor, state_tensors(alone_cache, 0)[name], rtol=1e-4, atol=1e-5), f"row {b}, {name}"


def test_padding_changes_no_bit(nano) -> None:
    """Other ids in the padding, even such that no vocabulary has: outputs and memory stay the same bits."""
    rows, results = prompts(), []
    for filler in (3, 700, -5, 10**6, nano.config.image_token_id):
        cache = nano.new_cache(5)
        out = nano(padded(rows, filler), cache, lengths=LENGTHS, last_only=True)
        step = nano(torch.tensor([[9], [9], [9], [9], [9]]), cache)
        results.append((out.logits, step.logits, [state_tensors(cache, b) for b in range(5)]))
    for logits, step, states in results[1:]:
        assert torch.equal(logits, results[0][0]) and torch.equal(step, results[0][1])
        for ours, first in zip(states, results[0][2]):
            assert all(torch.equal(ours[name], first[name]) for name in first)


def test_last_only_takes_the_last_token_of_every_row(nano_plain) -> None:
    rows = padded(prompts(), 3)
    whole = nano_plain(rows, nano_plain.new_cache(5), lengths=LENGTHS).logits
    last = nano_plain(rows, nano_plain.new_cache(5), lengths=LENGTHS, last_only=True).logits
    assert last.shape == (5, 1, 768)
    for b, length in enumerate(LENGTHS):
        assert relative_l2(last[b, 0], whole[b, length - 1]) < FLOOR


def test_a_finished_row_stands_still(nano) -> None:
    cache = nano.new_cache(2)
    nano(padded(prompts((11, 9)), 3), cache, lengths=(11, 9))
    before = state_tensors(cache, 1)
    for token in range(10):  # the other row wraps its rings
        nano(torch.tensor([[100 + token], [0]]), cache, lengths=(1, 0))
    assert cache.lengths == (21, 9)
    after = state_tensors(cache, 1)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_padding_goes_through_no_expert(nano) -> None:
    points = {}
    nano(padded(prompts(), 3), nano.new_cache(5), lengths=LENGTHS, observe=points.__setitem__)
    assert points["layers.3.ffn.expert_ids"].shape[:2] == (1, sum(LENGTHS))


def test_lengths_that_make_no_sense_are_refused(nano) -> None:
    ids = torch.full((2, 4), 20)
    for lengths in ((4,), (5, 1), (-1, 2), (0, 0)):
        cache = nano.new_cache(2)
        with pytest.raises(ValueError, match="lengths must be 2 numbers from 0 to 4"):
            nano(ids, cache, lengths=lengths)
        assert cache.lengths == (0, 0)
    with pytest.raises(ValueError, match="token id 768"):
        nano(torch.tensor([[5, 768]]).expand(2, -1) + 0, nano.new_cache(2), lengths=(2, 1))


def test_batches_can_be_reordered(nano_plain) -> None:
    """Pitfall 35: `select` moves everything, the Engram history too; a sequence can be forked."""
    cache = nano_plain.new_cache(3)
    nano_plain(padded(prompts((12, 11, 17)), 3), cache, lengths=(12, 11, 17))
    picked = cache.select([2, 0, 2])
    assert picked.lengths == (17, 12, 17)
    step = torch.tensor([[40], [41], [42]])
    logits = nano_plain(step, picked).logits
    same = nano_plain(torch.tensor([[41], [77], [40]]), cache).logits
    assert relative_l2(logits[0], same[2]) < FLOOR and relative_l2(logits[1], same[0]) < FLOOR
    assert cache.lengths == (13, 12, 18)  # the original went on by itself
    assert not torch.equal(logits[0], logits[2])


def test_generation_of_a_batch_equals_each_alone(nano_plain) -> None:
    """Greedy, with different lengths and ends: rows stop at different steps."""
    rows = prompts((5, 17, 1))
    settings = Settings(max_new_tokens=15, chunk_size=8)
    first = decoding.generate(nano_plain, rows, settings)
    list(first)
    stops = (first.tokens[1][9], first.tokens[2][4])  # two tokens that occur become end markers
    settings = Settings(max_new_tokens=15, chunk_size=8, stop_ids=stops)
    together = decoding.generate(nano_plain, rows, settings)
    emitted = [[], [], []]
    for row, ids in together:
        emitted[row] += ids
    assert emitted == together.tokens
    assert len(set(map(len, emitted))) > 1 and decoding.END in together.stopped_by
    for b, row in enumerate(rows):
        alone = decoding.generate(nano_plain, [row], settings)
        list(alone)
        assert alone.tokens[0] == together.tokens[b] and alone.stopped_by[0] == together.stopped_by[b]


def test_sampling_with_a_generator_per_row_ignores_the_neighbours(nano_plain) -> None:
    rows = prompts((5, 17, 9))
    settings = Settings(max_new_tokens=9, sampling=Sampling(1.0, 0.9), speculate=True)
    together = decoding.generate(nano_plain, rows, settings, [torch.Generator().manual_seed(b) for b in range(3)])
    list(together)
    for b, row in enumerate(rows):
        alone = decoding.generate(nano_plain, [row], settings, [torch.Generator().manual_seed(b)])
        list(alone)
        assert alone.tokens[0] == together.tokens[b]


def test_plain_sampling_equals_the_command_line(nano_plain) -> None:
    """One generator, no drafts: the draws are those of `sampling.sample`, in its order."""
    from inference.sampling import sample

    settings = Settings(max_new_tokens=10, sampling=Sampling(0.8, 0.95))
    run = decoding.generate(nano_plain, [[15, 16, 17]], settings, torch.Generator().manual_seed(4))
    list(run)
    generator, cache = torch.Generator().manual_seed(4), nano_plain.new_cache()
    logits, wanted = nano_plain(torch.tensor([[15, 16, 17]]), cache).logits, []
    for _ in range(10):
        wanted.append(int(sample(logits[:, -1], settings.sampling, generator)))
        logits = nano_plain(torch.tensor([wanted[-1:]]), cache, text_only=True).logits
    assert run.tokens[0] == wanted


def test_continuing_a_cache(nano_plain) -> None:
    """A second turn: the newest emitted token is in no cache yet, so it starts the next prompt."""
    cache = nano_plain.new_cache()
    first = decoding.generate(nano_plain, [[15, 16, 17]], Settings(max_new_tokens=9), cache=cache)
    list(first)
    assert cache.lengths == (3 + 8,)
    second = decoding.generate(nano_plain, [[first.tokens[0][-1], 30, 31]], Settings(max_new_tokens=5), cache=cache)
    list(second)
    fresh = decoding.generate(nano_plain, [[15, 16, 17, *first.tokens[0], 30, 31]], Settings(max_new_tokens=5))
    list(fresh)
    assert second.tokens == fresh.tokens


@pytest.mark.parametrize("settings, message", [
    (dict(max_new_tokens=0), "max_new_tokens must be at least 1"), (dict(chunk_size=0), "chunk_size must be at least 1"),
    (dict(confidence_threshold=1.5), "confidence_threshold"), (dict(prefill="half"), "full, replay, halo"),
    (dict(draft_tokens=-1), "draft_tokens"), (dict(confidence_temperatures=(1.0, 0.0)), "confidence_temperatures")])
def test_settings_that_make_no_sense_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_runs_that_cannot_start_are_refused(nano) -> None:
    for rows, keywords, message in (
            ([], {}, "no prompt"), ([[1], []], {}, "prompt 1 has no token"),
            ([[1] * 1025], {}, "max_position_embeddings is 1024"),
            ([[1], [2]], {"cache": nano.new_cache(3)}, "2 prompts for a cache of 3"),
            ([[1]], {"settings": Settings(sampling=Sampling(1.0))}, "needs a torch.Generator"),
            ([[1]], {"settings": Settings(sampling=Sampling(1.0)), "generator": [torch.Generator()] * 2}, "each of the 1")):
        with pytest.raises(ValueError, match=message):
            decoding.generate(nano, rows, **keywords)


def test_a_written_image_id_is_text(nano) -> None:
    """The model may write the placeholder of images: it goes on as a text token, while a prompt that has it is refused."""
    image = nano.config.image_token_id
    call = torch.tensor([[image, 20]])
    with pytest.raises(ValueError, match="image"):
        nano(call, nano.new_cache())
    points = {}
    nano(call, nano.new_cache(), text_only=True, observe=points.__setitem__)
    assert "image_mask" not in points
    assert torch.equal(points["embed"][0, 0], nano.embed.weight[image].to(torch.float32))


def test_context_limit_stops_a_row(nano) -> None:
    run = decoding.generate(nano, [[15] * 1020, [16] * 8], Settings(max_new_tokens=9, chunk_size=600, speculate=True))
    list(run)
    assert run.stopped_by == [decoding.LIMIT, decoding.FULL]
    assert len(run.tokens[0]) == 5 and run.cache.lengths[0] == 1024  # the fifth token stands behind the last position
