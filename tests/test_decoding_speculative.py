"""Draft, verify, accept, roll back: the text is that of plain decoding, and rejected drafts leave no trace.

Real drafts of a random checkpoint are nearly always rejected, so most tests put forced drafts in their place: right up to
a chosen position, wrong from there on.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inference import decoding, dspark
from inference.decoding import Settings, accept
from inference.sampling import Sampling
from reference.metrics import relative_l2
from tests.test_decoding_batch import state_tensors

SIZE = 5  # drafts of a block


class Forced:
    """Stands in for `model.draft`: the first `accepted(row, round)` drafts continue `texts` rightly, the next one does not."""

    def __init__(self, starts: list[int], texts: list[list[int]], accepted, vocabulary: int = 768) -> None:
        self.starts, self.texts, self.accepted, self.vocabulary, self.rounds = starts, texts, accepted, vocabulary, 0

    def __call__(self, anchor, cache, choose=None, observe=None) -> dspark.Draft:
        rows = []
        for row, (start, text, length) in enumerate(zip(self.starts, self.texts, cache.lengths)):
            done = length - start + 1  # tokens emitted so far, the anchor among them
            right = [*text[done:done + SIZE], *[9] * SIZE][:SIZE]
            count = self.accepted(row, self.rounds)
            wrong = [(token + 1) % self.vocabulary for token in right]
            rows.append([int(anchor[row]), *right[:count], *wrong[count:]])
        self.rounds += 1
        ids = torch.tensor(rows)
        logits = torch.nn.functional.one_hot(ids[:, 1:], self.vocabulary).to(torch.float32) * 30
        return dspark.Draft(ids, logits, torch.full((len(rows), SIZE), 2.0))


def random_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(8, 768, (length,), generator=generator).tolist() for length in lengths]


def finish(run: decoding.Generation) -> decoding.Generation:
    for _ in run:
        pass
    return run


@pytest.fixture(scope="module")
def plain(nano_plain):
    """10 prompts, 36 tokens each, token by token: every ring wraps 4 times or more."""
    prompts = random_prompts(10, 30, seed=5)
    return prompts, finish(decoding.generate(nano_plain, prompts, Settings(max_new_tokens=36, stop_ids=()))).tokens


def test_greedy_text_equals_plain_decoding_with_real_drafts(nano_plain, plain) -> None:
    """20 prompts of 200 tokens, with fake quantization and without: `python -m reference.speculation [--no-fake-quant]`."""
    prompts, texts = plain
    run = finish(decoding.generate(nano_plain, prompts, Settings(max_new_tokens=36, stop_ids=(), speculate=True)))
    assert run.tokens == texts
    assert run.stats.sent > 1_200


def test_greedy_text_equals_plain_decoding_with_mixed_acceptance(nano_plain, plain, monkeypatch) -> None:
    prompts, texts = plain
    forced = Forced([len(prompt) for prompt in prompts], texts, lambda row, round: (3 * row + 5 * round + round // 3) % 6)
    monkeypatch.setattr(nano_plain, "draft", forced)
    run = finish(decoding.generate(nano_plain, prompts, Settings(max_new_tokens=36, stop_ids=(), speculate=True)))
    assert run.tokens == texts
    assert set(run.stats.histogram) == set(range(6)) and 3 < run.stats.accepted_length < 4
    assert run.stats.saved_calls == 10 * 35 - len(run.rounds)


# Accepted drafts per round; starts around the wrap of the window (8), odd and even.
ROUNDS = [(0, 0, 0), (1, 1), (2, 2), (3, 3), (5, 5), (0, 5, 2, 1, 3)]


@pytest.mark.parametrize("accepted", ROUNDS, ids=str)
@pytest.mark.parametrize("start", [7, 18])
def test_rounds_leave_the_state_of_never_having_drafted(nano_plain, start, accepted) -> None:
    """Every state tensor. Not bit for bit: the rejected rows share matrix products with the kept ones (measured: 3e-6)."""
    text = torch.randint(8, 768, (1, start + 1 + 6 * len(accepted)), generator=torch.Generator().manual_seed(start))
    states = []
    for drafting in (True, False):
        cache, position = nano_plain.new_cache(), start
        nano_plain(text[:, :start], cache)
        for count in accepted:
            call = text[:, position:position + 6].clone()
            if drafting:
                nano_plain.draft(call[:, 0], cache)
                call[:, count + 1:] = 9  # rejected
                cache.commit(nano_plain(call, cache, commit=False).pending, (count + 1,))
            else:
                nano_plain(call[:, :count + 1], cache)
            position += count + 1
        assert cache.lengths == (position,)
        draft = nano_plain.draft(text[:, position], cache)
        states.append({**state_tensors(cache, 0), "draft": draft.logits, "confidence": draft.confidence,
                       "logits": nano_plain(text[:, position:position + 1], cache).logits})
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("accepted", ROUNDS, ids=str)
def test_rejected_drafts_leave_no_trace(nano, accepted) -> None:
    """Bit for bit: what the rejected rows have left behind in the stores may be anything, nothing reads it."""
    text = torch.randint(8, 768, (1, 18 + 6 * len(accepted)), generator=torch.Generator().manual_seed(3))
    results = []
    for poison in (None, 0x77):
        cache, position, seen = nano.new_cache(), 17, []
        nano(text[:, :17], cache)
        for count in accepted:
            out = nano(text[:, position:position + 6], cache, commit=False)
            cache.commit(out.pending, (count + 1,))
            position += count + 1
            if poison is not None:
                for kind in (cache.compressed, cache.index_keys):
                    for source, store in kind.items():
                        store.stored[:, position // cache.ratios[source]:] = poison
            seen += [out.logits, nano.draft(text[:, position - 1], cache).logits]
        seen.append(nano(text[:, position:position + 1], cache).logits)
        results.append((seen, state_tensors(cache, 0)))
    assert all(torch.equal(*pair) for pair in zip(results[0][0], results[1][0]))
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


def test_committing_the_whole_call_would_leave_a_trace(nano) -> None:
    """The mutant of the test above: forgetting to drop rejected rows is seen."""
    text = torch.randint(8, 768, (1, 24), generator=torch.Generator().manual_seed(1))
    right, wrong = nano.new_cache(), nano.new_cache()
    for cache, kept in ((right, 3), (wrong, 6)):
        nano(text[:, :18], cache)
        cache.commit(nano(text[:, 18:24], cache, commit=False).pending, (kept,))
    wrong.state = dataclasses.replace(wrong.state, lengths=(21,))
    following = [nano(text[:, 21:22], cache).logits for cache in (right, wrong)]
    assert relative_l2(*following) > 1e-4


@pytest.mark.parametrize("width", range(1, 7))
def test_verification_of_any_width(nano_plain, width) -> None:
    """Rows of a verification equal single steps, for every width and both parities."""
    text = torch.randint(8, 768, (1, 30), generator=torch.Generator().manual_seed(2))
    for start in (16, 17):
        cache, steps = nano_plain.new_cache(), nano_plain.new_cache()
        nano_plain(text[:, :start], cache)
        nano_plain(text[:, :start], steps)
        logits = nano_plain(text[:, start:start + width], cache).logits
        single = [nano_plain(text[:, start + i:start + i + 1], steps).logits for i in range(width)]
        assert relative_l2(logits, torch.cat(single, dim=1)) < 5e-6


# --- ends and limits -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(nano_plain):
    """A prompt and its plain continuation."""
    prompt = random_prompts(1, 20, seed=7)[0]
    return prompt, finish(decoding.generate(nano_plain, [prompt], Settings(max_new_tokens=40, stop_ids=()))).tokens[0]


@pytest.fixture
def forced_run(nano_plain, text, monkeypatch):
    """The prompt, its plain text, and: accepted drafts per round, settings -> finished speculative run."""
    prompt, text = text

    def run(accepted: int, **settings) -> decoding.Generation:
        with monkeypatch.context() as patch:
            patch.setattr(nano_plain, "draft", Forced([len(prompt)], [text], lambda row, round: accepted))
            return finish(decoding.generate(nano_plain, [prompt], Settings(speculate=True, **settings)))

    return prompt, text, run


@pytest.mark.parametrize("place", [0, 1, 3, 5, 6, 7])
def test_end_marker_inside_the_accepted_prefix(nano_plain, forced_run, place) -> None:
    """Nothing after it is emitted, there is no bonus, and the memory ends before it, as in plain decoding."""
    prompt, text, run = forced_run
    place = text.index(text[place])  # the first occurrence stops
    done = run(5, max_new_tokens=40, stop_ids=(text[place],))
    assert done.tokens[0] == text[:place + 1] and done.stopped_by == [decoding.END]
    assert done.cache.lengths == (len(prompt) + place,)
    plain = finish(decoding.generate(nano_plain, [prompt], Settings(max_new_tokens=40, stop_ids=(text[place],))))
    assert plain.tokens == done.tokens and plain.cache.lengths == done.cache.lengths
    state, wanted = state_tensors(done.cache, 0), state_tensors(plain.cache, 0)
    assert all(torch.allclose(state[name], wanted[name], rtol=1e-4, atol=1e-5) for name in state)


@pytest.mark.parametrize("limit", range(1, 14))
def test_the_largest_number_of_new_tokens_holds(forced_run, limit) -> None:
    prompt, text, run = forced_run
    done = run(5, max_new_tokens=limit, stop_ids=())
    assert done.tokens[0] == text[:limit] and done.stopped_by == [decoding.FULL]
    assert done.cache.lengths == (len(prompt) + limit - 1,)
    assert all(entry.sent <= limit - 1 for entry in done.rounds)


@pytest.mark.parametrize("settings, sent", [({}, 5), ({"draft_tokens": 2}, 2), ({"draft_tokens": 0}, 0),
                                            ({"confidence_threshold": 0.9}, 0), ({"confidence_threshold": 0.5}, 5),
                                            # sigmoid(2 / 4) = 0.62 at the third position only
                                            ({"confidence_threshold": 0.7, "confidence_temperatures": (1.0, 1.0, 4.0)}, 2)])
def test_how_many_drafts_are_sent(forced_run, settings, sent) -> None:
    prompt, text, run = forced_run
    done = run(5, max_new_tokens=30, stop_ids=(), **settings)
    assert done.tokens[0] == text[:30]
    assert done.rounds[0].sent == done.rounds[0].accepted == sent


def test_an_interrupt_in_the_middle_of_a_round(nano_plain, forced_run, monkeypatch) -> None:
    """In the draft, in any layer of the verification, before the commit: iterating again gives the same text."""
    prompt, text, _ = forced_run
    for place in ("mtp.1.out", "layers.6.mid", "commit"):
        run = decoding.generate(nano_plain, [prompt], Settings(max_new_tokens=8, stop_ids=(), speculate=True))
        next(run), next(run)
        with monkeypatch.context() as patch:
            def stop(*arguments, **keywords):
                raise KeyboardInterrupt

            def watch(name, value):
                if name == place:
                    raise KeyboardInterrupt

            if place == "commit":
                patch.setattr(type(run.cache), "commit", stop)
            else:
                forward, draft = nano_plain.forward, nano_plain.draft
                patch.setattr(nano_plain, "forward", lambda *a, **k: forward(*a, **{**k, "observe": watch}))
                patch.setattr(nano_plain, "draft", lambda *a, **k: draft(*a, **{**k, "observe": watch}))
            state = run.cache.state
            with pytest.raises(KeyboardInterrupt):
                while True:
                    next(run)
            assert run.cache.state is state
        assert finish(run).tokens[0] == text[:8], place


def test_an_interrupt_between_two_chunks_of_the_prompt(nano_plain, text, monkeypatch) -> None:
    """The chunks that were done are given back, so that iterating again does not read them twice."""
    prompt, wanted = text
    assert len(prompt) > 5
    run = decoding.generate(nano_plain, [prompt], Settings(max_new_tokens=5, stop_ids=(), chunk_size=2))
    calls, forward = [], nano_plain.forward

    def failing(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(nano_plain, "forward", failing)
        with pytest.raises(KeyboardInterrupt):
            next(run)
    assert run.cache.lengths == (0,) and run.tokens == [[]]
    assert finish(run).tokens[0] == wanted[:5]


# --- sampling is lossless --------------------------------------------------------------------------------------

VOCABULARY, DRAWS = 6, 100_000


def critical_chi_square(freedom: int) -> float:
    """Wilson-Hilferty: exceeded by chance once in 10^5."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * (2 / (9 * freedom)) ** 0.5) ** 3


