"""How the rows of a packed cache lie in memory: codes and scales, one byte string per row.

    window row     E4M3 codes, one E8M0 scale per 32 channels            512 channels: 512 + 16 = 528 bytes
    compressed row E2M1 codes, two a byte, one E4M3 scale per 16         512 channels: 256 + 32 = 288 bytes
    index key      E2M1 codes, two a byte, one E8M0 scale per 32         128 channels:  64 +  4 =  68 bytes
Why nothing is lost
    The forward fake-quantizes a row before it is stored, so every channel is code * scale already; that product is exact in
    BF16 and in float32. `pack` gives the codes and scales of such a row, `unpack` the same values again, bit for bit
    (-0 and +0 count as one value). What is not such a row is refused.
Why packing is not the quantizer once more
    Quantizing a compressed row twice changes it where its E4M3 scale is subnormal: the scale 2 * 2^-9 with largest code 4
    would become 1 * 2^-9, and 4 would no longer fit. So the scale is looked for that reproduces the whole group.
Mirrors
    report: cache sizes (890 bytes a token for compressed rows and index keys). The official code keeps BF16 buffers.
Tests
    tests/test_cache_packed.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.quant import (E2M1_VALUES, E4M3_MAX, dequantize_groups, e2m1_decode, e2m1_encode, e2m1_pairs, e8m0_to_float,
                             float_to_e8m0, pack_nibbles, quantize_fp4_e8m0, quantize_fp8)

BLOCK = 32  # official: channels per E8M0 scale
SMALL_BLOCK = 16  # official: channels per E4M3 scale


@dataclass(frozen=True)
class Packing:
    """One layout. pack: values [..., n] -> bytes [..., width(n)] uint8; unpack: bytes -> values [..., n] float32."""

    name: str
    width: Callable[[int], int]  # channels -> bytes
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]

    def pack(self, values: Tensor) -> Tensor:
        """Fake-quantized values [..., n] -> uint8 [..., width(n)]. Raises ValueError for other values."""
        stored, fits = self.try_pack(values)
        self.check(fits)
        return stored

    def try_pack(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `pack`, and whether the values fit, [] bool, for a `check` later: looking at it stops the host."""
        stored = self.encode(values.detach())
        return stored, (self.decode(stored) == values.detach()).all()

    def check(self, fits: Tensor) -> None:
        """Raise ValueError if what was packed did not fit."""
        if not bool(fits):
            raise ValueError(f"Packing {self.name}: its values are no codes times scales. Either they hold NaN or infinity, so "
                             "the weights overflow (look at the recorded points), or they were not fake-quantized (use a cache "
                             "of kind 'bf16').")

    def unpack(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [..., width(n)] -> values [..., n]; exact in BF16 and float32."""
        return self.decode(stored).to(dtype)


def _encode_fp8(values: Tensor) -> Tensor:
    codes, scale = quantize_fp8(values)  # gives a fake-quantized row back unchanged (tested for every code and scale)
    return torch.cat((codes.view(torch.uint8), float_to_e8m0(scale).view(torch.uint8)), dim=-1)


def _decode_fp8(stored: Tensor) -> Tensor:
    codes, scale = _split(stored, BLOCK)
    return dequantize_groups(codes.view(torch.float8_e4m3fn).to(torch.float32), e8m0_to_float(scale), torch.float32)


def _encode_fp4_e8m0(values: Tensor) -> Tensor:
    codes, scale = quantize_fp4_e8m0(values)  # likewise
    return torch.cat((pack_nibbles(codes), float_to_e8m0(scale).view(torch.uint8)), dim=-1)


def _decode_fp4_e8m0(stored: Tensor) -> Tensor:
    codes, scale = _split(stored, BLOCK // 2)
    return dequantize_groups(_nibble_values(codes), e8m0_to_float(scale), torch.float32)


def _encode_fp4_e4m3(values: Tensor) -> Tensor:
    """Try, for every group, the scales at which its largest magnitude is a code; the first that fits the group is taken."""
    grouped = values.to(torch.float32).unflatten(-1, (-1, SMALL_BLOCK))
    largest = grouped.abs().amax(-1, keepdim=True)
    codes, scale = torch.zeros_like(grouped, dtype=torch.uint8), torch.zeros_like(largest, dtype=torch.uint8)
    found = torch.zeros_like(largest, dtype=torch.bool)
    for top in reversed(E2M1_VALUES[1:]):  # 6 nearly always fits
        tried = (largest / top).clamp(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)  # a group of zeros has scale 2^-9
        wide = tried.to(torch.float32)
        tried_codes = e2m1_encode(grouped / wide)
        fits = ~found & (e2m1_decode(tried_codes) * wide == grouped).all(-1, keepdim=True)
        codes = torch.where(fits, tried_codes, codes)
        scale = torch.where(fits, tried.view(torch.uint8), scale)
        found = found | fits
        if grouped.device.type == "cpu" and bool(found.all()):
            break  # elsewhere looking costs more than trying on
    return torch.cat((pack_nibbles(codes.flatten(-2)), scale.squeeze(-1)), dim=-1)


def _decode_fp4_e4m3(stored: Tensor) -> Tensor:
    codes, scale = _split(stored, SMALL_BLOCK // 2)
    return dequantize_groups(_nibble_values(codes), scale.view(torch.float8_e4m3fn).to(torch.float32), torch.float32)


def _split(stored: Tensor, code_bytes: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows; `code_bytes` bytes of codes per byte of scale."""
    groups = stored.shape[-1] // (code_bytes + 1)
    codes, scale = stored.split((groups * code_bytes, groups), dim=-1)
    return codes.contiguous(), scale.contiguous()


def _nibble_values(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] float32; one look-up per byte, for two values."""
    return F.embedding(packed.to(torch.int32), e2m1_pairs(packed.device, torch.float32)).flatten(-2)


WINDOW = Packing("a window row", lambda n: n + n // BLOCK, _encode_fp8, _decode_fp8)
COMPRESSED = Packing("a compressed row", lambda n: n // 2 + n // SMALL_BLOCK, _encode_fp4_e4m3, _decode_fp4_e4m3)
INDEX_KEY = Packing("an index key", lambda n: n // 2 + n // BLOCK, _encode_fp4_e8m0, _decode_fp4_e8m0)
