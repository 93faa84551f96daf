"""Number formats: how stored bytes become values, and how values are rounded to them.

What it computes
    1. Scalar formats: E2M1 (FP4), E4M3 (FP8), E8M0 (power-of-two scale), and fields of 2 to 8 bits.
    2. Activation quantizers, each as `quantize_*` (codes and scales) and `fake_quant_*` (the values they stand for).
    3. Weight formats, each a pair `decode_*` (stored tensors to BF16, computed in float32 and rounded once) and
       `encode_*` (values to stored tensors). `PackedWeight` is a weight that stays packed in memory and is decoded when
       it is used.

    format       stored weight                  companions                             element (r, c)
    FP8 blocks   E4M3 [R, C]                    scale E8M0 [ceil(R/32), ceil(C/32)]    code * scale[r//32, c//32]
    FP8 rows     E4M3 [.., C]                   scale E8M0 [.., C/32]                  code * scale[c//32]
    MXFP4        two codes a byte [.., C/2]     scale E8M0 [.., C/32]                  code * scale[c//32]
    NVFP4        two codes a byte [R, C/2]      scale E4M3 [R, C/16], global F32 []    code * scale[c//16] * global
    affine b, g  b-bit fields, uint32 [.., C*b/32]  scales, biases BF16 [.., C/g]      code * scale[c//g] + bias[c//g]
    The MLX layouts mxfp8 and mxfp4 are "FP8 rows" and "MXFP4" with the same bytes seen as little-endian uint32 words.
    Every decode is exact in BF16 except for the affine formats and for an NVFP4 global that is no power of two.
Mirrors
    official: `act_quant`, `fp4_act_quant` and the FP4/FP8 GEMM operand layout of the official kernel file. NVFP4: the
    exporter of NVIDIA Model Optimizer. Affine and mx: `mx.quantize` and `mx.dequantize` of MLX.
Tests
    tests/test_quant.py, tests/test_quant_formats.py, tests/test_golden_ops.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    return _e2m1_table(code.device)[code.to(torch.int64)]


@functools.cache
def _e2m1_table(device: torch.device) -> Tensor:
    """The values of codes 0..15. Kept per device: copying it there anew would stop the host at every use."""
    return torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=device)


@functools.cache
def e2m1_pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2]: the two values of every byte of packed codes, low nibble first. Kept per device, likewise."""
    return e2m1_decode(unpack_nibbles(torch.arange(256, dtype=torch.uint8, device=device))).to(dtype).view(256, 2)


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


def _divided(x: Tensor, number: float) -> Tensor:
    """x / number as a true division. On CUDA torch would multiply by the reciprocal of a Python number, one rounding more."""
    return x / x.new_full((), number)


def quantize_fp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """E4M3 codes with one power-of-two scale per `group` channels (official: act_quant, scale_fmt ue8m0).

    x [..., n] -> codes [..., n] float8_e4m3fn, scales [..., n/group] float32. The amax has a floor of 1e-4, so an
    all-zero group has scale 2^-22.
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    # official: multiplies by the float32 reciprocal, does not divide by 448.
    scale = power_of_two_ceil(amax * (1.0 / E4M3_MAX))
    codes = (grouped / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)  # an overflow would cast to NaN
    return codes.flatten(-2), scale.squeeze(-1)


def quantize_fp4_e8m0(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """E2M1 codes with one power-of-two scale per `group` channels (official: fp4_act_quant, index queries and keys).

    x [..., n] -> codes [..., n] uint8 (one code per element), scales [..., n/group] float32; an all-zero group has
    2^-126.
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = power_of_two_ceil(amax * (1.0 / E2M1_MAX))
    codes = e2m1_encode((grouped / scale).clamp(-E2M1_MAX, E2M1_MAX))
    return codes.flatten(-2), scale.squeeze(-1)


def quantize_fp4_e4m3(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """E2M1 codes with one E4M3 scale per `group` channels (official: fp4_act_quant, compressed KV rows).

    x [..., n] -> codes [..., n] uint8, scales [..., n/group] float8_e4m3fn. Here the official code divides by 6; the
    amax has a floor of 6 * 2^-9, so an all-zero group has the smallest E4M3 number 2^-9 as its scale.
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = _divided(amax, E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    codes = e2m1_encode((grouped / scale.to(torch.float32)).clamp(-E2M1_MAX, E2M1_MAX))
    return codes.flatten(-2), scale.squeeze(-1)


def dequantize_groups(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values [..., n] times scale [..., n/group], in their dtype, cast once to `dtype`."""
    grouped = values.unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.unsqueeze(-1)).flatten(-2).to(dtype)


