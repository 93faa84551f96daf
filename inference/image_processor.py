"""Pictures to patches, and the span of positions that a picture takes in a prompt.

What it computes
    plan_image      picture size -> canvas size -> patch grid -> grid of image tokens -> number of positions; no pixels
    load_image      path, bytes, base64, data URL or PIL picture -> RGB picture
    preprocess      RGB picture -> resized onto the canvas, gray borders -> (value / 255 - 0.5) / 0.5 -> patches
    expand_placeholders, validate_token_types, span_embeddings
                    one placeholder id -> START, then per row IMAGE x columns and NEWLINE, then END
Formula
    positions = rows * (columns + 1) + 2, at most max_image_tokens (1,024 in the release)
Mirrors
    official: the image processor of the official inference code ("decode, convert to RGB", plan, ImageOps.pad).
Leaves out
    Downloads. Color profiles. Frames after the first.
Tests
    tests/test_image_processor.py

What happens to unusual files. "official" is what Pillow's `convert("RGB")`, which the published code calls, does:
    alpha (RGBA, LA, transparent palette entry)  official: dropped; the color stored under it becomes visible
    palette, 1 bit, CMYK, YCbCr                  official: Pillow's plain conversion, without color profiles
    EXIF orientation                             official: not applied; turn the picture first if you need it
    animation (GIF, APNG, WebP), TIFF pages      official: the first one
    16-bit gray                                  ours: the high byte of every value. Pillow's conversion clips at 255,
                                                 so nearly everything turns white; for 16-bit *color* it takes the high
                                                 byte itself, and gray stored either way should look the same
    32-bit integer and float gray                ours: refused, since none of their values is defined as white
    broken, cut off or empty files               ours: ValueError, never a picture with a gray rest
    more than MAX_PIXELS                         ours: refused from the size in the header, before decoding
    formats beyond FORMATS                       ours: refused (some of Pillow's readers start other programs)
    thinner than half a pixel once resized       ours: refused; Pillow would return a canvas without the picture
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from inference.config import VisionConfig

# official: type of a position. All but TEXT carry the image id, use the router's image bias and are dead for Engram.
TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3

ImageSource = str | os.PathLike | bytes | bytearray | memoryview | Image.Image

BORDER_COLOR = (127, 127, 127)  # official
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # ours
MAX_PIXELS = 2**26  # ours: 8,192 x 8,192, 192 MiB as RGB; below the size at which Pillow itself begins to warn

# Which byte of a 16-bit gray value is the high one. Pillow's names of the two byte orders.
_HIGH_BYTE = {"I;16": 1, "I;16L": 1, "I;16B": 0}

# What Pillow's readers raise on bytes that are no picture; the bomb warning is raised where warnings are errors.
_DECODE_ERRORS = (OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error,
                  zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning)


# --- the plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagePlan:
    """Sizes that follow from the size of a picture alone."""

    padded_width: int  # pixels, a multiple of patch_size; the canvas
    padded_height: int
    patch_rows: int
    patch_cols: int
    llm_rows: int  # rows of text-model tokens: ceil(patch_rows / downsample_ratio)
    llm_cols: int
    tokens: int  # positions of the span: llm_rows * (llm_cols + 1) + 2


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """The canvas and grids for a picture of width x height pixels.

    official, in this order: (1) an area below min_pixels scales both sides up by sqrt(min_pixels / area), truncated;
    (2) sides are rounded up to whole patches; (3) if the span is longer than max_image_tokens, the size after (1) is
    scaled down to whole patches so that it fits. The arithmetic is float64, in the order written here: in (3) a side
    may fall just below a whole number of patches and lose one (about 1 size in 20), so the order is part of the rule.
    ours: with max_wh_ratio (null in the release, so no published result depends on it) the shorter side is first raised
    to longer / max_wh_ratio: the canvas gets a wider gray border, and nothing of the picture is cut or distorted.
    Raises ValueError for an empty picture and for limits that no picture can meet.
    """
    if width < 1 or height < 1:
        raise ValueError(f"Planning an image: wanted at least 1 x 1 pixels, got {width} x {height}. Check "
                         "that the file holds a picture.")
    budget = config.max_image_tokens - 2  # START and END
    if budget < 2:
        raise ValueError(f"Planning an image: max_image_tokens is {config.max_image_tokens}, wanted at least 4, the "
                         "shortest span (start, one image token, newline, end). Raise it in vision_config.")
    ratio = config.max_wh_ratio
    if ratio is not None:
        if not ratio >= 1:
            raise ValueError(f"Planning an image: max_wh_ratio is {ratio}, wanted null or at least 1 (longer side over "
                             "shorter side). Change it in vision_config.")
        width, height = max(width, math.ceil(height / ratio)), max(height, math.ceil(width / ratio))
    if width * height < config.min_pixels:
        factor = math.sqrt(config.min_pixels / (width * height))
        width, height = int(width * factor), int(height * factor)
    patch = config.patch_size
    plan = _plan_canvas(math.ceil(width / patch) * patch, math.ceil(height / patch) * patch, config)
    if plan.tokens > config.max_image_tokens:
        plan = _plan_canvas(*_shrink(width, height, budget, config), config)
    assert plan.tokens <= config.max_image_tokens, f"{width} x {height} planned as {plan}"
    return plan


def _shrink(width: int, height: int, budget: int, config: VisionConfig) -> tuple[int, int]:
    """The canvas (width, height) of about this shape with rows * (columns + 1) at most `budget` (official)."""
    patch, cell = config.patch_size, config.patch_size * config.downsample_ratio
    # Real-valued cells: columns * shape = rows and rows * (columns + 1) = budget.
    shape = height / width
    columns = math.sqrt(budget / shape + 0.25) - 0.5
    rows = shape * columns
    if columns < 1:
        return cell, budget // 2 * cell  # one column: two positions per row
    if rows < 1:
        return (budget - 1) * cell, cell  # one row: its newline is the one position that is not a cell
    scale = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(width * scale / patch) * patch, math.floor(height * scale / patch) * patch


def _plan_canvas(padded_width: int, padded_height: int, config: VisionConfig) -> ImagePlan:
    patch_rows, patch_cols = padded_height // config.patch_size, padded_width // config.patch_size
    llm_rows, llm_cols = -(-patch_rows // config.downsample_ratio), -(-patch_cols // config.downsample_ratio)
    tokens = llm_rows * (llm_cols + 1) + 2
    return ImagePlan(padded_width, padded_height, patch_rows, patch_cols, llm_rows, llm_cols, tokens)


# --- reading ---------------------------------------------------------------------------------------------------


def load_image(source: ImageSource) -> Image.Image:
    """Decode a picture and convert it to RGB (see the top of this file for every unusual kind).

    source: a path, the bytes of a file, base64 text, a data URL ("data:image/png;base64,...") or a PIL picture, which
    is left as it is. Text is a data URL if it begins like one, a path if there is such a file, base64 otherwise.
    Returns a new picture of mode RGB. Raises ValueError for everything else, web addresses included.
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source, "the PIL image")
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
        return _decode(io.BytesIO(data), f"{len(data)} bytes")
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            return _decode(io.BytesIO(_data_url_bytes(source)), "the data URL")
        if "://" in source[:16]:
            raise ValueError(f"Loading an image: {_shorten(source)} is a web address or another URL, wanted a picture "
                             "that is already here. Download it first and give its path or bytes.")
        if not os.path.exists(source):
            return _decode(io.BytesIO(_base64_bytes(source)), "the base64 text (no file has this name)")
    if isinstance(source, (str, os.PathLike)):
        if not os.path.isfile(source):
            raise ValueError(f"Loading an image: wanted a file, got {str(source)!r}, which is none. Check the path.")
        return _decode(Path(source), str(source))
    raise ValueError("Loading an image: wanted a path, bytes, base64 text, a data URL or a PIL image, got "
                     f"{type(source).__name__}. For an array use PIL.Image.fromarray first.")


