"""Engram (inference/engram.py): constants and hash ids of the release, the look-back, and the gate.

Hash ids are compared with recorded ones (real 129,280-token vocabulary, released layout), with Python integers and
with the oracle; the gate with the oracle's scalar form.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from inference.cache import DEAD
from inference.config import Config, TextConfig, layer_plan
from inference.context import Context
from inference.engram import Engram, NgramHash, hash_multipliers, hash_primes
from inference.numerics import Numerics
from inference.tokenizer import Tokenizer, fold_vocabulary
from reference.metrics import relative_l2
from reference.oracles import engram as oracle

FLOAT32, NATIVE = Numerics.of("float32"), Numerics.of("native")


@pytest.fixture(scope="module")
def golden(golden_dir) -> dict:
    return json.loads((golden_dir / "engram_released.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def released(golden_dir) -> TextConfig:
    return Config.from_file(golden_dir.parents[1] / "inference" / "configs" / "deepseek-v4.1-flash.json").text_config


@pytest.fixture(scope="module")
def released_hash(released) -> NgramHash:
    return NgramHash(released, torch.from_numpy(fold_vocabulary(Tokenizer.load(), released.vocab_size)))


@pytest.fixture(scope="module")
def nano_hash(nano_config, nano_dir) -> NgramHash:
    text = nano_config.text_config
    return NgramHash(text, torch.from_numpy(fold_vocabulary(Tokenizer.load(nano_dir), text.vocab_size)))


def nothing_before(rows: int = 1) -> Tensor:
    """The history of a sequence that starts with this call."""
    return torch.full((rows, 3), DEAD)


def hash_of(slots: list[int], table: NgramHash, slot: int) -> list[int]:
    """Python integers: row ids of one position from what its look-backs 0, 1, 2, 3 read."""
    columns, offset, accumulated = [], 0, 0
    for look_back, (value, multiplier) in enumerate(zip(slots, table.multipliers[slot])):
        product = value * multiplier
        assert product < 2**63
        accumulated ^= product
        for prime in table.primes[slot][look_back - 1] if look_back else ():
            columns.append(accumulated % prime + offset)
            offset += prime
    return columns


# --- constants and hash ids of the release -----------------------------------------------------------------------


def test_released_constants(released, golden) -> None:
    """Pitfall 34: primes, multipliers and row sums are in no file; every one of them exactly."""
    assert hash_primes(released) == golden["primes"]
    assert hash_multipliers(released) == golden["multipliers"]
    rows = [sum(map(sum, layer)) for layer in golden["primes"]]
    assert rows == golden["rows"] == list(released.engram_num_embeddings) == [384_006_168, 384_016_682]
    # Fewer classes, or a search that starts anew for every layer (wrong variants), hash to other rows.
    assert hash_multipliers(dataclasses.replace(released, engram_compressed_vocab_size=99_091)) != golden["multipliers"]
    assert golden["primes"][1][0][0] > golden["primes"][0][2][7]


def test_primes_equal_trial_division(nano_config) -> None:
    text = nano_config.text_config
    wanted = oracle.column_primes(len(text.engram_layer_ids), text.engram_max_ngram_size, text.engram_n_heads,
                                  text.engram_vocab_size)
    assert [sum(layer, []) for layer in hash_primes(text)] == wanted


def test_released_hash_ids(released_hash, golden) -> None:
    """Pitfall 34: folded ids and all 24 columns of both layers, for every recorded text."""
    assert released_hash.pad == golden["folded_pad"] == 2
    for text, case in golden["cases"].items():
        folded = released_hash.fold(torch.tensor([case["ids"]]), None)
        assert folded[0].tolist() == case["folded"], text
        got = [released_hash.hash_ids(folded, nothing_before(), slot)[0].tolist() for slot in range(2)]
        assert [[row[p] for row in got] for p in range(len(case["ids"]))] == case["hash_ids"], text


def test_released_hash_ids_around_an_image(released_hash, golden) -> None:
    """Pitfall 36: recorded ids of text, an image at two positions, text."""
    case = golden["image_case"]
    ids = torch.tensor([case["ids"]])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, case["image_positions"]] = True
    folded = released_hash.fold(ids, mask)
    assert (folded == DEAD).nonzero()[:, 1].tolist() == case["image_positions"]
    for slot in range(2):
        got = released_hash.hash_ids(folded, nothing_before(), slot)[0].tolist()
        assert got == [position[slot] for position in case["hash_ids"]]
        through = released_hash.hash_ids(released_hash.fold(ids, None), nothing_before(), slot)[0].tolist()
        assert through != got  # wrong variant: image ids hashed like words


def test_a_few_released_ids_by_heart(released_hash) -> None:
    """BOS + "Hello, world!": columns 0, 7, 8, 15, 16, 23 of both layers at positions 0 and 4."""
    folded = released_hash.fold(torch.tensor([[0, 19923, 14, 2058, 3]]), None)
    wanted = {(0, 0): [5702652, 121476532, 131476717, 247482304, 257520185, 380066193],
              (0, 4): [4547813, 121426042, 128530695, 241334485, 266829306, 376490189],
              (1, 0): [14361964, 120604547, 132225184, 252505246, 261362261, 372375971],
              (1, 4): [4771272, 115432189, 138577563, 241764731, 260028778, 373732779]}
    for (slot, position), columns in wanted.items():
        got = released_hash.hash_ids(folded, nothing_before(), slot)[0, position]
        assert got[[0, 7, 8, 15, 16, 23]].tolist() == columns


def test_products_fit_into_int64(released, released_hash) -> None:
    """Pitfall 37: largest class times largest multiplier in Python integers, torch and NumPy; float64 loses it."""
    largest = released.engram_compressed_vocab_size - 1
    bound = (2**63 - 1) // released.engram_compressed_vocab_size // 2
    assert bound == 46_539_438_283_891
    multiplier = max(max(layer) for layer in released_hash.multipliers)
    assert largest * (2 * (bound - 1) + 1) < 2**63  # the worst that could be drawn
    exact = largest * multiplier
    assert (torch.tensor([largest]) * multiplier).item() == exact == int(np.int64(largest) * np.int64(multiplier))
    assert int(float(largest) * float(multiplier)) != exact
    folded = torch.tensor([[largest, largest - 1, 0, largest, 1, largest]])
    for slot in range(2):
        got = released_hash.hash_ids(folded, nothing_before(), slot)
        assert got.dtype == torch.int64
        for p in range(3, 6):
            assert got[0, p].tolist() == hash_of(folded[0, p - 3:p + 1].flip(0).tolist(), released_hash, slot)


def test_other_tokenizer_is_refused(nano_config, nano_hash) -> None:
    """Pitfall 34: a class too few, too many, or another vocabulary: an error about the tokenizer, never a rehash."""
    text, folded = nano_config.text_config, nano_hash.folded_ids
    merged, split = folded.clone(), folded.clone()
    merged[folded == folded.max()] = 0
    split[-1] = folded.max() + 1
    for wrong in (merged, split, folded[:-1]):
        with pytest.raises(ValueError, match="tokenizer folds.*classes.*use the tokenizer of this checkpoint"):
            NgramHash(text, wrong)
    with pytest.raises(ValueError, match="engram_num_embeddings says 661 rows for layer 1, but its primes .* to 660"):
        NgramHash(dataclasses.replace(text, engram_num_embeddings=(661, 864)), folded)


# --- look-back ---------------------------------------------------------------------------------------------------


def read_slots(folded: list[int], image: set[int], pad: int, position: int) -> list[int]:
    """What look-backs 0 .. 3 of a position read: pad from the start of the sequence or an image on."""
    slots, alive = [], True
    for look_back in range(4):
        p = position - look_back
        alive = alive and p >= 0 and p not in image
        slots.append(folded[p] if alive else pad)
    return slots


@pytest.mark.parametrize(("image", "pads"), [
    ({2, 3, 4}, {5: 3, 6: 2, 7: 1, 8: 0, 2: 4, 4: 4, 1: 2}),  # A
    ({3}, {4: 3, 5: 2, 6: 1, 7: 0}),  # B: skipping instead of stopping would read tokens 1 and 2
    ({1, 4}, {2: 3, 3: 2, 5: 3, 6: 2, 7: 1, 8: 0}),  # C: text between two images
    (set(), {0: 3, 1: 2, 2: 1, 3: 0})], ids=["A", "B", "C", "start"])
def test_image_stops_the_look_back(nano_hash, image: set[int], pads: dict[int, int]) -> None:
    """Pitfall 36. `pads`: how many of the four look-backs of a position read the folded pad id."""
    folded = [10 + p for p in range(10)]
    marked = torch.tensor([[DEAD if p in image else c for p, c in enumerate(folded)]])
    for slot in range(2):
        got = nano_hash.hash_ids(marked, nothing_before(), slot)[0]
        for position in range(10):
            slots = read_slots(folded, image, nano_hash.pad, position)
            assert slots.count(nano_hash.pad) == pads.get(position, slots.count(nano_hash.pad))
            assert got[position].tolist() == hash_of(slots, nano_hash, slot)


def test_nothing_before_an_image_matters_after_it(nano_hash) -> None:
    """Pitfall 36 B: tokens 0 .. 2 move no hash from 4 on; a look-back that skips the image (wrong variant) does."""
    first, second = torch.tensor([[1, 2, 3, DEAD, 20, 21, 22, 23]]), torch.tensor([[7, 8, 9, DEAD, 20, 21, 22, 23]])
    hashes = [nano_hash.hash_ids(folded, nothing_before(), 0) for folded in (first, second)]
    assert torch.equal(hashes[0][:, 3:], hashes[1][:, 3:])
    assert not torch.equal(hashes[0][:, 1], hashes[1][:, 1])
    skipped = [nano_hash.hash_ids(folded[folded != DEAD][None], nothing_before(), 0) for folded in (first, second)]
    assert not torch.equal(skipped[0][:, 3], skipped[1][:, 3])


def test_image_ids_reach_three_positions_and_no_further(nano_hash) -> None:
    """Pitfall 36: the ids under the mask are never read; the mask itself moves its positions and three more."""
    ids, mask = torch.arange(30, 42)[None], torch.zeros(1, 12, dtype=torch.bool)
    mask[0, 4:6] = True
    other = ids.clone()
    other[mask] = 99
    hashes = [nano_hash.hash_ids(nano_hash.fold(values, mask), nothing_before(), 1) for values in (ids, other)]
    assert torch.equal(*hashes)
    plain = nano_hash.hash_ids(nano_hash.fold(ids, None), nothing_before(), 1)
    moved = (plain != hashes[0]).any(-1)[0].tolist()
    assert moved == [4 <= p < 9 for p in range(12)]


def test_short_text_equals_the_oracle(nano_hash, nano_config) -> None:
    """Batch rows on their own, every length from 1 on; the history slots before the sequence are DEAD, not class 0."""
    text = nano_config.text_config
    primes = [sum(layer, []) for layer in nano_hash.primes]
    for length in range(1, 7):
        folded = torch.randint(0, text.engram_compressed_vocab_size, (3, length))
        for slot in range(2):
            got = nano_hash.hash_ids(folded, nothing_before(3), slot)
            for row in range(3):
                factors, classes = nano_hash.multipliers[slot], folded[row].tolist()
                assert got[row].tolist() == oracle.hash_ids(classes, nano_hash.pad, factors, primes[slot], 2).tolist()
            wrong = nano_hash.hash_ids(folded, torch.zeros(3, 3, dtype=torch.int64), slot)
            assert not torch.equal(wrong[:, 0], got[:, 0])


# --- history across calls ----------------------------------------------------------------------------------------


def recorded_hashes(nano, cache, ids: Tensor, **options) -> tuple[dict[int, Tensor], object]:
    points: dict[str, Tensor] = {}
    out = nano(ids, cache, observe=points.__setitem__, **options)
    return {layer: points[f"layers.{layer}.engram.hash_ids"] for layer in (1, 4)}, out


@pytest.mark.parametrize("cut", range(1, 7))
def test_cut_prompt_gives_the_same_hash_ids(nano, cut: int) -> None:
    """Pitfall 35: cut after 1 .. 6 tokens, two different rows; an empty history (wrong variant) differs there."""
    ids = torch.stack((torch.arange(30, 42), torch.arange(300, 312)))
    whole, _ = recorded_hashes(nano, nano.new_cache(2), ids)
    cache = nano.new_cache(2)
    parts = [recorded_hashes(nano, cache, part)[0] for part in ids.split((cut, 1, 11 - cut), dim=1)]
    forgotten, _ = recorded_hashes(nano, nano.new_cache(2), ids[:, cut:])
    for slot, layer in enumerate((1, 4)):
        alone = nano.engram_hash.hash_ids(nano.engram_hash.fold(ids, None), nothing_before(2), slot)
        assert torch.equal(whole[layer], alone)
        assert torch.equal(torch.cat([part[layer] for part in parts], dim=1), whole[layer])
        assert not torch.equal(forgotten[layer][:, 0], whole[layer][:, cut])


def test_rejected_tokens_leave_no_trace(nano) -> None:
    """Pitfall 35: of a call of 6 tokens each row keeps another number; the hash continues from the kept ones."""
    start, tried, after = (first + torch.arange(2 * size).view(2, size)
                           for first, size in ((30, 5), (400, 6), (200, 4)))
    kept, cache = (2, 5), nano.new_cache(2)
    recorded_hashes(nano, cache, start)
    _, out = recorded_hashes(nano, cache, tried, commit=False)
    cache.commit(out.pending, kept)
    got, _ = recorded_hashes(nano, cache, after)
    for row, count in enumerate(kept):
        ids = torch.cat((start[row], tried[row, :count], after[row]))[None]
        alone, _ = recorded_hashes(nano, nano.new_cache(), ids)
        for layer in (1, 4):
            assert torch.equal(got[layer][row], alone[layer][0, -4:])


def test_first_call_of_one_token_then_fifty(nano) -> None:
    """Pitfall 38: nothing is sized by the first call."""
    ids, cache = torch.arange(30, 81)[None], nano.new_cache()
    whole, _ = recorded_hashes(nano, nano.new_cache(), ids)
    first, _ = recorded_hashes(nano, cache, ids[:, :1])
    rest, _ = recorded_hashes(nano, cache, ids[:, 1:])
    for layer in (1, 4):
        assert rest[layer].shape[1] == 50
        assert torch.equal(torch.cat((first[layer], rest[layer]), dim=1), whole[layer])


# --- gate --------------------------------------------------------------------------------------------------------


def random_engram(numerics: Numerics = FLOAT32) -> tuple[Engram, Context, Tensor, Tensor]:
    """A layer with a table of 168 rows, and 6 tokens whose streams differ in size."""
    config = TextConfig(hidden_size=64, engram_layer_ids=(1,), engram_num_embeddings=(168,), engram_vocab_size=23)
    engram = Engram(config, layer_plan(config)[1])
    for parameter in engram.parameters():
        parameter.copy_(torch.randn(parameter.shape) / (parameter.shape[1] ** 0.5 if parameter.shape[1] == 192 else 1))
    context = Context(numerics, positions=torch.arange(6)[None], starts=(0,), counts=(6,))
    streams = torch.randn(1, 6, 4, 64) * torch.tensor([1.0, 8.0, 0.1, 3.0]).view(4, 1)
    return engram, context, streams.to(numerics.dtype), torch.randint(0, 168, (1, 6, 6))


def run_engram(engram: Engram, context: Context, streams: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    points: dict[str, Tensor] = {}
    out = engram(streams, ids, dataclasses.replace(context, observe=points.__setitem__))
    return points["layers.1.engram.gate"], out


def test_gate_and_update_equal_the_oracle() -> None:
    """Four keys, then the value; one statistic per stream; zero at image positions. Wrong variants of each differ."""
    engram, context, streams, ids = random_engram()
    context = dataclasses.replace(context, image_mask=torch.tensor([[False, False, True, True, False, False]]))
    weights = {name: parameter.double().numpy() for name, parameter in engram.named_parameters()}
    arguments = (streams[0].double().numpy(), ids[0].numpy(), context.image_mask[0].numpy())
    wanted_gate, wanted = (torch.from_numpy(part) for part in oracle.engram(*arguments, weights, "", 1e-20))
    gate, out = run_engram(engram, context, streams, ids)
    assert gate.dtype == torch.float32
    assert relative_l2(gate[0], wanted_gate) < 1e-6 and relative_l2(out[0], wanted) < 1e-6
    assert not gate[0, 2:4].any() and torch.equal(out[0, 2:4], streams[0, 2:4])
    value_first = weights | {"wkv.weight": np.roll(weights["wkv.weight"], 64, axis=0)}
    assert relative_l2(out[0], torch.from_numpy(oracle.engram(*arguments, value_first, "", 1e-20)[1])) > 1e-2
    keys = engram.wkv(engram.embed(ids, FLOAT32).flatten(-2), FLOAT32)[..., :256].unflatten(-1, (4, 64))
    dot = (streams * engram.q_weight * engram.k_weight * keys).sum(-1) / 8 / keys.square().mean(-1).sqrt()
    jointly = dot / streams.square().mean((-1, -2)).sqrt().unsqueeze(-1)
    assert relative_l2(torch.sigmoid(torch.copysign(jointly.abs().sqrt(), jointly))[0, :2], wanted_gate[:2]) > 1e-2


@pytest.mark.parametrize(("sign", "wanted"), [(1, 1e-3), (-1, -1e-3), (0, 1e-3)])
def test_gate_floor_and_sign(sign: int, wanted: float) -> None:
    """|dot| is raised to 1e-6 before the root and its sign copied; +0 is positive, sign(0) = 0 would give 0.5."""
    engram, context, streams, ids = random_engram()
    streams = torch.ones_like(streams)
    engram.wkv.weight.fill_(0.01)
    engram.embed.weight.fill_(1.0)  # every key is a positive constant
    engram.k_weight.fill_(1.0)
    engram.q_weight.fill_(sign * 1e-8)  # dot = sign * 1e-8 * 8
    gate, _ = run_engram(engram, context, streams, ids)
    assert torch.allclose(gate, torch.tensor(1 / (1 + math.exp(-wanted))), rtol=1e-7, atol=1e-8)
    assert bool((gate != 0.5).all()) and bool(((gate > 0.5) == (sign >= 0)).all())


def test_gate_is_a_signed_root() -> None:
    """A dot product of +4 opens to sigmoid(2), of -4 to sigmoid(-2): by hand, with D = 64 equal channels."""
    engram, context, streams, ids = random_engram()
    engram.wkv.weight.fill_(0.01)
    engram.embed.weight.fill_(1.0)
    engram.k_weight.fill_(1.0)
    engram.q_weight.copy_(torch.tensor([0.5, -0.5, 2.0, -2.0]).unsqueeze(1).expand(4, 64))  # dot = 8 q
    gate, _ = run_engram(engram, context, torch.full_like(streams, 3.0), ids)
    wanted = [1 / (1 + math.exp(-root)) for root in (2, -2, 4, -4)]
    assert gate[0, 0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_tiny_streams_use_the_norm_epsilon() -> None:
    """Pitfall 27: at amplitude 1e-11 the gate follows 1e-20; with 1e-6 (wrong variant) the dot products vanish."""
    engram, context, streams, ids = random_engram()
    weights = {name: parameter.double().numpy() for name, parameter in engram.named_parameters()}
    arguments = ((1e-11 * streams[0].double()).numpy(), ids[0].numpy(), np.zeros(6, bool), weights, "")
    gate, _ = run_engram(engram, context, 1e-11 * streams, ids)
    assert relative_l2(gate[0], torch.from_numpy(oracle.engram(*arguments, 1e-20)[0])) < 1e-5
    assert relative_l2(gate[0], torch.from_numpy(oracle.engram(*arguments, 1e-6)[0])) > 1e-2


def test_native_rounds_once() -> None:
    """BF16 streams: float32 gate and sum, one cast; the product with wkv quantizes its input."""
    engram, context, streams, ids = random_engram(NATIVE)
    gate, out = run_engram(engram, context, streams, ids)
    rows = engram.embed(ids, NATIVE).flatten(-2)
    value = engram.wkv(rows, NATIVE)[..., -64:]
    assert out.dtype == torch.bfloat16 and gate.dtype == torch.float32
    assert torch.equal(out, (streams.float() + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).bfloat16())
    assert not torch.equal(out, streams + (gate.unsqueeze(-1) * value.unsqueeze(-2)).bfloat16())
    unquantized = copy.deepcopy(engram)
    unquantized.wkv.quantize_input = False
    assert not torch.equal(run_engram(unquantized, context, streams, ids)[0], gate)
