"""The small operations through torch.compile: `with compiled_forms(device): ...`, the same model with fewer, larger kernels.

What it does
    The model is written as chains of small operations, each a pass over memory and, on a GPU, a launch of its own. Within
    the context the functions below are replaced, from outside, by what torch.compile makes of them; products of matrices,
    the choice of columns and sparse attention stay as they are, and so does every module. The first call of a shape compiles:
    seconds each, minutes in all (ours: 50 graphs for the nano checkpoint); later runs find the code in torch's own cache.
        weights        decoders of packed formats, with the choice of experts in the same kernel
        activations    FP8 and FP4 rounding; RMSNorm; rotary embedding; gated product of the experts, their sum; router
        streams        mixes with all Sinkhorn rounds (on GPUs), collapse, expand
        cache          unpacking; packing (on GPUs)
        attention      window indices, index scores
Values
    Decoders and FP8/FP4 rounding give the same bits. The rest is float32 inside with the same roundings to BF16
    (`OPTIONS`), but sums run in another order, so that a result may differ by one rounding.
Shapes
    Rows and tokens are a dynamic size, widths are fixed: two compilations per function and width, one for a size of 1.
Leaves out
    Gradients; training has its own use of `per_token` (reference/training_forms.py).
Test
    tests/test_compiled.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from unittest import mock

import torch
from torch import Tensor

import inference.attention
import inference.dspark
import inference.experts
import inference.hyper_connections
import inference.indexer
import inference.model
import inference.moe
import inference.packing
import inference.quant
from inference.experts import Stack
from inference.hyper_connections import Mixes
from inference.layers import RMSNorm
from inference.moe import Gate
from inference.packing import Packing
from inference.quant import PackedWeight
from inference.rope import rotate

OPTIONS = {  # of Inductor
    "emulate_precision_casts": True,  # round to BF16 wherever the code does, and contract no product and sum into one step
    "eager_numerics.division_rounding": True,  # Triton's own division is approximate
}
MIX_OPTIONS = {"max_fusion_size": 4096}  # ours: all Sinkhorn rounds in one kernel; the default would cut them into pieces
RECOMPILE_LIMIT = 1024  # per function: every format, width and kind of memory layout is a compilation


@contextlib.contextmanager
def compiled_forms(device: torch.device | str, backend: str = "inductor") -> Iterator[None]:
    """Within the context, models on `device` run with compiled small operations. Nothing is left behind but compiled code.

    backend: of torch.compile; "eager" traces the same functions and runs them as they are (for tests: no code is built).
    Raises ValueError where torch.compile cannot build code for this device.
    """
    device = torch.device(device)
    _check_compiler(device, backend)
    fast = functools.partial(compile_whole, backend=backend)
    with contextlib.ExitStack() as stack:
        def replace(owner: object, name: str, form: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, form))

        stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT,
                                                       accumulated_recompile_limit=RECOMPILE_LIMIT))
        # Inside kernels: arithmetic in place of tables, which would be built anew in each of them.
        for module in (inference.quant, inference.packing):
            replace(module, "e2m1_decode", e2m1_values)
        replace(inference.packing, "_nibble_values", nibble_values)
        replace(inference.quant, "_nibble_values", lambda packed: nibble_values(packed).to(torch.bfloat16))
        replace(inference.quant, "_e4m3_values", e4m3_values)

        decode, plain_rows = fast(decode_stored), PackedWeight.rows
        replace(PackedWeight, "dequantize", lambda weight: decode(weight.format.decode, _raw(weight.tensors), None))
        replace(PackedWeight, "rows", lambda weight, index: decode(
            weight.format.decode, _raw(weight.tensors), _dynamic(index.flatten(), 0)).unflatten(0, index.shape)
            if weight.format.rowwise else plain_rows(weight, index))
        replace(Stack, "decode", lambda block, index: decode(
            block.format.decode, _raw(block.tensors), _dynamic(index, 0)).view(-1, *block.shape))
        for name in ("_round_fp8", "_round_fp4_e8m0", "_round_fp4_e4m3"):
            replace(inference.quant, name, per_row(getattr(inference.quant, name), fast))
        replace(RMSNorm, "forward", per_row(RMSNorm.forward, fast))
        unpack = fast(_unpacked)
        replace(Packing, "unpack", lambda packing, stored, dtype: unpack(packing, _rows(stored), dtype).unflatten(
            0, stored.shape[:-1]))

        turn = per_token(_rotate_tokens, fast)
        for module in (inference.attention, inference.indexer):
            replace(module, "rotate", lambda x, positions, frequencies, inverse=False: turn(
                x, positions.unsqueeze(-1), frequencies, inverse))
        for module, name in ((inference.model, "collapse"), (inference.dspark, "collapse"), (inference.model, "expand")):
            replace(module, name, per_token(getattr(module, name), fast))

        def replace_with_sizes(owner: object, name: str, axes: dict[int, tuple[int, ...]]) -> None:
            """axes: number of an argument -> its axes of dynamic size."""
            one = fast(getattr(owner, name))
            replace(owner, name, lambda *arguments: one(*(
                _dynamic(x, *axes.get(i, ())) if isinstance(x, Tensor) else x for i, x in enumerate(arguments))))

        replace_with_sizes(Gate, "forward", {1: (0,), 2: (0,)})
        replace_with_sizes(inference.experts, "gated_product", {0: (0,), 1: (0,), 2: (0,)})
        replace_with_sizes(inference.experts, "sum_of_experts", {0: (0,)})
        replace_with_sizes(inference.attention, "window_indices", {0: (0, 1), 1: (0,), 3: (0,)})
        replace_with_sizes(inference.indexer, "_weighted_scores", {0: (0, 1), 1: (0, 1), 2: (0, 1)})
        if device.type != "cpu":
            # On a CPU packing looks at values to stop early, and the rounds of Sinkhorn take half a minute to compile.
            pack = fast(_packed)

            def try_pack(packing: Packing, values: Tensor) -> tuple[Tensor, Tensor]:
                stored, fits = pack(packing, _rows(values.detach()))
                return stored.unflatten(0, values.shape[:-1]), fits

            replace(Packing, "try_pack", try_pack)
            replace(inference.hyper_connections, "sinkhorn", sinkhorn_in_scalars)
            replace(inference.model, "compute_mixes",
                    per_token(inference.model.compute_mixes, functools.partial(fast, more=MIX_OPTIONS)))
        yield


def _check_compiler(device: torch.device, backend: str) -> None:
    """Raise ValueError if nothing can be compiled for this device."""
    try:
        compile_whole(lambda x: x * 2 + 1, backend=backend)(torch.ones(2, device=device))
    except Exception as error:  # mostly Dynamo's and Inductor's own; a broken package in the environment can raise anything
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"Compiling the small operations for {device}: wanted a working "
                         f"{'C++ compiler (g++)' if device.type == 'cpu' else 'Triton and C compiler'}, but torch.compile "
                         f"says: {lines[0] if lines else repr(error)} Install it, or run without --compile.") from error


# --- how a function is compiled -----------------------------------------------------------------------------------


def compile_whole(form: Callable, more: Mapping[str, object] = MappingProxyType({}), backend: str = "inductor") -> Callable:
    """torch.compile of a form that never goes back to Python in between. more: options besides `OPTIONS`."""
    return torch.compile(form, fullgraph=True, backend=backend, options={**OPTIONS, **more} if backend == "inductor" else None)


def _dynamic(x: Tensor, *axes: int) -> Tensor:
    """x, whose sizes along `axes` may be others in the next call. A size of 1 is compiled by itself.

    `.data` is no view of anything: what a view was taken from is part of what torch.compile specializes on.
    """
    assert not (x.requires_grad and torch.is_grad_enabled()), "compiled_forms is for calls without gradients"
    x = x.data
    for axis in axes:
        torch._dynamo.maybe_mark_dynamic(x, axis)
    return x


def per_token(form: Callable, fast: Callable[[Callable], Callable], dynamic: bool = True) -> Callable:
    """A form that treats every token alone, compiled (by `fast`) on flattened tokens: batches of any shape share it.

    Arguments [B, S, ...] of three axes or more become [B * S, ...], fields of `Mixes` too. dynamic=False: one compilation
    for every number of tokens, and gradients.
    """
    once = fast(form)

    def chosen(*arguments):
        first = next(x for x in arguments if isinstance(x, Tensor))
        if first.dim() < 3:
            return form(*arguments)
        batch = first.shape[:2]

        def flat(x: Tensor) -> Tensor:
            if x.dim() < 3 or x.shape[:2] != batch:
                return x
            return _dynamic(x.flatten(0, 1).contiguous(), 0) if dynamic else x.flatten(0, 1)

        return _mapped(once(*(_mapped(x, flat) for x in arguments)), lambda x: x.unflatten(0, batch))

    return chosen


def per_row(form: Callable, fast: Callable[[Callable], Callable]) -> Callable:
    """A form of one tensor that treats every row alone, compiled on [n, w] in place of [..., w]."""
    once = fast(form)

    def chosen(*arguments):
        *before, x = arguments
        return once(*before, _rows(x)).view(x.shape)

    return chosen


def _rows(x: Tensor) -> Tensor:
    """[..., w] -> [n, w], of dynamic size."""
    return _dynamic(x.reshape(-1, x.shape[-1]), 0)


def _mapped(x: object, change: Callable[[Tensor], Tensor]) -> object:
    """change(x) for a tensor, for every field of `Mixes`; anything else as it is."""
    if isinstance(x, Mixes):
        return Mixes(*(change(getattr(x, field.name)) for field in dataclasses.fields(x)))
    return change(x) if isinstance(x, Tensor) else x


# --- forms that exist for the compiler only -----------------------------------------------------------------------


def decode_stored(decode: Callable[..., Tensor], stored: Sequence[Tensor], index: Tensor | None) -> Tensor:
    """A weight format's decoder on what is stored; index [n] int64: on some rows, or some of a block of experts; in one pass.

    stored: [R, ...] or [E, R, ...] with bytes for codes. Returns BF16 [R, C], [n, C], or [n * R, C] ([n, R, C] where a global
    scale [E, 1, 1] is stored).
    """
    if index is None:
        return decode(*stored)
    parts = [tensor[index] for tensor in stored]
    if parts[0].dim() == 2 or any(part.shape[1:] == (1, 1) for part in parts[1:]):
        return decode(*parts)
    return decode(*(part.flatten(0, 1) for part in parts))


def _raw(stored: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Codes, words and scales of one byte as bytes: the compiler does not know all of their dtypes."""
    return tuple(tensor if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.view(torch.uint8)
                 for tensor in stored)