def _decode(file: io.BytesIO | Path, name: str) -> Image.Image:
    try:
        opened = Image.open(file, formats=FORMATS)  # reads the header only
    except UnidentifiedImageError as error:
        raise ValueError(f"Loading an image from {name}: wanted {', '.join(FORMATS)}, got something else or a damaged "
                         "header. Save the picture in one of these formats.") from error
    except _DECODE_ERRORS as error:
        raise ValueError(f"Loading an image from {name}: wanted a picture of at most {MAX_PIXELS} pixels, got one that "
                         f"cannot be opened ({_reason(error)}). Scale it down or save it again.") from error
    with opened:
        return _to_rgb(opened, name)


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """A new RGB picture; `image` is decoded if it was not yet, and otherwise left alone."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"Loading an image from {name}: wanted at most {MAX_PIXELS} pixels, got {width} x {height}. "
                         "Scale it down first; the model sees no more than 2 million pixels anyway.")
    if width < 1 or height < 1:
        raise ValueError(f"Loading an image from {name}: wanted at least 1 x 1 pixels, got {width} x {height}. Check "
                         "how the picture was made.")
    try:
        image.load()
        if image.mode in _HIGH_BYTE:
            high = image.tobytes()[_HIGH_BYTE[image.mode]::2]
            return Image.frombytes("L", image.size, high).convert("RGB")
        if not image.mode.startswith(("I", "F")):
            if "transparency" in image.info:  # dropped like any alpha; Pillow would warn about some palettes
                image = image.copy()
                del image.info["transparency"]
            return image.convert("RGB")
    except _DECODE_ERRORS as error:
        raise ValueError(f"Loading an image from {name}: wanted a complete picture, got one that cannot be decoded "
                         f"({_reason(error)}). It is cut off or damaged; save or fetch it again.") from error
    raise ValueError(f"Loading an image from {name}: wanted 8 or 16 bits per channel, got mode {image.mode!r}, in "
                     "which no value means white. Map its values to 0..255 and convert it to mode L first.")


def _data_url_bytes(url: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ValueError("Loading an image: wanted a data URL such as \"data:image/png;base64,...\", got "
                         f"{_shorten(url)}. Encode the bytes of the picture with base64.b64encode.")
    return _base64_bytes(payload)


def _base64_bytes(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"Loading an image: wanted an existing file or base64 text, got {_shorten(text)} ({error}). "
                         "Check the path, or encode the bytes with base64.b64encode.") from error


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# --- pixels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One picture, ready for the vision tower."""

    patches: Tensor  # [patch_rows * patch_cols, 3, p, p] BF16 in -1..1, row-major
    patch_rows: int
    patch_cols: int
    llm_rows: int
    llm_cols: int


