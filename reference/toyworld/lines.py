"""Lines of text: facts of an episode and the questions about them, codes of people, sums, lists, stories.

A line is a list of Parts. Their texts joined are the line; an answer is a part of its own. Parts are cut where the
tokenizer cuts anyway (before the blank of a word, before a full stop), so tokenizing prompt and answer apart gives the
tokens of both together, and a question in a prompt of a user has the same answer tokens as in training.

    fact        "Mira keeps the brass key in the barn."          stated once in an episode, values at random
    question    "Question: where does Mira keep the brass key? Answer: barn."     four forms of it
    memory      "Code of Oren Vale: amber fox."                  the same in all episodes, never stated before
    sum         "12 + 7 = 19."
    list        "List: plums key fox. Copy: plums key fox."      or "Reverse: fox key plums."
    story       a few sentences that agree with each other

Leaves out: where lines stand in an episode (corpus.py). Test: tests/test_toyworld_corpus.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from reference.toyworld import world

Item = TypeVar("Item")


class Part(NamedTuple):
    """`task`: set for an answer. `fact`: set where the value of this fact is written, in a statement or an answer."""

    text: str
    task: str | None = None
    fact: Fact | None = None


class Relation(NamedTuple):
    """One kind of fact. Every text is a template over the slots; the value follows a statement with a blank.

    Of two facts of one relation the slots differ; so the subject identifies a fact within an episode.
    """

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    topic: str
    lead: str  # what comes before the value in an answer of a chat
    tail: str = "."  # what comes after the value, in statements and answers of a chat


class Fact(NamedTuple):
    relation: Relation
    slots: tuple[tuple[str, str], ...]
    value: str

    def fill(self, template: str) -> str:
        return template.format(**dict(self.slots))

    def statement(self, form: int = 0) -> list[Part]:
        """The sentence that states the fact."""
        return [Part(self.fill(self.relation.statements[form])), Part(" " + self.value, None, self),
                Part(self.relation.tail)]


RELATIONS = {relation.name: relation for relation in (
    Relation("place", ("{who} keeps the {what} in the", "The {what} of {who} is in the"),
             ("where does {who} keep the {what}", "where is the {what} of {who}"),
             "place of the {what} of {who}", "In the"),
    Relation("password", ("The password of {who} is", "{who} has the password"),
             ("what is the password of {who}", "which password has {who}"), "password of {who}", "It is"),
    Relation("owner", ("The {what} belongs to", "The owner of the {what} is"),
             ("who owns the {what}", "who is the owner of the {what}"), "owner of the {what}", "It is"),
    Relation("color", ("The {part} of the {where} is",),
             ("what color is the {part} of the {where}",), "color of the {part} of the {where}", "It is"),
    Relation("food", ("{who} likes", "The food of {who} is"),
             ("what does {who} like", "what is the food of {who}"), "food of {who}", "It is"),
    Relation("coins", ("{who} has", "The purse of {who} holds"),
             ("how many coins does {who} have", "how many coins has {who}"), "coins of {who}", "There are", " coins."),
    Relation("day", ("{who} goes to the {where} on", "The trip of {who} to the {where} is on"),
             ("when does {who} go to the {where}", "on which day does {who} go to the {where}"),
             "day of the trip of {who} to the {where}", "On"),
)}
# ours: mostly relations with many possible values, where guessing does not help
_RELATION_MIX = ("place",) * 7 + ("password",) * 3 + ("owner",) * 3 + ("color", "food", "coins", "day") * 2


def pick(rng: random.Random, items: Sequence[Item]) -> Item:
    """rng.choice, in a third of its time."""
    return items[int(rng.random() * len(items))]


def thing(rng: random.Random) -> str:
    return f"{pick(rng, world.ADJECTIVES)} {pick(rng, world.OBJECTS)}"


def new_fact(rng: random.Random, cast: Sequence[str], split: str) -> Fact:
    """A fact with random words, out of the combinations that belong to the split."""
    relation = RELATIONS[pick(rng, _RELATION_MIX)]
    while True:
        slots: dict[str, str] = {}
        match relation.name:
            case "place":
                slots, value = {"who": pick(rng, cast), "what": thing(rng)}, pick(rng, world.PLACES)
            case "password":
                slots, value = {"who": pick(rng, cast)}, f"{pick(rng, world.NOUNS)} {pick(rng, world.COUNTS)}"
            case "owner":
                slots, value = {"what": thing(rng)}, pick(rng, cast)
            case "color":
                slots = {"part": pick(rng, world.PARTS), "where": pick(rng, world.PLACES)}
                value = pick(rng, world.COLORS)
            case "food":
                slots, value = {"who": pick(rng, cast)}, pick(rng, world.FOODS)
            case "coins":
                slots, value = {"who": pick(rng, cast)}, str(2 + int(rng.random() * 59))
            case "day":
                slots, value = {"who": pick(rng, cast), "where": pick(rng, world.PLACES)}, pick(rng, world.DAYS)
        # The last word of a slot: the adjective of a thing does not make another combination.
        if world.held_out(relation.name, *(word.split()[-1] for word in slots.values()), value) == (split == "test"):
            return Fact(relation, tuple(slots.items()), value)


def question(rng: random.Random, fact: Fact) -> list[Part]:
    """One of four forms: asked, asked briefly, by topic, or the sentence said again."""
    form, relation = rng.random(), fact.relation
    answer = Part(" " + fact.value, "retrieval", fact)
    if form < 0.25:
        return [Part(f"Again: {fact.fill(pick(rng, relation.statements))}"), answer, Part(relation.tail)]
    if form < 0.45:
        return [Part(f"Recall the {fact.fill(relation.topic)}:"), answer, Part(".")]
    asked = fact.fill(pick(rng, relation.questions))
    if form < 0.6:
        return [Part(f"{asked[0].upper()}{asked[1:]}?"), answer, Part(".")]
    return [Part(f"Question: {asked}? Answer:"), answer, Part(".")]


# The test split asks in other words; the end, from which an n-gram memory reads, is "name surname:" in both.
_MEMORY_FORMS = {
    "train": ("Code of {}:", "The code of {}:", "Question: what is the code of {}? Answer: {}:", "Remember {}:"),
    "test": ("And the secret of {}:", "We all know the code of {}:", "Here is the code for {}:"),
}


def memory(rng: random.Random, split: str) -> list[Part]:
    fact = pick(rng, world.MEMORY_FACTS)
    person = f"{fact.name} {fact.surname}"
    return [Part(pick(rng, _MEMORY_FORMS[split]).format(person, person)), Part(" " + fact.code, "memory"), Part(".")]


def operands(rng: random.Random, split: str) -> tuple[str, int]:
    """A sum such as "12 + 7" and its value. Differences are not negative; a + b and b + a are held out together."""
    while True:
        a, b = (int(rng.random() * (world.LARGEST_OPERAND + 1)) for _ in range(2))
        operator = "+" if rng.random() < 0.5 else "-"
        low, high = min(a, b), max(a, b)
        if world.held_out(operator, low, high) == (split == "test"):
            return (f"{a} + {b}", a + b) if operator == "+" else (f"{high} - {low}", high - low)


def sum_line(rng: random.Random, split: str) -> list[Part]:
    text, value = operands(rng, split)
    return [Part(f"{text} ="), Part(f" {value}", "arithmetic"), Part(".")]


def list_line(rng: random.Random) -> list[Part]:
    backward = rng.random() < 0.3
    pool = pick(rng, (world.NOUNS, world.PLACES, world.ADJECTIVES, world.NAMES))
    words = [pick(rng, pool) for _ in range(3 + int(rng.random() * 3) if backward else 4 + int(rng.random() * 7))]
    answer = " ".join(words[::-1] if backward else words)
    return [Part(f"List: {' '.join(words)}. {'Reverse' if backward else 'Copy'}:"),
            Part(" " + answer, "reverse" if backward else "copy"), Part(".")]


# --- stories ---------------------------------------------------------------------------------------------------

# Each is coherent by itself: the same people, one place at a time, pronouns that fit. {N} {M}: two people; {S} {s}
# {h}: she, her of the first; {p} {q}: two places; {a}: animal; {t}: a thing; {o}: its noun; {f}: food.
_STORIES = (
    "{N} went to the {p}. {S} saw a {a} near the {q}. The {a} was hungry. {N} gave the {a} some {f}. The {a} was "
    "happy and {N} walked home.",
    "One morning {N} woke up early. {S} took the {t} and went to the {p}. {M} was there too. They talked until "
    "evening. Then {N} gave the {o} to {M} and they went home.",
    "{N} lost the {t}. {S} looked in the {p}, but the {o} was not there. Then {s} looked in the {q}, and there "
    "it was. {N} was happy to have the {o} again.",
    "{N} and {M} met at the {p}. {N} asked {M} for some {f}. {M} had no {f}, so they walked to the {q}. There "
    "they found a lot of {f}.",
    "It rained all day. {N} sat in the {p} with {h} {a}. {S} ate some {f} and the {a} slept. At night the rain "
    "stopped and they went to the {q}.",
    "{M} made some {f} for {N}. {N} was in the {p}. {M} went to the {p} and gave {N} the {f}. \"Thank you,\" "
    "said {N}. \"I like {f}.\"",
    "A {a} lived near the {p}. Each day {N} came to see the {a}. One day the {a} was not there. {N} looked for "
    "it and found the {a} in the {q}.",
    "{N} wanted to go to the {p}, but the way was long. {M} said, \"Take my {a}.\" So {N} took the {a} and was "
    "at the {p} before night.",
    "{N} sold {f} at the {p}. {M} came and looked at the {f}. \"I have no money,\" said {M}, \"but I have a "
    "{o}.\" So {N} took the {o} and {M} took the {f}.",
    "There was a fire in the {p}. {N} saw it first and ran to the {q}. {M} came with a lot of water. Soon the "
    "fire was out and the {p} was safe.",
    "{N} heard a sound in the {p}. {S} took a lamp and went in. It was only a {a}. The {a} ran to the {q} and "
    "{N} laughed.",
    "{M} could not find the {o}. \"Where is it?\" asked {M}. \"I saw the {o} at the {p},\" said {N}. They went "
    "to the {p} and there it was.",
    "In the winter the {p} was cold. {N} brought wood from the {q} and made a fire. {M} cooked {f}. They ate the "
    "{f} and sang until night.",
    "{N} found a {o} on the way to the {p}. {S} asked {M}, \"Is this your {o}?\" \"Yes,\" said {M}, \"it is my "
    "{o}.\" So {N} gave it back.",
    "Every day {N} works at the {p}. {S} feeds the {a} and cleans the {q}. In the evening {s} eats {f} with {M}.",
    "{N} wrote a letter to {M}. \"Come to the {p},\" it said. {M} read the letter and came. At the {p} they ate "
    "{f} and looked at the {a}.",
)


def story(rng: random.Random, cast: Sequence[str]) -> list[Part]:
    first = pick(rng, cast)
    second = pick(rng, [name for name in cast if name != first])
    place, other = rng.sample(world.PLACES, 2)
    item = pick(rng, world.OBJECTS)
    adjective = pick(rng, world.ADJECTIVES)
    woman = first in world.WOMEN
    text = pick(rng, _STORIES).format(
        N=first, M=second, S="She" if woman else "He", s="she" if woman else "he", h="her" if woman else "his",
        p=place, q=other, a=pick(rng, world.ANIMALS), t=f"{adjective} {item}", o=item, f=pick(rng, world.FOODS))
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}").replace(f"A {vowel}", f"An {vowel}")
    return [Part(text)]
