"""What the toy model can do, and which mechanism it owes that to.

    python -m reference.toyworld.eval [--ckpt DIR] [--only SECTION ...] [--episodes N] [--tokens 1024] [--prompts N]
                                      [--new-tokens N] [--questions N] [--markdown]

prints these sections, on episodes of the test split (pictures: also on new ones of the other); about six minutes on one
core. The checkpoint must have the toy tokenizer.

ablations    one row per variant of the same weights: the model as it is, the model with one mechanism disturbed
             (`VARIANTS`), and a 4-gram model of the corpus
    loss        mean -log p(next token) in nats over every token of the text episodes but the first of each
    the others  share of questions whose whole answer is predicted: argmax of the logits before each of its tokens, all
                tokens before it given. Retrieval is split by the distance to the place that told the value: within the
                sliding window, where plain attention sees it, and beyond, where only compressed rows can carry it.
                "chat" counts tool calls too.
distance     retrieval by distance in octaves, the sliding window being the first; twice as many text episodes
pictures     questions about pictures by kind ("Where is the C S?": C a color, S a shape, P a place), for pictures with a
             combination that training held out and for new ones without; twice as many episodes of each
drafts       DSpark against decoding without drafts, then the calibration of its confidence head: eval_drafts.py
prefill      the shorter prefill modes against the full one: eval_drafts.py

Ablations replace functions of inference/ from outside for the length of a `with` block; the model holds no switch for
them. The weights were trained with everything on: a row says what the trained model relies on, not how good a model
trained without the mechanism would be. The first three sections run in native numerics, the others in float32.

Leaves out: free answers (answers are teacher-forced).
Test: tests/test_toyworld_eval.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import log
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import inference
import inference.attention
from inference.command import Parser, run
from inference.context import Context
from inference.encoding import IMAGE, USER
from inference.engram import Engram
from inference.hyper_connections import Mixes, collapse, expand
from inference.image_processor import process_image
from inference.indexer import Indexer
from inference.model import Layer, Model
from inference.tokenizer import Tokenizer
from reference.toyworld import eval_drafts, world
from reference.toyworld.corpus import CHECKPOINT, SHORTEST, Episode, Question, episode
from reference.toyworld.eval_drafts import GREEDY, KINDS, SAMPLED, Lines

SECTIONS = ("ablations", "distance", "pictures", "drafts", "prefill")
COLUMNS = ("retrieval in window", "retrieval beyond", "memory", "copy", "chat", "picture")
EPISODES = 10  # ours: text episodes by default; with a fifth as many chats and pictures two minutes on one core
OTHER_SHARE = 5  # ours: one chat and one picture episode for so many of text
ORDER = 4  # ours: of the n-gram baseline
NGRAM_EPISODES = 1000  # ours: training text of the baseline, about a million tokens
NOISE_SEED = 0  # ours
DISTANCE_EPISODES = 2  # ours: text episodes of "distance" for each of --episodes; the longest distances are rare
PICTURE_EPISODES, PICTURE_TOKENS = 2, 512  # ours: of each split for each of --episodes; --tokens at most
NEW_PICTURES = 10**9  # ours: first seed of new pictures; training draws seeds below 2**48, and hardly these
PROMPTS, NEW_TOKENS = 24, 80  # ours: continued with and without drafts, two minutes on one core
QUESTIONS = 60  # ours: asked after each prefill mode, a minute


# --- ablations -----------------------------------------------------------------------------------------------------


def compressed_attention_off() -> AbstractContextManager:
    """Every selection is empty (-1): attention sees its window and the sink."""

    def nothing(scores: Tensor, count: int) -> Tensor:
        return torch.full((*scores.shape[:-1], min(count, scores.shape[-1])), -1, device=scores.device)

    return patch.object(inference.attention, "select_columns", nothing)


@contextmanager
def _replaced_scores(replacement: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Index scores [B, S, N] become replacement(scores) on visible columns. Candidate blocks follow the new scores."""
    original = Indexer.score

    def score(self: Indexer, *arguments, **options) -> Tensor:
        scores = original(self, *arguments, **options)
        return replacement(scores).masked_fill(scores == float("-inf"), float("-inf"))

    with patch.object(Indexer, "score", score):
        yield