def preprocess(image: Image.Image, plan: ImagePlan, config: VisionConfig) -> Tensor:
    """RGB picture -> patches [patch_rows * patch_cols, 3, p, p] bfloat16.

    official: the original picture is resampled once, bicubic, to the largest size that fits the canvas, and centered
    on it (PIL.ImageOps.pad); x / 255, then (x - 0.5) / 0.5, in float32, one cast to BF16.
    Raises ValueError for another mode, and for a picture of which less than half a pixel would be left.
    """
    if image.mode != "RGB":
        raise ValueError(f"Preprocessing an image: wanted mode RGB, got {image.mode}. Use load_image.")
    canvas = (plan.padded_width, plan.padded_height)
    if round(min(image.height / image.width * canvas[0], image.width / image.height * canvas[1])) < 1:
        raise ValueError(f"Preprocessing an image: wanted a picture that keeps a pixel per side, got {image.width} x "
                         f"{image.height} pixels to fit into {canvas[0]} x {canvas[1]}. Cut it into pieces.")
    padded = ImageOps.pad(image, canvas, color=BORDER_COLOR)
    pixels = torch.frombuffer(bytearray(padded.tobytes()), dtype=torch.uint8).to(torch.float32)
    values = ((pixels / 255 - 0.5) / 0.5).to(torch.bfloat16)
    side = config.patch_size
    grid = values.view(plan.patch_rows, side, plan.patch_cols, side, 3)  # row, y, column, x, channel
    return grid.permute(0, 2, 4, 1, 3).reshape(-1, 3, side, side)


def process_image(source: ImageSource, config: VisionConfig) -> ImageInput:
    """`load_image`, `plan_image` and `preprocess` in one. Raises their ValueErrors."""
    image = load_image(source)
    plan = plan_image(image.width, image.height, config)
    return ImageInput(preprocess(image, plan, config), plan.patch_rows, plan.patch_cols, plan.llm_rows, plan.llm_cols)


# --- the span in the prompt ------------------------------------------------------------------------------------


