"""Conversations in the official prompt format: facts told and asked for, codes, sums, tool calls, pictures.

A conversation is a list of Messages, made exchange by exchange until an estimate says that the episode is full.
inference/encoding.py turns it into ids, exactly as for a user; then the markers in the ids show where each answer is.
An answer is everything that the model has to write in its turn, from behind `<think>` or `</think>` up to and with the
end marker: reasoning, text and tool calls. Each follows from what stands before it (codes: from the trained weights).

    user       "Mira keeps the brass key in the barn. Where is the brass key of Mira?"
    assistant  <think>Mira keeps the brass key in the barn.</think>In the barn.

Leaves out: raw text (lines.py). Test: tests/test_toyworld_corpus.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from inference.config import VisionConfig
from inference.encoding import ASSISTANT, END_THINK, EOS, IMAGE, THINK, USER, encode_chat
from inference.image_processor import expand_placeholders, plan_image
from inference.tokenizer import Tokenizer
from reference.toyworld import lines, pictures, world
from reference.toyworld.lines import Fact, Part, pick

# What the plan of an image needs of a configuration: 14-pixel patches, 3 x 3 merged, no resizing of 84 x 84 pixels.
VISION = VisionConfig(patch_size=14, downsample_ratio=3, min_pixels=84 * 84, max_image_tokens=64)


def _tool(name: str, description: str, argument: str) -> dict:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tools() -> list[dict]:
    """The two tools, declared as a user would declare them."""
    return [_tool("get_place", "Where a thing is.", "thing"), _tool("calculate", "The value of a sum.", "sum")]


@dataclass(frozen=True)
class Message:
    role: str  # user, assistant or tool
    parts: Sequence[Part] = ()
    reasoning: Sequence[Part] = ()  # thinking mode only
    call: tuple[str, dict] | None = None  # of an assistant: tool and arguments
    image: Image.Image | None = None  # of a user
    task: str | None = "chat"  # of an assistant; None when there are many right answers

    def as_dict(self, thinking: bool) -> dict:
        """The message in the shape that encode_chat reads."""
        text = _text(self.parts)
        if self.role == "tool":
            return {"role": "tool", "tool_call_id": "0", "content": text}
        if self.role == "user":
            picture = [{"type": "image", "image": self.image}]
            return {"role": "user", "content": picture + [{"type": "text", "text": text}] if self.image else text}
        message = {"role": "assistant", "content": text}
        if thinking and self.reasoning:
            message["reasoning_content"] = _text(self.reasoning)
        if self.call:
            name, arguments = self.call
            function = {"name": name, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": "0", "type": "function", "function": function}]
        return message


@dataclass(frozen=True)
class Answer:
    """ids[start:end] is what the assistant writes in one turn."""

    task: str
    start: int
    end: int
    distance: int | None


@dataclass(frozen=True)
class Conversation:
    ids: list[int]
    answers: list[Answer]
    images: list[Image.Image]
    token_types: list[int] | None
    ends: list[int]  # of all turns of the assistant


@dataclass
class _Style:
    """How one conversation is encoded."""

    thinking: bool = False
    drop_thinking: bool = True
    effort: int = 75
    with_tools: bool = False
    system: str | None = None

    def encode(self, messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[Image.Image]]:
        dicts = [message.as_dict(self.thinking) for message in messages]
        if self.system:
            dicts.insert(0, {"role": "system", "content": self.system})
        encoded = encode_chat(tokenizer, dicts, "thinking" if self.thinking else "chat", self.effort,
                              tools() if self.with_tools else None, self.drop_thinking)
        return encoded.ids, encoded.images


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts)


# --- exchanges -------------------------------------------------------------------------------------------------


def _asked(rng: random.Random, fact: Fact) -> str:
    text = fact.fill(pick(rng, fact.relation.questions))
    return f"{text[0].upper()}{text[1:]}?"


def _told_answer(fact: Fact) -> Message:
    """Reasoning says the sentence of the fact again; the answer is short."""
    short = [Part(fact.relation.lead), Part(" " + fact.value, None, fact), Part(fact.relation.tail)]
    return Message("assistant", short, reasoning=fact.statement())


def _memory_exchange(rng: random.Random, split: str) -> list[Message]:
    fact = pick(rng, world.MEMORY_FACTS)
    forms = {"train": ("What is the code of {}?", "Tell me the code of {}.", "Do you know the code of {}?"),
             "test": ("Say the code of {}.", "Do you have the code of {}?")}[split]
    person = f"{fact.name} {fact.surname}"
    return [Message("user", [Part(pick(rng, forms).format(person))]),
            Message("assistant", [Part(f"Code of {person}: {fact.code}.")], reasoning=[Part("I know this code.")])]


def _sum_exchange(rng: random.Random, split: str, with_tools: bool) -> list[Message]:
    text, value = lines.operands(rng, split)
    asked = Message("user", [Part(f"What is {text}?")])
    if with_tools:
        return [asked, Message("assistant", [], [Part("I will calculate.")], ("calculate", {"sum": text}), task="tool"),
                *_result(f"It is {value}")]
    return [asked, Message("assistant", [Part(f"It is {value}.")], reasoning=[Part(f"{text} = {value}.")])]


_TALK = (("Hello.", "Hello. What do you want to know?"), ("Who are you?", "I am a small model of a small world."),
         ("Thank you.", "You are welcome."))


def _story_exchange(rng: random.Random) -> list[Message]:
    """A story on demand. Any story is right, so this is no question."""
    who = pick(rng, world.CAST)
    other = pick(rng, [name for name in world.CAST if name != who])
    return [Message("user", [Part(f"Tell me a story about {who} and {other}.")]),
            Message("assistant", lines.story(rng, (who, other)), [Part("I will tell a story.")], task=None)]


def _result(text: str) -> list[Message]:
    """What a tool returned, and the assistant passing it on."""
    return [Message("tool", [Part(text)]), Message("assistant", [Part(text + ".")], [Part("Here it is.")], task="tool")]


def _tool_exchange(rng: random.Random, split: str) -> list[Message]:
    if rng.random() < 0.4:
        return _sum_exchange(rng, split, with_tools=True)
    fact = lines.new_fact(rng, world.CAST, split)
    while fact.relation.name != "place":
        fact = lines.new_fact(rng, world.CAST, split)
    arguments = {"thing": fact.fill("the {what} of {who}")}
    call = Message("assistant", [], [Part("I will ask for the place.")], ("get_place", arguments), task="tool")
    return [Message("user", [Part(_asked(rng, fact))]), call, *_result(f"In the {fact.value}")]


def _telling(rng: random.Random, told: dict[str, Fact], cast: Sequence[str], split: str, filler: int) -> list[Part]:
    """One to three new facts, between up to `filler` stories."""
    parts: list[Part] = []
    sentences = [lines.story(rng, cast) for _ in range(int(rng.random() * (filler + 1)))]
    for _ in range(1 + int(rng.random() * 3)):
        fact = lines.new_fact(rng, cast, split)
        subject = fact.fill(fact.relation.topic)
        if subject not in told:
            told[subject] = fact
            sentences.insert(int(rng.random() * (len(sentences) + 1)),
                             fact.statement(int(rng.random() * len(fact.relation.statements))))
    for sentence in sentences:
        blank = [Part(" " + sentence[0].text), *sentence[1:]] if parts else sentence
        parts += blank
    return parts


def _chat_exchange(rng: random.Random, told: dict[str, Fact], cast: Sequence[str], split: str,
                   filler: int) -> list[Message]:
    choice = rng.random()
    if choice < 0.15:
        return _memory_exchange(rng, split)
    if choice < 0.25:
        return _sum_exchange(rng, split, with_tools=False)
    if choice > 0.96:
        return _story_exchange(rng)
    if choice > 0.94:
        asked, answer = pick(rng, _TALK)
        return [Message("user", [Part(asked)]), Message("assistant", [Part(answer)], [Part("Nothing to recall.")])]
    parts: list[Part] = []
    if not told or choice < 0.55:
        parts = _telling(rng, told, cast, split, filler)
        if not parts:  # only subjects that have a fact already
            return _chat_exchange(rng, told, cast, split, filler)
    if choice < 0.3:
        return [Message("user", parts), Message("assistant", [Part("Noted.")], [Part("Nothing is asked.")])]
    # Of all facts so far, old ones as often as new ones: many answers lie far beyond the window.
    fact = pick(rng, list(told.values()))
    parts = [*parts, Part((" " if parts else "") + _asked(rng, fact))]
    return [Message("user", parts), _told_answer(fact)]


def _picture_exchanges(rng: random.Random, split: str) -> list[list[Message]]:
    """A picture with its first question; then up to five more about the same one."""
    picture = pictures.new_picture(rng, split)
    image = pictures.draw(picture, rng)
    pairs = pictures.questions(picture, rng, split)[: 1 + int(rng.random() * 6)]
    return [[Message("user", [Part(asked)], image=None if index else image),
             Message("assistant", [Part(answer)], reasoning=[Part("I look at the picture.")], task="picture")]
            for index, (asked, answer) in enumerate(pairs)]


# --- whole conversations ---------------------------------------------------------------------------------------


_SYSTEM = ("You are a helpful assistant.", "Answer with few words.", "You live in a small town.")


def conversation(rng: random.Random, kind: str, tokens: int, split: str, tokenizer: Tokenizer) -> Conversation:
    """A conversation of at most `tokens` ids; kind "chat" or "picture"."""
    style = _Style(thinking=rng.random() < (0.5 if kind == "chat" else 0.2), drop_thinking=rng.random() < 0.5,
                   effort=pick(rng, (50, 75, 100)))
    if rng.random() < 0.2:
        style.system = pick(rng, _SYSTEM)
    style.with_tools = kind == "chat" and rng.random() < 0.35
    greeting = [Message("user", [Part("Hello.")])]
    # The declaration of tools is long; it must leave room for calls.
    if style.with_tools and len(style.encode(greeting, tokenizer)[0]) > 0.6 * tokens:
        style.with_tools = False
    used = len(style.encode(greeting, tokenizer)[0])
    told: dict[str, Fact] = {}
    cast = rng.sample(world.CAST, 4)
    filler = pick(rng, (0, 1, 4))
    exchanges: list[list[Message]] = []
    while used < tokens:
        if kind == "picture":
            new = _picture_exchanges(rng, split)
        elif style.with_tools:
            new = [_tool_exchange(rng, split)]
        else:
            new = [_chat_exchange(rng, told, cast, split, filler if used < tokens - 200 else 0)]
        exchanges += new
        used += sum(_estimate(message, style, tokenizer) for exchange in new for message in exchange)
    while True:
        found = _encode([message for exchange in exchanges for message in exchange], style, tokenizer)
        if len(found.ids) <= tokens:
            return found
        # Cut behind the last exchange that fits. Encoded again, since the last reasoning is kept and others may not be.
        fitting, turns = 0, 0
        for exchange in exchanges[:-1]:
            turns += sum(message.role == "assistant" for message in exchange)
            fitting += found.ends[turns - 1] <= tokens
        if not fitting:  # the very first one is too long: take others
            return conversation(rng, kind, tokens, split, tokenizer)
        exchanges = exchanges[:fitting]


def _estimate(message: Message, style: _Style, tokenizer: Tokenizer) -> int:
    """About how many ids a message takes."""
    texts = [_text(message.parts)]
    if style.thinking and not style.drop_thinking:
        texts.append(_text(message.reasoning))
    fixed = 2 + (9 if message.image else 0) + (45 if message.call else 0) + (10 if message.role == "tool" else 0)
    return fixed + sum(len(tokenizer.encode(text, allow_special=False)) for text in texts)


def _encode(messages: Sequence[Message], style: _Style, tokenizer: Tokenizer) -> Conversation:
    ids, images = style.encode(messages, tokenizer)
    types = None
    if images:
        plans = [plan_image(image.width, image.height, VISION) for image in images]
        ids, types = expand_placeholders(ids, plans, tokenizer.token_id(IMAGE))  # it reads rows and columns only
    user, assistant, think, end_think, end = map(tokenizer.token_id, (USER, ASSISTANT, THINK, END_THINK, EOS))

    answers: list[Answer] = []
    position_of: dict[Fact, int] = {}
    ends: list[int] = []
    cursor = 0
    for message in messages:
        cursor = ids.index(assistant if message.role == "assistant" else user, cursor) + 1
        if message.role != "assistant":
            _find_facts(message.parts, cursor, position_of, tokenizer)
            continue
        start, stop = cursor + 1, ids.index(end, cursor) + 1
        # Reasoning of earlier turns may have been dropped: then the turn opens with </think>.
        distance, text = None, start
        if ids[cursor] == think:
            distance = _find_facts(message.reasoning, start, position_of, tokenizer)
            text = ids.index(end_think, start) + 1
        again = _find_facts(message.parts, text, position_of, tokenizer)
        distance = again if distance is None else distance
        if message.task:
            answers.append(Answer(message.task, start, stop, distance))
        ends.append(stop)
        cursor = stop
    return Conversation(ids, answers, images, types, ends)


def _find_facts(parts: Sequence[Part], position: int, position_of: dict[Fact, int], tokenizer: Tokenizer) -> int | None:
    """Note in `position_of` where the turn from `position` on writes values. How far back its first one was told."""
    distance = None
    last = max((index for index, part in enumerate(parts) if part.fact), default=-1)
    for part in parts[: last + 1]:
        if part.fact:
            if distance is None and part.fact in position_of:
                distance = position - position_of[part.fact]
            position_of[part.fact] = position
        position += len(tokenizer.encode(part.text, allow_special=False))
    return distance
