"""Rotation of the text model (inference/rope.py and where it is applied): pairing, tables by layer kind, positions.

Frequencies are compared with the float64 closed form, rotations with the scalar loop of the oracle.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor

from inference.config import Config, TextConfig, layer_plan
from inference.context import Context
from inference.numerics import Numerics
from inference.rope import rope_frequencies, rotate
from reference.metrics import relative_l2
from reference.oracles import rope as oracle
from reference.oracles.basics import linear, rms_norm

FLOAT32 = Numerics.of("float32")


@pytest.fixture(scope="module")
def released(golden_dir) -> TextConfig:
    return Config.from_file(golden_dir.parents[1] / "inference" / "configs" / "deepseek-v4.1-flash.json").text_config


def tables(config: TextConfig) -> tuple[Tensor, Tensor]:
    """Frequencies of the first window-only and of the first compressed layer."""
    plan = layer_plan(config)
    return tuple(rope_frequencies(config, next(layer for layer in plan if (layer.compress_ratio > 0) == compressed))
                 for compressed in (False, True))


def rotated(x: Tensor, position: int, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """One vector [D] at one position."""
    return rotate(x.view(1, 1, -1), torch.tensor([[position]]), frequencies, inverse).view(-1)


def oracle_rotated(x: Tensor, position: int, frequencies: Tensor, inverse: bool = False) -> Tensor:
    return torch.from_numpy(oracle.rotate(x.double().numpy(), position, frequencies.numpy(), inverse))


def half_split(x: Tensor, position: int, frequencies: Tensor) -> Tensor:
    """Wrong variant: channel i is paired with channel i + R/2."""
    half = len(frequencies)
    fixed, a, b = x[:-2 * half], x[-2 * half:-half], x[-half:]
    cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
    return torch.cat((fixed, a * cos - b * sin, a * sin + b * cos))


# --- pairs and direction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [0, 5, 31])
def test_adjacent_channels_are_a_pair(released, pair: int) -> None:
    """Pitfall 1: a unit vector on the first channel of a pair becomes (cos, sin) on the two, zero elsewhere."""
    frequencies = tables(released)[0]
    unit = torch.zeros(512)
    unit[448 + 2 * pair] = 1.0
    got = rotated(unit, 1, frequencies)
    wanted = torch.zeros(512)
    angle = 10000.0 ** (-2 * pair / 64)
    wanted[448 + 2 * pair], wanted[448 + 2 * pair + 1] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(half_split(unit, 1, frequencies), wanted, rtol=1e-3, atol=1e-9)


def test_rotation_equals_the_oracle(released) -> None:
    """All pairs, forward and inverse; the channels before the last 64 pass bit for bit."""
    x = torch.randn(512)
    for frequencies in tables(released):
        for position in (0, 1, 300, 65_537):
            for inverse in (False, True):
                got = rotated(x, position, frequencies, inverse)
                assert relative_l2(got, oracle_rotated(x, position, frequencies, inverse)) < 1e-6
                assert torch.equal(got[:448], x[:448])
        assert torch.equal(rotated(x, 0, frequencies), x)
        assert relative_l2(rotated(x, 300, frequencies), half_split(x, 300, frequencies)) > 0.1


def test_heads_turn_alike_and_rows_by_their_own_position(released) -> None:
    frequencies, positions = tables(released)[1], torch.tensor([[3, 4, 5], [900, 901, 902]])
    x = torch.randn(2, 3, 4, 128)
    got = rotate(x, positions, frequencies)
    for row in range(2):
        for token in range(3):
            for head in range(4):
                wanted = oracle_rotated(x[row, token, head], int(positions[row, token]), frequencies)
                assert relative_l2(got[row, token, head], wanted) < 1e-6
    assert torch.equal(rotate(x[:, :, 0], positions, frequencies), got[:, :, 0])


def test_the_first_pair_turns_fastest(released) -> None:
    """Pitfall 6: frequencies, not their inverses: 1 radian per token first, then ever slower."""
    for frequencies in tables(released):
        assert frequencies[0] == 1 and bool((frequencies.diff() < 0).all()) and bool((frequencies > 0).all())


def test_rotation_is_float32_inside(released) -> None:
    """BF16 input: the float32 result, rounded once; a BF16 sine (wrong variant) would show."""
    frequencies, x = tables(released)[0], torch.randn(1, 7, 512).bfloat16()
    positions = torch.arange(100, 107)[None]
    assert torch.equal(rotate(x, positions, frequencies), rotate(x.float(), positions, frequencies).bfloat16())
    assert not torch.equal(rotate(x, positions, frequencies), rotate(x, positions, frequencies.bfloat16().float()))


def test_angle_is_a_float32_product(released) -> None:
    """Near one million tokens the rounding of position * frequency is part of the definition; float64 angles differ."""
    frequencies, x, position = tables(released)[1], torch.randn(64), 1_000_003
    got = rotated(x, position, frequencies)
    assert relative_l2(got, oracle_rotated(x, position, frequencies)) < 1e-6
    angle = position * frequencies.double()
    a, b = x.double().view(-1, 2).unbind(-1)
    exact = torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).flatten()
    assert relative_l2(got, exact) > 1e-3


# --- tables ------------------------------------------------------------------------------------------------------


def test_released_tables_equal_the_closed_form(released) -> None:
    """Pitfall 2: base 10000 without YaRN for window-only layers and draft stages, base 160000 with YaRN for others."""
    values = dataclasses.asdict(released)
    window, compressed = tables(released)
    for layer in layer_plan(released):
        table = rope_frequencies(released, layer)
        wanted = torch.from_numpy(oracle.rotary_frequencies(values, layer.compress_ratio))
        torch.testing.assert_close(table.double(), wanted, rtol=3e-7, atol=0)
        assert torch.equal(table, compressed if layer.compress_ratio else window)
    x = torch.randn(64)
    plain = 160000.0 ** (-torch.arange(0, 64, 2) / 64)
    for wrong in (window, plain):  # the other kind's table; YaRN forgotten
        assert relative_l2(rotated(x, 300, wrong), rotated(x, 300, compressed)) > 0.01


def test_released_yarn_ramp(released) -> None:
    """low = 15 is the last untouched pair, high = 25 the first one divided by 16; a few values to six digits."""
    table = tables(released)[1].double()
    share = table * 160000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    wanted = 1 - ((torch.arange(32) - 15) / 10).clamp(0, 1).double() * (1 - 1 / 16)
    torch.testing.assert_close(share, wanted, rtol=1e-6, atol=0)
    values = {0: 1.0, 1: 0.687656, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 24: 1.953125e-5, 25: 5.372313e-6,
              31: 5.680529e-7}
    for pair, value in values.items():
        assert table[pair].item() == pytest.approx(value, rel=1e-6)


def test_degenerate_ramp_stays_finite() -> None:
    """low = high is a step, not a division by zero."""
    config = TextConfig()
    scaling = dataclasses.replace(config.rope_scaling, original_max_position_embeddings=1)
    config = dataclasses.replace(config, rope_scaling=scaling, qk_rope_head_dim=4, compress_rope_theta=1e30)
    table = rope_frequencies(config, layer_plan(config)[2])
    wanted = torch.from_numpy(oracle.rotary_frequencies(dataclasses.asdict(config), 2))
    torch.testing.assert_close(table.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("position", [7, 300, 200_000])
def test_rotation_keeps_the_norm(released, position: int) -> None:
    """Pitfall 3: no mscale; the usual 0.1 ln(16) + 1 = 1.277 would stretch the rotated part."""
    x = torch.randn(64, dtype=torch.float64).float()
    for frequencies in tables(released):
        assert rotated(x, position, frequencies).norm().item() == pytest.approx(x.norm().item(), rel=1e-6)


# --- where the model rotates -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points(nano_plain) -> dict[str, Tensor]:
    """Recorded points of 23 tokens after 300 others, without fake quantization, so that rotations stand alone."""
    ids, cache, recorded = 20 + torch.arange(323)[None], nano_plain.new_cache(), {}
    with torch.no_grad():
        nano_plain(ids[:, :300], cache)
        nano_plain(ids[:, 300:], cache, observe=recorded.__setitem__)
    return recorded


def nano_table(nano_plain, ratio: int) -> Tensor:
    return torch.from_numpy(oracle.rotary_frequencies(dataclasses.asdict(nano_plain.config.text_config), ratio))


def test_window_rows_and_queries_turn_at_their_position(nano_plain, points) -> None:
    """Pitfall 2, per layer: positions 300 .. 322, each layer with the table of its kind; the other table fails."""
    heads, other_kind = nano_plain.config.text_config.num_attention_heads, {0: 2, 1: 0, 2: 0}
    for layer in nano_plain.layers:
        name, ratio = layer.plan.name, layer.plan.compress_ratio
        frequencies, other = nano_table(nano_plain, ratio), nano_table(nano_plain, other_kind[ratio])
        rows, kv = points[f"{name}.attn.kv_pre_rope"][0], points[f"{name}.attn.kv"][0]
        q_weight = layer.attn.wq_b.weight
        q_weight = q_weight.dequantize() if not isinstance(q_weight, Tensor) else q_weight
        queries = linear(points[f"{name}.attn.q_latent"][0].double().numpy(), q_weight.double().numpy())
        for token in (0, 22):
            assert relative_l2(kv[token], oracle_rotated(rows[token], 300 + token, frequencies)) < 1e-5
            assert relative_l2(kv[token], oracle_rotated(rows[token], 300 + token, other)) > 1e-2
            head, q = torch.from_numpy(queries[token]).view(heads, -1)[1], points[f"{name}.attn.q"][0, token, 1]
            assert relative_l2(q, oracle_rotated(head, 300 + token, frequencies)) < 1e-5


@pytest.mark.parametrize("source", [2, 4, 6])
def test_latents_turn_at_their_first_token(nano_plain, points, source: int) -> None:
    """Pitfall 4: row j at j * ratio (150 groups of 2 came before), index keys too; j or the last token's fails."""
    layer = nano_plain.layers[source]
    ratio, name = layer.plan.compress_ratio, f"layers.{source}.attn"
    frequencies, first = nano_table(nano_plain, ratio), 300 // ratio
    latent, rows, keys = (points[f"{name}.{part}"][0] for part in ("compressor.latent", "compressor.kv", "indexer.k"))
    assert len(latent) == 323 // ratio - first
    wk, k_norm = layer.attn.indexer.wk.weight.double().numpy(), layer.attn.indexer.k_norm.weight.double().numpy()
    for group in (0, 3, len(latent) - 1):
        position = (first + group) * ratio
        key = torch.from_numpy(rms_norm(linear(latent[group].double().numpy(), wk), k_norm, 1e-20))
        for got, source_row in ((rows[group], latent[group]), (keys[group], key)):
            assert relative_l2(got, oracle_rotated(source_row, position, frequencies)) < 1e-5
            if ratio > 1:
                for wrong in (first + group, position + ratio - 1):
                    assert relative_l2(got, oracle_rotated(source_row, wrong, frequencies)) > 1e-2


@pytest.mark.parametrize(("key", "query"), [(37, 37), (37, 40), (301, 340)])
@pytest.mark.parametrize("layer_id", [0, 2])
def test_output_is_turned_back(nano_plain, layer_id: int, key: int, query: int) -> None:
    """Pitfall 5: one key and no sink: the output is the value turned by key - query, unrotated when they are equal."""
    attn = copy.deepcopy(nano_plain.layers[layer_id].attn)
    frequencies, width = attn.frequencies(torch.device("cpu")), nano_plain.config.text_config.head_dim
    value = torch.randn(1, 1, width)
    row = rotate(value, torch.tensor([[key]]), frequencies)
    context = Context(FLOAT32, positions=torch.tensor([[query]]), starts=(query,), counts=(1,))
    attn.attn_sink.fill_(float("-inf"))
    heads = len(attn.attn_sink)
    out = attn.attend(torch.randn(1, 1, heads, width), row, torch.tensor([[[0, -1]]]), frequencies, context)
    wanted = oracle_rotated(value.flatten(), key - query, frequencies)
    for head in range(heads):
        assert relative_l2(out[0, 0, head], wanted) < 1e-5
    assert relative_l2(row.flatten(), wanted) > 1e-2  # wrong variant: not turned back
