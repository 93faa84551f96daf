"""Rounding flips: values that lie on a rounding boundary and fall the other way in another implementation.

A fake quantizer turns a difference of 1e-7 before it into a whole code after it, and a tie in a selection is decided by a
rule that others do not share. Both are legitimate, but only if that one decision explains the whole difference. So they are
not tolerated, they are proved: `Arbiter` runs the model once and notes every decision that was close; then it
takes decisions the other way, one after the other, and keeps those that make the result agree.

What is watched, in the model and in graft.py: the fake quantizers of window rows, compressed rows, index queries and keys;
ties at the boundary of a selection. It works from outside, by replacing the functions that `inference` calls while it is
active; nothing is left behind.

BF16 numerics round after every product and norm, each time with some entries so close to a midpoint that another order of sums
takes them to the other side. There are too many of them to try one by one: `Roundings` takes a random part of them the other
way. A difference that such runs `reproduce` is legitimate; one that none does is not excused.
Tests: tests/test_verify.py
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import inference.attention
import inference.indexer
import inference.moe
import reference.graft

# ours: relative nudges, smallest first. The largest is far above float32 noise of these models (about 1e-6 at the
# end of nano) and far below the distance of neighbouring codes (6e-2 for E4M3).
NUDGES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5)
# ours: error of a float32 sum of K products in units of sqrt(K) * 2^-24 * |products|. Measured on a CPU: at most 1.9 (BLAS,
# blocks of 16 and one by one, K from 64 to 512, 600,000 sums each); twice that here. Casts of float32 values get the same.
SUM_UNITS = 4
# ours: seeds, and the share of the close roundings that is moved: all at once moves most, fewer leave others alone
ROUNDINGS = tuple(enumerate((1.0,) * 6 + (0.5,) * 2 + (0.25,) * 2))
# Functions and the channels that share a scale: a decision is one code, or the scale of one group.
_QUANTIZERS = ((inference.attention, "fake_quant_fp8", 32), (inference.attention, "fake_quant_fp4_e4m3", 16),
               (inference.indexer, "fake_quant_fp4_e8m0", 32), (reference.graft, "fake_quant_fp4_e4m3", 16))


@dataclass(frozen=True)
class Decision:
    """One close decision. call: running number of the watched call; entry: flat index of the group or row."""

    call: int
    entry: int
    nudge: float  # signed for a quantizer: relative change that takes it to the other side; 0 for a tie
    where: str

    def __str__(self) -> str:
        kind = "tie" if self.nudge == 0 else f"{abs(self.nudge):.0e} from a rounding boundary"
        return f"{self.where} ({kind})"


class Arbiter:
    """Decides close calls. `taken` are the decisions to take the other way; `close` collects all close ones of a run."""

    def __init__(self, taken: tuple[Decision, ...] = ()) -> None:
        self.taken = taken
        self.close: list[Decision] = []  # only collected when nothing is taken the other way
        self.calls: dict[str, int] = {}  # point -> watched calls before it
        self._call, self._where = 0, "before the first point"

    def observe(self, name: str, value: Tensor) -> None:
        """Observer of the run: remembers the last point, to say where a decision was."""
        self.mark(name)

    def mark(self, name: str) -> None:
        """Note that the point `name` is computed now: only decisions before it can have changed it."""
        self._where = f"after {name}"
        self.calls[name] = self._call

    @contextlib.contextmanager
    def active(self) -> Iterator[Arbiter]:
        """While active, the watched functions of `inference` go through this arbiter."""
        watched = [(module, name, getattr(module, name), functools.partial(self._quantizer, group=group))
                   for module, name, group in _QUANTIZERS]
        watched += [(module, "select_columns", module.select_columns, self._selector)
                    for module in (inference.attention, reference.graft)]
        for module, name, function, wrap in watched:
            setattr(module, name, wrap(function))
        try:
            yield self
        finally:
            for module, name, function, _ in watched:
                setattr(module, name, function)

    def _quantizer(self, quantize: Callable[[Tensor], Tensor], group: int) -> Callable[[Tensor], Tensor]:
        def decide(x: Tensor) -> Tensor:
            call, self._call = self._call, self._call + 1
            rounded = quantize(x).reshape(-1, group)
            seen: set[int] = set()
            # A nudge leaves a BF16 number as it is: there only ties are close, and Roundings does the rest.
            for size in NUDGES if not self.taken and x.dtype == torch.float32 else ():
                for nudge in (size, -size):
                    changed = (quantize(x * (1 + nudge)).reshape(-1, group) != rounded).any(-1)
                    for entry in changed.nonzero().flatten().tolist():
                        if entry not in seen:
                            seen.add(entry)
                            row = [int(i) for i in torch.unravel_index(torch.tensor(entry * group), x.shape)]
                            self.close.append(Decision(call, entry, nudge, f"{self._where} {row}"))
            for decision in self.taken:
                if decision.call == call:
                    other = quantize(x * (1 + decision.nudge)).reshape(-1, group)
                    entry = decision.entry
                    rounded = torch.cat((rounded[:entry], other[entry:entry + 1], rounded[entry + 1:]))
            return rounded.view_as(x)
        return decide

    def _selector(self, select: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        def decide(scores: Tensor, count: int) -> Tensor:
            call, self._call = self._call, self._call + 1
            chosen = select(scores, count)
            columns = scores.shape[-1]
            reverse = (columns - 1 - select(scores.flip(-1), count)).sort(-1).values  # highest column first among equals
            reverse = reverse.masked_fill(reverse == columns, -1)
            rows, other = chosen.flatten(0, -2), reverse.flatten(0, -2)
            for row in (rows != other).any(-1).nonzero().flatten().tolist():
                index = [int(i) for i in torch.unravel_index(torch.tensor(row), chosen.shape[:-1])]
                self.close.append(Decision(call, row, 0.0, f"selection {self._where} {index}"))
                if any(decision.call == call and decision.entry == row for decision in self.taken):
                    rows = torch.cat((rows[:row], other[row:row + 1], rows[row + 1:]))
            return rows.view_as(chosen)
        return decide


def explain(run: Callable[[Arbiter], tuple[int, str | None]], most: int = 4, tries: int = 60,
            ) -> tuple[str | None, tuple[Decision, ...]]:
    """Find close decisions that, taken the other way, bring a run within its bounds.

    run(arbiter) runs the model with the arbiter active and returns how many points agreed before the first that did not,
    and that point (None when all agree). Greedy: of the close decisions before that point, closest first, the one that takes
    the run furthest is kept, then the next, at most `most`. Returns the first point still out of bounds and those decisions.
    """
    first = Arbiter()
    agreed, point = run(first)
    taken: tuple[Decision, ...] = ()
    while point is not None and len(taken) < most:
        before = first.calls.get(point, math.inf)
        close = sorted((d for d in first.close if d.call < before and d not in taken), key=lambda d: abs(d.nudge))
        best: tuple[int, str | None, Decision] | None = None
        for decision in close[:tries]:
            attempt, where = run(Arbiter((*taken, decision)))
            if best is None or attempt > best[0]:
                best = (attempt, where, decision)
            if where is None:
                break
        if best is None or best[0] <= agreed:
            break
        agreed, point, taken = best[0], best[1], (*taken, best[2])
    return point, taken


class Roundings(TorchDispatchMode):
    """While active, part of the close BF16 roundings fall the other way, as other orders of summation would make them.

    A product is computed in float64; an entry is close if the nearest BF16 numbers of value - t and value + t differ,
    t = SUM_UNITS * sqrt(K) * 2^-24 * |products|. Float32 products move by at most t, casts from float32 take t relative to the
    entry and the row. Only a share of the entries is moved, all others stay as this device rounds them. Experts run as a
    loop and attention in its torch form, because grouped products and compiled kernels cannot be looked into.
    """

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.seed, self.share = seed, share
        self._generators: dict[torch.device, torch.Generator] = {}
        self._outside = contextlib.ExitStack()

    def __enter__(self) -> Roundings:
        usable, kernel = inference.moe.Experts.usable_stacks, os.environ.get("KERNEL")

        def restore() -> None:
            inference.moe.Experts.usable_stacks = usable
            os.environ.pop("KERNEL")
            if kernel is not None:
                os.environ["KERNEL"] = kernel

        inference.moe.Experts.usable_stacks = lambda experts, x: None
        os.environ["KERNEL"] = "torch"
        self._outside.callback(restore)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._outside.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = function(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.bmm.default, aten.addmm.default) and out.dtype in (torch.bfloat16, torch.float32):
            left, right = (factor.to(torch.float64) for factor in args[-2:])
            exact = left @ right + (args[0].to(torch.float64) if len(args) == 3 else 0)
            reach = (left.square() @ right.square()).sqrt() * (SUM_UNITS * 2**-24 * left.shape[-1] ** 0.5)
            # A sum that float32 holds exactly, as most sums of FP8 times FP4 are, is the same in every order.
            return self._moved(out, exact, torch.where(exact == exact.to(torch.float32), 0.0, reach))
        if function is aten._to_copy.default and out.dtype == torch.bfloat16 and args[0].dtype == torch.float32 and out.dim():
            exact = args[0].to(torch.float64)
            row = exact.square().mean(-1, keepdim=True).sqrt().nan_to_num(0.0, 0.0, 0.0)
            # What is a BF16 number already, as the values of a quantizer, was not rounded.
            return self._moved(out, exact, torch.where(exact == out, 0.0, (exact.abs() + row) * (SUM_UNITS * 2**-24)))
        return out

    def _moved(self, out: Tensor, exact: Tensor, reach: Tensor) -> Tensor:
        """`out`, with a share of its entries replaced by the rounding of a random value within `reach` of the exact one."""
        if out.device not in self._generators:
            self._generators[out.device] = torch.Generator(out.device).manual_seed(self.seed)
        where, side = (torch.rand(out.shape, generator=self._generators[out.device], device=out.device) for _ in range(2))
        if out.dtype == torch.float32:
            return torch.where(where < self.share, (exact + (2 * side - 1) * reach).to(torch.float32), out)
        # Full reach to either side, so that a close entry goes to the other one half of the time.
        other = (exact + torch.where(side < 0.5, -reach, reach)).to(out.dtype)
        return torch.where((where < self.share) & exact.isfinite(), other, out)


def reproduce(compute: Callable[[], Iterator[tuple[str, Tensor]]], name: str, value: Tensor, expected: Tensor,
              agrees: Callable[[Tensor], bool]) -> Tensor | None:
    """The point `name` with rows that close roundings bring nearer to the expected ones, once it agrees; None if it never does.

    compute(): the points, `name` among them, in order of computation; value: that point as this device computes it.
    Rows are taken from different runs: each is computed on its own, and all roundings of one run need not suit every row.
    """
    for seed, share in ROUNDINGS:
        with Roundings(seed, share), contextlib.closing(compute()) as attempt:
            other = next(tensor for point, tensor in attempt if point == name)
        closer = _distance(other, expected) < _distance(value, expected)
        value = torch.where(closer.view(*value.shape[:-1], 1), other, value)
        if agrees(value):
            return value
    return None


def rows_off(actual: Tensor, expected: Tensor, bound: float) -> Tensor:
    """Rows (last axis) that are further from the expected ones than `bound` times their norm; integers: at all. [rows] bool."""
    if not actual.dtype.is_floating_point:
        return _distance(actual, expected) > 0
    norm = expected.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).flatten(0, -2).norm(dim=-1)
    return _distance(actual, expected) > bound * norm


def _distance(actual: Tensor, expected: Tensor) -> Tensor:
    """How far every row is from the expected one, [rows]: the norm of the difference, for integers the number of others."""
    a, b = (value.flatten(0, -2) if value.dim() > 1 else value[None] for value in (actual, expected))
    if not a.dtype.is_floating_point:
        return (a != b).sum(-1).to(torch.float64)
    a, b = a.to(torch.float64), b.to(torch.float64)
    return torch.where(a == b, 0.0, (a - b).nan_to_num(math.inf, math.inf, math.inf)).norm(dim=-1)
