"""Pictures of colored shapes, one per cell of 42 x 42 pixels, and what can be asked about them.

A cell is one position of the text model: patches of 14 pixels, three by three of them merged. Some cells are empty.
Canvases are 2 x 2, 2 x 3 and 3 x 2 cells, so no picture is resized on its way into the model.

The test split holds out combinations (shape, color, cell): a training picture has none of them, and every test picture
has at least one; questions about it come first.

Leaves out: the conversation around a picture (chats.py). Test: tests/test_toyworld_corpus.py
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from reference.toyworld import world
from reference.toyworld.lines import pick

CELL = 42  # pixels: patch_size 14 x downsample_ratio 3
GRIDS = ((2, 2), (2, 3), (3, 2))
_RGB = {"red": (220, 30, 30), "green": (30, 160, 50), "blue": (30, 60, 220), "yellow": (240, 210, 20),
        "black": (10, 10, 10), "purple": (140, 40, 160)}
_BACKGROUNDS = ((255, 255, 255), (190, 190, 190))
_ROWS = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
_COLUMNS = {2: ("left", "right"), 3: ("left", "middle", "right")}


@dataclass(frozen=True)
class Picture:
    rows: int
    columns: int
    cells: tuple[tuple[str, str] | None, ...]  # (color, shape), row by row

    def where(self, index: int) -> str:
        """Name of a cell, such as "top left"."""
        row, column = divmod(index, self.columns)
        return f"{_ROWS[self.rows][row]} {_COLUMNS[self.columns][column]}"

    def held_out(self, index: int) -> bool:
        return self.cells[index] is not None and world.held_out(*self.cells[index], *divmod(index, self.columns))


def new_picture(rng: random.Random, split: str) -> Picture:
    """A random picture of the split."""
    while True:
        rows, columns = pick(rng, GRIDS)
        filled = 0.45 + 0.4 * rng.random()
        cells = tuple((pick(rng, world.PAINTS), pick(rng, world.SHAPES)) if rng.random() < filled else None
                      for _ in range(rows * columns))
        picture = Picture(rows, columns, cells)
        if any(cells) and any(map(picture.held_out, range(len(cells)))) == (split == "test"):
            return picture


def draw(picture: Picture, rng: random.Random) -> Image.Image:
    """The picture, RGB; size and place of each shape within its cell vary a little, as do the tones."""
    image = Image.new("RGB", (picture.columns * CELL, picture.rows * CELL), pick(rng, _BACKGROUNDS))
    canvas = ImageDraw.Draw(image)
    for index, content in enumerate(picture.cells):
        if content is None:
            continue
        color, shape = content
        row, column = divmod(index, picture.columns)
        radius = 11 + int(rng.random() * 7)  # at most 17: stays inside the cell with the shift below
        x = column * CELL + CELL // 2 + int(rng.random() * 7) - 3
        y = row * CELL + CELL // 2 + int(rng.random() * 7) - 3
        tone = tuple(min(255, max(0, value + int(rng.random() * 31) - 15)) for value in _RGB[color])
        if shape == "circle":
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tone)
        elif shape == "square":
            canvas.rectangle((x - radius, y - radius, x + radius, y + radius), fill=tone)
        elif shape == "triangle":
            canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=tone)
        else:
            arm = radius // 3
            canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=tone)
            canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=tone)
    return image


def _named(content: tuple[str, str] | None) -> str:
    return "nothing" if content is None else f"a {content[0]} {content[1]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def questions(picture: Picture, rng: random.Random, split: str) -> list[tuple[str, str]]:
    """All (question, answer) pairs with one right answer, shuffled. In the test split, about held-out cells first."""
    cells = picture.cells
    filled = [index for index, content in enumerate(cells) if content is not None]
    pairs: list[tuple[bool, str, str]] = []  # (about a held-out cell, question, answer)
    for index, content in enumerate(cells):
        special = picture.held_out(index)
        pairs.append((special, f"What is at the {picture.where(index)}?", _sentence(_named(content))))
        if content is None:
            continue
        color, shape = content
        if sum(other is not None and other[1] == shape for other in cells) == 1:
            pairs.append((special, f"What color is the {shape}?", f"It is {color}."))
        if sum(other is not None and other[0] == color for other in cells) == 1:
            pairs.append((special, f"What shape is {color}?", f"It is a {shape}."))
        if cells.count(content) == 1:
            pairs.append((special, f"Where is the {color} {shape}?", f"At the {picture.where(index)}."))
            if index % picture.columns:
                pairs.append((special, f"What is left of the {color} {shape}?", _sentence(_named(cells[index - 1]))))
    pairs.append((False, "How many shapes are there?", f"I see {len(filled)}."))
    color = pick(rng, world.PAINTS)
    count = sum(cells[index][0] == color for index in filled)
    pairs.append((False, f"How many {color} shapes are there?", f"I see {count}."))
    listed = ", ".join(f"{_named(cells[index])} at the {picture.where(index)}" for index in filled)
    pairs.append((True, "Describe the picture.", _sentence(listed)))
    if len(filled) == 2:
        first, second = filled
        if first // picture.columns == second // picture.columns:
            relation = "left of"
        elif first % picture.columns == second % picture.columns:
            relation = "above"
        else:
            relation = "and"
        caption = f"{_named(cells[first])} {relation} {_named(cells[second])}"
        pairs.append((True, "Write a caption.", _sentence(caption)))
    rng.shuffle(pairs)
    if split == "test":
        pairs.sort(key=lambda pair: not pair[0])  # stable: the order within each half stays random
    return [(asked, answer) for _, asked, answer in pairs]
