"""Episodes of the small world: token ids with the questions in them marked.

    python -m reference.toyworld.corpus --seed 3 --tokens 300 [--kind text|chat|picture] [--split train|test]

prints an episode, and with --speed measures how fast they are made.

An episode is a function of (seed, tokens, split, kind) and of the tokenizer. Kind "text" states facts and asks for them
later, at distances drawn so that each octave from a few tokens to the length of the episode is as likely, and mixes in
codes, sums, lists and stories (lines.py). "chat" and "picture" are conversations in the official format (chats.py).

Held out by construction: the test split draws from its own seeds, its facts, sums and pictures are combinations that no
training episode contains (world.held_out), and it asks for codes, which training must have seen, in other words.

Test: tests/test_toyworld_corpus.py
"""

from __future__ import annotations

import heapq
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from inference.command import Parser, run
from inference.encoding import BOS
from inference.tokenizer import Tokenizer
from reference.toyworld import chats, lines, world
from reference.toyworld.lines import Fact, Part

CHECKPOINT = Path(__file__).parent / "checkpoint"
KINDS = ("text", "chat", "picture")
KIND_SHARES = (0.65, 0.15, 0.20)  # ours
SHORTEST = 128  # ours: tokens; below, a conversation may not fit
LONGEST = 1 << 20  # official: context of the published model; ten seconds to make
NEAREST = 6  # ours: tokens from a fact to the line that asks for it, at least


@dataclass(frozen=True)
class Question:
    """The answer is ids[start:end]; the model predicts it from ids[start - 1] on.

    task: retrieval, memory, arithmetic, copy or reverse in text; chat, tool or picture, one per turn of the assistant.
    distance: tokens from the place where the episode last told the value, in a statement or in an earlier answer, to
    the place in the answer where it stands. None where the episode does not tell it.
    """

    task: str
    start: int
    end: int
    distance: int | None


@dataclass(frozen=True)
class Episode:
    """ids begin with BOS. token_types is what the model takes beside images; None without them."""

    ids: list[int]
    kind: str
    questions: tuple[Question, ...]
    images: tuple[Image.Image, ...] = ()
    token_types: list[int] | None = None


def load_tokenizer() -> Tokenizer:
    return Tokenizer.load(CHECKPOINT)


def episode(seed: int, tokens: int, split: str, tokenizer: Tokenizer, *, kind: str | None = None) -> Episode:
    """One episode of at most `tokens` ids. A text has exactly as many; a conversation ends with its last full turn.

    split: "train" or "test". kind: "text", "chat" or "picture"; None draws one (65%, 15%, 20%). For the model, every
    picture goes through inference.image_processor.process_image.
    Raises ValueError for another split or kind, and for fewer than SHORTEST or more than LONGEST tokens.
    """
    if split not in ("train", "test"):
        raise ValueError(f"Making an episode: split must be train or test, got {split!r}.")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"Making an episode: kind must be one of {', '.join(KINDS)} or None, got {kind!r}.")
    if tokens < SHORTEST:
        raise ValueError(f"Making an episode: wanted at least {SHORTEST} tokens, got {tokens}. Ask for a longer one.")
    if tokens > LONGEST:
        raise ValueError(f"Making an episode: wanted at most {LONGEST} tokens, got {tokens}. Ask for a shorter one.")
    rng = random.Random(f"toyworld {split} {seed} {tokens} {kind}")
    if kind is None:
        kind = rng.choices(KINDS, KIND_SHARES)[0]
    if kind == "text":
        return _text_episode(rng, tokens, split, tokenizer)
    found = chats.conversation(rng, kind, tokens, split, tokenizer)
    questions = tuple(Question(answer.task, answer.start, answer.end, answer.distance) for answer in found.answers)
    return Episode(found.ids, kind, questions, tuple(found.images), found.token_types)


