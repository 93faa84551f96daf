"""Number formats: how stored bytes become values, and how activations are rounded to them.

What it computes
    1. Scalar formats: E2M1 (FP4), E4M3 (FP8), E8M0 (power-of-two scale).
    2. Activation quantizers, each as `quantize_*` (codes and scales) and `fake_quant_*` (the values they stand for).
    3. Weight decoders: packed tensors of a checkpoint to BF16, computed in float32 and rounded once. `PackedWeight`
       is a weight that stays packed in memory and is decoded when it is used.
Formulas
    value = code value * scale.  power_of_two_ceil(x) = 2^ceil(log2 x), done on the bits of the float32.
Mirrors
    official: `act_quant`, `fp4_act_quant` and the FP4/FP8 GEMM operand layout of the official kernel file.
Tests
    tests/test_quant.py, tests/test_golden_ops.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# official: E2M1 magnitudes of codes 0..7; code + 8 is the negative.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0

# --- scalar formats --------------------------------------------------------------------------------------------


def power_of_two_ceil(x: Tensor) -> Tensor:
    """Smallest power of two that is at least x.

    x: any shape, float32, positive and normal. Returns float32. Works on the bits (official: exponent plus one if any
    mantissa bit is set), because a floating logarithm errs next to powers of two.
    """
    bits = x.to(torch.float32).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """E8M0 bytes to float32: byte b is 2^(b-127); byte 255 is NaN.

    scale: float8_e8m0fnu or uint8, any shape. The bytes are reinterpreted, never converted: a converting copy would
    turn 2^-7 into 0.
    """
    byte = scale.view(torch.uint8).to(torch.int32)
    bits = byte << 23
    bits = torch.where(byte == 0, torch.full_like(bits, 1 << 22), bits)  # 2^-127 is a float32 subnormal
    value = bits.view(torch.float32)
    return torch.where(byte == 255, torch.full_like(value, float("nan")), value)


def float_to_e8m0(scale: Tensor) -> Tensor:
    """Powers of two (float32, 2^-126 .. 2^127) to E8M0 bytes (float8_e8m0fnu)."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def e2m1_encode(x: Tensor) -> Tensor:
    """Nearest E2M1 code, ties to the even code, saturating at 6; keeps the sign of zero.

    x: float32, any shape. Returns uint8 codes 0..15 (bit 3 is the sign).
    """
    magnitude = x.abs()
    # official: a midpoint goes to the even one of its two codes, hence > and >= in turn.
    code = ((magnitude > 0.25).to(torch.uint8) + (magnitude >= 0.75) + (magnitude > 1.25) + (magnitude >= 1.75)
            + (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5.0))
    return code + 8 * torch.signbit(x).to(torch.uint8)


def e2m1_decode(code: Tensor) -> Tensor:
    """E2M1 codes 0..15 (uint8) to float32; code 8 is -0."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=code.device)
    return table[code.to(torch.int64)]


def pack_nibbles(code: Tensor) -> Tensor:
    """[..., 2n] codes to [..., n] bytes; the even element goes to the low nibble (official)."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes (int8 or uint8) to [..., 2n] codes (uint8), low nibble first."""
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)


# --- activation quantizers -------------------------------------------------------------------------------------


def _groups(x: Tensor, group: int) -> Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"Quantizing activations in groups of {group}: the last dimension is {x.shape[-1]}, wanted a "
                         f"multiple of {group}. Choose widths that are multiples of it.")
    return x.to(torch.float32).unflatten(-1, (-1, group))


def quantize_fp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """E4M3 codes with one power-of-two scale per `group` channels (official: act_quant, scale_fmt ue8m0).

    x [..., n] -> codes [..., n] float8_e4m3fn, scales [..., n/group] float32. The amax has a floor of 1e-4, so an all-zero
    group has scale 2^-22.
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    # official: multiplies by the float32 reciprocal, does not divide by 448.
    scale = power_of_two_ceil(amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32))
    codes = (grouped / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)  # an overflow would cast to NaN
    return codes.flatten(-2), scale.squeeze(-1)


def quantize_fp4_e8m0(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """E2M1 codes with one power-of-two scale per `group` channels (official: fp4_act_quant, index queries and keys).

    x [..., n] -> codes [..., n] uint8 (one code per element), scales [..., n/group] float32; an all-zero group has 2^-126.
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = power_of_two_ceil(amax * torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32))
    codes = e2m1_encode((grouped / scale).clamp(-E2M1_MAX, E2M1_MAX))
    return codes.flatten(-2), scale.squeeze(-1)


