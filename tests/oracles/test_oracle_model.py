"""The whole oracle against the golden traces, and wrong variants that the traces must catch.

Fake quantization turns a difference of rounding into a step where a value sits on a midpoint. The golden traces were
made in float32, so a few codes turn there; they are listed below. A listed code is legitimate because its value lies
within 5e-7 of its group's largest magnitude from the midpoint, and because with the listed codes replaced everything
after them agrees again within the ordinary bound.
"""

import numpy as np
import pytest

from reference.oracles import attention, compressor, engram, hyper_connections, indexer, model, moe, rope
from reference.oracles.model import oracle_forward
from reference.oracles.quantizers import FP8_GROUP32, fake_quantize

# trace -> (layer, row, channel) of window codes that the golden float32 arithmetic rounds the other way
TURNED = {"text_prefill.float32": [(6, 7, 38)], "vision_prefill.float32": [(8, 7, 49), (8, 20, 23)]}
NOISE = 5e-7  # measured: the listed values are 8e-8 to 4e-7 away from their midpoints


def arguments(inputs: dict) -> tuple:
    """Golden inputs -> arguments of oracle_forward after the checkpoint."""
    count = sum(name.endswith(".grid") for name in inputs)
    images = [[inputs[f"image{i}.{part}"] for i in range(count)] for part in ("patches", "grid")]
    return inputs["input_ids"], True, inputs.get("token_types"), *images


