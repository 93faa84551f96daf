"""The arithmetic that a forward pass uses, as one frozen value that is passed down.

    native       released arithmetic: BF16 activations; inputs of FP8 and FP4 linears quantized to FP8 per 32
    dequantized  BF16 activations, inputs not quantized
    float32      float32 activations on the same dequantized weights; the mode to compare logic in

`fake_quant` switches the quantize-dequantize of the KV and index caches, in every mode (official: always on).
The weights are the same BF16 values in all modes: dequantized in float32 and rounded once.

Mirrors official: `ModelArgs.dtype`, `act_quant` and `fp4_act_quant` call sites. Tests: tests/test_numerics.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numerics:
    name: str
    dtype: torch.dtype  # activations between modules
    quantize_inputs: bool  # FP8 per 32 before the linears that the release stores in FP8 or FP4
    fake_quant: bool  # window rows, compressed rows, index queries and keys

    @classmethod
    def of(cls, name: str, fake_quant: bool = True) -> Numerics:
        """The mode called `name`. Raises ValueError for any other name."""
        if name not in MODES:
            raise ValueError(f"Choosing the numerics: {name!r} is not one of {', '.join(MODES)}.")
        dtype, quantize_inputs = MODES[name]
        return cls(name, dtype, quantize_inputs, fake_quant)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """While active (as `with` or as a decorator), CUDA products are what they say, whatever the program around has chosen.

    Float32 products take no TF32, and sums of BF16 products stay in float32 until they are rounded (official: FP32 accumulation).
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = "ieee", False
    try:
        yield
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = before


MODES = {
    "native": (torch.bfloat16, True),
    "dequantized": (torch.bfloat16, False),
    "float32": (torch.float32, False),
}