def quantize_fp4_e4m3(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """E2M1 codes with one E4M3 scale per `group` channels (official: fp4_act_quant, compressed KV rows).

    x [..., n] -> codes [..., n] uint8, scales [..., n/group] float8_e4m3fn. Here the official code divides by 6; the amax has a
    floor of 6 * 2^-9, so an all-zero group has the smallest E4M3 number 2^-9 as its scale.
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    codes = e2m1_encode((grouped / scale.to(torch.float32)).clamp(-E2M1_MAX, E2M1_MAX))
    return codes.flatten(-2), scale.squeeze(-1)


def dequantize_groups(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values [..., n] float32 times scale [..., n/group] float32, in float32, cast once to `dtype`."""
    grouped = values.unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quant_fp8(x: Tensor) -> Tensor:
    """x [..., n] rounded to what `quantize_fp8` can store; same dtype."""
    codes, scale = quantize_fp8(x)
    return dequantize_groups(codes.to(torch.float32), scale, x.dtype)


def fake_quant_fp4_e8m0(x: Tensor) -> Tensor:
    """x [..., n] rounded to what `quantize_fp4_e8m0` can store; same dtype."""
    codes, scale = quantize_fp4_e8m0(x)
    return dequantize_groups(e2m1_decode(codes), scale, x.dtype)


def fake_quant_fp4_e4m3(x: Tensor) -> Tensor:
    """x [..., n] rounded to what `quantize_fp4_e4m3` can store; same dtype."""
    codes, scale = quantize_fp4_e4m3(x)
    return dequantize_groups(e2m1_decode(codes), scale.to(torch.float32), x.dtype)


# --- weights as stored -----------------------------------------------------------------------------------------


def decode_fp8_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """Dense FP8: weight [R, C] float8_e4m3fn, scale [ceil(R/32), ceil(C/32)] E8M0, one scale per 32x32 tile -> BF16."""
    rows, columns = weight.shape
    factor = e8m0_to_float(scale).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return (weight.to(torch.float32) * factor).to(torch.bfloat16)


def decode_fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Engram rows: weight [R, C] float8_e4m3fn, scale [R, C/32] E8M0, one scale per 32 channels of a row -> BF16."""
    return dequantize_groups(weight.to(torch.float32), e8m0_to_float(scale), torch.bfloat16)


def decode_mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """MXFP4: weight [R, C/2] packed codes, scale [R, C/32] E8M0 -> BF16 [R, C]."""
    return dequantize_groups(e2m1_decode(unpack_nibbles(weight)), e8m0_to_float(scale), torch.bfloat16)


@dataclass(frozen=True)
class WeightFormat:
    """How one stored weight is laid out. `decode(weight, *companions)` gives BF16 [rows, columns].

    `rowwise` says that a row can be decoded alone, which the Engram tables need.
    """

    name: str
    companions: tuple[str, ...]  # suffixes of the tensors that go with `.weight`
    decode: object
    rowwise: bool


FORMATS = {
    "fp8_blocks": WeightFormat("FP8 E4M3, 32x32 tiles, E8M0", ("scale",), decode_fp8_blocks, False),
    "fp8_rows": WeightFormat("FP8 E4M3, 1x32, E8M0", ("scale",), decode_fp8_rows, True),
    "mxfp4": WeightFormat("MXFP4 E2M1, 1x32, E8M0", ("scale",), decode_mxfp4, True),
}


@dataclass(frozen=True)
class PackedWeight:
    """A weight that stays as stored. Stands where the dense parameter would: `linear.weight`, `embed.weight`.

    tensors: the stored `weight` followed by its companions, in the order that the format's decoder takes.
    """

    format: WeightFormat
    tensors: tuple[Tensor, ...]
    shape: tuple[int, int]  # logical [rows, columns]

    def dequantize(self) -> Tensor:
        """The whole weight, BF16 [rows, columns]."""
        return self.format.decode(*self.tensors)

    def rows(self, index: Tensor) -> Tensor:
        """Rows `index` [...] int64 of a row-wise format -> BF16 [..., columns]."""
        flat = index.flatten()
        if self.format.rowwise:
            values = self.format.decode(*(_take_rows(tensor, flat) for tensor in self.tensors))
        else:
            values = self.dequantize()[flat]
        return values.unflatten(0, index.shape) if index.dim() != 1 else values

    def to(self, device: torch.device | str) -> PackedWeight:
        return PackedWeight(self.format, tuple(tensor.to(device) for tensor in self.tensors), self.shape)


def _take_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[index] for one-byte dtypes whose indexing torch does not implement: gather the bytes, view them back."""
    return tensor.view(torch.uint8)[index].view(tensor.dtype)