def chi_square(found: torch.Tensor, law: torch.Tensor) -> float:
    wanted = law.to(torch.float64) * found.sum()
    return float(((found.to(torch.float64) - wanted).square() / wanted).sum())


def toy_round(rule) -> tuple[float, float]:
    """100,000 rounds of two drafts over six tokens. Chi-square over its critical value: first token, second given first.

    The model's second distribution depends on the first token, as a real one does. rule: `accept` or a wrong one.
    """
    generator = torch.Generator().manual_seed(11)
    law = torch.softmax(torch.randn(VOCABULARY, generator=generator), 0)
    guess = torch.softmax(torch.randn(VOCABULARY, generator=generator), 0)
    law_after = torch.softmax(torch.randn(VOCABULARY, VOCABULARY, generator=generator), 1)
    guess_after = torch.softmax(torch.randn(VOCABULARY, VOCABULARY, generator=generator), 1)
    last = torch.softmax(torch.randn(VOCABULARY, generator=generator), 0)
    first = decoding.draw(guess.expand(DRAWS, -1), generator)
    second = decoding.draw(guess_after[first], generator)
    target = torch.stack((law.expand(DRAWS, -1), law_after[first], last.expand(DRAWS, -1)), dim=1)
    draft = torch.stack((guess.expand(DRAWS, -1), guess_after[first]), dim=1)
    ids = torch.stack((first, second), dim=1)
    accepted, extra = rule(target, draft, ids, torch.full((DRAWS,), 2), generator)
    out_first = torch.where(accepted >= 1, first, extra)
    worst_first = chi_square(out_first.bincount(minlength=VOCABULARY), law) / critical_chi_square(VOCABULARY - 1)
    out_second = torch.where(accepted >= 2, second, extra)[accepted >= 1]
    pairs = torch.zeros(VOCABULARY, VOCABULARY).index_put((first[accepted >= 1], out_second), torch.ones(1), accumulate=True)
    found = sum(chi_square(row, wanted) for row, wanted in zip(pairs, law_after))
    return worst_first, found / critical_chi_square(VOCABULARY * (VOCABULARY - 1))