def turned_rows(checkpoint, points: dict, layer: int, codes: list) -> np.ndarray:
    """Window rows of one layer with the listed codes replaced by their neighbor across the midpoint."""
    text, prefix = checkpoint.config["text_config"], f"layers.{layer}.attn."
    x, rows = points[prefix + "in"][0], points[prefix + "kv_quant"][0].copy()
    frequencies = rope.rotary_frequencies(text, text["compress_ratios"][layer])
    exact = attention.unquantized_rows(x, checkpoint.weights, prefix, range(len(x)), frequencies, text["rms_norm_eps"])
    for row, channel in codes:
        group = slice(channel // 32 * 32, channel // 32 * 32 + 32)
        reach = NOISE * np.abs(exact[row, group]).max()
        below, above = (fake_quantize(exact[row] + shift, FP8_GROUP32)[channel] for shift in (-reach, reach))
        assert below != above, f"layer {layer}, row {row}, channel {channel}: not within {NOISE} of a midpoint"
        rows[row, channel] = below + above - rows[row, channel]
    return rows[None]


def test_text_without_fake_quantization(nano, golden_trace, compare):
    inputs, golden = golden_trace("text_prefill.float32_no_fake_quant")
    points = oracle_forward(nano, inputs["input_ids"], fake_quant=False)
    assert compare(points, golden) == []


@pytest.mark.parametrize("name", TURNED)
def test_prefill(nano, golden_trace, compare, name):
    inputs, golden = golden_trace(name)
    points = oracle_forward(nano, *arguments(inputs))
    turned_layer = TURNED[name][0][0]
    earlier = tuple(f"layers.{i}." for i in range(turned_layer))
    assert [wrong for wrong in compare(points, golden) if wrong.startswith(earlier)] == []
    codes = [(row, channel) for _, row, channel in TURNED[name]]
    graft = {f"layers.{turned_layer}.attn.kv_quant": turned_rows(nano, points, turned_layer, codes)}
    if f"layers.{turned_layer}.attn.kv_quant" in golden:
        np.testing.assert_array_equal(graft[f"layers.{turned_layer}.attn.kv_quant"], golden[list(graft)[0]])
    points = oracle_forward(nano, *arguments(inputs), grafts=graft)
    assert [wrong for wrong in compare(points, golden) if wrong not in graft] == []


def test_recorded_input_removes_the_turned_code(nano, golden_trace):
    """Fed the recorded module input, the oracle rounds as the golden does: the difference was inherited, not added."""
    inputs, golden = golden_trace("text_prefill.float32")
    points = oracle_forward(nano, inputs["input_ids"], grafts={"layers.6.attn.in": golden["layers.6.attn.in"]})
    np.testing.assert_array_equal(points["layers.6.attn.kv_quant"], golden["layers.6.attn.kv_quant"])


def test_truncated_prompts_equal_the_rows_of_the_whole(nano, golden_trace, error_of):
    """The oracle has no cache, so this is what decoding must reproduce; odd lengths leave a ratio-2 group open."""
    inputs, _ = golden_trace("text_prefill.float32")
    ids = inputs["input_ids"]
    whole = oracle_forward(nano, ids)
    for length in (1, 2, 3, 8, 9, 17, 24, 31):
        part = oracle_forward(nano, ids[:, :length])
        assert error_of(part["logits"], whole["logits"][:, :length]) < 1e-12, length
        for layer in (2, 4, 6, 8):
            selected = part[f"layers.{layer}.attn.indexer.topk"]
            expected = whole[f"layers.{layer}.attn.indexer.topk"][:, :length, : selected.shape[-1]]
            np.testing.assert_array_equal(selected, expected)


def test_batch_rows_are_independent(nano, golden_trace):
    ids = golden_trace("decode.float32")[0]["input_ids"][:, :20]
    both, second = oracle_forward(nano, ids), oracle_forward(nano, ids[1:])
    for name in both:
        np.testing.assert_array_equal(both[name][1:], second[name])


def test_later_image_rows_do_not_reach_back(nano, golden_trace):
    inputs, _ = golden_trace("vision_prefill.float32")
    ids, fake_quant, types, patches, grids = arguments(inputs)
    start = int(grids[1][0])
    plain = oracle_forward(nano, ids, fake_quant, types, patches, grids)
    moved = oracle_forward(nano, ids, fake_quant, types, [patches[0], -patches[1]], grids)
    np.testing.assert_array_equal(plain["logits"][:, : start + 1], moved["logits"][:, : start + 1])
    assert (plain["logits"][:, start + 1 :] != moved["logits"][:, start + 1 :]).any(axis=-1).all()


def test_bad_requests_are_explained(nano):
    with pytest.raises(ValueError, match=r"\[B, S\]"):
        oracle_forward(nano, np.zeros(5, int))
    with pytest.raises(ValueError, match="0..767"):
        oracle_forward(nano, np.array([[768]]))
    with pytest.raises(ValueError, match="token_types there do not spell"):
        patches, grid = np.zeros((9, 3, 14, 14)), np.array([1, 3, 3, 1, 1])
        oracle_forward(nano, np.full((1, 6), 5), token_types=np.full((1, 6), -1), patches=[patches], grids=[grid])


# --- wrong variants: name -> (module, function, replacement made from the right function, first wrong point) ---------


def half_split(right):
    def rotate(vector, position, frequencies, inverse=False):
        width, half = 2 * len(frequencies), len(frequencies)
        order = [i for pair in range(half) for i in (pair, half + pair)]  # adjacent place <- half-split place
        tail = right(vector[-width:][order], position, frequencies, inverse)
        result = np.array(vector, np.float64)
        result[np.arange(len(vector) - width, len(vector))[order]] = tail
        return result

    return rotate


def at_row_number(right):
    return lambda latent, ratio, frequencies: right(latent, 1, frequencies)


def one_table(right):
    return lambda text, ratio: right(text, 0)


def no_inverse(right):
    return lambda vector, position, frequencies, inverse=False: (
        vector if inverse else right(vector, position, frequencies))


def no_sink(right):
    return lambda query, rows, sink: right(query, rows, -np.inf)


def not_lagged(right):
    def wrapped(streams, pre_used, prefix, kind, checkpoint, *rest):
        fn, base, scale = (checkpoint.weights[f"{prefix}hc_{kind}_{part}"] for part in ("fn", "base", "scale"))
        own_pre, _, _ = hyper_connections.mixes(streams, fn, base, scale, checkpoint.config["text_config"])
        return right(streams, own_pre, prefix, kind, checkpoint, *rest)

    return wrapped


def transposed(right):
    return lambda output, streams, post, comb: right(output, streams, post, comb.transpose(0, 2, 1))


def biased_weights(right):
    def route(x, gate_weight, bias, active, scaling):
        ids, _, biased = right(x, gate_weight, bias, active, scaling)
        chosen = np.take_along_axis(biased, ids, axis=-1)
        return ids, chosen / chosen.sum(axis=-1, keepdims=True) * scaling, biased

    return route


def unpinned(right):
    def candidate_rows(score, ratio, block_size, keep):
        result = np.zeros(score.shape, bool)
        for p, row in enumerate(score):
            blocks = np.array([row[b : b + block_size].max() for b in range(0, len(row), block_size)])
            for b in indexer.best(blocks, keep):
                result[p, b * block_size : (b + 1) * block_size] = True
        return result

    return candidate_rows


def wrong_last_multiplier(right):
    return lambda classes, pad_class, factors, primes, heads: right(
        classes, pad_class, [*factors[:-1], factors[-2]], primes, heads)


MUTANTS = {
    "half-split rotation": (attention, "rotate", half_split, "layers.0.attn.q"),
    "row rotated at j": (compressor, "rotated_rows", at_row_number, "layers.2.attn.compressor.kv"),
    "one rotation table": (model, "rotary_frequencies", one_table, "layers.2.attn.q"),
    "output not rotated back": (attention, "rotate", no_inverse, "layers.0.attn.out_unrotated"),
    "sink dropped": (attention, "attend", no_sink, "layers.0.attn.out_unrotated"),
    # The streams that enter layer 0 are equal copies: there a collapse only scales, which the norm undoes, and comb may
    # be turned around. Both mistakes show one sub-layer later.
    "mixes not lagged": (model, "wrapped", not_lagged, "layers.0.ffn.in"),
    "comb transposed": (hyper_connections, "expand", transposed, "layers.0.out"),
    "weights from biased scores": (moe, "route", biased_weights, "layers.0.ffn.expert_weights"),
    "newest block not pinned": (indexer, "candidate_rows", unpinned, "layers.6.attn.indexer.candidates"),
    "wrong last multiplier": (engram, "hash_ids", wrong_last_multiplier, "layers.1.engram.hash_ids"),
}


def first_wrong_point(nano, golden_trace, compare) -> str | None:
    """Run the first 24 golden tokens (row 7 of layer 6 grafted, see TURNED) and name the first point that differs."""
    inputs, golden = golden_trace("text_prefill.float32")
    graft = {"layers.6.attn.kv_quant": golden["layers.6.attn.kv_quant"][:, :24]}
    points = oracle_forward(nano, inputs["input_ids"][:, :24], grafts=graft)
    cut = {name: golden[name][tuple(slice(size) for size in value.shape)] for name, value in points.items()}
    return next((name for name in compare(points, cut) if name not in graft), None)


def test_no_mutant_no_difference(nano, golden_trace, compare):
    assert first_wrong_point(nano, golden_trace, compare) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught_at_the_expected_point(nano, golden_trace, compare, monkeypatch, name):
    module, function, mutate, expected = MUTANTS[name]
    monkeypatch.setattr(module, function, mutate(getattr(module, function)))
    assert first_wrong_point(nano, golden_trace, compare) == expected