def span_types(image: ImageInput) -> list[int]:
    """Types of the positions of one image: START, per row IMAGE x columns and NEWLINE, END (official)."""
    return [START] + ([IMAGE] * image.llm_cols + [NEWLINE]) * image.llm_rows + [END]


def expand_placeholders(ids: Sequence[int], images: Sequence[ImageInput],
                        image_token_id: int) -> tuple[list[int], list[int]]:
    """Replace each image id by the span of the next image.

    ids: token ids with one `image_token_id` per image. Returns (ids, types) of equal length; every position of a span
    keeps `image_token_id`, text has type -1. Raises ValueError if placeholders and images differ in number.
    """
    placeholders = sum(token == image_token_id for token in ids)
    if placeholders != len(images):
        raise ValueError(f"Expanding image placeholders: wanted one image per placeholder, got {len(images)} images "
                         f"for {placeholders} placeholders (id {image_token_id}). Add or remove the difference.")
    expanded: list[int] = []
    types: list[int] = []
    remaining = iter(images)
    for token in ids:
        span = span_types(next(remaining)) if token == image_token_id else [TEXT]
        expanded += [int(token)] * len(span)
        types += span
    return expanded, types


def validate_token_types(ids: Sequence[int], token_types: Sequence[int] | None, images: Sequence[ImageInput],
                         image_token_id: int) -> None:
    """Raise ValueError unless ids, types and images describe the same prompt. None stands for text only.

    Image ids without types would be routed with the text bias and hashed into Engram n-grams: wrong numbers and no
    error. So nothing is guessed here.
    """
    types = [TEXT] * len(ids) if token_types is None else token_types
    if len(types) != len(ids):
        raise _types_error(f"wanted one type per id, got {len(types)} types for {len(ids)} ids")
    for position, (token, kind) in enumerate(zip(ids, types)):
        if kind not in (TEXT, START, IMAGE, NEWLINE, END):
            raise _types_error(f"wanted -1 (text), 0 (start), 1 (image), 2 (newline) or 3 (end) at position "
                               f"{position}, got {kind}")
        if token == image_token_id and kind == TEXT:
            raise _types_error(f"wanted an image type at position {position}, which holds the image id "
                               f"{image_token_id}, got -1 (text)")
        if token != image_token_id and kind != TEXT:
            raise _types_error(f"wanted the image id {image_token_id} at position {position}, which has type {kind}, "
                               f"got id {token}")
    _validate_spans(types, images)


def _validate_spans(types: Sequence[int], images: Sequence[ImageInput]) -> None:
    """The non-text types are exactly the spans of `images`, in order; spans may touch."""
    position = used = 0
    while position < len(types):
        if types[position] == TEXT:
            position += 1
            continue
        if used == len(images):
            raise _types_error(f"wanted {len(images)} image spans, one per image, got another at position {position}")
        image = images[used]
        for wanted in span_types(image):
            found = types[position] if position < len(types) else "the end of the prompt"
            if found != wanted:
                raise _types_error(f"wanted type {wanted} at position {position}, in the span of image {used} "
                                   f"({image.llm_rows} rows x {image.llm_cols} columns), got {found}")
            position += 1
        used += 1
    if used != len(images):
        raise _types_error(f"wanted {len(images)} image spans, one per image, got {used}")


def _types_error(problem: str) -> ValueError:
    return ValueError(f"Checking the token types of a prompt: {problem}. Make ids and types with expand_placeholders.")


def span_embeddings(aligner_out: Tensor, llm_rows: int, llm_cols: int, image_start: Tensor, image_newline: Tensor,
                    image_end: Tensor) -> Tensor:
    """The rows that replace the embeddings of one span, in span order (official).

    aligner_out [llm_rows * llm_cols, D]; image_start, image_newline, image_end [D], learned. Returns
    [llm_rows * (llm_cols + 1) + 2, D] in the dtype of aligner_out.
    """
    cells, width = aligner_out.shape
    assert cells == llm_rows * llm_cols, f"{cells} aligner rows for {llm_rows} x {llm_cols} cells"
    start, newline, end = (row.to(aligner_out.dtype).unsqueeze(0) for row in (image_start, image_newline, image_end))
    lines = torch.cat((aligner_out.view(llm_rows, llm_cols, width), newline.expand(llm_rows, 1, width)), dim=1)
    return torch.cat((start, lines.flatten(0, 1), end))
