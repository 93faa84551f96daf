"""The words of the small world, the facts that hold in every episode, and the rule of the held-out split.

Names and surnames, adjectives and nouns are short words that the tokenizer holds as one token each. MEMORY_FACTS gives
1,500 people a code of two words; no episode states one before it asks for it, so only trained weights can know it. A
code follows "name surname:", three tokens that an n-gram memory sees as one key.

Leaves out: how the words become text (lines.py). Test: tests/test_toyworld_corpus.py
"""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

# Names without their pronouns would leave the stories without he and she. The first 16 of each act in stories.
WOMEN = tuple("""Mira Anna Lena Nina Ruth Vera Jana Rosa Ada Clara Greta Elsa Maud Iris Nora Olga
    Tilda Wanda Julia Hanna Celia Freya Heidi Kira Molly Petra Rita Thea Uma Zora""".split())
MEN = tuple("""Tom Oren Paul Hugo Karl Otto Liam Emil Finn Ivan Noah Simon Peter Felix Leo Bruno
    Marco Boris Victor Edgar Ralph Dario Gus Jonas Lars Nils Quinn Sven Walt Abe""".split())
CAST = WOMEN[:16] + MEN[:16]
NAMES = WOMEN + MEN

SURNAMES = tuple("""Vale Abbot Baird Boyd Bryce Carr Cobb Cole Dunn Drake Ellis Farr Fenn Flynn Gage Gibb Hale Hart Holt
    Hurd Hyde Irwin Ives Judd Kane Kerr Kemp Knox Lang Lowe Lund Marsh Moss Nash Neal Orr Page Penn Pike Pratt Reed
    Rhys Ross Sears Shaw Stark Tate Todd Troy Usher Vance Vogt Wade Webb Wells Wyatt Yates York Zell Lyle""".split())

SHAPES = ("circle", "square", "triangle", "cross")
PAINTS = ("red", "green", "blue", "yellow", "black", "purple")  # of pictures
COLORS = PAINTS + ("white", "brown", "gray", "pink")
MATERIALS = ("brass", "silver", "copper", "iron", "golden", "wooden", "paper", "glass", "stone", "clay", "velvet",
             "cotton", "leather", "straw", "amber", "ivory")
QUALITIES = tuple("""small big old new long short round thin heavy light soft hard dark bright clean dusty warm cold dry
    wet quiet loud quick slow sweet bitter wild tame brave shy proud lazy happy sad tired hungry empty full""".split())
ADJECTIVES = COLORS + MATERIALS + QUALITIES  # 64

ANIMALS = tuple("""fox owl cat dog horse goat duck goose hen crow wolf bear deer frog mouse rabbit snake bee swan pig
    sheep cow fish turtle""".split())
OBJECTS = tuple("""key hat lamp cup bell book map ring coat drum flute box basket rope knife spoon bowl clock mirror
    candle ladder hammer bucket button brush chair coin comb fan flag glove kite letter needle pot pen shoe sock
    whistle sword""".split())
NOUNS = ANIMALS + OBJECTS  # 64

PLACES = tuple("""barn mill river garden kitchen tower forest market school church bridge cellar attic stable harbor
    meadow cave library bakery castle shop field pond lake hill inn well yard port temple park station museum theater
    farm village tent orchard dock hut""".split())
FOODS = tuple("plums bread cheese apples honey soup rice nuts cake beans pears eggs carrots figs corn grapes".split())
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COUNTS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
PARTS = ("door", "roof", "gate", "wall")  # of a place; they have a color

LARGEST_OPERAND = 30  # of a sum; ours
MEMORY_PEOPLE = 1500  # ours: more than a few layers keep easily, few enough to meet each one hundreds of times


class MemoryFact(NamedTuple):
    name: str
    surname: str
    code: str  # two words


def _memory_facts() -> tuple[MemoryFact, ...]:
    rng = random.Random("toyworld memory facts")
    people = rng.sample([(name, surname) for name in NAMES for surname in SURNAMES], MEMORY_PEOPLE)
    return tuple(MemoryFact(*person, f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}") for person in people)


MEMORY_FACTS = _memory_facts()


def held_out(*words: object) -> bool:
    """True for the tenth of all combinations of words that only the test split may contain.

    A checksum decides, so the split needs no list and does not depend on the order in which episodes are made.
    """
    return zlib.crc32("|".join(map(str, words)).encode()) % 10 == 0
