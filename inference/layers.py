"""The two layers that everything else is made of: RMSNorm and Linear, and how a weight is read when it is used.

What they compute
    RMSNorm: y = w * x / sqrt(mean(x^2) + eps), all in float32, one cast at the end.
    Linear:  y = x W^T (+ b). Three kinds, fixed by the release, whatever the file format of the weight:
             `quantize_input`: the release multiplies FP8 by FP8 (or FP4), so native numerics first rounds x to FP8 per 32;
             `float32`: the release runs this product in float32 (compressor of ratio 2, router, heads);
             neither: a BF16 product.
Weights
    `weight` is an `nn.Parameter` (dense), a `quant.PackedWeight` (as stored, decoded at use) or a
    `streaming.StreamedWeight` (on disk, read and decoded at use). All give the same BF16 values; `dense_weight` and
    `weight_rows` are the places that read any of them.
Mirrors
    official: classes `RMSNorm`, `Linear`, `ColumnParallelLinear`, `RowParallelLinear` (one process).
Tests
    tests/test_layers.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.numerics import Numerics
from inference.quant import PackedWeight, fake_quant_fp8
from inference.streaming import StreamedWeight


Weight = Tensor | PackedWeight | StreamedWeight


def dense_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values of a weight in `dtype`. BF16 to float32 widens exactly; float32 is only narrowed if it was BF16."""
    if not isinstance(weight, Tensor):
        weight = weight.dequantize()
    return weight.to(dtype)


def weight_rows(weight: Weight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of an embedding or table: index [...] int64 -> [..., columns] in `dtype`."""
    rows = F.embedding(index, weight) if isinstance(weight, Tensor) else weight.rows(index)
    return rows.to(dtype)


def empty_parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """A parameter without values: the loader assigns them (and their dtype)."""
    return nn.Parameter(torch.empty(shape, dtype=dtype))


class RMSNorm(nn.Module):
    """official: RMSNorm. Text eps is 1e-20, vision eps 1e-6: never exchange them."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., width], dtype of x. Float32 inside, one cast."""
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(torch.float32) * (wide * scale)).to(x.dtype)


class Linear(nn.Module):
    """y = x W^T (+ bias). W is [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, quantize_input: bool = False,
                 float32: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.quantize_input, self.float32 = quantize_input, float32
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor, numerics: Numerics) -> Tensor:
        """x [..., in] -> [..., out]; float32 for the float32 kind, otherwise the activation dtype."""
        dtype = torch.float32 if self.float32 else numerics.dtype
        if self.quantize_input and numerics.quantize_inputs:
            x = fake_quant_fp8(x)
        # ours: FP8 and FP4 operands are exact in BF16, so a BF16 product with float32 accumulation differs from the
        # official block products in summation order only.
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), dense_weight(self.weight, dtype), bias)

    def extra_repr(self) -> str:
        kind = "input to FP8" if self.quantize_input else "float32" if self.float32 else "bf16"
        return f"{self.in_features} -> {self.out_features}, {kind}, bias={self.bias is not None}"


class Embedding(nn.Module):
    """A table of rows; holds only `weight` [rows, width], so that names equal the checkpoint's."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = empty_parameter(rows, width)

    def forward(self, index: Tensor, numerics: Numerics) -> Tensor:
        """index [...] int64 -> [..., width] in the activation dtype."""
        return weight_rows(self.weight, index, numerics.dtype)