def test_sampling_is_lossless() -> None:
    assert max(toy_round(accept)) < 1


def _take_all(target, draft, ids, sent, generator):
    return sent, decoding.draw(target[:, -1], generator)


def _no_ratio(target, draft, ids, sent, generator):
    """Accepts with the model's probability alone."""
    return accept(target, torch.ones_like(draft), ids, sent, generator)


def _no_residual(target, draft, ids, sent, generator):
    """Draws from the model's distribution after a rejection, not from what is left of it."""
    accepted, _ = accept(target, draft, ids, sent, generator)
    return accepted, decoding.draw(target[torch.arange(len(ids)), accepted], generator)


def _wrong_row(target, draft, ids, sent, generator):
    """Judges a draft with the row after it."""
    return accept(target[:, [1, 2, 2]], draft, ids, sent, generator)


@pytest.mark.parametrize("rule", [_take_all, _no_ratio, _no_residual, _wrong_row])
def test_wrong_acceptance_rules_fail(rule) -> None:
    assert max(toy_round(rule)) > 10


def test_a_rejection_without_residual_draws_from_the_model() -> None:
    """Equal laws have no residual; rounding may still reject. The next token then comes from the model's law."""
    law = torch.softmax(torch.randn(1, 2, VOCABULARY), -1)
    draft = law[:, :1] * 1.0000001
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        accepted, extra = accept(law, draft, law[:, 0].argmax(-1, keepdim=True), torch.tensor([1]), generator)
        assert int(accepted) in (0, 1) and 0 <= int(extra) < VOCABULARY


def test_greedy_acceptance() -> None:
    """One-hot laws: the longest prefix that agrees, then the model's own token; what was not sent is not judged."""
    def one_hot(ids):
        return torch.nn.functional.one_hot(torch.tensor(ids), VOCABULARY).to(torch.float32)

    target = one_hot([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    ids = torch.tensor([[1, 2], [1, 4], [0, 2], [1, 2]])
    accepted, extra = accept(target, one_hot(ids.tolist()), ids, torch.tensor([2, 2, 2, 1]), None)
    assert accepted.tolist() == [2, 1, 0, 1] and extra.tolist() == [3, 2, 1, 2]


def test_sampled_speculation_repeats_with_its_seed(nano) -> None:
    settings = Settings(max_new_tokens=10, sampling=Sampling(1.0, 0.9), speculate=True)
    runs = [finish(decoding.generate(nano, [[100, 101], [102]], settings, torch.Generator().manual_seed(seed)))
            for seed in (1, 1, 2)]
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens
    assert runs[0].stats == runs[1].stats and runs[0].stats.accepted > 0
    assert "drafts accepted" in runs[0].stats.line()
