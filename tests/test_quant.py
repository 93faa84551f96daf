"""Number formats and the three activation quantizers (inference/quant.py) against tables, integers and the oracle.

The weight formats and the bytes of the published checkpoint are in test_quant_formats.py, the golden quantizer outputs
in test_golden_ops.py. Wrong variants stand beside the test that must tell them apart.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference.quant import (decode_fp8_blocks, decode_fp8_rows, decode_mxfp4, e2m1_decode, e2m1_encode, e8m0_to_float,
                             fake_quant_fp4_e4m3, fake_quant_fp4_e8m0, fake_quant_fp8, float_to_e8m0, pack_nibbles,
                             power_of_two_ceil, quantize_fp4_e4m3, quantize_fp4_e8m0, quantize_fp8, unpack_nibbles)
from reference.oracles import quantizers as oracle

ALL_CODES = torch.arange(256, dtype=torch.uint8)
QUANTIZERS = {
    "fp8": (fake_quant_fp8, quantize_fp8, oracle.FP8_GROUP32),
    "fp4_e8m0": (fake_quant_fp4_e8m0, quantize_fp4_e8m0, oracle.FP4_GROUP32),
    "fp4_e4m3": (fake_quant_fp4_e4m3, quantize_fp4_e4m3, oracle.FP4_GROUP16),
}


def e4m3_table() -> list[float]:
    """Value of every E4M3 code, from the definition: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    table = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        table.append(math.nan if code & 0x7F == 0x7F else math.copysign(value, -1 if code & 0x80 else 1))
    return table


def same_values(got: Tensor, wanted: list[float]) -> bool:
    """Equal in float64, NaN where NaN is wanted, and of the same sign at zero."""
    wanted = torch.tensor(wanted, dtype=torch.float64)
    return (torch.equal(got.double().nan_to_num(nan=1e300), wanted.nan_to_num(nan=1e300))
            and torch.equal(torch.signbit(got.double())[~wanted.isnan()], torch.signbit(wanted)[~wanted.isnan()]))


# --- E8M0, E4M3, E2M1 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_e8m0_codes(dtype: torch.dtype) -> None:
    """Pitfall 39: 2^(b-127) for every byte, the subnormal 2^-127 in both targets, NaN at 255; never the raw byte."""
    wanted = [2.0 ** (code - 127) for code in range(255)] + [math.nan]
    assert same_values(e8m0_to_float(ALL_CODES).to(dtype), wanted)
    assert same_values(e8m0_to_float(ALL_CODES.view(torch.float8_e8m0fnu)).to(dtype), wanted)
    assert wanted[0] == 2.0**-127 and wanted[127] == 1 and wanted[254] == 2.0**127
    assert torch.equal(float_to_e8m0(e8m0_to_float(ALL_CODES[1:255])).view(torch.uint8), ALL_CODES[1:255])
    exponent_bits_only = (ALL_CODES.int() << 23).view(torch.float32)  # wrong variant: 0 and infinity at the ends
    assert not same_values(exponent_bits_only, wanted)


def test_all_e4m3_codes() -> None:
    """Pitfall 39: every code through the decoder with scale 1; 0x7E is 448, 0x7F and 0xFF are NaN, there is no 480."""
    ones = torch.full((1, 8), 127, dtype=torch.uint8)
    table = e4m3_table()
    assert (table[0x7E], table[0x08], table[0x01]) == (448.0, 2.0**-6, 2.0**-9)
    assert same_values(decode_fp8_rows(ALL_CODES.view(torch.float8_e4m3fn)[None], ones)[0], table)


