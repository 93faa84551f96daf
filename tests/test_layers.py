"""RMSNorm, Linear and Embedding (inference/layers.py) against float64; what each kind of Linear does to its input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.layers import Embedding, Linear, RMSNorm, dense_weight, weight_rows
from inference.numerics import Numerics
from inference.quant import (FORMATS, PackedWeight, decode_fp8_blocks, encode_fp8_blocks, encode_fp8_rows, encode_mxfp4,
                             fake_quant_fp8, quantize_fp8)
from reference.metrics import relative_l2
from reference.oracles.basics import rms_norm

NATIVE, DEQUANTIZED, FLOAT32 = (Numerics.of(name) for name in ("native", "dequantized", "float32"))


def norm(width: int, eps: float, weight: Tensor | None = None) -> RMSNorm:
    layer = RMSNorm(width, eps)
    layer.weight = nn.Parameter((1 + 0.2 * torch.randn(width) if weight is None else weight).bfloat16())
    return layer


def linear(columns: int, rows: int, weight: Tensor | None = None, **kind: bool) -> Linear:
    layer = Linear(columns, rows, **kind)
    layer.weight = nn.Parameter((torch.randn(rows, columns) / columns**0.5 if weight is None else weight).bfloat16())
    return layer


def with_weight(layer: nn.Module, weight: Tensor | PackedWeight) -> nn.Module:
    """`layer` with a dense or packed weight, placed the way the loader does it."""
    del layer._parameters["weight"]
    layer.weight = weight
    return layer


# --- RMSNorm -----------------------------------------------------------------------------------------------------


def test_norm_equals_float64() -> None:
    layer, x = norm(128, 1e-20), 3 * torch.randn(2, 5, 128)
    wanted = torch.from_numpy(rms_norm(x.double().numpy(), layer.weight.double().numpy(), 1e-20))
    assert relative_l2(layer(x), wanted) < 1e-6
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_norm_epsilon() -> None:
    """Pitfall 27: input of amplitude 1e-11 tells 1e-20 (RMS about 0.1) from the hyper-connections' 1e-6 (1e-8)."""
    x = 1e-11 * torch.randn(4, 512)
    rms = {eps: norm(512, eps, torch.ones(512))(x).square().mean().sqrt().item() for eps in (1e-20, 1e-6)}
    assert 0.09 < rms[1e-20] < 0.11
    assert 0.9e-8 < rms[1e-6] < 1.1e-8


def test_norm_casts_once() -> None:
    """BF16 input: exactly the float32 result, rounded at the end; a cast before the weight (wrong variant) differs."""
    layer, x = norm(256, 1e-20), torch.randn(20, 256).bfloat16()
    assert torch.equal(layer(x), layer(x.float()).bfloat16())
    twice = layer.weight * norm(256, 1e-20, torch.ones(256))(x)
    assert not torch.equal(layer(x), twice)


# --- Linear ------------------------------------------------------------------------------------------------------


def test_input_is_quantized_in_native_numerics_only() -> None:
    """The product of the release: FP8 codes times scales; dequantized and float32 numerics leave the input alone."""
    layer, x = linear(64, 48, quantize_input=True), torch.randn(3, 64).bfloat16()
    plain = linear(64, 48, layer.weight)
    assert torch.equal(layer(x, NATIVE), plain(fake_quant_fp8(x), NATIVE))
    assert not torch.equal(layer(x, NATIVE), plain(x, NATIVE))  # the switch is live
    assert torch.equal(layer(x, DEQUANTIZED), plain(x, DEQUANTIZED))
    assert torch.equal(layer(x.float(), FLOAT32), plain(x.float(), FLOAT32))


def test_native_product_is_the_block_product() -> None:
    """official FP8 GEMM: per 32 inputs the sum of codes times both scales, in block order; within one BF16 step."""
    codes, scale = encode_fp8_blocks(torch.randn(64, 96))
    packed = PackedWeight(FORMATS["fp8_blocks"], (codes, scale), (64, 96))
    layer, x = with_weight(Linear(96, 64, quantize_input=True), packed), torch.randn(10, 96).bfloat16()
    x_codes, x_scale = quantize_fp8(x)
    blocks = torch.zeros(10, 64)
    weight_scale = scale.float().repeat_interleave(32, 0)
    for block in range(3):
        columns = slice(32 * block, 32 * block + 32)
        products = x_codes[:, columns].float() @ codes[:, columns].float().T
        blocks += products * (x_scale[:, block:block + 1] * weight_scale[:, block])
    got, wanted = layer(x, NATIVE), blocks.bfloat16()
    step = 2.0**-7 * wanted.float().abs() + 1e-6  # a BF16 step is at most 2^-7 of the value
    assert got.dtype == torch.bfloat16 and bool(((got.float() - wanted.float()).abs() <= step).all())
    assert (got == wanted).float().mean() > 0.95


def test_float32_kind_widens() -> None:
    """Router, heads, pooling compressors: BF16 input and weight, float32 product; a BF16 product (variant) differs."""
    layer, x = linear(128, 32, float32=True), torch.randn(6, 128).bfloat16()
    wanted = x.double() @ layer.weight.double().T
    for numerics in (NATIVE, FLOAT32):
        assert layer(x, numerics).dtype == torch.float32
        assert relative_l2(layer(x, numerics), wanted) < 1e-6
    assert relative_l2(linear(128, 32, layer.weight)(x, NATIVE), wanted) > 1e-4


def test_bias_is_added() -> None:
    layer, x = Linear(32, 8, bias=True), torch.randn(2, 32)
    layer.weight, layer.bias = nn.Parameter(torch.randn(8, 32).bfloat16()), nn.Parameter(torch.randn(8).bfloat16())
    torch.testing.assert_close(layer(x, FLOAT32), x @ layer.weight.float().T + layer.bias.float())
    assert linear(32, 8).bias is None


def test_weights_give_the_same_values_packed_or_dense() -> None:
    codes, scale = encode_fp8_blocks(torch.randn(64, 96))
    packed = PackedWeight(FORMATS["fp8_blocks"], (codes, scale), (64, 96))
    dense = decode_fp8_blocks(codes, scale)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(dense_weight(packed, dtype), dense_weight(dense, dtype))
        assert dense_weight(packed, dtype).dtype == dtype
    x = torch.randn(3, 96)
    assert torch.equal(*(with_weight(Linear(96, 64), weight)(x, FLOAT32) for weight in (packed, dense)))


# --- Embedding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [("fp8_rows", encode_fp8_rows), ("mxfp4", encode_mxfp4)], ids=lambda pair: pair[0])
def test_embedding_reads_rows_of_any_weight(encode) -> None:
    key, encoder = encode
    packed = PackedWeight(FORMATS[key], encoder(torch.randn(20, 64)), (20, 64))
    dense, index = packed.dequantize(), torch.tensor([[3, 19, 3], [0, 7, 8]])
    for weight in (packed, dense):
        table = with_weight(Embedding(20, 64), weight)
        for numerics in (NATIVE, FLOAT32):
            rows = table(index, numerics)
            assert rows.dtype == numerics.dtype and torch.equal(rows, F.embedding(index, dense).to(numerics.dtype))
    assert torch.equal(weight_rows(packed, index, torch.float32)[0, 1], dense[19].float())
