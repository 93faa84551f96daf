"""The table of what the toy model can do (reference/toyworld/eval.py), on the bundled checkpoint."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import inference
from reference.toyworld import eval as evaluate
from reference.toyworld.corpus import CHECKPOINT, episode, load_tokenizer

TOKENIZER = load_tokenizer()
WINDOW = 32
NEAR, FAR = evaluate.COLUMNS[:2]


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


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_an_answer_counts_when_all_its_tokens_are_predicted(kind) -> None:
    found = episode(2, 600, "test", TOKENIZER, kind=kind)
    asked = [question for question in found.questions if evaluate.column_of(question, WINDOW)]
    spoiled = asked[0]

    def stub(wrong: tuple[int, ...]) -> SimpleNamespace:
        """Predicts every id with logit 10 against 0, but not those at the positions `wrong`."""
        logits = 10.0 * F.one_hot(torch.tensor(found.ids[1:] + [0]), TOKENIZER.vocab_size).to(torch.float32)
        for position in wrong:
            logits[position - 1] = -logits[position - 1]

        class Stub:
            config = SimpleNamespace(text_config=SimpleNamespace(sliding_window=WINDOW), vision_config=None)
            norm = SimpleNamespace(weight=torch.zeros(1))
            new_cache = staticmethod(lambda batch: None)

            def __call__(self, ids, cache, **options):
                return SimpleNamespace(logits=logits[None])

        return Stub()

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


@pytest.mark.parametrize("arguments, reason", [
    (["--episodes", "0"], "at least 1"), (["--tokens", "64"], "at least 128"), (["--tokens", "4096"], "at most 2048"),
    (["--ckpt", "nowhere"], "nowhere")])
def test_bad_input_is_named(arguments, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        evaluate.main(arguments)
