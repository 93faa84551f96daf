"""The tables of what the toy model can do (reference/toyworld/eval.py, eval_drafts.py), on the bundled checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import inference
from inference import decoding
from inference.decoding import Round, Stats
from reference.toyworld import eval as evaluate
from reference.toyworld import eval_drafts
from reference.toyworld.corpus import CHECKPOINT, episode, load_tokenizer
from reference.toyworld.eval_drafts import GREEDY, SAMPLED

TOKENIZER = load_tokenizer()
WINDOW = 32
NEAR, FAR = evaluate.COLUMNS[:2]
NEW_TOKENS = 8  # per prompt


@pytest.fixture(scope="module")
def exact() -> inference.Model:
    """float32 without fake quantization: what remains is rounding."""
    return inference.load(CHECKPOINT, numerics="float32", fake_quant=False)


@pytest.fixture(scope="module")
def drafted(exact) -> dict[tuple[str, bool], eval_drafts.Run]:
    return eval_drafts.decode_prompts(exact, eval_drafts.draft_prompts(TOKENIZER, 4, 128), NEW_TOKENS)


def test_ablations_hurt_where_they_should() -> None:
    model = inference.load(CHECKPOINT)
    assert model.config.text_config.sliding_window == WINDOW
    episodes = evaluate.evaluation_episodes(TOKENIZER, text=1, other=0, tokens=768)
    names = ("compressed attention off", "random selection", "Engram off")
    rows = evaluate.evaluate(model, episodes, ("model", *names))
    whole = rows["model"]
    assert all(rows[name].loss > whole.loss for name in names)
    for name in names[:2]:
        assert rows[name].share(FAR) < whole.share(FAR) - 0.3, name
    assert rows["Engram off"].share("memory") < whole.share("memory") - 0.3


def test_every_variant_changes_the_logits_and_leaves_no_trace() -> None:
    model = inference.load(CHECKPOINT)
    found = episode(0, 256, "test", TOKENIZER, kind="text")
    whole = evaluate.episode_logits(model, found)
    for name, variant in evaluate.VARIANTS.items():
        with variant():
            own = evaluate.episode_logits(model, found)
        assert own.isfinite().all() and torch.equal(own, whole) == (name == "model"), name
    assert torch.equal(evaluate.episode_logits(model, found), whole)


def stub_model(logits: torch.Tensor):
    """Returns these logits [S, V] whatever it reads."""
    class Stub:
        config = SimpleNamespace(text_config=SimpleNamespace(sliding_window=WINDOW), vision_config=None)
        norm = SimpleNamespace(weight=torch.zeros(1))
        new_cache = staticmethod(lambda batch: None)

        def __call__(self, ids, cache, **options):
            return SimpleNamespace(logits=logits[None])

    return Stub()


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_an_answer_counts_when_all_its_tokens_are_predicted(kind) -> None:
    found = episode(2, 600, "test", TOKENIZER, kind=kind)
    asked = [question for question in found.questions if evaluate.column_of(question, WINDOW)]
    spoiled = asked[0]

    def stub(wrong: tuple[int, ...]):
        """Predicts every id with logit 10 against 0, but not those at the positions `wrong`."""
        logits = 10.0 * F.one_hot(torch.tensor(found.ids[1:] + [0]), TOKENIZER.vocab_size).to(torch.float32)
        for position in wrong:
            logits[position - 1] = -logits[position - 1]

        return stub_model(logits)

    perfect = evaluate.measure(stub(()), [found])
    assert perfect.right == perfect.asked and perfect.asked.total() == len(asked)
    for wrong, lost in ((spoiled.start, 1), (spoiled.end - 1, 1), (spoiled.start - 1, 0)):
        own = evaluate.measure(stub((wrong,)), [found])
        assert perfect.right.total() - own.right.total() == lost, wrong
        if kind == "text":
            others = TOKENIZER.vocab_size - 1
            price = math.log(others + math.exp(-10)) + 10 - math.log(1 + others * math.exp(-10))
            assert own.loss - perfect.loss == pytest.approx(price / (len(found.ids) - 1), rel=1e-3)


def test_ngram_probabilities() -> None:
    model = evaluate.Ngram([[0, 1, 2, 1, 2, 1, 3]], vocabulary=5, order=3)
    for context in ([], [1], [2, 1], [4, 4], [0, 1]):
        assert sum(model.probability(context, token) for token in range(5)) == pytest.approx(1)
    # By hand: after nothing, 6 tokens of 3 kinds (1 three times, 2 twice, 3 once); after 1: 2, 2, 3; after 2 1: 2, 3.
    none = (2 + 3 / 5) / 9
    one = (2 + 2 * none) / 5
    assert model.probability([1], 2) == pytest.approx(one)
    assert model.probability([2, 1], 2) == pytest.approx((1 + 2 * one) / 4)
    assert model.probability([4], 2) == pytest.approx(none)


def test_octaves_divide_what_the_ablations_count(exact) -> None:
    episodes = evaluate.evaluation_episodes(TOKENIZER, text=1, other=0, tokens=320)
    octaves, whole = evaluate.measure_distance(exact, episodes), evaluate.measure(exact, episodes)
    assert list(octaves) == [32, 64, 128]
    assert octaves[WINDOW] == (whole.right[NEAR], whole.asked[NEAR])
    beyond = [counts for last, counts in octaves.items() if last > WINDOW]
    assert tuple(map(sum, zip(*beyond))) == (whole.right[FAR], whole.asked[FAR])
    lines = evaluate.distance_lines({32: (1, 4), 64: (2, 2)}, 32)
    assert lines == [["distance", "up to 32", "33 to 64"], ["answered", "25%", "100%"], ["questions", "4", "2"]]


def test_octaves_end_where_they_say() -> None:
    """An answer at distance 64 belongs to 33 to 64, one at 65 to the next."""
    ids = [0] + [3] * 200
    asked = [evaluate.Question("retrieval", 100 + distance, 101 + distance, distance) for distance in (32, 33, 64, 65)]
    asked.append(evaluate.Question("chat", 150, 151, 33))  # no retrieval: does not count
    logits = F.one_hot(torch.tensor([3] * len(ids)), 10).float()
    logits[100 + 64 - 1, 4] = 2  # the answer at distance 64 is wrong
    found = evaluate.Episode(ids, "text", tuple(asked))
    assert evaluate.measure_distance(stub_model(logits), [found]) == {32: (1, 1), 64: (1, 2), 128: (1, 1)}


def test_prompts_end_where_the_model_goes_on() -> None:
    prompts = eval_drafts.draft_prompts(TOKENIZER, 4, 400)
    for number, ids in enumerate(prompts):
        found = episode(number // 2, 400, "test", TOKENIZER, kind=("text", "chat")[number % 2])
        assert found.ids[:len(ids)] == ids and len(found.ids) // 2 <= len(ids) < len(found.ids)
        if found.kind == "text":
            assert len(ids) == 200
        else:
            assert len(ids) in [question.start for question in found.questions]


def test_drafts_save_calls_and_the_table_adds_up(drafted) -> None:
    assert drafted[GREEDY, True].tokens == drafted[GREEDY, False].tokens != drafted[SAMPLED, False].tokens
    assert all(len(tokens) == NEW_TOKENS for run in drafted.values() for tokens in run.tokens)
    lines = eval_drafts.draft_lines(drafted, 5)
    assert all(len(line) == len(lines[0]) for line in lines)
    for line, run in zip(lines[1:], drafted.values()):
        entry = dict(zip(lines[0], line))
        rounds = [one for stats in run.stats for one in stats.rounds]
        after_first = 4 * (NEW_TOKENS - 1)  # the first token of each comes with its prompt
        assert entry["tokens"] == str(after_first) and int(entry["calls"]) + int(entry["saved"]) == after_first
        assert float(entry["tau"]) == pytest.approx(after_first / len(rounds), abs=0.006)  # with the bonus
        texts = [one for stats in run.stats[::2] for one in stats.rounds]
        assert float(entry["tau text"]) == pytest.approx(2 * (NEW_TOKENS - 1) / len(texts), abs=0.006)
        if "on" in line[0]:
            counts = [int(count) for count in entry["calls by accepted 0 .. 5"].split()]
            assert len(counts) == 6 and sum(counts) == len(rounds)
            assert sum(n * count for n, count in enumerate(counts)) == after_first - len(rounds)
            assert float(entry["tau"]) > 1.3  # drafts of chance would stay near 1
        else:
            assert entry["calls by accepted 0 .. 5"] == "-" and entry["time"] == "1.00"


def test_a_changed_text_is_an_error(exact, monkeypatch) -> None:
    """Verification that lets every draft stand changes the greedy text."""
    original = decoding.accept

    def credulous(target, draft, draft_ids, sent, generator):
        return sent, original(target, draft, draft_ids, sent, generator)[1]

    monkeypatch.setattr(decoding, "accept", credulous)
    with pytest.raises(AssertionError, match=r"prompt \d+ at new token \d+"):
        eval_drafts.decode_prompts(exact, eval_drafts.draft_prompts(TOKENIZER, 1, 128), NEW_TOKENS)


def test_the_changed_place_is_named(exact, monkeypatch) -> None:
    model = exact
    assert not eval_drafts.parts(model, 0, [0, 17], [1, 2], [1, 2])
    with pytest.raises(AssertionError, match=r"prompt 1 at new token 2: \[5\] without them, \[6\] with"):
        eval_drafts.parts(model, 1, [0, 17], [3, 4, 5], [3, 4, 6])
    with pytest.raises(AssertionError, match=r"prompt 0 at new token 1: \[\] without them, \[2\] with"):
        eval_drafts.parts(model, 0, [0, 17], [1], [1, 2])
    logits = model(torch.tensor([[0, 17, 3, 4]]), model.new_cache(1)).logits[0, -1]
    gap = float((logits[5] - logits[6]).abs())
    monkeypatch.setattr(eval_drafts, "NEAR_TIE", 1.01 * gap)
    assert eval_drafts.parts(model, 1, [0, 17], [3, 4, 5], [3, 4, 6])
    monkeypatch.setattr(eval_drafts, "NEAR_TIE", 0.99 * gap)
    with pytest.raises(AssertionError):
        eval_drafts.parts(model, 1, [0, 17], [3, 4, 5], [3, 4, 6])


def simulated(temperature: float, seed: int, count: int = 1500) -> list[Round]:
    """Rounds of a head whose logits are `temperature` times too large."""
    generator = torch.Generator().manual_seed(seed)
    logits = temperature * (torch.randn(count, 3, generator=generator) + 1)
    stands = torch.rand(logits.shape, generator=generator) < torch.sigmoid(logits / temperature)
    accepted = stands.to(torch.int64).cumprod(1).sum(1).tolist()
    return [Round(0, 3, n, tuple(row)) for n, row in zip(accepted, logits.tolist())]


def test_calibration_is_judged_on_the_other_half(monkeypatch) -> None:
    monkeypatch.setattr(eval_drafts, "CHANCE_DRAWS", 10)

    def percentages(lines, column: str) -> list[float]:
        return [float(line[lines[0].index(column)].rstrip("%")) for line in lines[1:]]

    repaired = eval_drafts.calibration_lines(simulated(3.0, 1), simulated(3.0, 2))
    spoiled = eval_drafts.calibration_lines(simulated(3.0, 1), simulated(1.0, 2))
    for k in range(3):
        assert percentages(repaired, "temperature")[k] == pytest.approx(3.0, rel=0.3)
        before, after, chance = (percentages(repaired, name)[k] for name in ("ECE before", "ECE after", "by chance"))
        # Half as large is nothing a perfect head would show, and neither is twice the error by chance.
        assert before > 2 * after and chance / 2 < after < 2 * chance
        assert percentages(spoiled, "ECE after")[k] > 2 * percentages(spoiled, "ECE before")[k]
    assert [line[1] for line in repaired[1:]] == ["1500"] * 3
    assert percentages(repaired, "all accepted") == sorted(percentages(repaired, "all accepted"), reverse=True)
    with pytest.raises(ValueError, match="Decode more tokens"):
        short = [Round(0, 1, entry.accepted > 0, entry.confidence) for entry in simulated(1.0, 3, 50)]
        eval_drafts.calibration_lines(simulated(1.0, 4, 50), short)


def test_halves_are_of_prompts_and_hold_both_kinds() -> None:
    stats = [Stats((Round(number, 5, 0),) * 2, 1, 3, "full", 0, 0) for number in range(8)]
    fitted_on, judged_on = eval_drafts.halves(eval_drafts.Run([], stats, 0.0))
    assert [entry.row for entry in fitted_on[::2]] == [0, 1, 4, 5]
    assert [entry.row for entry in judged_on[::2]] == [2, 3, 6, 7]


def test_prefill_modes(exact) -> None:
    found = episode(1, 320, "test", TOKENIZER, kind="text")
    asked = [(found, question) for question in found.questions
             if question.start > 180 and question.end > question.start + 1]  # answers of several tokens
    prefills = eval_drafts.measure_prefills(exact, asked)
    rows = [question.start for _, question in asked]
    # By hand: five encoder layers run everything, then the window of 32; a halo adds 31 for each layer that follows.
    assert prefills["full"].layer_rows == 8 * sum(rows)
    assert prefills["replay"].layer_rows == 5 * sum(rows) + len(rows) * 3 * 32
    assert prefills["halo"].layer_rows == 5 * sum(rows) + len(rows) * (32 + 63 + 94)
    assert len(asked) == 2 and any(prefills["full"].answered)
    at_once = dict(evaluate.answers(evaluate.episode_logits(exact, found), found))
    for mode in ("full", "halo"):
        assert prefills[mode].answered == [at_once[question] for _, question in asked], mode
    errors = {mode: max(float((mine - right).norm() / right.norm()) for mine, right in
                        zip(prefills[mode].logits, prefills["full"].logits)) for mode in ("halo", "replay")}
    assert errors["halo"] < 2e-6 < 2e-5 < errors["replay"]  # rounding: 2e-7


def test_prefill_table() -> None:
    right, other = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    full = eval_drafts.Prefills(100, 2.0, [True, True, False], [right] * 3)
    replay = eval_drafts.Prefills(60, 1.0, [True, False, False], [right, right, other])
    lines = eval_drafts.prefill_lines({"full": full, "replay": replay}, [False, True, True])
    assert lines[1] == ["full", "100", "100%", "1.00", "67%", "50%", "100%", "0e+00", "0e+00"]
    assert lines[2] == ["replay (approximate)", "60", "60%", "0.50", "33%", "0%", "67%", "9e-02", "3e-01"]
    assert lines[3] == ["questions", "-", "-", "-", "3", "2", "3", "-", "-"]
    assert eval_drafts.spread(range(10), 4) == [0, 2, 5, 7] and eval_drafts.spread(range(3), 4) == [0, 1, 2]


def test_sections_are_printed(capsys, monkeypatch, exact, drafted) -> None:
    def decode(model, prompts, new_tokens):
        assert (model, len(prompts), new_tokens) == (exact, 4, NEW_TOKENS)
        return drafted

    monkeypatch.setattr(inference, "load", lambda *arguments, **options: exact)
    monkeypatch.setattr(eval_drafts, "decode_prompts", decode)
    small = ["--episodes", "1", "--tokens", "128", "--prompts", "4", "--questions", "2",
             "--new-tokens", str(NEW_TOKENS)]
    assert evaluate.main(["--only", "distance", "drafts", "prefill", *small]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    titles = ("Retrieval by distance", "Drafts, 4 prompts", "Calibration", "Prefill modes")
    assert len(blocks) == 4 and all(block.startswith(title) for block, title in zip(blocks, titles)), blocks
    assert evaluate.main(["--only", "drafts", "--markdown", *small]) == 0
    title, blank, header, rule, *rest = capsys.readouterr().out.splitlines()
    assert title.startswith("**Drafts") and title.endswith("**") and not blank and len(rest) == 4 + 1 + 2 + 2 + 5
    assert header.startswith("| decoding") and set(rule) <= set("|-: ") and rest[0].startswith("| greedy, drafts off")
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(["--only", "speed"])
    assert stopped.value.code == 3


def test_questions_about_pictures_by_kind() -> None:
    assert evaluate.picture_kind("<｜User｜>Where?<｜User｜><｜deepseek_image｜>Where is the red cross?<｜Assistant｜><think>"
                                 ) == "Where is the C S?"
    assert evaluate.picture_kind("<｜User｜>What is at the middle left?<｜Assistant｜></think>") == "What is at the P?"
    found = episode(0, 400, "test", TOKENIZER, kind="picture")
    wrong = found.questions[0]
    logits = F.one_hot(torch.tensor(found.ids[1:] + [0]), TOKENIZER.vocab_size).to(torch.float32)
    logits[wrong.start - 1].neg_()
    model, chat = stub_model(logits), episode(0, 400, "test", TOKENIZER, kind="chat")
    model.config.vision_config = inference.config.Config.from_file(CHECKPOINT).vision_config
    own = evaluate.measure_pictures(model, [found], TOKENIZER)
    kind = evaluate.picture_kind(TOKENIZER.decode(found.ids[:wrong.start]))
    assert dict(own.asked - own.right) == {kind: 1} and own.asked.total() == len(found.questions)
    assert not evaluate.measure_pictures(stub_model(torch.zeros(len(chat.ids), 9)), [chat], TOKENIZER).asked
    one = evaluate.Scores(0.0, Counter({"B?": 1}), {"B?": 2, "A?": 1})
    assert evaluate.picture_lines({"x": one, "y": evaluate.Scores(0.0, {"B?": 3}, {"B?": 3})}) == [
        ["question", "x", "questions", "y", "questions"], ["A?", "0%", "1", "-", "0"], ["B?", "50%", "2", "100%", "3"],
        ["all", "33%", "3", "100%", "3"]]


def test_section_pictures_shows_both_splits(capsys, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(evaluate, "episode", lambda seed, *rest, **kind: seen.append((seed, *rest[:2])) or seed)
    monkeypatch.setattr(evaluate, "measure_pictures", lambda model, episodes, tokenizer: evaluate.Scores(
        0.0, {"Where?": len(list(episodes))}, {"Where?": 8}))
    assert evaluate.main(["--only", "pictures", "--episodes", "1"]) == 0
    assert seen == [(0, 512, "test"), (1, 512, "test"), (10**9, 512, "train"), (10**9 + 1, 512, "train")]
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        [name, "25%", "8", "25%", "8"] for name in ("Where?", "all")]


def test_another_tokenizer_is_refused(nano_dir) -> None:
    """The nano model has as many ids, so its answers would be counted, all as wrong."""
    with pytest.raises(ValueError, match="another tokenizer"):
        evaluate.main(["--ckpt", str(nano_dir), "--only", "distance"])


@pytest.mark.parametrize("arguments, reason", [
    (["--episodes", "0"], "at least 1"), (["--tokens", "64"], "at least 128"), (["--tokens", "4096"], "at most 2048"),
    (["--ckpt", "nowhere"], "nowhere"), (["--prompts", "3"], "at least 4"), (["--new-tokens", "6"], "at least 7"),
    (["--questions", "0"], "at least 1")])
def test_bad_input_is_named(arguments, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        evaluate.main(arguments)
