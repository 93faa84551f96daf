"""Planning, reading, pixels and prompt spans, against published vectors, recorded patches and wrong variants."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import random
import struct
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps
from safetensors.torch import load_file

from inference.config import Config, VisionConfig
from inference.image_processor import (END, IMAGE, MAX_PIXELS, NEWLINE, START, TEXT, ImageInput, expand_placeholders,
                                       load_image, plan_image, preprocess, process_image, span_embeddings,
                                       validate_token_types)

NANO = Path(__file__).parent.parent / "reference" / "golden" / "nano"
RELEASED = VisionConfig(patch_size=14, downsample_ratio=3, max_image_tokens=1024, min_pixels=544 * 544)
SMALL = VisionConfig(patch_size=14, downsample_ratio=3, max_image_tokens=1024, min_pixels=1)  # tests its own pixels
IMAGE_ID = 5
GRAY = torch.tensor((127 / 255 - 0.5) / 0.5).to(torch.bfloat16)  # the border, as the model sees it


def encode(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB picture in which every pixel differs from its neighbors."""
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))


def png(width: int, height: int, rows: bytes, bits: int, color_type: int) -> bytes:
    """A PNG file from its parts: sizes and bit depths that Pillow does not write."""
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# --- the plan --------------------------------------------------------------------------------------------------

VECTORS = [  # width, height -> canvas, patch grid, image token grid (each width x height), positions
    (1, 1, 546, 546, 39, 39, 13, 13, 184),
    (224, 224, 546, 546, 39, 39, 13, 13, 184),
    (544, 544, 546, 546, 39, 39, 13, 13, 184),
    (545, 543, 546, 546, 39, 39, 13, 13, 184),
    (448, 336, 630, 476, 45, 34, 15, 12, 194),
    (640, 480, 644, 490, 46, 35, 16, 12, 206),
    (1024, 768, 1036, 770, 74, 55, 25, 19, 496),
    (1302, 1302, 1302, 1302, 93, 93, 31, 31, 994),
    (1303, 1303, 1302, 1302, 93, 93, 31, 31, 994),
    (1344, 1344, 1302, 1302, 93, 93, 31, 31, 994),
    (1600, 1200, 1512, 1134, 108, 81, 36, 27, 1001),
    (4000, 3000, 1512, 1134, 108, 81, 36, 27, 1001),
    (1920, 1080, 1708, 966, 122, 69, 41, 23, 968),
    (1080, 1920, 966, 1708, 69, 122, 23, 41, 986),
    (100, 5000, 112, 5012, 8, 358, 3, 120, 482),
    (5000, 100, 5012, 112, 358, 8, 120, 3, 365),
    (10, 100000, 42, 21462, 3, 1533, 1, 511, 1024),
    (100000, 10, 42882, 42, 3063, 3, 1021, 1, 1024),
]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector[0]}x{vector[1]}")
def test_plan_vectors(vector):
    plan = plan_image(vector[0], vector[1], RELEASED)
    assert (plan.padded_width, plan.padded_height, plan.patch_cols, plan.patch_rows, plan.llm_cols, plan.llm_rows,
            plan.tokens) == vector[2:]


@given(st.integers(1, 30000), st.integers(1, 30000), st.sampled_from([RELEASED, VisionConfig(), SMALL]))
@settings(max_examples=300, deadline=None)
def test_plan_properties(width, height, config):
    plan = plan_image(width, height, config)
    assert plan.padded_width == plan.patch_cols * config.patch_size > 0
    assert plan.padded_height == plan.patch_rows * config.patch_size > 0
    assert plan.llm_rows == math.ceil(plan.patch_rows / config.downsample_ratio)
    assert plan.llm_cols == math.ceil(plan.patch_cols / config.downsample_ratio)
    assert plan.tokens == plan.llm_rows * (plan.llm_cols + 1) + 2 <= config.max_image_tokens


