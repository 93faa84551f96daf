"""Routed experts in grouped products: what the loop of moe.py computes, without a loop over experts.

What it computes
    The n * A pairs (token, expert) are sorted by expert, so that every expert has a run of rows, and
        gate, up, y    = three grouped products over the runs:  out[i] = x[i] W[expert of row i]^T
        hidden         = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, float32
    then go back to the order of tokens, where each token adds its A results in float32, in ascending expert id.
Same numbers as the loop
    Inputs of w1, w3 and w2 are quantized row by row as there. The order of sums inside a product is the library's, so a
    BF16 result may differ by one rounding (BF16 products of one row and of several already do).
Where the weights are
    A `Stack` holds one matrix of all experts [E, R, C] in one block; the parameters of the experts are views of it.
    Dense stacks go into the product as they are. Packed stacks are decoded first: with at most as many pairs as
    experts, one matrix per pair; with more, all experts, or those that any token chose, a few at a time, if all do not
    fit into the memory budget.
Host synchronization
    None, except for one read of the run lengths and one copy back in the last case (a prompt on packed weights of the
    released size).
Mirrors
    official: the loop over experts of class `MoE`; the grouped product is ours.
Tests
    tests/test_moe.py, tests/test_cuda.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.numerics import Numerics
from inference.quant import PackedWeight, WeightFormat, fake_quant_fp8

# ours: bytes in which decoding one value passes through memory at once (codes as integers, looked up values, product).
BYTES_DECODED = 8


@dataclass(frozen=True)
class Stack:
    """One matrix of all experts. format None: tensors = ([E, R, C] BF16,); else as stored, each with E in front."""

    format: WeightFormat | None
    tensors: tuple[Tensor, ...]
    shape: tuple[int, int]  # logical [R, C] of one expert

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def count(self) -> int:
        return len(self.tensors[0])

    def holds(self, weight: object, index: int) -> bool:
        """Whether `weight` is expert `index` of this block (it is not after the weights were moved or replaced)."""
        first = weight.tensors[0] if isinstance(weight, PackedWeight) else weight
        return isinstance(first, Tensor) and first.data_ptr() == self.tensors[0][index].data_ptr()

    def decode(self, index: Tensor) -> Tensor:
        """Experts index [n] int64 -> [n, R, C] BF16. Packed stacks only."""
        rows, columns = self.shape
        parts = [_bytes(tensor)[index].view(tensor.dtype) for tensor in self.tensors]
        # A global scale [n, 1, 1] meets values [n, R, C]; all else is a longer matrix, rows of one expert after the other.
        if any(part.shape[1:] == (1, 1) for part in parts[1:]):
            return self.format.decode(*parts)
        return self.format.decode(*(part.flatten(0, 1) for part in parts)).view(-1, rows, columns)


def stack_weights(owners: Sequence[nn.Module]) -> Stack | None:
    """Put the `weight` of every owner into one block and make it a view of that. None, and no change, if they differ.

    Owners: modules with a BF16 parameter or a `PackedWeight` of one shape, format and device.
    """
    weights = [owner.weight for owner in owners]
    first = weights[0]
    if all(isinstance(weight, PackedWeight) for weight in weights):
        if len({(weight.format.name, weight.shape, _layout(weight)) for weight in weights}) > 1:
            return None
        if first.format.tiled and first.shape[0] % 32:
            return None  # experts laid one after the other would not begin at a tile
        columns = [torch.stack([_bytes(_matrix(weight.tensors[i])) for weight in weights])
                   for i in range(len(first.tensors))]
        tensors = tuple(column.view(_matrix(tensor).dtype) for column, tensor in zip(columns, first.tensors))
        for number, owner in enumerate(owners):
            parts = tuple(tensor[number].view(old.shape) for tensor, old in zip(tensors, owner.weight.tensors))
            owner.weight = PackedWeight(first.format, parts, first.shape)
        return Stack(first.format, tensors, first.shape)
    if not all(isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and weight.shape == first.shape
               and weight.device == first.device for weight in weights):
        return None
    block = torch.stack([weight.detach() for weight in weights])
    for number, owner in enumerate(owners):
        owner.weight.data = block[number]
    return Stack(None, (block,), tuple(first.shape))


def grouped_experts(tokens: Tensor, ids: Tensor, weights: Tensor, stacks: tuple[Stack, Stack, Stack], limit: float,
                    numerics: Numerics, budget: int) -> Tensor:
    """tokens [n, D] BF16; ids [n, A] int64 ascending; weights [n, A] float32; stacks of w1, w3, w2 -> [n, D] float32.

    budget: bytes that decoded weights may take at once.
    """
    active = ids.shape[1]
    experts, order = ids.flatten().sort(stable=True)  # pairs by expert
    x = (fake_quant_fp8(tokens) if numerics.quantize_inputs else tokens)[order // active]
    pair_weights = weights.flatten()[order].unsqueeze(-1)
    parts = []
    for rows, matrices, ends in _runs(experts, stacks, budget):
        gate, up = (_product(x[rows], matrix, ends) for matrix in matrices(0, 1))
        hidden = gated_product(gate, up, pair_weights[rows], limit)
        hidden = fake_quant_fp8(hidden) if numerics.quantize_inputs else hidden
        parts.append(_product(hidden, *matrices(2), ends))
    y = torch.cat(parts)[order.argsort()].unflatten(0, (-1, active))  # back to [n, A, D]
    return sum_of_experts(y)


def gated_product(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """gate, up [p, C], weights [p, 1] float32 -> input of w2 [p, C], dtype of gate; float32 inside."""
    dtype, gate, up = gate.dtype, gate.to(torch.float32), up.to(torch.float32)
    return (weights * (F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit))).to(dtype)


def sum_of_experts(y: Tensor) -> Tensor:
    """y [n, A, D], in ascending expert id -> [n, D] float32, added in the order of the loop."""
    total = torch.zeros_like(y[:, 0], dtype=torch.float32)
    for slot in range(y.shape[1]):
        total = total + y[:, slot].to(torch.float32)
    return total


def _runs(experts: Tensor, stacks: tuple[Stack, Stack, Stack], budget: int,
          ) -> Iterator[tuple[slice, Callable[..., Iterable[Tensor]], Tensor]]:
    """Slices of pairs that are computed together. experts [p] int64 ascending.

    Yields (rows, matrices, ends): a slice of pairs; a function from stack numbers to BF16 matrices [g, R, C]; where the
    run of each of the g matrices ends within the slice, int32 [g].
    """
    first, pairs = stacks[0], len(experts)
    everyone = torch.arange(first.count, device=experts.device)
    ends = torch.searchsorted(experts, everyone, right=True).to(torch.int32)
    if first.format is None:
        yield slice(0, pairs), lambda *numbers: [stacks[i].tensors[0] for i in numbers], ends
        return
    at_once = max(1, budget // (BYTES_DECODED * first.shape[0] * first.shape[1]))

    def decoder(index: Tensor) -> Callable[..., Iterable[Tensor]]:
        return lambda *numbers: (stacks[i].decode(index) for i in numbers)

    if pairs <= first.count:
        for begin in range(0, pairs, at_once):
            index = experts[begin:begin + at_once]
            yield (slice(begin, begin + len(index)), decoder(index),
                   torch.arange(1, len(index) + 1, dtype=torch.int32, device=experts.device))
        return
    if at_once >= first.count:
        yield slice(0, pairs), decoder(everyone), ends
        return
    last = ends.tolist()  # the host stops here, and at the copy below
    chosen = [expert for expert, (begin, end) in enumerate(zip([0, *last], last)) if end > begin]
    chosen_ids = torch.tensor(chosen, device=experts.device)
    for number in range(0, len(chosen), at_once):
        some, index = chosen[number:number + at_once], chosen_ids[number:number + at_once]
        begin = last[some[0] - 1] if some[0] else 0
        yield slice(begin, last[some[-1]]), decoder(index), ends[index] - begin


def _product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """x [p, C], matrices [g, R, C], ends [g] int32 -> [p, R]: rows up to ends[0] through matrix 0, and so on."""
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm  # public since torch 2.10
    return grouped(x, matrices.transpose(1, 2), offs=ends)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, for dtypes whose indexing or stacking torch may not implement (FP8, uint32)."""
    return tensor.contiguous().view(torch.uint8)


def _matrix(tensor: Tensor) -> Tensor:
    """A global scale [] as [1, 1]."""
    return tensor.reshape(1, 1) if tensor.numel() == 1 else tensor


def _layout(weight: PackedWeight) -> tuple[object, ...]:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in weight.tensors)