def random_selection() -> AbstractContextManager:
    """Index scores are uniform noise; the same in every `with` block that runs the same calls."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return _replaced_scores(lambda scores: torch.rand(scores.shape, generator=generator).to(scores.device))


def most_recent_selection() -> AbstractContextManager:
    """The newest visible columns win. float32, because bfloat16 cannot count beyond 256."""
    return _replaced_scores(lambda scores: torch.arange(
        scores.shape[-1], dtype=torch.float32, device=scores.device).expand(scores.shape))


def candidate_filter_off() -> AbstractContextManager:
    """Layers that choose within candidate blocks choose from all visible columns instead."""

    def everything(blocks: Tensor, block_size: int, columns: int) -> Tensor:
        return torch.ones(*blocks.shape[:-1], columns, dtype=torch.bool, device=blocks.device)

    return patch.object(inference.attention, "block_columns", everything)


def engram_off() -> AbstractContextManager:
    """Engram adds nothing to the streams."""
    return patch.object(Engram, "forward", lambda self, streams, hash_ids, context: streams)


def hyper_connections_not_lagged() -> AbstractContextManager:
    """Every sub-layer collapses with the pre vector of its own input. The head keeps the last one computed."""

    def sublayers(self: Layer, streams: Tensor, pre: Tensor, attention: Callable[[Tensor], Tensor],
                  context: Context) -> tuple[Tensor, Tensor]:
        def half(kind: str, streams: Tensor, norm: Callable, body: Callable) -> tuple[Tensor, Mixes]:
            mixes = self.mixes(kind, streams)
            return expand(streams, body(norm(collapse(streams, mixes.pre_next))), mixes), mixes

        streams, _ = half("attn", streams, self.attn_norm, attention)
        streams, mixes = half("ffn", streams, self.ffn_norm, lambda x: self._feed_forward(x, context))
        return streams, mixes.pre_next

    return patch.object(Layer, "sublayers", sublayers)


VARIANTS: Mapping[str, Callable[[], AbstractContextManager]] = {
    "model": nullcontext,
    "compressed attention off": compressed_attention_off,
    "random selection": random_selection,
    "most recent selection": most_recent_selection,
    "candidate filter off": candidate_filter_off,
    "Engram off": engram_off,
    "hyper-connections not lagged": hyper_connections_not_lagged,
}


# --- measuring -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """One row of the table."""

    loss: float  # nats per token of the text episodes; NaN without any
    right: Mapping[str, int]  # column -> questions whose whole answer is predicted
    asked: Mapping[str, int]  # column -> questions

    def share(self, column: str) -> float | None:
        """Part of the questions answered, 0 to 1; None where there were none."""
        return self.right[column] / self.asked[column] if self.asked.get(column) else None


def evaluation_episodes(tokenizer: Tokenizer, text: int = EPISODES, other: int = EPISODES // OTHER_SHARE,
                  tokens: int = 1024) -> list[Episode]:
    """Of the test split `text` text episodes, then `other` chats and as many with pictures, each up to `tokens` ids."""
    wanted = [("text", text), ("chat", other), ("picture", other)]
    return [episode(seed, tokens, "test", tokenizer, kind=kind) for kind, count in wanted for seed in range(count)]


def column_of(question: Question, window: int) -> str | None:
    """The column that counts a question; None where no column does (sums, reversed lists)."""
    if question.task == "retrieval":
        return COLUMNS[0] if question.distance <= window else COLUMNS[1]
    task = "chat" if question.task == "tool" else question.task
    return task if task in COLUMNS else None


@torch.no_grad()
def episode_logits(model: Model, found: Episode) -> Tensor:
    """All logits of one episode, [S, V] float32, from a cache of its own."""
    device = model.norm.weight.device
    given = {}
    if found.token_types is not None:
        given = {"token_types": torch.tensor([found.token_types], device=device),
                 "images": [[process_image(image, model.config.vision_config) for image in found.images]]}
    return model(torch.tensor([found.ids], device=device), model.new_cache(1), commit=False, **given).logits[0]


def measure(model: Model, episodes: Iterable[Episode]) -> Scores:
    """Loss on the text episodes and answers of all; within a `with VARIANTS[name]():` block, of that variant."""
    window = model.config.text_config.sliding_window
    total, tokens = 0.0, 0
    right, asked = Counter(), Counter()
    for found in episodes:
        logits = episode_logits(model, found).to("cpu", torch.float32)
        ids = torch.tensor(found.ids)
        if found.kind == "text":
            total += float(F.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
            tokens += len(ids) - 1
        for question, answered in answers(logits, found):
            column = column_of(question, window)
            if column is not None:
                asked[column] += 1
                right[column] += answered
    return Scores(total / tokens if tokens else float("nan"), right, asked)


def answers(logits: Tensor, found: Episode) -> Iterator[tuple[Question, bool]]:
    """All questions of an episode, and whether logits [S, V] predict every token of the answer."""
    hits = (logits[:-1].argmax(-1).cpu() == torch.tensor(found.ids[1:])).tolist()
    for question in found.questions:
        yield question, all(hits[question.start - 1:question.end - 1])


def measure_distance(model: Model, episodes: Iterable[Episode]) -> dict[int, tuple[int, int]]:
    """Retrieval by distance: upper end of the octave -> (answered, asked). The first octave is the sliding window."""
    found: dict[int, tuple[int, int]] = {}
    for one in episodes:
        for question, answered in answers(episode_logits(model, one), one):
            if question.task == "retrieval":
                octave = model.config.text_config.sliding_window
                while octave < question.distance:
                    octave *= 2
                right, asked = found.get(octave, (0, 0))
                found[octave] = right + answered, asked + 1
    return dict(sorted(found.items()))


def picture_kind(before: str) -> str:
    """The kind of the question that ends the text `before` an answer: "Where is the red cross?" -> "Where is the C S?"."""
    asked = before.rsplit(USER, 1)[-1].replace(IMAGE, "").split("<")[0].strip()
    for letter, words in (("C", "|".join(world.PAINTS)), ("S", "|".join(world.SHAPES)),
                          ("P", "(?:top|middle|bottom) (?:left|middle|right)")):
        asked = re.sub(rf"\b(?:{words})\b", letter, asked)
    return asked


def measure_pictures(model: Model, episodes: Iterable[Episode], tokenizer: Tokenizer) -> Scores:
    """Questions about pictures by `picture_kind`. The loss is not measured (NaN)."""
    right, asked = Counter(), Counter()
    for found in episodes:
        for question, answered in answers(episode_logits(model, found), found):
            if question.task == "picture":
                kind = picture_kind(tokenizer.decode(found.ids[:question.start]))
                asked[kind] += 1
                right[kind] += answered
    return Scores(float("nan"), right, asked)


class Ngram:
    """Counts of 1- to n-grams, mixed by Witten-Bell back-off; below single tokens lies the uniform distribution.

    p(w | h) = (count(h w) + kinds(h) p(w | shorter h)) / (count(h) + kinds(h)); kinds(h): different tokens after h.
    Contexts never seen pass p of the shorter one on. Source: Witten and Bell, 1991, in the interpolated form.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], vocabulary: int, order: int = ORDER) -> None:
        self.vocabulary, self.order = vocabulary, order
        self.after: dict[tuple[int, ...], Counter] = defaultdict(Counter)  # context -> counts of the token after it
        for ids in sequences:
            for i in range(1, len(ids)):
                for length in range(min(order - 1, i) + 1):
                    self.after[tuple(ids[i - length:i])][ids[i]] += 1
        self.totals = {context: counts.total() for context, counts in self.after.items()}

    def probability(self, context: Sequence[int], token: int) -> float:
        """p(token | the last order - 1 ids of context)."""
        known = tuple(context[max(0, len(context) - self.order + 1):])
        value = 1 / self.vocabulary
        for first in range(len(known), -1, -1):
            counts = self.after.get(known[first:])
            if counts is None:
                break  # a longer context was not seen either
            value = (counts[token] + len(counts) * value) / (self.totals[known[first:]] + len(counts))
        return value

    def loss(self, episodes: Iterable[Episode]) -> float:
        """Mean -log p in nats over all tokens but the first of every text episode, as `measure` takes it."""
        losses = [-log(self.probability(found.ids[max(0, i - self.order + 1):i], found.ids[i]))
                  for found in episodes if found.kind == "text" for i in range(1, len(found.ids))]
        return sum(losses) / len(losses)


