"""Decoding with the toy model: what drafts save, how well they know it, and what shorter prefills cost.

    python -m reference.toyworld.eval --only drafts prefill

drafts       the same prompts with drafts off and on, greedy and sampled at temperature 1 (`decode_prompts`)
    tau          accepted length, tokens per call of the backbone: accepted drafts and the bonus, the one token of a
                 call that is the model's own (DSpark paper; decoding.Stats). 1 with drafts off, at most 6 with blocks
                 of 5. The last call of a text sends fewer drafts, because no more tokens are wanted
    histogram    calls by the number of drafts they accepted, none first
    saved        calls that one token per call would have taken beyond these
    time         of everything after the first token, a batch of one prompt, against drafts off with the same sampling
calibration  of the confidence head on the sampled texts, whose acceptance it was trained to predict: error (ECE) of the
             estimate that drafts 1 .. k are all accepted, before and after sequential temperature scaling
             (reference/calibration.py). The temperatures are fitted on one half of the prompts, both errors are of the
             other half. "by chance" is what a perfect head would show there: bins of few calls are never quite even
prefill      questions asked after a prefill of everything before the answer, in every mode of config.prefill_rows:
             "halo" is exact up to rounding, "replay" is not
Everything runs in float32, where the greedy text with drafts must be the greedy text without: another one is an error, unless
it parts where two tokens have the same logit up to NEAR_TIE; such texts are counted.
In native numerics calls of one and of six rows round differently, and near-ties may fall the other way.
Left out: pictures (a prefill treats them as other rows) and batches (reference/speculation.py decodes in batches).
Test: tests/test_toyworld_eval.py
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from inference import decoding
from inference.config import PREFILL_MODES
from inference.decoding import Round, Settings, Stats
from inference.model import Model
from inference.prompts import Prompt
from inference.sampling import Sampling
from inference.tokenizer import Tokenizer
from reference import calibration
from reference.toyworld.corpus import Episode, Question, episode

KINDS = ("text", "chat")  # of the prompts to continue, in turn
GREEDY, SAMPLED = "greedy", "sampled"
TEMPERATURES = {GREEDY: 0.0, SAMPLED: 1.0}
CHANCE_DRAWS = 50  # ours: draws of outcomes for the error by chance; its mean is then good to a few percent
CHANCE_SEED = 0  # ours
# ours, in logits: calls of other lengths round a cached row to another FP8 code once in thousands of rows, which moved logits of
# the toy model by 4e-4 (float32, measured). Below this, two tokens are as good as equal.
NEAR_TIE = 1e-3
Lines = list[list[str]]  # a table: the header, then one list per row; the first column holds names


# --- drafts --------------------------------------------------------------------------------------------------------


def draft_prompts(tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """Ids of `count` prompts, text and chat in turn, from episodes of the test split of up to `tokens` ids.

    A text ends at its half, a chat before the first answer of its second half, where its assistant would go on.
    """
    prompts = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        found = episode(number // len(KINDS), tokens, "test", tokenizer, kind=kind)
        half = len(found.ids) // 2
        answers = [question.start for question in found.questions if question.start >= half]
        prompts.append(found.ids[:answers[0] if kind == "chat" and answers else half])
    return prompts


@dataclass(frozen=True)
class Run:
    """All prompts decoded in one way."""

    tokens: list[list[int]]  # new ids, per prompt
    stats: list[Stats]  # per prompt
    seconds: float  # after the first token of each
    parted: int = 0  # prompts whose text drafts have changed at a near-tie

    def pooled(self, kind: str | None = None) -> Stats:
        """Stats of all prompts, or of those of one kind."""
        own = [stats for number, stats in enumerate(self.stats) if kind in (None, KINDS[number % len(KINDS)])]
        return dataclasses.replace(
            own[0], rounds=tuple(entry for stats in own for entry in stats.rounds), sequences=len(own),
            new_tokens=sum(stats.new_tokens for stats in own))


def decode_prompts(model: Model, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[tuple[str, bool], Run]:
    """(sampling, drafts on) -> Run, one prompt at a time; one prefill serves its four decodings.

    The text goes on after end markers, so that all have `new_tokens`. Prompt number n samples with seed n. Raises
    AssertionError where the greedy texts differ by more than a near-tie.
    """
    # A prompt's four decodings follow each other: whatever slows the machine down meanwhile slows down all of them.
    found = {(name, speculate): ([], [], []) for name in TEMPERATURES for speculate in (False, True)}
    parted = 0
    for number, ids in enumerate(tqdm(prompts, desc="drafts", unit="prompt", file=sys.stderr)):
        cache = model.new_cache(1)
        if len(ids) > 1:
            with torch.no_grad():
                decoding.prefill(model, [Prompt(list(ids[:-1]), None)], cache)
        prefilled = cache.state
        for (name, speculate), (tokens, stats, seconds) in found.items():
            cache.restore(prefilled)
            settings = Settings(new_tokens, Sampling(TEMPERATURES[name]), speculate, stop_ids=())
            run = decoding.generate(model, [ids[-1:]], settings, torch.Generator().manual_seed(number), cache)
            next(run)
            start = time.perf_counter()
            for _ in run:
                pass
            seconds.append(time.perf_counter() - start)
            tokens.append(run.tokens[0])
            stats.append(run.stats)
        parted += parts(model, number, ids, *(found[GREEDY, speculate][0][-1] for speculate in (False, True)))
    return {key: Run(tokens, stats, sum(seconds), parted) for key, (tokens, stats, seconds) in found.items()}


def parts(model: Model, number: int, ids: Sequence[int], plain: Sequence[int], drafted: Sequence[int]) -> bool:
    """Whether drafts have changed the greedy text of prompt `number`, at a near-tie.

    Raises AssertionError, naming the place, if the logits of the two tokens there are further apart than NEAR_TIE.
    """
    if plain == drafted:
        return False
    place = next((i for i, pair in enumerate(zip(plain, drafted)) if pair[0] != pair[1]), min(len(plain), len(drafted)))
    pair = [*plain[place:place + 1], *drafted[place:place + 1]]
    if len(pair) == 2:
        before = torch.tensor([[*ids, *plain[:place]]], device=model.norm.weight.device)
        with torch.no_grad():
            logits = model(before, model.new_cache(1), commit=False, last_only=True).logits[0, -1]
        if abs(float(logits[pair[0]] - logits[pair[1]])) <= NEAR_TIE:
            return True
    raise AssertionError(f"Drafts have changed the greedy text of prompt {number} at new token {place}: "
                         f"{plain[place:place + 1]} without them, {drafted[place:place + 1]} with them.")


def equality(run: Run) -> str:
    """What `parts` found, in words."""
    same = len(run.tokens) - run.parted
    if not run.parted:
        return "the greedy texts with and without are equal"
    return f"the greedy texts with and without are equal in {same}, the others part at a near-tie (logits within {NEAR_TIE})"


def draft_lines(runs: Mapping[tuple[str, bool], Run], block: int) -> Lines:
    """The table of `decode_prompts`; block: drafts per call."""
    lines = [["decoding", "tokens", "calls", "saved", "tau", *(f"tau {kind}" for kind in KINDS),
              f"calls by accepted 0 .. {block}", "ms/token", "time"]]
    for (name, speculate), run in runs.items():
        stats = run.pooled()
        histogram = " ".join(str(stats.histogram.get(count, 0)) for count in range(block + 1)) if speculate else "-"
        lines.append([
            f"{name}, drafts {'on' if speculate else 'off'}", str(stats.new_tokens - stats.sequences),
            str(len(stats.rounds)), str(stats.saved_calls), f"{stats.accepted_length:.2f}",
            *(f"{run.pooled(kind).accepted_length:.2f}" for kind in KINDS), histogram,
            f"{1000 * run.seconds / (stats.new_tokens - stats.sequences):.1f}",
            f"{run.seconds / runs[name, False].seconds:.2f}"])
    return lines


# --- calibration ---------------------------------------------------------------------------------------------------


def halves(run: Run) -> tuple[list[Round], list[Round]]:
    """Rounds of the prompts to fit on and of those to judge on; both hold every kind of prompt."""
    parts: tuple[list[Round], list[Round]] = [], []
    for number, stats in enumerate(run.stats):
        parts[number // len(KINDS) % 2].extend(stats.rounds)
    return parts


def chance_errors(rounds: Sequence[Round], temperatures: Sequence[float]) -> list[float]:
    """Mean ECE per draft position if every draft were accepted with exactly the probability that the head estimates."""
    generator = torch.Generator().manual_seed(CHANCE_SEED)
    logits = torch.tensor([entry.confidence[:len(temperatures)] for entry in rounds], dtype=torch.float64)
    estimates = torch.sigmoid(logits / torch.tensor(temperatures, dtype=torch.float64))
    drawn = []
    for _ in range(CHANCE_DRAWS):
        stands = torch.rand(estimates.shape, generator=generator, dtype=torch.float64) < estimates
        accepted = stands.to(torch.int64).cumprod(1).sum(1).tolist()
        drawn.append(calibration.errors([dataclasses.replace(entry, accepted=min(entry.sent, count))
                                         for entry, count in zip(rounds, accepted)], temperatures))
    return [sum(column) / CHANCE_DRAWS for column in zip(*drawn)]


def calibration_lines(fitted_on: Sequence[Round], judged_on: Sequence[Round]) -> Lines:
    """Per draft position: what was judged, the temperature from the one half, errors on the other.

    Raises ValueError if one half never sent as many drafts as the other.
    """
    temperatures = calibration.fit_temperatures(fitted_on)
    before = calibration.errors(judged_on)
    if len(before) != len(temperatures):
        raise ValueError(f"Calibrating the toy model: one half of the prompts sent up to {len(temperatures)} drafts "
                         f"per call, the other up to {len(before)}. Decode more tokens.")
    after, chance = calibration.errors(judged_on, temperatures), chance_errors(judged_on, temperatures)
    lines = [["drafts", "calls", "all accepted", "temperature", "ECE before", "ECE after", "by chance"]]
    for k, row in enumerate(zip(before, after, chance), 1):
        sent = [entry for entry in judged_on if entry.sent >= k]
        share = sum(entry.accepted >= k for entry in sent) / len(sent)
        lines.append([f"1 .. {k}", str(len(sent)), f"{share:.0%}", f"{temperatures[k - 1]:.2f}",
                      *(f"{error:.1%}" for error in row)])
    return lines


# --- prefill -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefills:
    """One prefill mode on all questions."""

    layer_rows: int
    seconds: float  # of the prefills
    answered: list[bool]  # per question: all tokens of the answer are predicted, those before each given
    logits: list[Tensor]  # per question: [V] float32, after the last token of the prompt


def spread(items: Sequence, count: int) -> list:
    """`count` of the items at equal steps, or all if there are fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