@pytest.mark.parametrize("width, height, canvas", [
    (561, 528, (574, 532)),  # just above min_pixels: not scaled (scaled by 0.9995, 560 would do)
    (3010, 588, (3010, 588)),  # exactly 1,024 positions: kept
    (1344, 1302, (1288, 1260)),  # 1,025 positions: shrunk
    (2984, 1622, (1750, 952)),  # 42 columns of 42 pixels fit, but 2984 * (42 * 42 / 2984) / 14 is just below 126
    (2343, 1500, (1624, 1036)),  # and here both 2343 / 14 * scale and a scale of 39 * (42 / 2343) would give 1638
])
def test_plan_at_its_edges(width, height, canvas):
    """Sizes worked out from the rule, where a neighboring rule or another order of its float64 operations differs."""
    plan = plan_image(width, height, RELEASED)
    assert (plan.padded_width, plan.padded_height) == canvas


@pytest.mark.parametrize("width, height", [(0, 5), (5, 0), (-1, 4)])
def test_plan_of_an_empty_image_is_refused(width, height):
    with pytest.raises(ValueError, match=f"wanted at least 1 x 1 pixels, got {width} x {height}"):
        plan_image(width, height, RELEASED)


def test_plan_refuses_impossible_limits():
    with pytest.raises(ValueError, match="max_image_tokens is 3, wanted at least 4"):
        plan_image(10, 10, dataclasses.replace(RELEASED, max_image_tokens=3))
    with pytest.raises(ValueError, match="max_wh_ratio is 0.5"):
        plan_image(10, 10, dataclasses.replace(RELEASED, max_wh_ratio=0.5))
    assert plan_image(9000, 10, dataclasses.replace(RELEASED, max_image_tokens=4)).tokens == 4


def test_max_wh_ratio_widens_the_canvas():
    limited = dataclasses.replace(RELEASED, max_wh_ratio=4.0)
    assert plan_image(5000, 100, limited) == plan_image(5000, 1250, RELEASED) != plan_image(5000, 100, RELEASED)
    assert plan_image(100, 5000, limited) == plan_image(1250, 5000, RELEASED)
    assert plan_image(1000, 300, limited) == plan_image(1000, 300, RELEASED)  # within the limit: no effect
    image = Image.new("RGB", (800, 20), (255, 255, 255))
    config = dataclasses.replace(SMALL, max_wh_ratio=2.0)
    middle = preprocess(image, plan_image(800, 20, config), config)
    assert (middle == 1).sum() == (round(20 / 800 * 812)) * 812 * 3  # the whole picture, undistorted
    assert (middle[:58] < 0).all() and (middle[-58:] < 0).all()  # gray above and below


# --- pixels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_recorded_images_give_the_recorded_patches(index):
    recorded = load_file(NANO / "traces" / "vision_prefill.float32.safetensors")
    image = process_image(NANO / "images" / f"image{index}.png", Config.from_file(NANO / "checkpoint").vision_config)
    grid = [image.patch_rows, image.patch_cols, image.llm_rows, image.llm_cols]
    assert grid == recorded[f"image{index}.grid"].tolist()[1:]
    assert image.patches.dtype == torch.bfloat16
    assert torch.equal(image.patches, recorded[f"image{index}.patches"])


