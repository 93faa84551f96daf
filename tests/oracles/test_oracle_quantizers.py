"""Number formats and fake quantizers against golden tensors, torch's formats and exhaustive tables."""

import numpy as np
import pytest
import torch

from reference.oracles import quantizers
from reference.oracles.quantizers import FP4_GROUP16, FP4_GROUP32, FP8_GROUP32, fake_quantize

GOLDEN_NAMES = {"fp8_b32": FP8_GROUP32, "fp4_e8m0_b32": FP4_GROUP32, "fp4_e4m3_b16": FP4_GROUP16}


@pytest.mark.parametrize("case", ["edges", "random", "ties"])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_fake_quantizers_equal_the_golden_values(ops, case, name):
    result = fake_quantize(ops[f"quant.{case}.input"], GOLDEN_NAMES[name])
    np.testing.assert_array_equal(result, ops[f"quant.{case}.{name}"])


def test_decoding_tables_equal_torch():
    codes = np.arange(256, dtype=np.uint8)
    bytes_ = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(quantizers.decode_e4m3(codes), bytes_.view(torch.float8_e4m3fn).float().numpy())
    np.testing.assert_array_equal(quantizers.decode_e8m0(codes), bytes_.view(torch.float8_e8m0fnu).float().numpy())


def test_low_nibble_is_the_even_column():
    np.testing.assert_array_equal(quantizers.decode_e2m1(np.array([0x21, 0xF8], np.uint8)), [0.5, 1.0, -0.0, -6.0])


def test_rounding_to_e4m3_equals_torch():
    random = torch.Generator().manual_seed(0)
    wide, subnormal = torch.randn(2000, generator=random) * 100, torch.randn(2000, generator=random) * 0.01
    values = torch.cat([wide, subnormal, torch.arange(-64, 64) / 1024]).clamp(-448, 448)
    ours = [quantizers.round_to_e4m3(value) for value in values.tolist()]
    np.testing.assert_array_equal(ours, values.to(torch.float8_e4m3fn).float().numpy())


def test_rounding_to_e2m1_ties_to_the_even_code():
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0]
    assert [quantizers.round_to_e2m1(value) for value in midpoints] == [0, 1, 1, 2, 2, 4, 4, 6]
    assert [quantizers.round_to_e2m1(-value) for value in midpoints] == [0, -1, -1, -2, -2, -4, -4, -6]
    for midpoint in midpoints[:-1]:
        below, above = np.nextafter(midpoint, 0), np.nextafter(midpoint, 9)
        assert quantizers.round_to_e2m1(below) < midpoint < quantizers.round_to_e2m1(above)


@pytest.mark.parametrize("exponent", [-30, -1, 0, 1, 7, 100])
def test_power_of_two_ceiling_turns_exactly_at_powers(exponent):
    power = np.float32(2.0**exponent)
    assert quantizers.power_of_two_ceiling(np.nextafter(power, np.float32(0))) == power
    assert quantizers.power_of_two_ceiling(power) == power
    assert quantizers.power_of_two_ceiling(np.nextafter(power, np.float32(np.inf))) == 2 * power


def test_e4m3_scale_divides_by_six():
    """One float32 step below 6 * 1.1875 the quotient lies below the midpoint; times float32(1/6) it would reach it.

    BF16 inputs never come this close. (For power-of-two scales, dividing and multiplying agree around every power.)
    """
    largest = np.nextafter(np.float32(7.125), np.float32(0))
    assert quantizers.group_scales(np.full((1, 16), largest), FP4_GROUP16) == 1.125
    assert quantizers.round_to_e4m3(largest * np.float32(1 / 6)) == 1.25


def test_bf16_rounding_equals_torch():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(quantizers.round_to_bf16(values.numpy()), values.bfloat16().float().numpy())


@pytest.mark.parametrize("quantizer", GOLDEN_NAMES.values())
def test_rounding_margin_is_where_codes_turn(quantizer):
    """Within the margin nothing turns; a little beyond it, moving every value by that share turns something."""
    values = np.random.default_rng(3).normal(size=(4, 32))
    margin = quantizers.rounding_margin(values, quantizer)
    reach = np.abs(values.reshape(-1, quantizer.group)).max(axis=1, keepdims=True).repeat(quantizer.group, 1)
    reach = reach.reshape(values.shape)
    before = fake_quantize(values, quantizer)
    # Moving all magnitudes at once also moves the scale, so the nearest code midpoint is tried value by value.
    turned = {
        share: any(
            (fake_quantize(np.where(np.arange(values.size).reshape(values.shape) == i, moved, values), quantizer)
             != before).any()
            for i in range(values.size)
            for moved in (values + share * margin * reach, values - share * margin * reach)
        )
        for share in (0.9, 1.1)
    }
    assert turned == {0.9: False, 1.1: True}