def train_ngram(tokenizer: Tokenizer, vocabulary: int, tokens: int, episodes: int = NGRAM_EPISODES) -> Ngram:
    """The baseline, counted on text episodes of the train split."""
    made = (episode(seed, tokens, "train", tokenizer, kind="text").ids
            for seed in tqdm(range(episodes), desc=f"{ORDER}-gram baseline", leave=False, file=sys.stderr))
    return Ngram(made, vocabulary)


def evaluate(model: Model, episodes: Sequence[Episode], names: Sequence[str] = tuple(VARIANTS)) -> dict[str, Scores]:
    """Scores by name of the variant. Raises ValueError for a name that is not in VARIANTS."""
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"Evaluating the toy model: no variant {unknown[0]!r}. Choose from: {', '.join(VARIANTS)}.")
    rows = {}
    with tqdm(total=len(names) * len(episodes), file=sys.stderr, unit="episode") as bar:
        def counted() -> Iterator[Episode]:
            for found in episodes:
                yield found
                bar.update()

        for name in names:
            bar.set_description(name)
            with VARIANTS[name]():
                rows[name] = measure(model, counted())
    return rows


# --- tables --------------------------------------------------------------------------------------------------------


def ablation_lines(rows: Mapping[str, Scores], baseline: float | None = None) -> Lines:
    """The table of `evaluate`. baseline: loss of the n-gram model, None for no row. The last row counts questions."""
    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.0%}"

    lines = [["variant", "loss", *COLUMNS]]
    lines += [[name, f"{own.loss:.3f}", *(percent(own.share(column)) for column in COLUMNS)]
              for name, own in rows.items()]
    if baseline is not None:
        lines.append([f"{ORDER}-gram baseline", f"{baseline:.3f}", *("-" for _ in COLUMNS)])
    asked = next(iter(rows.values())).asked
    return [*lines, ["questions", "-", *(str(asked.get(column, 0)) for column in COLUMNS)]]


