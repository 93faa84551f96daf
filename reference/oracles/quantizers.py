"""Number formats decoded from their bits, and the three activation quantizers of the published kernels.

    E4M3 (fn)   sign, 4 exponent bits (bias 7), 3 mantissa bits; largest 448; no infinity; 0x7F and 0xFF are NaN
    E8M0        byte b is 2^(b-127); 255 is NaN
    E2M1        codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign; two codes per byte, even column low

    fake_quant(x) = code(x / scale) * scale, one scale per group of consecutive channels

Mirrors: act_quant and fp4_act_quant of the official kernel file. Leaves out: packing to codes, since only the
quantize-dequantize values take part in the forward. Test: tests/oracles/test_oracle_quantizers.py (golden tensors).

The kernels compute in float32, so these functions round their input to float32 first and stay there: near a rounding
midpoint the float32 quotient decides the code.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # official: the eight magnitudes of FP4
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbors; the even code wins
FP8_MAX, FP4_MAX = 448.0, 6.0  # official: largest finite magnitude of each format


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """codes uint8 [...] -> values float32 [...]; exact."""
    table = np.zeros(256, np.float32)
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent > 0 else mantissa / 8 * 2.0**-6
        table[code] = -magnitude if code & 128 else magnitude
    table[0x7F] = table[0xFF] = np.nan
    return table[codes]


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """codes uint8 [...] -> powers of two, float32 [...]; byte 0 is the float32 subnormal 2^-127."""
    table = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float64).astype(np.float32)
    return table[codes]


def decode_e2m1(packed: np.ndarray) -> np.ndarray:
    """packed uint8 [..., C/2] -> values float32 [..., C]; the low nibble holds the even column."""
    table = np.array(E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES), np.float32)
    values = np.empty(packed.shape[:-1] + (2 * packed.shape[-1],), np.float32)
    values[..., 0::2] = table[packed & 15]
    values[..., 1::2] = table[packed >> 4]
    return values


def decode_bf16(bits: np.ndarray) -> np.ndarray:
    """bits uint16 [...] -> values float32 [...]: BF16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """values float32 [...] -> float32 [...] on the BF16 grid, nearest, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def power_of_two_ceiling(values: np.ndarray) -> np.ndarray:
    """Smallest power of two >= each positive float32, on the bits; a floating logarithm would miss by one."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return ((exponent + (mantissa > 0)) << 23).astype(np.uint32).view(np.float32)


def e4m3_step(magnitudes: np.ndarray) -> np.ndarray:
    """Distance between neighboring E4M3 values around each magnitude, float64."""
    _, exponent = np.frexp(magnitudes)  # magnitude = fraction * 2^exponent with 0.5 <= fraction < 1
    return 2.0 ** (np.maximum(exponent - 1, -6) - 3)  # below 2^-6 the format is subnormal with the fixed step 2^-9


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest E4M3 values, ties to the even mantissa, saturating at +-448; float64."""
    magnitudes = np.minimum(np.abs(np.asarray(values, np.float64)), FP8_MAX)
    return np.copysign(np.rint(magnitudes / e4m3_step(magnitudes)) * e4m3_step(magnitudes), values)


def round_to_e2m1(values: np.ndarray) -> np.ndarray:
    """Nearest E2M1 values, ties to the even code, saturating at +-6; the sign of zero is kept. float64."""
    magnitudes = np.minimum(np.abs(np.asarray(values, np.float64)), FP4_MAX)
    codes = np.zeros(magnitudes.shape, int)
    for lower_code, midpoint in enumerate(E2M1_MIDPOINTS):  # a code rises by one at each midpoint below the value
        codes += (magnitudes > midpoint) | ((magnitudes == midpoint) & (lower_code % 2 == 1))
    return np.copysign(np.array(E2M1_MAGNITUDES)[codes], values)


class Quantizer(NamedTuple):
    """One activation quantizer. official: the floors and reciprocals of the kernels."""

    group: int  # consecutive channels sharing a scale
    floor: np.float32  # lower bound of the largest magnitude, so that an all-zero group gets a finite scale
    power_of_two: bool  # scale format: power of two (E8M0), otherwise E4M3
    largest: float  # largest magnitude of the code format
    code: Callable[[np.ndarray], np.ndarray]  # nearest code values


FP8_GROUP32 = Quantizer(32, np.float32(1e-4), True, FP8_MAX, round_to_e4m3)  # window KV
FP4_GROUP32 = Quantizer(32, np.float32(6 * 2.0**-126), True, FP4_MAX, round_to_e2m1)  # index queries and keys
FP4_GROUP16 = Quantizer(16, np.float32(6 * 2.0**-9), False, FP4_MAX, round_to_e2m1)  # compressed KV


def group_scales(groups: np.ndarray, quantizer: Quantizer) -> np.ndarray:
    """groups float32 [n, G] -> their scales, float32 [n, 1]."""
    largest = np.maximum(np.abs(groups).max(axis=1, keepdims=True), quantizer.floor)
    if quantizer.power_of_two:
        # official: multiplies by the float32 reciprocal, does not divide
        return power_of_two_ceiling(largest * np.float32(1 / quantizer.largest))
    return round_to_e4m3(largest / np.float32(quantizer.largest)).astype(np.float32)  # official: true division


def fake_quantize(values: np.ndarray, quantizer: Quantizer) -> np.ndarray:
    """Round to the quantizer's grid and back: [..., D] -> float64 [..., D]. D must be a multiple of the group.

    The official kernel casts the result to BF16; that cast is exact (at most 4 + 4 significant bits).
    """
    if values.shape[-1] % quantizer.group:
        raise ValueError(f"fake quantization: wanted a multiple of {quantizer.group} channels, got {values.shape[-1]}")
    groups = np.asarray(values, np.float32).reshape(-1, quantizer.group)
    scales = group_scales(groups, quantizer)
    quotients = groups / scales  # float32 / float32: rounded once
    return (quantizer.code(quotients) * scales).reshape(values.shape)


def rounding_margin(values: np.ndarray, quantizer: Quantizer) -> float:
    """Smallest change, as a share of its group's largest magnitude, that could turn a code or a scale. ours.

    [..., D] -> one number. A model in float32 whose values differ by less than this share rounds identically.
    """
    groups = np.abs(np.asarray(values, np.float64).reshape(-1, quantizer.group))
    groups = groups[groups.max(axis=1, initial=0) > quantizer.floor]  # below it, the floor fixes the scale
    if len(groups) == 0:
        return np.inf
    largest = groups.max(axis=1, keepdims=True)
    scales = group_scales(groups.astype(np.float32), quantizer).astype(np.float64)
    # the largest magnitudes at which the scale would become its neighbor
    if quantizer.power_of_two:
        boundaries = np.concatenate([scales, scales / 2], axis=1) * quantizer.largest
    else:
        half_steps = e4m3_step(scales) / 2
        boundaries = np.concatenate([scales + half_steps, scales - half_steps], axis=1) * quantizer.largest
    codes = groups / scales
    if quantizer.largest == FP4_MAX:
        distances = np.abs(codes[..., None] - np.array(E2M1_MIDPOINTS)).min(axis=-1)
    else:
        distances = np.abs(codes / e4m3_step(codes) % 1 - 0.5) * e4m3_step(codes)  # midpoints: half a step off the grid
    return float(min(np.abs(largest / boundaries - 1).min(), (distances * scales / largest).min()))