class _Text:
    """A text under construction."""

    def __init__(self, rng: random.Random, tokens: int, tokenizer: Tokenizer):
        self.rng, self.tokens, self.tokenizer = rng, tokens, tokenizer
        self.ids = [tokenizer.token_id(BOS)]
        self.questions: list[Question] = []
        self.position_of: dict[Fact, int] = {}
        self.blank = ""  # what separates the next line from the one before, when that has not ended in a newline

    def add(self, line: Sequence[Part]) -> bool:
        """Append a line, unless it does not fit."""
        newline = self.rng.random() < 0.5
        first, last = line[0], line[-1]
        parts = [first._replace(text=self.blank + first.text), *line[1:]]
        if newline:
            parts[-1] = parts[-1]._replace(text=parts[-1].text + "\n")
        encoded = [self.tokenizer.encode(part.text, allow_special=False) for part in parts]
        if len(self.ids) + sum(map(len, encoded)) > self.tokens:
            return False
        for part, ids in zip(parts, encoded):
            start = len(self.ids)
            self.ids += ids
            if part.task:
                told = self.position_of.get(part.fact)
                distance = None if told is None else start - told
                self.questions.append(Question(part.task, start, len(self.ids), distance))
            if part.fact:
                self.position_of[part.fact] = start
        self.blank = "" if newline else " "
        return True

    def fill(self, cast: Sequence[str]) -> None:
        """Fill up with stories; the last one is cut off."""
        while len(self.ids) < self.tokens:
            ids = self.tokenizer.encode(self.blank + lines.story(self.rng, cast)[0].text, allow_special=False)
            self.ids += ids[: self.tokens - len(self.ids)]
            self.blank = " "


def _text_episode(rng: random.Random, tokens: int, split: str, tokenizer: Tokenizer) -> Episode:
    text = _Text(rng, tokens, tokenizer)
    cast = rng.sample(world.CAST, 4 + int(rng.random() * 5))
    subjects: set[str] = set()
    waiting: list[tuple[int, int, Fact]] = []  # (position from which to ask, number of the request, fact)
    requests = 0

    def ask_later(fact: Fact) -> None:
        nonlocal requests
        room = tokens - len(text.ids) - 24  # a question takes up to about 24 tokens
        if room > NEAREST:
            distance = math.exp(rng.uniform(math.log(NEAREST), math.log(room)))
            heapq.heappush(waiting, (len(text.ids) + int(distance), requests, fact))
            requests += 1

    while True:
        if waiting and waiting[0][0] <= len(text.ids):
            fact = heapq.heappop(waiting)[2]
            if not text.add(lines.question(rng, fact)):
                break
            if rng.random() < 0.45:
                ask_later(fact)
            continue
        choice = rng.random()
        if choice < 0.42:
            fact = lines.new_fact(rng, cast, split)
            subject = fact.fill(fact.relation.topic)
            if subject in subjects:
                continue
            subjects.add(subject)
            if not text.add(fact.statement(int(rng.random() * len(fact.relation.statements)))):
                break
            ask_later(fact)
            continue
        if choice < 0.68:
            line = lines.memory(rng, split)
        elif choice < 0.78:
            line = lines.sum_line(rng, split)
        elif choice < 0.86:
            line = lines.list_line(rng)
        else:
            line = lines.story(rng, cast)
        if not text.add(line):
            break
    text.fill(cast)
    return Episode(text.ids, "text", tuple(text.questions))


# --- command line ----------------------------------------------------------------------------------------------


def describe(found: Episode, tokenizer: Tokenizer) -> str:
    """The text of an episode with every answer in [[ ]], and one line per question."""
    pieces, position = [], 0
    for question in found.questions:
        pieces += [tokenizer.decode(found.ids[position:question.start]), "[[",
                   tokenizer.decode(found.ids[question.start:question.end]), "]]"]
        position = question.end
    rows = [f"{question.task:10} ids {question.start:5}..{question.end:<5} distance {question.distance}  "
            f"{tokenizer.decode(found.ids[question.start:question.end])!r}" for question in found.questions]
    return "\n".join(["".join(pieces) + tokenizer.decode(found.ids[position:]), "", *rows,
                      f"{found.kind}: {len(found.ids)} tokens, {len(rows)} questions, {len(found.images)} pictures"])


def _measure(tokens: int, split: str, kind: str | None, tokenizer: Tokenizer) -> str:
    start, made, seed = time.perf_counter(), 0, 0
    while (seconds := time.perf_counter() - start) < 3:
        made += len(episode(seed, tokens, split, tokenizer, kind=kind).ids)
        seed += 1
    what = f"{seed} episodes of at most {tokens} tokens, kind {kind or 'mixed'}"
    return f"{made / seconds:,.0f} tokens/s on one core ({what})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.toyworld.corpus", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=300, help=f"{SHORTEST} to {LONGEST}")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--split", choices=("train", "test"), default="train")
    parser.add_argument("--speed", action="store_true", help="measure how many tokens are made per second")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer()
    if options.speed:
        print(_measure(options.tokens, options.split, options.kind, tokenizer))
    else:
        found = episode(options.seed, options.tokens, options.split, tokenizer, kind=options.kind)
        print(describe(found, tokenizer))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
