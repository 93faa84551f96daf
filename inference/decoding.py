"""The loop around the model: prefill in chunks, then tokens one by one or in drafted blocks that the model verifies.

    prefill   every prompt in calls of `chunk_size` tokens; prompts of different lengths share their calls
    plain     feed the newest token (the anchor), take the next one from the logits
    draft     DSpark proposes x_1 .. x_G after the anchor; [anchor, x_1 .. x_L] is one call of the model; row k - 1 of it judges
              x_k. Accepted drafts and one token of the model's own (the bonus) are new; the bonus is the next anchor
    accept    x_k with probability min(1, p_model(x_k) / p_draft(x_k)); at the first rejection the next token is drawn from the
              normalized positive part of p_model - p_draft, after L acceptances from p_model. The law of the text is that of
              plain sampling; at temperature 0 both are one-hot, so the text itself is the same
    roll back nothing: the call does not commit, `Cache.commit` then takes anchor and accepted drafts only
Prefill modes (config.prefill_rows)
    "full": every layer runs every prompt token, the definition. "halo": decoder layers run only the tokens that the rest
    depends on, exact up to rounding. "replay": they run only the last window of the prompt, APPROXIMATE.
Mirrors
    DSpark paper: draft, verification, acceptance. official: the inference code has the draft forward only; this loop is ours.
    report: decoder bounded replay.
Tests
    tests/test_decoding_chunks.py, tests/test_decoding_batch.py, tests/test_decoding_speculative.py,
    tests/test_decoding_prefill.py, tests/test_snapshot.py
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from inference import dspark, snapshot
from inference.cache import Cache
from inference.config import PREFILL_MODES, prefill_rows
from inference.image_processor import TEXT
from inference.model import Model, Observer
from inference.prompts import Prompt
from inference.sampling import Sampling, probabilities

DRAFT_FLOOR = 1e-8  # official evaluation code: lower bound of p_draft in the ratio, and of a residual that is drawn from
END, FULL, LIMIT = "end marker", "max_new_tokens", "context limit"  # why a sequence stopped

Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True)
class Settings:
    """How to generate. Raises ValueError for values without meaning."""

    max_new_tokens: int = 64  # per sequence
    sampling: Sampling = Sampling(temperature=0.0)
    speculate: bool = False  # draft and verify; needs a checkpoint with draft stages
    draft_tokens: int | None = None  # most drafts to send per round; None: the whole block
    # Drafts from the first one whose estimated acceptance is below this are not sent; 0 sends all (official evaluation code).
    confidence_threshold: float = 0.0
    confidence_temperatures: tuple[float, ...] = ()  # per draft position, see reference/calibration.py; empty: all 1
    prefill: str = "full"  # "full", "halo" or "replay" (approximate)
    chunk_size: int = 1024  # prompt tokens per call. A streamed checkpoint is read once per call
    stop_ids: tuple[int, ...] | None = None  # None: the end marker of the configuration

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"Generating: {name} must be at least 1, got {getattr(self, name)}.")
        if self.draft_tokens is not None and self.draft_tokens < 0:
            raise ValueError(f"Generating: draft_tokens must be 0 or more, got {self.draft_tokens}.")
        if not 0 <= self.confidence_threshold <= 1:
            raise ValueError(f"Generating: confidence_threshold must be between 0 (all drafts are sent) and 1, got "
                             f"{self.confidence_threshold}.")
        if any(not temperature > 0 for temperature in self.confidence_temperatures):
            raise ValueError(f"Generating: confidence_temperatures must be above 0, got {self.confidence_temperatures}.")
        if self.prefill not in PREFILL_MODES:
            raise ValueError(f"Generating: prefill must be one of {', '.join(PREFILL_MODES)}, got {self.prefill!r}.")


class Emission(NamedTuple):
    """New tokens of one sequence."""

    row: int
    ids: list[int]


@dataclass(frozen=True)
class Round:
    """One call of the model after the prefill, for one sequence."""

    row: int
    sent: int  # drafts in the call
    accepted: int  # of them
    confidence: tuple[float, ...] = ()  # of all drafts of the block, logits as the head gives them


@dataclass(frozen=True)
class Stats:
    """What a generation did so far."""

    rounds: tuple[Round, ...]
    sequences: int
    new_tokens: int  # of all sequences
    prefill: str  # mode; the approximate one says so
    layer_rows: int  # layers times prompt tokens that the prefill ran
    full_layer_rows: int  # that "full" runs

    @property
    def accepted_length(self) -> float:
        """tau: tokens per round, the bonus included (DSpark paper); 1 without drafts."""
        return 1 + sum(entry.accepted for entry in self.rounds) / max(1, len(self.rounds))

    @property
    def histogram(self) -> dict[int, int]:
        """Accepted drafts -> rounds with that many."""
        return dict(sorted(Counter(entry.accepted for entry in self.rounds).items()))

    @property
    def sent(self) -> int:
        """Drafts that the model judged."""
        return sum(entry.sent for entry in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(entry.accepted for entry in self.rounds)

    @property
    def saved_calls(self) -> int:
        """Calls that token-by-token decoding would have made for the same tokens beyond these; per sequence, summed.

        The first token of a sequence comes from its prefill.
        """
        return max(0, self.new_tokens - self.sequences) - len(self.rounds)

    def line(self) -> str:
        """One line for people."""
        text = f"prefill {self.prefill}: {self.layer_rows} of {self.full_layer_rows} layer-rows"
        if self.sent:
            text += (f"; {self.accepted} of {self.sent} drafts accepted ({self.accepted / self.sent:.0%}), accepted length "
                     f"{self.accepted_length:.2f} with the bonus, {self.saved_calls} calls saved, rounds by accepted drafts "
                     f"{self.histogram}")
        return text


def generate(model: Model, prompts: Sequence[Prompt | Sequence[int]], settings: Settings = Settings(),
             generator: Generators = None, cache: Cache | None = None) -> Generation:
    """Complete a batch of prompts. Iterate over the result to get `Emission(row, ids)` as tokens come.

    prompts: `prompts.Prompt`s or lists of ids, of any lengths. generator: the only source of randomness, one for all
    sequences or one for each (then a sequence does not depend on its neighbours); not needed at temperature 0.
    cache: a new one by default; one that holds earlier tokens is continued (its newest emitted token is in no cache yet and
    must start the prompt). Raises ValueError for prompts that do not fit and settings that this checkpoint cannot serve.
    """
    prompts = [prompt if isinstance(prompt, Prompt) else Prompt([int(token) for token in prompt], None)
               for prompt in prompts]
    if not prompts:
        raise ValueError("Generating: no prompt was given.")
    cache = model.new_cache(len(prompts)) if cache is None else cache
    _check(model, prompts, settings, generator, cache)
    return Generation(model, prompts, settings, generator, cache)


def _check(model: Model, prompts: Sequence[Prompt], settings: Settings, generator: Generators, cache: Cache) -> None:
    limit = model.config.text_config.max_position_embeddings
    if cache.batch_size != len(prompts):
        raise ValueError(f"Generating: {len(prompts)} prompts for a cache of {cache.batch_size} sequences.")
    for row, (prompt, known) in enumerate(zip(prompts, cache.lengths)):
        if not prompt.ids:
            raise ValueError(f"Generating: prompt {row} has no token. Begin with the begin marker at least.")
        if known + len(prompt.ids) > limit:
            raise ValueError(f"Generating: prompt {row} ends at {known + len(prompt.ids)} tokens, "
                             f"max_position_embeddings is {limit}. Shorten it.")
    if settings.speculate and not model.mtp:
        raise ValueError("Generating: speculate needs draft stages, which this checkpoint does not have "
                         "(num_nextn_predict_layers is 0). Generate without it.")
    if settings.sampling.temperature > 0 and not isinstance(generator, torch.Generator):
        if generator is None or len(generator) != len(prompts):
            raise ValueError(f"Generating: sampling needs a torch.Generator, or one for each of the {len(prompts)} prompts.")


class Generation:
    """A running generation; `generate` makes it. Iterating runs it; between two steps everything can be read.

    An exception inside a step (an interrupt, say) leaves everything but the random generator as it was before the step, so
    iterating may go on.
    """

    def __init__(self, model: Model, prompts: Sequence[Prompt], settings: Settings, generator: Generators,
                 cache: Cache) -> None:
        self.model, self.settings, self.generator, self.cache = model, settings, generator, cache
        self.stop_ids = (model.config.eos_token_id,) if settings.stop_ids is None else settings.stop_ids
        self.tokens: list[list[int]] = [[] for _ in range(cache.batch_size)]  # new ones, per sequence
        self.stopped_by: list[str | None] = [None] * cache.batch_size  # END, FULL or LIMIT
        self.rounds: list[Round] = []
        self._prompts = prompts
        self.layer_rows = self.full_layer_rows = 0
        self._ready: deque[Emission] = deque()

    def __iter__(self) -> Iterator[Emission]:
        return self

    def __next__(self) -> Emission:
        while not self._ready:
            if all(self.stopped_by):
                raise StopIteration
            before = self.cache.state, list(self.tokens), list(self.stopped_by), list(self.rounds)
            try:
                with torch.no_grad():
                    self._round() if any(self.tokens) else self._prefill()
            except BaseException:  # an interrupt too: a step is taken whole or not at all
                state, self.tokens, self.stopped_by, self.rounds = before
                self._ready.clear()
                if self.cache.state is not state:
                    self.cache.restore(state)
                raise
        return self._ready.popleft()

    @property
    def stats(self) -> Stats:
        mode = self.settings.prefill + (" (approximate)" if self.settings.prefill == "replay" else "")
        return Stats(tuple(self.rounds), len(self.tokens), sum(map(len, self.tokens)), mode, self.layer_rows,
                     self.full_layer_rows)

    def _prefill(self) -> None:
        lengths = [len(prompt.ids) for prompt in self._prompts]
        logits = prefill(self.model, self._prompts, self.cache, self.settings.prefill, self.settings.chunk_size)
        text = self.model.config.text_config
        self.layer_rows = sum(sum(prefill_rows(text, self.settings.prefill, length)) for length in lengths)
        self.full_layer_rows = sum(lengths) * text.num_hidden_layers
        first = self._draw(probabilities(logits, self.settings.sampling))
        for row, token in enumerate(first.tolist()):
            self._emit(row, [token])

    def _round(self) -> None:
        """One call of the model for all sequences that go on, and what follows from it."""
        batch, device = self.cache.batch_size, self.model.norm.weight.device
        active = [stopped is None for stopped in self.stopped_by]
        anchors = torch.tensor([tokens[-1] for tokens in self.tokens], device=device)
        ids, sent, draft, draft_law = anchors.unsqueeze(1), [0] * batch, None, None
        if self.settings.speculate:
            draft = self.model.draft(anchors, self.cache, choose=lambda logits: self._draw(self._law(logits)))
            sent, ids, draft_law = self._sent(draft, active), draft.ids, self._law(draft.logits)
        lengths = [1 + count if goes_on else 0 for count, goes_on in zip(sent, active)]
        out = self.model(ids[:, :max(lengths)], self.cache, lengths=lengths, text_only=True, commit=False)
        sent_rows = torch.tensor(sent, device=device)
        accepted, bonus = accept(self._law(out.logits), draft_law, ids[:, 1:], sent_rows, self._randomness)
        new = [[*row[:count], last] for row, count, last in zip(ids[:, 1:].tolist(), accepted.tolist(), bonus.tolist())]
        new = [self._up_to_end(tokens) if goes_on else [] for tokens, goes_on in zip(new, active)]
        # The newest token is in no cache yet: the call's anchor and all new tokens but the last are.
        self.cache.commit(out.pending, [len(tokens) for tokens in new])
        for row in range(batch):
            if active[row]:
                confidence = () if draft is None else tuple(draft.confidence[row].tolist())
                self.rounds.append(Round(row, sent[row], int(accepted[row]), confidence))
                self._emit(row, new[row])

    def _sent(self, draft: dspark.Draft, active: Sequence[bool]) -> list[int]:
        """Drafts to send per sequence: none below the confidence threshold, none that could not be kept."""
        settings, limit = self.settings, self.model.config.text_config.max_position_embeddings
        size = draft.confidence.shape[1]
        most = size if settings.draft_tokens is None else min(size, settings.draft_tokens)
        scale = torch.ones(size, device=draft.confidence.device)
        for position, temperature in enumerate(settings.confidence_temperatures[:size]):
            scale[position] = temperature
        sure = torch.sigmoid(draft.confidence / scale) >= settings.confidence_threshold
        # The decision on draft k looks at confidences 1 .. k, which depend on tokens before it only: the law stays.
        confident = sure.to(torch.int64).cumprod(dim=1).sum(dim=1).tolist()
        room = [min(settings.max_new_tokens - len(tokens), limit - length) - 1
                for tokens, length in zip(self.tokens, self.cache.lengths)]
        return [max(0, min(most, count, free)) if goes_on else 0
                for count, free, goes_on in zip(confident, room, active)]

    def _law(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.settings.sampling)

    @property
    def _randomness(self) -> Generators:
        return None if self.settings.sampling.temperature == 0 else self.generator

    def _draw(self, weights: Tensor) -> Tensor:
        return draw(weights, self._randomness)

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        """New tokens up to the first end marker. That they are not too many is seen to by `_sent`."""
        ends = [count for count, token in enumerate(tokens, 1) if token in self.stop_ids]
        return tokens[:ends[0]] if ends else tokens

    def _emit(self, row: int, tokens: list[int]) -> None:
        self.tokens[row] = [*self.tokens[row], *tokens]
        if tokens[-1] in self.stop_ids:
            self.stopped_by[row] = END
        elif len(self.tokens[row]) >= self.settings.max_new_tokens:
            self.stopped_by[row] = FULL
        elif self.cache.lengths[row] >= self.model.config.text_config.max_position_embeddings:
            self.stopped_by[row] = LIMIT
        self._ready.append(Emission(row, tokens))

    def save(self, folder: str | Path) -> None:
        """Write everything that `resume` needs to go on in another process with the same bits. Any time after the prefill."""
        if not any(self.tokens):
            raise ValueError("Saving a generation: it has not begun. Take the first token from it before.")
        generators = [] if self.generator is None else (
            [self.generator] if isinstance(self.generator, torch.Generator) else list(self.generator))
        extra = {"settings": dataclasses.asdict(self.settings), "tokens": self.tokens, "stopped_by": self.stopped_by,
                 "rounds": [dataclasses.astuple(entry) for entry in self.rounds], "ready": list(self._ready),
                 "layer_rows": [self.layer_rows, self.full_layer_rows], "shared_generator": len(generators) == 1}
        states = {f"generator.{number}": generator.get_state() for number, generator in enumerate(generators)}
        snapshot.save(folder, self.model, self.cache, extra, states)


def resume(model: Model, folder: str | Path) -> Generation:
    """The generation that `Generation.save` wrote. Raises ValueError for another checkpoint or damaged files."""
    cache, extra, states = snapshot.load(folder, model)
    try:
        settings = extra["settings"]
        settings = Settings(**{**settings, "sampling": Sampling(**settings["sampling"]),
                               "confidence_temperatures": tuple(settings["confidence_temperatures"]),
                               "stop_ids": None if settings["stop_ids"] is None else tuple(settings["stop_ids"])})
        generators = [torch.Generator() for _ in states]
        for number, generator in enumerate(generators):
            generator.set_state(states[f"generator.{number}"])
        generator = None if not generators else generators[0] if extra["shared_generator"] else generators
        resumed = Generation(model, (), settings, generator, cache)  # the prompts are in the cache
        resumed.tokens, resumed.stopped_by = extra["tokens"], extra["stopped_by"]
        resumed.rounds = [Round(row, sent, accepted, tuple(sure)) for row, sent, accepted, sure in extra["rounds"]]
        resumed.layer_rows, resumed.full_layer_rows = extra["layer_rows"]
        resumed._ready.extend(Emission(row, ids) for row, ids in extra["ready"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"Resuming a generation: {folder} holds a cache but no generation ({error!r}). Was it written by "
                         "Generation.save?") from None
    return resumed


def prefill(model: Model, prompts: Sequence[Prompt], cache: Cache, mode: str = "full", chunk_size: int = 1024,
            observe: Observer | None = None) -> Tensor:
    """Run prompts of any lengths into the cache, in calls of at most `chunk_size` tokens each.

    Returns the logits after every prompt's last token, [B, V] float32. Afterwards drafting is possible at once: the draft
    rings are filled along the way. mode: see config.prefill_rows. Interrupted, the cache holds the calls that were done.
    """
    device, text = model.norm.weight.device, model.config.text_config
    lengths = [len(prompt.ids) for prompt in prompts]
    firsts = _first_positions(model, lengths, cache.lengths, mode)
    spans = [_span_rows(model, prompt, observe) for prompt in prompts]
    has_types = any(prompt.token_types is not None for prompt in prompts)
    logits = torch.zeros(len(prompts), text.vocab_size, device=device)
    for start in range(0, max(lengths), chunk_size):
        counts = [min(max(0, length - start), chunk_size) for length in lengths]
        ids = torch.zeros(len(prompts), max(counts), dtype=torch.int64, device=device)
        types = torch.full_like(ids, TEXT) if has_types else None
        rows: list[Tensor | None] = [None] * len(prompts)
        for row, (prompt, count) in enumerate(zip(prompts, counts)):
            ids[row, :count] = torch.tensor(prompt.ids[start:start + count], dtype=torch.int64)
            if prompt.token_types is not None:
                types[row, :count] = torch.tensor(prompt.token_types[start:start + count], dtype=torch.int64)
                before = sum(kind != TEXT for kind in prompt.token_types[:start])
                rows[row] = spans[row][before:before + int((types[row] != TEXT).sum())]
        out = model(ids, cache, token_types=types, image_rows=rows if has_types else None, lengths=counts,
                    first_positions=firsts, last_only=True, observe=observe)
        for row, (length, count) in enumerate(zip(lengths, counts)):
            if count and start + count == length:
                logits[row] = out.logits[row, -1]
    return logits


def _first_positions(model: Model, lengths: Sequence[int], starts: Sequence[int], mode: str) -> dict[int, list[int]] | None:
    """The first position that every decoder layer runs, per sequence; None if all run everything."""
    needed = [prefill_rows(model.config.text_config, mode, length) for length in lengths]
    firsts = {}
    for layer_id in range(len(model.layers)):
        # 0 where nothing is skipped: then the window also reaches into what the cache had before.
        first = [start + length - rows[layer_id] if rows[layer_id] < length else 0
                 for start, length, rows in zip(starts, lengths, needed)]
        if any(first) or firsts:
            firsts[layer_id] = first
    border = model.config.text_config.kv_source_layer_ids[-1:]
    return {layer_id: firsts.get(layer_id, [0] * len(lengths)) for layer_id in range(border[0], len(model.layers))
            } if firsts else None


def _span_rows(model: Model, prompt: Prompt, observe: Observer | None) -> Tensor | None:
    """Embeddings of all image span positions of a prompt, in order: [n, D]."""
    if prompt.token_types is None:
        return None
    rows = [model.image_rows(image, observe) for image in prompt.images]
    found = sum(kind != TEXT for kind in prompt.token_types)
    if sum(map(len, rows)) != found:
        raise ValueError(f"Generating: a prompt has {found} positions of image types, its {len(rows)} images fill "
                         f"{sum(map(len, rows))}. Make ids and types with expand_placeholders.")
    return torch.cat(rows) if rows else torch.zeros(0, model.config.text_config.hidden_size)


def accept(target: Tensor, draft: Tensor | None, draft_ids: Tensor, sent: Tensor, generator: Generators,
           ) -> tuple[Tensor, Tensor]:
    """How many drafts stand, and the token after them.

    target [B, 1 + L, V]: the model's probabilities, row k for the token after drafts < k; draft [B, G, V]: those that
    draft_ids [B, G] were drawn from (None: G = L = 0), G >= L; sent [B] int64: drafts of each sequence that the model has
    judged, at most L. generator: None if all probabilities are one-hot. Returns accepted [B] int64 and next_ids [B] int64.
    """
    batch, length = target.shape[0], target.shape[1] - 1
    accepted = torch.zeros(batch, dtype=torch.int64, device=target.device)
    each = torch.arange(batch, device=target.device)
    if draft is not None:
        drawn = draft_ids[:, :length].unsqueeze(2)
        p_target, p_draft = (law[:, :length].gather(2, drawn).squeeze(2) for law in (target, draft))
        chance = p_target / p_draft.clamp_min(DRAFT_FLOOR)
        # For the whole block whatever was sent: how much luck a sequence uses up must not depend on its neighbours.
        luck = _random(generator, tuple(draft_ids.shape), target.device, lambda x, g: x.uniform_(generator=g))[:, :length]
        stands = (luck < chance) & (torch.arange(length, device=target.device) < sent.unsqueeze(1))
        accepted = stands.to(torch.int64).cumprod(dim=1).sum(dim=1)
    weights = target[each, accepted]
    if draft is not None:
        # After a rejection: what the draft has given too rarely. It makes up for what it has given too often.
        rejected = (accepted < sent).unsqueeze(1)
        residual = (weights - draft[each, accepted.clamp_max(draft.shape[1] - 1)]).clamp_min(0.0)
        usable = rejected & (residual.sum(dim=1, keepdim=True) > DRAFT_FLOOR)
        weights = torch.where(usable, residual, weights)
    return accepted, draw(weights, generator)


def draw(weights: Tensor, generator: Generators) -> Tensor:
    """One draw per row of weights [B, V] (not necessarily normalized) -> [B] int64; None: the largest weight."""
    if generator is None:
        return weights.argmax(-1)
    # official: the largest of p / Exp(1) is a draw from p.
    return (weights / _random(generator, weights.shape, weights.device, lambda x, g: x.exponential_(generator=g))).argmax(-1)


def _random(generator: Generators, shape: tuple[int, ...], device: torch.device, fill) -> Tensor:
    """Noise [B, ...] float32, drawn on the CPU so that a seed means the same everywhere; 0.5 without a generator."""
    if generator is None:
        return torch.full(shape, 0.5, device=device)
    if isinstance(generator, torch.Generator):
        return fill(torch.empty(shape), generator).to(device)
    return torch.stack([fill(torch.empty(shape[1:]), own) for own in generator]).to(device)
