"""Rounding flips: values that lie on a rounding boundary and fall the other way in another implementation.

A fake quantizer turns a difference of 1e-7 before it into a whole code after it, and a tie in a selection is decided by a
rule that others do not share. Both are legitimate, but only if that one decision explains the whole difference. So they are
not tolerated, they are proved: `Arbiter` runs the model once and notes every decision that was close; then it
takes decisions the other way, one after the other, and keeps those that make the result agree.

What is watched, in the model and in graft.py: the fake quantizers of window rows, compressed rows, index queries and keys; ties at the boundary of a
selection. It works from outside, by replacing the functions that `inference` calls while it is active; nothing is left behind.
Tests: tests/test_verify.py
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import inference.attention
import inference.indexer
import reference.graft

# ours: relative nudges, smallest first. The largest is far above float32 noise of these models (about 1e-6 at the
# end of nano) and far below the distance of neighbouring codes (6e-2 for E4M3).
NUDGES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5)
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
        self._call, self._point = 0, "start"

    def observe(self, name: str, value: Tensor) -> None:
        """Observer of the run: remembers the last point, to say where a decision was."""
        self.mark(name)

    def mark(self, name: str) -> None:
        """Note that the point `name` is computed now: only decisions before it can have changed it."""
        self._point = name
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
            for size in NUDGES if not self.taken else ():
                for nudge in (size, -size):
                    changed = (quantize(x * (1 + nudge)).reshape(-1, group) != rounded).any(-1)
                    for entry in changed.nonzero().flatten().tolist():
                        if entry not in seen:
                            seen.add(entry)
                            row = [int(i) for i in torch.unravel_index(torch.tensor(entry * group), x.shape)]
                            self.close.append(Decision(call, entry, nudge, f"after {self._point} {row}"))
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
                self.close.append(Decision(call, row, 0.0, f"selection after {self._point} {index}"))
                if any(decision.call == call and decision.entry == row for decision in self.taken):
                    rows = torch.cat((rows[:row], other[row:row + 1], rows[row + 1:]))
            return rows.view_as(chosen)
        return decide


def explain(run: Callable[[Arbiter], tuple[int, str | None]], most: int = 4, tries: int = 60,
            ) -> tuple[str | None, tuple[Decision, ...]]:
    """Find close decisions that, taken the other way, bring a run within its bounds.

    run(arbiter) runs the model with the arbiter active and returns how many points agreed before the first that did not,
    and that point (None when all agree). Greedy: of the close decisions before that point, closest first, the one that takes the
    run furthest is kept, then the next, at most `most`. Returns the first point still out of bounds and the decisions taken.
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