def e2m1_values(code: Tensor) -> Tensor:
    """As `quant.e2m1_decode`: E2M1 codes 0..15 (uint8) to float32, through the bits of the result.

    Codes 2 .. 7 are exponent (two bits) and mantissa (one bit) already; 252 = 2 * 126 moves the bias of 1 to 127.
    """
    magnitude = code.to(torch.int32) & 7
    bits = torch.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + 252) << 22)  # 0 and 0.5 are subnormal
    return (bits | (code.to(torch.int32) & 8) << 28).view(torch.float32)


def nibble_values(packed: Tensor) -> Tensor:
    """[..., n] bytes to the values of their 2 n E2M1 codes, float32, low nibble first."""
    return e2m1_values(inference.quant.unpack_nibbles(packed))


def e4m3_values(packed: Tensor) -> Tensor:
    """As `quant._e4m3_values`: E4M3 codes to BF16, by conversion on every device."""
    return packed.contiguous().view(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)


def sinkhorn_in_scalars(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """As `hyper_connections.sinkhorn`: logits [..., C, C] -> [..., C, C], without an operation across tokens or entries.

    Row and column divisions are collected in two factors per token: comb[i, j] = row[i] first[i, j] column[j], and a row
    step is row[i] <- row[i] / (row[i] sum_j first[i, j] column[j] + eps). The entries of a token are separate tensors
    [...], so that everything is elementwise over tokens and the compiler can make one kernel of all rounds.
    """
    copies = range(logits.shape[-1])

    def total(parts: Sequence[Tensor]) -> Tensor:
        result = parts[0]
        for part in parts[1:]:
            result = result + part
        return result

    def divided(own: list[Tensor], lines: list[list[Tensor]], others: list[Tensor]) -> list[Tensor]:
        return [factor / (factor * total([a * b for a, b in zip(line, others)]) + eps) for factor, line in zip(own, lines)]

    first = []
    for i in copies:
        line = [logits[..., i, j] for j in copies]
        top = line[0]
        for entry in line[1:]:
            top = torch.maximum(top, entry)
        powers = [(entry - top).exp() for entry in line]
        first.append([power / total(powers) + eps for power in powers])
    transposed = [[line[j] for line in first] for j in copies]
    row = [torch.ones_like(first[0][0]) for _ in copies]
    column = divided(row, transposed, row)
    for _ in range(rounds - 1):
        row = divided(row, first, column)
        column = divided(column, transposed, row)
    return torch.stack([row[i] * first[i][j] * column[j] for i in copies for j in copies], -1).view(logits.shape)


def _rotate_tokens(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> Tensor:
    """As `rope.rotate` for x [n, D] or [n, H, D], positions [n, 1]."""
    return rotate(x.unsqueeze(0), positions.view(1, -1), frequencies, inverse).squeeze(0)


def _unpacked(packing: Packing, stored: Tensor, dtype: torch.dtype) -> Tensor:
    return packing.decode(stored).to(dtype)


def _packed(packing: Packing, values: Tensor) -> tuple[Tensor, Tensor]:
    stored = packing.encode(values)
    return stored, (packing.decode(stored) == values).all()