class _StraightThrough(torch.autograd.Function):
    """A quantizer whose gradient is the identity, as in training; through the casts it would be rounded to FP8 or lost."""

    @staticmethod
    def forward(ctx, x: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        return quantize(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _fake_quant(x: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    return _StraightThrough.apply(x, quantize) if x.requires_grad and torch.is_grad_enabled() else quantize(x)


def fake_quant_fp8(x: Tensor) -> Tensor:
    """x [..., n] rounded to what `quantize_fp8` can store; same dtype. Gradients pass straight through."""
    return _fake_quant(x, _round_fp8)


def fake_quant_fp4_e8m0(x: Tensor) -> Tensor:
    """x [..., n] rounded to what `quantize_fp4_e8m0` can store; same dtype. Gradients pass straight through."""
    return _fake_quant(x, _round_fp4_e8m0)


def fake_quant_fp4_e4m3(x: Tensor) -> Tensor:
    """x [..., n] rounded to what `quantize_fp4_e4m3` can store; same dtype. Gradients pass straight through."""
    return _fake_quant(x, _round_fp4_e4m3)


def _round_fp8(x: Tensor) -> Tensor:
    codes, scale = quantize_fp8(x)
    return dequantize_groups(codes.to(torch.float32), scale, x.dtype)


def _round_fp4_e8m0(x: Tensor) -> Tensor:
    codes, scale = quantize_fp4_e8m0(x)
    return dequantize_groups(e2m1_decode(codes), scale, x.dtype)


def _round_fp4_e4m3(x: Tensor) -> Tensor:
    codes, scale = quantize_fp4_e4m3(x)
    return dequantize_groups(e2m1_decode(codes), scale.to(torch.float32), x.dtype)


# --- fields of 2 to 8 bits -------------------------------------------------------------------------------------


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """[..., n*bits/32] uint32 words to [..., n] unsigned fields (uint8).

    A row is one little-endian bit stream, least significant bit first (MLX): field i is stream bits i*bits ..
    (i+1)*bits - 1, without padding, so fields of 3, 5 and 6 bits straddle words. Eight fields fill exactly `bits`
    bytes.
    """
    octets = words.contiguous().view(torch.uint8).unflatten(-1, (-1, bits))
    fields = []
    for i in range(8):
        first, shift = divmod(i * bits, 8)
        field = octets[..., first].to(torch.int16)
        if shift + bits > 8:
            field = field | (octets[..., first + 1].to(torch.int16) << 8)
        fields.append(((field >> shift) & (2**bits - 1)).to(torch.uint8))
    return torch.stack(fields, dim=-1).flatten(-2)


def pack_bits(fields: Tensor, bits: int) -> Tensor:
    """[..., n] fields below 2^bits (uint8, n*bits a multiple of 32 and n of 8) to [..., n*bits/32] uint32 words."""
    eight = fields.unflatten(-1, (-1, 8)).to(torch.int64)
    stream = (eight << (bits * torch.arange(8, device=fields.device))).sum(-1)  # disjoint bits: a sum is an or
    octets = (stream.unsqueeze(-1) >> (8 * torch.arange(bits, device=fields.device))) & 0xFF
    return octets.to(torch.uint8).flatten(-2).view(torch.uint32)


def as_words(tensor: Tensor) -> Tensor:
    """[..., n] one-byte elements as [..., n/4] uint32 words, bytes in order: how MLX stores mxfp4 and mxfp8 weights."""
    return tensor.contiguous().view(torch.uint8).view(torch.uint32)


# --- weights as stored: decoders -------------------------------------------------------------------------------
# FP8 and FP4 codes are exact in BF16, and so are E8M0 and E4M3 scales. A BF16 product is the float32 product rounded
# once, so multiplying in BF16 gives the values of multiplying in float32 and casting, in half the memory.


def decode_fp8_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """Dense FP8: weight [R, C] float8_e4m3fn, scale [ceil(R/32), ceil(C/32)] E8M0, one scale per 32x32 tile -> BF16."""
    rows, columns = weight.shape
    values = _tiles(_e4m3_values(weight)) * e8m0_to_float(scale).to(torch.bfloat16)[:, None, :, None]
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()


def _tiles(values: Tensor) -> Tensor:
    """values [R, C] -> [ceil(R/32), 32, ceil(C/32), 32], padded with zeros."""
    rows, columns = values.shape
    if rows % 32 or columns % 32:
        values = torch.nn.functional.pad(values, (0, -columns % 32, 0, -rows % 32))
    return values.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))


def decode_fp8_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 rows: weight [..., C] float8_e4m3fn (or [..., C/4] uint32 words, MLX mxfp8), scale [..., C/32] E8M0 -> BF16.

    Engram rows and MLX mxfp8: one scale per row and 32 channels, never a 32x32 tile.
    """
    return dequantize_groups(_e4m3_values(weight), e8m0_to_float(scale).to(torch.bfloat16), torch.bfloat16)


def _e4m3_values(packed: Tensor) -> Tensor:
    """[..., n] E4M3 codes, or words of four, to BF16. A look-up on a CPU, where torch converts five times as slowly."""
    octets = packed.contiguous().view(torch.uint8)
    if octets.device.type != "cpu":
        return octets.view(torch.float8_e4m3fn).to(torch.bfloat16)
    table = torch.arange(256, dtype=torch.uint8, device=packed.device).view(torch.float8_e4m3fn).to(torch.bfloat16)
    return table.index_select(0, octets.flatten().to(torch.int32)).view(octets.shape)


def decode_mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """MXFP4: weight [..., C/2] packed codes (or [..., C/8] uint32 words, MLX mxfp4), scale [..., C/32] E8M0 -> BF16."""
    return dequantize_groups(_nibble_values(weight), e8m0_to_float(scale).to(torch.bfloat16), torch.bfloat16)


def _nibble_values(packed: Tensor) -> Tensor:
    """[..., n] bytes or words to the values of their E2M1 codes, BF16. One look-up per byte, for two values."""
    octets = packed.contiguous().view(torch.uint8)
    pairs = e2m1_pairs(packed.device, torch.bfloat16).view(torch.int32).flatten()  # one number, which a CPU selects faster
    return pairs.index_select(0, octets.flatten().to(torch.int32)).view(torch.bfloat16).view(*octets.shape[:-1], -1)


def decode_nvfp4(weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """NVFP4: weight [R, C/2] packed codes, scale [R, C/16] float8_e4m3fn, global_scale [] float32 -> BF16 [R, C].

    The global scale multiplies, it is no reciprocal. code * scale has at most 6 significant bits, so it is exact and
    the product is rounded at most once, by the global scale.
    """
    values = dequantize_groups(_nibble_values(weight), _e4m3_values(scale), torch.float32)
    return (values * global_scale).to(torch.bfloat16)


def decode_affine(words: Tensor, scales: Tensor, biases: Tensor, bits: int) -> Tensor:
    """Affine: words [..., C*bits/32] uint32, scales and biases [..., C/group] -> BF16 [..., C].

    ours: scale * code + bias in float32 (the product is exact), rounded once. `mx.dequantize` with BF16 scales also
    rounds the product; the quantized matrix product of MLX does not.
    """
    codes = unpack_bits(words, bits).to(torch.float32).unflatten(-1, (scales.shape[-1], -1))
    values = codes * scales.to(torch.float32).unsqueeze(-1) + biases.to(torch.float32).unsqueeze(-1)
    return values.flatten(-2).to(torch.bfloat16)


# --- weights as stored: encoders -------------------------------------------------------------------------------
# All take values [..., C] of any float dtype, compute in float32 and round to nearest, ties to even. FP8 and MXFP4:
# encoding what the decoder returned gives the same values again (not always the same bytes: a scale may shrink). The
# other encoders fit their scales to the values, so only `mxfp4_to_nvfp4` is lossless there.


def _weight_scale(amax: Tensor, format_max: float) -> tuple[Tensor, Tensor]:
    """Smallest power of two s with amax <= s * format_max: as float32, and as E8M0.

    ours: the float scale is at least 2^-126, and an all-zero group gets byte 0, as in the published files.
    """
    scale = power_of_two_ceil((amax * (1.0 / format_max)).clamp_min(2.0**-126))
    stored = torch.where(amax == 0, 0, float_to_e8m0(scale).view(torch.uint8)).view(torch.float8_e8m0fnu)
    return scale, stored


def _check_multiple(values: Tensor, group: int, format_name: str) -> None:
    if values.shape[-1] % group:
        raise ValueError(f"Encoding a weight as {format_name}: rows of {values.shape[-1]} values, wanted a multiple of "
                         f"{group}. Keep this weight in BF16.")


def encode_fp8_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [R, C] -> codes [R, C] float8_e4m3fn, scale [ceil(R/32), ceil(C/32)] float8_e8m0fnu, one per tile."""
    rows, columns = values.shape
    tiles = _tiles(values.to(torch.float32))
    scale, stored = _weight_scale(tiles.abs().amax((1, 3)), E4M3_MAX)
    codes = (tiles / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).flatten(0, 1).flatten(1, 2)
    return codes[:rows, :columns].contiguous().to(torch.float8_e4m3fn), stored


def encode_fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., C] -> codes [..., C] float8_e4m3fn, scale [..., C/32] float8_e8m0fnu; MLX mxfp8 with `as_words`."""
    _check_multiple(values, 32, "FP8, 1x32")
    grouped = _groups(values, 32)
    scale, stored = _weight_scale(grouped.abs().amax(-1), E4M3_MAX)
    codes = (grouped / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), stored


def encode_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., C] -> packed codes [..., C/2] uint8, scale [..., C/32] float8_e8m0fnu.

    The published native files tag the packed bytes int8 (`.view(torch.int8)`), MLX uint32 (`as_words`).
    """
    _check_multiple(values, 32, "MXFP4")
    grouped = _groups(values, 32)
    scale, stored = _weight_scale(grouped.abs().amax(-1), E2M1_MAX)
    codes = e2m1_encode((grouped / scale.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX))
    return pack_nibbles(codes.flatten(-2)), stored