def test_patches_are_row_major_and_channel_first():
    """42 x 28 pixels whose colors are their own coordinates."""
    data = bytes(value for y in range(28) for x in range(42) for value in (x, y, 200))
    patches = process_image(Image.frombytes("RGB", (42, 28), data), SMALL).patches
    assert patches.shape == (6, 3, 14, 14)
    for patch in range(6):
        for y in range(14):
            for x in range(14):
                wanted = torch.tensor([patch % 3 * 14 + x, patch // 3 * 14 + y, 200]) / 255
                assert torch.equal(patches[patch, :, y, x], ((wanted - 0.5) / 0.5).to(torch.bfloat16)), (patch, y, x)


def test_all_256_levels():
    """The affine map in float32, then one rounding; the ends are exact and nothing is clipped."""
    data = bytes(level for level in range(256) for _ in range(3))
    image = Image.frombytes("RGB", (16, 16), data).resize((224, 224), Image.Resampling.NEAREST)
    patches = process_image(image, SMALL).patches
    levels = patches[:, 0, 7, 7].tolist()  # one patch per level
    assert levels[0] == -1 and levels[255] == 1
    for level, value in enumerate(levels):
        exact = (level / 255 - 0.5) / 0.5
        assert abs(value - exact) <= 2.0 ** (math.frexp(exact)[1] - 9) + 1e-7, level  # half a BF16 step, float32 error
    wrong = (torch.arange(256).to(torch.bfloat16) / 255 - 0.5) / 0.5  # the map in BF16
    assert not torch.equal(torch.tensor(levels).to(torch.bfloat16), wrong)


def pixels(image: ImageInput) -> torch.Tensor:
    """[height, width, 3] from patches, written as the inverse of the definition."""
    side = image.patches.shape[-1]
    rows = [torch.cat(list(image.patches[r * image.patch_cols:(r + 1) * image.patch_cols]), dim=-1)
            for r in range(image.patch_rows)]
    joined = torch.cat(rows, dim=-2)
    assert joined.shape == (3, image.patch_rows * side, image.patch_cols * side)
    return joined.permute(1, 2, 0)


def normalized(image: Image.Image) -> torch.Tensor:
    values = torch.tensor(list(image.tobytes())).view(image.height, image.width, 3)
    return ((values / 255 - 0.5) / 0.5).to(torch.bfloat16)


def test_resized_once_bicubic_centered_with_gray_border():
    image = noise(448, 336)  # canvas 630 x 476; the picture becomes 630 x 472, two gray rows above and below
    got = pixels(process_image(image, RELEASED))
    assert torch.equal(got[2:474], normalized(image.resize((630, 472), Image.Resampling.BICUBIC)))
    assert (torch.cat((got[:2], got[474:])) == GRAY).all()
    wrong = {
        "stretched": image.resize((630, 476), Image.Resampling.BICUBIC),
        "bilinear": ImageOps.pad(image, (630, 476), Image.Resampling.BILINEAR, color=(127, 127, 127)),
        "black border": ImageOps.pad(image, (630, 476)),
        "at the top": ImageOps.pad(image, (630, 476), color=(127, 127, 127), centering=(0, 0)),
        "resampled twice": ImageOps.pad(image.resize((628, 471), Image.Resampling.BICUBIC), (630, 476),
                                        color=(127, 127, 127)),
    }
    for name, other in wrong.items():
        assert not torch.equal(got, normalized(other)), name


def test_border_left_and_right():
    got = pixels(process_image(noise(100, 5000), RELEASED))  # canvas 112 x 5012, picture 100 x 5012
    assert (got[:, :6] == GRAY).all() and (got[:, 106:] == GRAY).all()
    assert not (got[:, 6] == GRAY).all() and not (got[:, 105] == GRAY).all()


@pytest.mark.parametrize("width, height", [(10, 100000), (100000, 10)])
def test_extreme_aspect_ratio_is_processed(width, height):
    image = process_image(Image.new("RGB", (width, height), (255, 0, 0)), RELEASED)
    assert image.patches.shape == (image.patch_rows * image.patch_cols, 3, 14, 14)
    assert (image.patches[:, 0] == 1).any()


def test_a_picture_that_would_vanish_is_refused():
    image = Image.new("RGB", (100000, 1))
    plan = plan_image(100000, 1, RELEASED)
    with pytest.raises(ValueError, match="100000 x 1 pixels to fit into 42882 x 42"):
        preprocess(image, plan, RELEASED)
    with pytest.raises(ValueError, match="wanted mode RGB, got L"):
        preprocess(Image.new("L", (10, 10)), plan, RELEASED)


# --- reading ---------------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_picture(tmp_path):
    image = noise(20, 10)
    data = encode(image, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    wrapped = "\n".join(text[i:i + 76] for i in range(0, len(text), 76))
    for source in (path, str(path), data, bytearray(data), memoryview(data), text, wrapped, image, Image.open(path),
                   "data:image/png;base64," + text, "DATA:;BASE64," + text):
        loaded = load_image(source)
        assert loaded.mode == "RGB" and loaded.size == (20, 10) and loaded.tobytes() == image.tobytes()
    assert load_image(image) is not image


@pytest.mark.parametrize("source, message", [
    ("http://example.com/a.png", "Download it first"),
    ("https://example.com/a.png", "Download it first"),
    ("HTTPS://EXAMPLE.COM/a.png", "Download it first"),
    ("file:///tmp/a.png", "Download it first"),
    ("no/such/picture.png", "wanted an existing file or base64 text, got 'no/such/picture.png'"),
    (Path("no/such/picture.png"), "wanted a file, got 'no/such/picture.png'"),
    (Path("x" * 5000), "wanted a file"),
    ("x" * 4999, "wanted an existing file or base64 text"),
    (".", "wanted a file, got '.'"),
    ("a\0b", "wanted an existing file or base64 text"),
    ("", "got something else or a damaged header"),
    ("Zm9vYmFy", "base64 text .no file has this name.: wanted PNG"),
    ("data:image/png,abc", "wanted a data URL such as"),
    ("data:image/png;base64", "wanted a data URL such as"),
    ("data:image/png;base64,@@@", "wanted an existing file or base64 text"),
    (b"", "0 bytes: wanted PNG"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "wanted PNG, JPEG, WEBP"),  # EPS would start a program
    (torch.zeros(3, 4, 4), "got Tensor"),
    (None, "got NoneType"),
])
def test_sources_that_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        load_image(source)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_and_their_damage(kind):
    data = encode(noise(32, 24), kind)
    assert load_image(data).size == (32, 24)
    for share in (0.3, 0.6, 0.9):
        with pytest.raises(ValueError, match="Loading an image from"):
            load_image(data[:int(share * len(data))])
    with pytest.raises(ValueError, match="something else or a damaged header"):
        load_image(b"\0" * 16 + data[16:])


def test_damaged_bytes_never_raise_anything_but_value_error():
    rng = random.Random(0)
    files = [encode(noise(16, 12), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow remarks on odd metadata
        for _ in range(400):
            data = bytearray(rng.choice(files))
            for _ in range(rng.choice((1, 2, 8))):
                data[rng.randrange(min(len(data), rng.choice((64, 10**6))))] = rng.randrange(256)
            try:
                assert load_image(data).mode == "RGB"
            except ValueError:
                refused += 1
    assert 100 < refused < 390


def test_empty_pictures():
    with pytest.raises(ValueError):
        load_image(png(0, 5, b"", 8, 2))
    with pytest.raises(ValueError, match="wanted at least 1 x 1 pixels, got 0 x 5"):
        load_image(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("width, height", [(8193, 8192), (10000, 10000), (100000, 100000)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("pillow_limit", [Image.MAX_IMAGE_PIXELS, None])
def test_bombs_are_refused_before_decoding(width, height, pillow_limit, monkeypatch):
    assert width * height > MAX_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)

    def decoded(self):
        raise AssertionError("the pixels were decoded")
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    with pytest.raises(ValueError, match=f"wanted (a picture of )?at most {MAX_PIXELS} pixels"):
        load_image(png(width, height, b"", 8, 2))
    assert Image.MAX_IMAGE_PIXELS == pillow_limit


def test_the_pixel_limit_is_inclusive_and_silent(monkeypatch):
    header = png(8192, 8192, b"", 8, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="wanted a complete picture"):  # so the size was accepted
            load_image(header)
        with pytest.raises(ValueError, match="at most"):  # Pillow's own warning, raised as an error
            load_image(png(10000, 10000, b"", 8, 2))
    monkeypatch.setattr("inference.image_processor.MAX_PIXELS", 199)
    with pytest.raises(ValueError, match="wanted at most 199 pixels, got 20 x 10"):
        load_image(noise(20, 10))


def test_alpha_is_dropped_not_blended():
    color = (10, 200, 30)
    rgba = Image.new("RGBA", (2, 2), (*color, 0))
    gray = Image.new("LA", (2, 2), (77, 3))
    palette = Image.new("P", (2, 1))
    palette.putpalette([*color, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    both = bytes((*color, 40, 50, 60))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_image(rgba).tobytes() == load_image(encode(rgba, "PNG")).tobytes() == bytes(color) * 4
        assert load_image(gray).tobytes() == load_image(encode(gray, "PNG")).tobytes() == bytes([77]) * 12
        for options in ({}, {"transparency": 1}, {"transparency": bytes([0, 128])}):
            assert load_image(encode(palette, "PNG", **options)).tobytes() == both
        assert load_image(encode(palette, "GIF", transparency=0)).tobytes() == both
    opened = Image.open(io.BytesIO(encode(palette, "PNG", transparency=1)))
    load_image(opened)
    assert opened.mode == "P" and opened.info["transparency"] == 1  # the caller's picture stays as it is


def test_cmyk_and_one_bit():
    cmyk = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    assert load_image(cmyk).tobytes() == bytes([0, 255, 255]) * 64
    red, green, blue = load_image(encode(cmyk, "JPEG", quality=100)).getpixel((4, 4))
    assert red < 5 and green > 250 and blue > 250  # the inverted form in which JPEG files store CMYK
    assert load_image(Image.new("1", (2, 2), 1)).tobytes() == bytes([255]) * 12


def test_sixteen_bits_keep_the_high_byte():
    values = (0, 255, 256, 0x1234, 0x8000, 0xFFFF)
    wanted = bytes(value >> 8 for value in values for _ in range(3))
    big, little = (b"".join(value.to_bytes(2, order) for value in values) for order in ("big", "little"))
    sources = [png(6, 1, b"\0" + big, 16, 0), encode(Image.frombytes("I;16", (6, 1), little), "TIFF"),
               Image.frombytes("I;16", (6, 1), little), Image.frombytes("I;16L", (6, 1), little),
               Image.frombytes("I;16B", (6, 1), big)]
    for source in sources:
        assert load_image(source).tobytes() == wanted
    # The reason for the rule: the same picture as 16-bit color, which Pillow itself reduces.
    as_color = b"".join(value.to_bytes(2, "big") * 3 for value in values)
    assert load_image(png(6, 1, b"\0" + as_color, 16, 2)).tobytes() == wanted
    clipped = Image.frombytes("I;16", (6, 1), little).convert("RGB").tobytes()
    assert clipped != wanted and clipped[6:] == b"\xff" * 12


@pytest.mark.parametrize("mode", ["I", "F", "I;16N"])
def test_modes_without_a_white_are_refused(mode):
    with pytest.raises(ValueError, match=f"got mode '{mode}', in which no value means white"):
        load_image(Image.new(mode, (2, 2)))


def test_exif_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to display
    data = encode(noise(20, 10), "JPEG", exif=exif)
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == (10, 20)  # what a viewer shows
    assert load_image(data).size == (20, 10)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_several(kind):
    red, blue = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(red, kind, save_all=True, append_images=[blue], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert load_image(data).tobytes() == red.tobytes()


# --- the span in the prompt ------------------------------------------------------------------------------------


def picture(llm_rows: int, llm_cols: int) -> ImageInput:
    return ImageInput(torch.zeros(9 * llm_rows * llm_cols, 3, 1, 1), 3 * llm_rows, 3 * llm_cols, llm_rows, llm_cols)


def test_expand_placeholders():
    images = [picture(2, 3), picture(1, 1), picture(2, 1)]
    ids, types = expand_placeholders([7, IMAGE_ID, 8, IMAGE_ID, IMAGE_ID], images, IMAGE_ID)
    assert ids == [7] + [5] * 10 + [8] + [5] * 4 + [5] * 6
    assert types == [-1, 0, 1, 1, 1, 2, 1, 1, 1, 2, 3, -1, 0, 1, 2, 3, 0, 1, 2, 1, 2, 3]
    assert (TEXT, START, IMAGE, NEWLINE, END) == (-1, 0, 1, 2, 3)
    assert expand_placeholders([7, 8], [], IMAGE_ID) == ([7, 8], [-1, -1])
    validate_token_types(ids, types, images, IMAGE_ID)


def test_expansion_equals_the_recorded_prompt():
    recorded = load_file(NANO / "traces" / "vision_prefill.float32.safetensors")
    wanted_ids, wanted_types = recorded["input_ids"][0].tolist(), recorded["token_types"][0].tolist()
    vision_config = Config.from_file(NANO / "checkpoint").vision_config
    images = [process_image(NANO / "images" / f"image{index}.png", vision_config) for index in (0, 1)]
    prompt = [token for token, kind in zip(wanted_ids, wanted_types) if kind in (TEXT, START)]
    assert expand_placeholders(prompt, images, IMAGE_ID) == (wanted_ids, wanted_types)
    validate_token_types(wanted_ids, wanted_types, images, IMAGE_ID)
    starts = [position for position, kind in enumerate(wanted_types) if kind == START]
    assert starts == [recorded[f"image{index}.grid"][0].item() for index in (0, 1)]


def test_span_embeddings_equal_the_recorded_embeddings():
    recorded = load_file(NANO / "traces" / "vision_prefill.float32.safetensors")
    stored = load_file(NANO / "checkpoint" / "model-00001-of-00006.safetensors")
    parts = [stored["image_" + name] for name in ("start", "newline", "end")]
    for index, suffix in enumerate(("", "#1")):
        start, _, _, rows, cols = recorded[f"image{index}.grid"].tolist()
        span = span_embeddings(recorded["aligner.out" + suffix], rows, cols, *parts)
        assert torch.equal(span, recorded["embed"][0, start:start + len(span)])
        swapped = span_embeddings(recorded["aligner.out" + suffix], rows, cols, parts[2], parts[1], parts[0])
        assert not torch.equal(swapped, span)


@pytest.mark.parametrize("placeholders, images", [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_placeholder_count_must_match(placeholders, images):
    with pytest.raises(ValueError, match=f"got {images} images for {placeholders} placeholders"):
        expand_placeholders([1] + [IMAGE_ID] * placeholders, [picture(1, 1)] * images, IMAGE_ID)


GOOD_IDS, GOOD_TYPES = [9, 5, 5, 5, 5, 5, 5, 8], [-1, 0, 1, 2, 1, 2, 3, -1]  # 2 rows x 1 column


def changed(values: list[int], position: int, value: int) -> list[int]:
    return values[:position] + [value] + values[position + 1:]


@pytest.mark.parametrize("ids, types, images, message", [
    (GOOD_IDS, None, [], "wanted an image type at position 1, which holds the image id 5, got -1"),
    (GOOD_IDS, [-1] * 8, [picture(2, 1)], "wanted an image type at position 1"),
    (GOOD_IDS, changed(GOOD_TYPES, 4, -1), [picture(2, 1)], "wanted an image type at position 4"),
    (changed(GOOD_IDS, 3, 77), GOOD_TYPES, [picture(2, 1)], "wanted the image id 5 at position 3, .* got id 77"),
    (GOOD_IDS, changed(GOOD_TYPES, 7, 1), [picture(2, 1)], "wanted the image id 5 at position 7"),
    (GOOD_IDS, changed(GOOD_TYPES, 2, 4), [picture(2, 1)], "at position 2, got 4"),
    (GOOD_IDS, GOOD_TYPES[:-1], [picture(2, 1)], "got 7 types for 8 ids"),
    (GOOD_IDS, changed(GOOD_TYPES, 1, 1), [picture(2, 1)], "wanted type 0 at position 1"),
    (GOOD_IDS, changed(GOOD_TYPES, 3, 1), [picture(2, 1)], "wanted type 2 at position 3"),
    (GOOD_IDS, GOOD_TYPES, [picture(1, 1)], r"wanted type 3 at position 4, in the span of image 0 \(1 rows x 1"),
    (GOOD_IDS, GOOD_TYPES, [picture(1, 2)], "wanted type 1 at position 3"),
    (GOOD_IDS[:5], GOOD_TYPES[:5], [picture(2, 1)], "wanted type 2 at position 5, .* got the end of the prompt"),
    (GOOD_IDS, GOOD_TYPES, [], "wanted 0 image spans, one per image, got another at position 1"),
    (GOOD_IDS, GOOD_TYPES, [picture(2, 1)] * 2, "wanted 2 image spans, one per image, got 1"),
    ([9, 8], None, [picture(2, 1)], "wanted 1 image spans, one per image, got 0"),
    (GOOD_IDS * 2, GOOD_TYPES * 2, [picture(2, 1)], "got another at position 9"),
])
def test_inconsistent_prompts_are_refused(ids, types, images, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate_token_types(ids, types, images, IMAGE_ID)
    assert "Make ids and types with expand_placeholders" in str(caught.value)


def test_consistent_prompts_pass():
    validate_token_types(GOOD_IDS, GOOD_TYPES, [picture(2, 1)], IMAGE_ID)
    validate_token_types([9, 8], None, [], IMAGE_ID)
    validate_token_types([], [], [], IMAGE_ID)