def distance_lines(octaves: Mapping[int, tuple[int, int]], window: int) -> Lines:
    """The table of `measure_distance`."""
    names = [f"up to {last}" if last == window else f"{last // 2 + 1} to {last}" for last in octaves]
    return [["distance", *names], ["answered", *(f"{right / asked:.0%}" for right, asked in octaves.values())],
            ["questions", *(str(asked) for _, asked in octaves.values())]]


def picture_lines(columns: Mapping[str, Scores]) -> Lines:
    """The table of `measure_pictures`, by title of the column. The last row is of all questions."""
    lines = [["question", *(cell for title in columns for cell in (title, "questions"))]]
    for kind in sorted(set().union(*(own.asked for own in columns.values()))):
        lines.append([kind])
        for own in columns.values():
            share = own.share(kind)
            lines[-1] += ["-" if share is None else f"{share:.0%}", str(own.asked.get(kind, 0))]
    lines.append(["all"])
    for own in columns.values():
        asked = sum(own.asked.values())
        lines[-1] += [f"{sum(own.right.values()) / asked:.0%}" if asked else "-", str(asked)]
    return lines


def table(lines: Lines, markdown: bool = False) -> str:
    """Lines as text with aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = [[line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
              for line in lines]
    if not markdown:
        return "\n".join("  ".join(line) for line in padded)
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


# --- command line --------------------------------------------------------------------------------------------------


def sections(given: argparse.Namespace, model: Model, tokenizer: Tokenizer) -> Iterator[tuple[str, Lines]]:
    """Title and table of everything that is asked for, as soon as it is measured."""
    text = model.config.text_config
    wanted = given.only or SECTIONS
    others = max(1, given.episodes // OTHER_SHARE)
    if "ablations" in wanted:
        episodes = evaluation_episodes(tokenizer, given.episodes, others, given.tokens)
        rows = evaluate(model, episodes)
        baseline = train_ngram(tokenizer, text.vocab_size, given.tokens).loss(episodes)
        yield "Share of questions answered, by variant of the same weights", ablation_lines(rows, baseline)
    if "distance" in wanted:
        episodes = evaluation_episodes(tokenizer, DISTANCE_EPISODES * given.episodes, 0, given.tokens)
        octaves = measure_distance(model, tqdm(episodes, desc="distance", unit="episode", file=sys.stderr))
        yield "Retrieval by distance in tokens", distance_lines(octaves, text.sliding_window)
    if "pictures" in wanted:
        columns = {}
        for title, split, first in (("held out", "test", 0), ("not held out", "train", NEW_PICTURES)):
            made = [episode(first + seed, min(given.tokens, PICTURE_TOKENS), split, tokenizer, kind="picture")
                    for seed in range(PICTURE_EPISODES * given.episodes)]
            columns[title] = measure_pictures(model, tqdm(made, desc=f"pictures, {title}", unit="episode", file=sys.stderr),
                                              tokenizer)
        yield ("Questions answered about new pictures, with and without a combination that training held out",
               picture_lines(columns))
    if not {"drafts", "prefill"} & set(wanted):
        return
    model = inference.load(given.ckpt, numerics="float32")
    if "drafts" in wanted:
        prompts = eval_drafts.draft_prompts(tokenizer, given.prompts, given.tokens)
        runs = eval_drafts.decode_prompts(model, prompts, given.new_tokens)
        yield (f"Drafts, {given.prompts} prompts; {eval_drafts.equality(runs[GREEDY, True])}",
               eval_drafts.draft_lines(runs, text.dspark_block_size))
        fitted_on, judged_on = eval_drafts.halves(runs[SAMPLED, True])
        yield ("Calibration of the confidence that all drafts are accepted, fitted on the other half of the prompts",
               eval_drafts.calibration_lines(fitted_on, judged_on))
    if "prefill" in wanted:
        episodes = [found for found in evaluation_episodes(tokenizer, given.episodes, others, given.tokens)
                    if found.kind in KINDS]
        asked = eval_drafts.spread([(found, question) for found in episodes for question in found.questions
                                    if column_of(question, text.sliding_window)], given.questions)
        if not asked:
            raise ValueError(f"Evaluating the toy model: episodes of {given.tokens} tokens ask nothing. Raise --tokens "
                             "or --episodes.")
        beyond = [column_of(question, text.sliding_window) == COLUMNS[1] for _, question in asked]
        yield ("Prefill modes; the error is that of the last logits, relative to those of the full prefill",
               eval_drafts.prefill_lines(eval_drafts.measure_prefills(model, asked), beyond))


def _check(given: argparse.Namespace, model: Model) -> None:
    """Raises ValueError for a checkpoint with another tokenizer than the corpus, and for numbers that cannot be used."""
    own, wanted = (json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) for folder in (given.ckpt, CHECKPOINT))
    if own != wanted:
        raise ValueError(f"Evaluating the toy model: {given.ckpt} has another tokenizer than the toy model, so the corpus is "
                         "foreign to it. Give a checkpoint of reference.train.")
    text = model.config.text_config
    least = {"episodes": 1, "tokens": SHORTEST, "questions": 1, "prompts": 2 * len(KINDS),
             "new_tokens": text.dspark_block_size + 2}  # a call sends at most two drafts fewer than tokens are wanted
    for name, bound in least.items():
        if getattr(given, name) < bound:
            raise ValueError(f"Evaluating the toy model: --{name.replace('_', '-')} must be at least {bound}, got "
                             f"{getattr(given, name)}.")
    if given.tokens > text.max_position_embeddings:
        raise ValueError(f"Evaluating the toy model: --tokens must be at most {text.max_position_embeddings}, the "
                         f"context of this checkpoint, got {given.tokens}.")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.toyworld.eval", description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=CHECKPOINT, help="folder of the toy model")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION",
                        help=f"what to print, of {', '.join(SECTIONS)}; all if not given")
    parser.add_argument("--episodes", type=int, default=EPISODES,
                        help=f"text episodes; for every {OTHER_SHARE} also one chat and one with pictures")
    parser.add_argument("--tokens", type=int, default=1024, help="length of an episode")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of the section drafts")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="of each of these prompts")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of the section prefill, at most")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    given = parser.parse_args(arguments)
    model, tokenizer = inference.load(given.ckpt), Tokenizer.load(given.ckpt)
    _check(given, model)
    for number, (title, lines) in enumerate(sections(given, model, tokenizer)):
        print("\n" * (number > 0) + (f"**{title}**\n" if given.markdown else title))
        print(table(lines, given.markdown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