@torch.no_grad()
def measure_prefills(model: Model, asked: Sequence[tuple[Episode, Question]]) -> dict[str, Prefills]:
    """Mode -> Prefills. Every question has a prefill of its own: all before its answer is the prompt."""
    device, text = model.norm.weight.device, model.config.text_config
    found = {mode: ([], [], [], []) for mode in PREFILL_MODES}
    for episode_, question in tqdm(asked, desc="prefill", unit="question", file=sys.stderr):
        prompt = Prompt(episode_.ids[:question.start], None)
        answer = torch.tensor(episode_.ids[question.start:question.end], device=device)
        for mode, (layer_rows, seconds, answered, last) in found.items():
            cache = model.new_cache(1)
            start = time.perf_counter()
            logits = decoding.prefill(model, [prompt], cache, mode)
            seconds.append(time.perf_counter() - start)
            layer_rows.append(sum(decoding.prefill_rows(text, mode, len(prompt.ids))))
            last.append(logits[0].cpu())
            if len(answer) > 1:
                logits = torch.cat([logits, model(answer[None, :-1], cache).logits[0]])
            answered.append(bool((logits.argmax(-1) == answer).all()))
    return {mode: Prefills(sum(layer_rows), sum(seconds), answered, last)
            for mode, (layer_rows, seconds, answered, last) in found.items()}


def prefill_lines(prefills: Mapping[str, Prefills], beyond: Sequence[bool]) -> Lines:
    """The table of `measure_prefills`; beyond: which questions ask for what the sliding window does not reach."""
    full = prefills["full"]
    lines = [["prefill", "layer-rows", "of full", "time", "answered", "beyond window", "same token",
              "error, mean", "largest"]]
    for mode, own in prefills.items():
        errors = [float((mine - right).norm() / right.norm()) for mine, right in zip(own.logits, full.logits)]
        same = [mine.argmax().item() == right.argmax().item() for mine, right in zip(own.logits, full.logits)]
        far = [answered for answered, is_far in zip(own.answered, beyond, strict=True) if is_far]
        lines.append([mode + (" (approximate)" if mode == "replay" else ""), str(own.layer_rows),
                      f"{own.layer_rows / full.layer_rows:.0%}", f"{own.seconds / full.seconds:.2f}",
                      _share(own.answered), _share(far), _share(same), f"{sum(errors) / len(errors):.0e}",
                      f"{max(errors):.0e}"])
    count = str(len(full.answered))
    lines.append(["questions", *["-"] * 3, count, str(sum(beyond)), count, "-", "-"])
    return lines


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits) / len(hits):.0%}" if hits else "-"