def test_e4m3_rounds_to_nearest_even() -> None:
    """At, just below and just above the midpoint of every two neighbors, through a group whose scale is 1."""
    values = torch.tensor(e4m3_table()[:0x7F], dtype=torch.float32)
    lower = torch.arange(0x7E)
    middle = (values[:-1] + values[1:]) / 2
    wanted = torch.stack((lower, lower + lower % 2, lower + 1), dim=1)  # below, at (to the even code), above
    probes = torch.stack((middle.nextafter(torch.tensor(0.0)), middle, middle.nextafter(torch.tensor(1e9))), dim=1)
    x = torch.full((probes.numel(), 32), 448.0)  # the largest code in every group keeps its scale at 1
    x[:, 0] = probes.flatten()
    codes, scale = quantize_fp8(x)
    assert bool((scale == 1).all())
    assert codes[:, 0].view(torch.uint8).tolist() == wanted.flatten().tolist()


def test_all_e2m1_codes() -> None:
    """Pitfall 40: code 8 is -0, and every code survives decode and encode."""
    wanted = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert same_values(e2m1_decode(ALL_CODES[:16]), wanted + [-value for value in wanted])
    assert e2m1_encode(e2m1_decode(ALL_CODES[:16])).tolist() == list(range(16))


def test_e2m1_midpoints_go_to_the_even_code() -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = [0, 2, 2, 4, 4, 6, 6]
    assert e2m1_encode(midpoints).tolist() == codes and e2m1_encode(-midpoints).tolist() == [c + 8 for c in codes]
    assert e2m1_encode(midpoints.nextafter(torch.tensor(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert e2m1_encode(midpoints.nextafter(torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1_encode(torch.tensor([6.1, 1e30, -1e30, 0.0, -0.0, -1e-30])).tolist() == [7, 7, 15, 0, 8, 8]
    up = torch.bucketize(midpoints, midpoints, right=True)  # wrong variants: ties all up, or all down
    down = torch.bucketize(midpoints, midpoints)
    assert up.tolist() != codes and down.tolist() != codes


def test_low_nibble_is_the_even_element() -> None:
    """Pitfall 40."""
    assert e2m1_decode(unpack_nibbles(torch.tensor([0x21], dtype=torch.uint8))).tolist() == [0.5, 1.0]
    assert torch.equal(pack_nibbles(unpack_nibbles(ALL_CODES)), ALL_CODES)
    assert torch.equal(unpack_nibbles(ALL_CODES.view(torch.int8)), unpack_nibbles(ALL_CODES))


# --- power-of-two scales -----------------------------------------------------------------------------------------


def exact_ceil(value: float) -> Fraction:
    """Smallest power of two >= value, in exact rational arithmetic."""
    power, value = Fraction(1), Fraction(value)
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power


def test_power_of_two_ceil_at_every_boundary() -> None:
    """Pitfall 44: one float32 step below, at and above 2^k for every normal k; a floating log2 errs there."""
    at = torch.ldexp(torch.ones(252), torch.arange(-125, 127))
    below, above = at.nextafter(torch.tensor(0.0)), at.nextafter(torch.tensor(1e39))
    assert torch.equal(power_of_two_ceil(below), at)
    assert torch.equal(power_of_two_ceil(at), at)
    assert torch.equal(power_of_two_ceil(above), 2 * at)
    assert [Fraction(v) for v in power_of_two_ceil(above).tolist()] == [exact_ceil(v) for v in above.tolist()]
    assert not torch.equal(torch.exp2(torch.log2(above).ceil()), 2 * at)  # wrong variant


@settings(deadline=None, max_examples=200)
@given(st.floats(2.0**-125, 2.0**126, width=32))
def test_power_of_two_ceil_is_exact(value: float) -> None:
    assert Fraction(power_of_two_ceil(torch.tensor(value)).item()) == exact_ceil(value)


# --- activation quantizers ---------------------------------------------------------------------------------------


def boundary_groups(quantizer: oracle.Quantizer) -> Tensor:
    """BF16 groups whose largest value lies below, at and above every power of two times the largest code."""
    rows = []
    for exponent in range(-12, 9):
        edge = torch.tensor(quantizer.largest * 2.0**exponent).bfloat16()
        for largest in (edge.nextafter(torch.zeros_like(edge)), edge, edge.nextafter(torch.full_like(edge, 1e9))):
            fractions = torch.linspace(-1, 1, 2 * quantizer.group)
            rows.append((largest.float() * fractions).bfloat16())
    return torch.stack(rows)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizer_equals_the_oracle(name: str) -> None:
    """Bit for bit, scale boundaries and many magnitudes; saturation of the E4M3 scale included."""
    fake_quant, _, quantizer = QUANTIZERS[name]
    spread = torch.randn(40, 64) * torch.exp2(torch.randint(-16, 14, (40, 1)))
    for x in (boundary_groups(quantizer), spread.bfloat16(), (1e4 * torch.randn(2, 64)).bfloat16()):
        wanted = torch.from_numpy(oracle.fake_quantize(x.float().numpy(), quantizer))
        got = fake_quant(x)
        assert got.dtype == torch.bfloat16 and bool(torch.isfinite(got).all())
        assert torch.equal(got.double(), wanted) and torch.equal(torch.signbit(got), torch.signbit(wanted))
        assert torch.equal(fake_quant(x.float()), wanted.float())  # the float32 numerics quantize the same way


@pytest.mark.parametrize(("name", "exponent"), [("fp8", -22), ("fp4_e8m0", -126), ("fp4_e4m3", -9)])
def test_all_zero_group(name: str, exponent: int) -> None:
    """The floor of the largest magnitude decides the scale; the values stay zero with their sign."""
    fake_quant, quantize, _ = QUANTIZERS[name]
    zeros = torch.zeros(1, 32, dtype=torch.bfloat16)
    zeros[0, 1] = -0.0
    assert bool((quantize(zeros)[1].double() == 2.0**exponent).all())
    assert not fake_quant(zeros).any() and torch.equal(torch.signbit(fake_quant(zeros)), torch.signbit(zeros))


@pytest.mark.parametrize(("name", "group"), [("fp8", 32), ("fp4_e8m0", 32), ("fp4_e4m3", 16)])
def test_scale_belongs_to_its_group(name: str, group: int) -> None:
    """A large value changes its own group of consecutive channels and no other."""
    fake_quant, quantize, _ = QUANTIZERS[name]
    x = torch.randn(1, 96)
    loud = x.clone()
    loud[0, group] = 1000.0
    same = fake_quant(x)[0] == fake_quant(loud)[0]
    assert bool(same[:group].all() and same[2 * group:].all()) and not bool(same[group:2 * group].all())
    assert quantize(x)[1].shape == (1, 96 // group)
    with pytest.raises(ValueError, match=f"groups of {group}.*multiple"):
        fake_quant(torch.zeros(1, 40))


# --- dense FP8 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(33, 70), (32, 64), (1, 5), (64, 33)])
def test_fp8_tiles_of_any_size(rows: int, columns: int) -> None:
    """Every element by its own scale[r // 32, c // 32], also where the last tiles are partial."""
    codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8)
    scale = torch.randint(110, 140, (-(-rows // 32), -(-columns // 32)), dtype=torch.uint8)
    table = e4m3_table()
    wanted = np.array([[table[codes[r, c]] * 2.0 ** (int(scale[r // 32, c // 32]) - 127) for c in range(columns)]
                       for r in range(rows)])
    got = decode_fp8_blocks(codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
    assert got.dtype == torch.bfloat16 and np.array_equal(got.double().numpy(), wanted)


def test_packed_fp4_has_32_elements_per_scale() -> None:
    """Pitfall 41: int8 [R, C/2] beside scales [R, C/32] looks like groups of 16 on disk and is groups of 32."""
    packed = torch.full((1, 32), 0x22, dtype=torch.int8)  # 64 elements, all 1.0
    scale = torch.tensor([[127, 130]], dtype=torch.uint8)
    assert decode_mxfp4(packed, scale)[0].tolist() == [1.0] * 32 + [8.0] * 32