def encode_nvfp4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """values [R, C] -> packed codes [R, C/2] uint8, scale [R, C/16] float8_e4m3fn, global scale [] float32. Lossy.

    Model Optimizer: global = amax / (6 * 448); scale = E4M3(group amax / 6 / global), within 2^-9 .. 448.
    """
    _check_multiple(values, 16, "NVFP4")
    grouped = _groups(values, 16)
    amax = grouped.abs().amax()
    global_scale = torch.where(amax > 0, _divided(amax, E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    scale = (_divided(grouped.abs().amax(-1), E2M1_MAX) / global_scale).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.to(torch.float32) * global_scale).unsqueeze(-1)
    codes = e2m1_encode((grouped / step).clamp(-E2M1_MAX, E2M1_MAX))
    return pack_nibbles(codes.flatten(-2)), scale, global_scale


def mxfp4_top_exponent(scale: Tensor) -> int:
    """Largest exponent of E8M0 scales (zero bytes, -127, count only if all are). w1 and w3 of an expert share one."""
    return int(scale.view(torch.uint8).max()) - 127


def mxfp4_to_nvfp4(weight: Tensor, scale: Tensor, top: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The lossless cast of MXFP4 to NVFP4.

    weight [R, C/2], scale [R, C/32] E8M0 -> codes [R, C/2] uint8, scale [R, C/16] float8_e4m3fn, global [] float32.
    Model Optimizer: global = 2^(top - 8), top the largest exponent of the tensor (or of w1 and w3 together, as their
    products are fused), and both halves of a group of 32 get 2^(exponent - top + 8). The top lands on 2^8 because 448
    is no power of two. Code 8 (-0) becomes 0. A group of zeros may be out of range; it gets the smallest scale, 2^-9.
    Raises ValueError if a group with values lies more than 17 steps below `top`: E4M3 holds 2^-9 .. 2^8 only.
    """
    exponent = scale.view(torch.uint8).to(torch.int32) - 127
    top = mxfp4_top_exponent(scale) if top is None else top
    codes = unpack_nibbles(weight)
    codes = torch.where(codes == 8, 0, codes)
    step = exponent - (top - 8)
    zero = (codes.unflatten(-1, (-1, 32)) == 0).all(-1)
    outside = ~zero & ((step < -9) | (step > 8))
    if bool(outside.any()):
        where = [int(i) for i in outside.nonzero()[0]]
        raise ValueError(f"Casting MXFP4 to NVFP4: the scale 2^{int(exponent[tuple(where)])} at {where} is outside 17 "
                         f"steps below the largest, 2^{top}, so the cast would lose bits. Keep this weight in MXFP4.")
    halves = torch.exp2(step.clamp(-9, 8).to(torch.float32)).repeat_interleave(2, -1).to(torch.float8_e4m3fn)
    return pack_nibbles(codes), halves, torch.tensor(2.0**(top - 8), dtype=torch.float32)


def affine_minmax(grouped: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """MLX's rule for one scale and bias per group: grouped [..., g] float32 -> scale, bias [...] float32.

    The end of larger magnitude is hit exactly and so is zero: scale = edge / round(edge / step), positive when the
    minimum is that end, otherwise negative; the bias is the value of code 0.
    """
    low, high = grouped.amin(-1), grouped.amax(-1)
    step = _divided(high - low, 2**bits - 1).clamp_min(1e-7)  # MLX: its eps
    from_low = low.abs() > high.abs()
    step = torch.where(from_low, step, -step)
    edge = torch.where(from_low, low, high)
    levels = torch.round(edge / step)
    return torch.where(levels != 0, edge / levels, step), torch.where(levels != 0, edge, torch.zeros_like(edge))


def affine_codes(grouped: Tensor, scale: Tensor, bias: Tensor, bits: int) -> Tensor:
    """Nearest codes: grouped [..., g] float32, scale and bias [...] float32 -> uint8 [..., g] in 0 .. 2^bits - 1."""
    codes = torch.round((grouped - bias.unsqueeze(-1)) / scale.unsqueeze(-1))
    return codes.clamp(0, 2**bits - 1).to(torch.uint8)


def encode_affine(values: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """values [..., C] -> words [..., C*bits/32] uint32, scales and biases [..., C/group] BF16, as `mx.quantize` does.

    MLX: codes are computed with the float32 scale and bias, which are rounded to BF16 afterwards.
    """
    if bits not in AFFINE_BITS or group not in AFFINE_GROUPS:
        raise ValueError(f"Encoding a weight as affine: {bits} bits in groups of {group}; wanted bits among "
                         f"{AFFINE_BITS} and a group among {AFFINE_GROUPS}.")
    _check_multiple(values, group, f"affine {bits}-bit")
    grouped = _groups(values, group)
    scale, bias = affine_minmax(grouped, bits)
    words = pack_bits(affine_codes(grouped, scale, bias, bits).flatten(-2), bits)
    return words, scale.to(torch.bfloat16), bias.to(torch.bfloat16)


# --- weights as stored: the table of formats ---------------------------------------------------------------------


@dataclass(frozen=True)
class WeightFormat:
    """How one stored weight is laid out. `decode(weight, *companions)` gives BF16 [rows, columns].

    `rowwise` says that a row can be decoded alone, which the Engram tables need.
    """

    name: str
    companions: tuple[str, ...]  # what goes with the weight, in the order that `decode` takes
    decode: Callable[..., Tensor]
    rowwise: bool
    tiled: bool = False  # one row of scales for TILE rows of the weight


TILE = 32  # official: rows and columns that share a scale in dense FP8
_SLICE = 1 << 20  # ours: values decoded at once, so that what that needs in between stays in a processor's cache

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FORMATS = {
    "fp8_blocks": WeightFormat("FP8 E4M3, 32x32 tiles, E8M0", ("scale",), decode_fp8_blocks, False, tiled=True),
    "fp8_rows": WeightFormat("FP8 E4M3, 1x32, E8M0", ("scale",), decode_fp8_rows, True),
    "mxfp4": WeightFormat("MXFP4 E2M1, 1x32, E8M0", ("scale",), decode_mxfp4, True),
    "mxfp8": WeightFormat("MXFP8 E4M3, 1x32, E8M0", ("scales",), decode_fp8_rows, True),
    "nvfp4": WeightFormat("NVFP4 E2M1, 1x16, E4M3 times F32", ("scale", "global_scale"), decode_nvfp4, False),
    **{f"affine{bits}_g{group}": WeightFormat(f"affine {bits}-bit, group {group}", ("scales", "biases"),
                                              partial(decode_affine, bits=bits), True)
       for bits in AFFINE_BITS for group in AFFINE_GROUPS},
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
        """The whole weight, BF16 [rows, columns]. On a CPU in slices of rows; no value depends on that."""
        rows, columns = self.shape
        step = max(TILE, _SLICE // columns // TILE * TILE)
        if rows <= step or self.tensors[0].device.type != "cpu":
            return self.format.decode(*self.tensors)
        out = torch.empty(self.shape, dtype=torch.bfloat16)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            out[first:last] = self.format.decode(*(self._part(i, first, last) for i in range(len(self.tensors))))
        return out

    def _part(self, index: int, first: int, last: int) -> Tensor:
        """What rows first .. last - 1 need of one stored tensor; `first` is a multiple of TILE."""
        tensor = self.tensors[index]
        if tensor.numel() == 1:  # a global scale
            return tensor
        tiled = index > 0 and self.format.tiled
        return tensor[first // TILE:-(-last // TILE)] if tiled else tensor[first:last]

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
    """tensor[index] for dtypes whose indexing torch may not implement (FP8, uint32): gather the bytes, view them back."""
    return tensor.view(torch.uint8)[index].view(tensor.dtype)
