"""Jobs of the converters: how the tensors of one output weight are computed from the source, piece by piece.

What it offers
    copy_job, dense_job, affine_job, mx_job, table_job, mxfp4_table_job, nvfp4_job: each takes weights of a `Source` and
    gives a `shard_writer.Job` that knows names, types and shapes at once and computes values when it is run.
Stacked experts
    `plans` is one weight, or all experts of one projection in order; the output then has the expert axis first, and one
    expert at a time is in memory.
Tests
    tests/test_convert.py, tests/test_oq.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference.matching import WeightPlan
from inference.quant import as_words, decode_mxfp4, decode_nvfp4, encode_mxfp4, mxfp4_to_nvfp4, mxfp4_top_exponent
from inference.shards import StoredTensor
from reference.oq_fit import DEFAULT_REFITS, quantize
from reference.shard_writer import Job, Piece, TensorSpec
from reference.source import copy_pieces, decode, read, read_pieces

Shape = tuple[int, ...]


def copy_job(stored: StoredTensor) -> Job:
    """One stored tensor of a native checkpoint, byte for byte."""

    def pieces() -> Iterator[Piece]:
        for first, values in copy_pieces(stored):
            yield stored.name, first, values

    return Job((TensorSpec(stored.name, stored.dtype, stored.shape),), pieces)


def dense_job(key: str, shape: Shape, plans: Sequence[WeightPlan]) -> Job:
    """The tensor `key`, decoded to BF16; F32 where that is how it is stored."""
    dtype = plans[0].tensors[0].dtype if plans[0].format is None else "BF16"
    spec = TensorSpec(key, dtype, shape)

    def pieces() -> Iterator[Piece]:
        for index, plan in enumerate(plans):
            for first, tensors in read_pieces(plan):
                yield from _place((spec,), (decode(plan, tensors),), index, first)

    return Job((spec,), pieces)


def affine_job(path: str, shape: Shape, plans: Sequence[WeightPlan], bits: int, group: int,
               importance: Tensor | None = None, refits: int = DEFAULT_REFITS) -> Job:
    """Affine `weight` U32 [.., C*bits/32], `scales` and `biases` BF16 [.., C/group].

    importance: [C], or [E, C] for stacked experts, float32; None for MLX's min/max rule.
    """
    groups = (*shape[:-1], shape[-1] // group)
    specs = (TensorSpec(f"{path}.weight", "U32", (*shape[:-1], shape[-1] * bits // 32)),
             TensorSpec(f"{path}.scales", "BF16", groups), TensorSpec(f"{path}.biases", "BF16", groups))

    def pieces() -> Iterator[Piece]:
        for index, plan in enumerate(plans):
            chosen = importance[index] if importance is not None and importance.dim() == 2 else importance
            for first, tensors in read_pieces(plan):
                values = quantize(decode(plan, tensors), chosen, bits, group, refits)
                yield from _place(specs, values, index, first)

    return Job(specs, pieces)


def mx_job(path: str, shape: Shape, plans: Sequence[WeightPlan]) -> Job:
    """FP8 tiles or MXFP4 as MLX lays them out: `weight` U32 [.., C/4] or [.., C/8], `scales` U8 [.., C/32].

    oMLX: the scale of an FP8 tile is repeated for its 32 rows.
    """
    per_word = 4 if plans[0].format == "fp8_blocks" else 8
    specs = (TensorSpec(f"{path}.weight", "U32", (*shape[:-1], shape[-1] // per_word)),
             TensorSpec(f"{path}.scales", "U8", (*shape[:-1], shape[-1] // 32)))

    def pieces() -> Iterator[Piece]:
        for index, plan in enumerate(plans):
            for first, (weight, scale) in read_pieces(plan):
                scales = scale.view(torch.uint8)
                if plan.format == "fp8_blocks":
                    scales = scales.repeat_interleave(32, 0)[:len(weight)]
                yield from _place(specs, (as_words(weight), scales), index, first)

    return Job(specs, pieces)


def table_job(path: str, plan: WeightPlan) -> Job:
    """An Engram table in its source bytes: `weight` F8_E4M3 [rows, C], `scale` F8_E8M0 [rows, C/32]."""
    rows, columns = plan.shape
    specs = (TensorSpec(f"{path}.weight", "F8_E4M3", (rows, columns)),
             TensorSpec(f"{path}.scale", "F8_E8M0", (rows, columns // 32)))

    def pieces() -> Iterator[Piece]:
        for first, tensors in read_pieces(plan):
            yield from _place(specs, tensors, 0, first)

    return Job(specs, pieces)


def mxfp4_table_job(plan: WeightPlan) -> Job:
    """An Engram table as MXFP4, under its native names: `weight` U8 [rows, C/2], `scale` F8_E8M0 [rows, C/32]."""
    base = plan.name.removesuffix(".weight")
    rows, columns = plan.shape
    specs = (TensorSpec(plan.name, "U8", (rows, columns // 2)),
             TensorSpec(f"{base}.scale", "F8_E8M0", (rows, columns // 32)))

    def pieces() -> Iterator[Piece]:
        for first, tensors in read_pieces(plan):
            yield from _place(specs, encode_mxfp4(decode(plan, tensors)), 0, first)

    return Job(specs, pieces)


def nvfp4_job(plan: WeightPlan, fused: WeightPlan | None, input_scale: float | None) -> Job:
    """An MXFP4 weight as NVFP4: `weight` U8, `weight_scale` E4M3 [R, C/16], `weight_scale_2` F32 [].

    fused: the weight that shares k_max (w1 and w3 of one expert). While it runs, ValueError if a block would change.
    """
    base = plan.name.removesuffix(".weight")
    rows, columns = plan.shape
    specs = [TensorSpec(plan.name, "U8", (rows, columns // 2)),
             TensorSpec(f"{base}.weight_scale", "F8_E4M3", (rows, columns // 16)),
             TensorSpec(f"{base}.weight_scale_2", "F32", ())]
    if input_scale is not None:
        specs.append(TensorSpec(f"{base}.input_scale", "F32", ()))

    def pieces() -> Iterator[Piece]:
        weight, scale = read(plan)
        top = mxfp4_top_exponent(scale)
        if fused is not None and fused.format == "mxfp4":
            top = max(top, mxfp4_top_exponent(read(fused)[1]))
        try:
            values = mxfp4_to_nvfp4(weight, scale, top)
        except ValueError as error:
            raise ValueError(f"{plan.name}: {error}") from None
        # By value: -0 and 0 are equal. This is the check over all blocks; it costs less than reading them.
        if not torch.equal(decode_nvfp4(*values), decode_mxfp4(weight, scale)):
            raise ValueError(f"{plan.name}: NVFP4 does not reproduce its values, so its shard was not written. This is "
                             "a defect of the converter, please report it with the tensor.")
        if input_scale is not None:
            values = (*values, torch.tensor(input_scale, dtype=torch.float32))
        yield from ((spec.name, 0, value) for spec, value in zip(specs, values))

    return Job(tuple(specs), pieces)


def _place(specs: Sequence[TensorSpec], values: Sequence[Tensor], expert: int, first_row: int) -> Iterator[Piece]:
    """Rows from `first_row` on of one weight (of one expert, where a spec has that axis) as pieces of its tensors."""
    for spec, value in zip(specs, values):
        if len(spec.shape) == value.dim():
            yield spec.name, first_row, value
        else:
            yield spec.name, expert * spec.shape[1] + first_row, value
