"""How reference/verify.py judges: a trace's points against the same points computed by this model, and how far they may differ.

Inputs are tensors by point name and two ways to compute them, so this file knows neither models nor kinds of traces:
    graft(recorded, arbiter)  every module from the values recorded before it (reference/graft.py)
    run(arbiter)              the model end to end
Three judgements, one Verdict each
    judge         float32. Both must agree within FLOAT32_BOUND, up to close decisions that are proven (reference/flips.py).
    judge_modules BF16. Every module from recorded inputs decides; then the run end to end must consist of the same
                  modules, each recomputed from the run's own values before it. Where that run leaves the trace is
                  information: one rounding is amplified at will, and so is a systematic error below the bound.
    judge_steps   BF16 decode steps, which record no inputs of modules. The run must consist of the modules of one whole
                  prompt, drafts decide from recorded conditioning, and end to end only gross errors count.
One point: relative L2 for floats, equality for integers, equality up to exact ties for selections (`compare`).
Tests: tests/test_verify.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.flips import Arbiter, Decision, explain, reproduce, rows_off
from reference.graft import DRAFT_PARTS
from reference.metrics import compare_selections, relative_l2, worst_entry

EQUAL, DIVERGED, NOT_COMPARABLE, BAD_INPUT = 0, 1, 2, 3
WORDS = {EQUAL: "equal", DIVERGED: "DIVERGED", NOT_COMPARABLE: "NOT COMPARABLE", BAD_INPUT: "BAD INPUT"}

# --- bounds, relative L2 where nothing else is said ------------------------------------------------------------------
# golden data: largest error of a right implementation that differs in summation order only
FLOAT32_BOUND = 2e-5
# golden data: how far one rounding flip may move an end-to-end float32 point
FLIP_BOUND = 2e-3
# ours: a flip inside attention was seen to move its first point by 2e-2; a larger error is not searched for flips
SEARCH_BOUND = 5e-2
# golden data: BF16 rounding and summation order of one module
NATIVE_BOUND = 1e-2
# ours: one entry against the bound of its tensor, relative to its size plus the RMS: one corrupted value would drown in a norm
ENTRY_FACTOR = 10
# golden data: sanity only, all rows together; ours: up to 0.31 measured on nano when close roundings fall anyhow
NATIVE_END_BOUND = 0.35
# ours: one row of the draft conditioning that another token made, in float32 and BF16. BF16: up to 0.69 measured when close
# roundings fall anyhow, from 1.17 on with another token
OTHER_ROW_FLOAT32, OTHER_ROW = 0.1, 0.9
# ours: the same row once the right token is found
SAME_ROW_FLOAT32, SAME_ROW = 1e-2, 0.5
# ours: drafts from recorded conditioning, all of a trace together. Measured on nano: 0.006 with other orders of summation,
# 0.031 when close roundings fall anyhow; mistakes of reference/mutants.py in a draft from 0.044 on (comb-transposed)
DRAFT_BOUND = 4e-2
# ours: one draft of them, up to 0.12 measured when close roundings fall anyhow; one entry of them, up to 0.44 in the same way
ONE_DRAFT, ONE_ENTRY = 0.25, 1.0
# ours: how far the logit of a drafted id may be from the best, in RMS of the logits; up to 0.01 measured from recorded
# conditioning when close roundings fall anyhow, above 0.25 between two such runs
CHOICE_GAP = 0.5
# ours: more rows of a point, or points, than these shares out of bounds are no close calls and not searched. When all close
# roundings of nano fall anyhow, 1 of 91 points goes out of bounds, in one row
CLOSE_ROWS, CLOSE_POINTS = 0.25, 0.1
# ours: ties that are taken the other way one by one, end to end in BF16
NATIVE_TRIES = 8

Points = Iterator[tuple[str, Tensor]]  # point name and tensor, in the order of computation
Graft = Callable[[dict[str, Tensor], Arbiter], Points]  # every point computed from the given ones before it
Run = Callable[[Arbiter], Points]  # every point end to end


class NotComparable(Exception):
    """The trace was not made from these tokens, this configuration or these settings."""


@dataclass
class Verdict:
    trace: str
    code: int
    text: str
    error: float = 0.0  # largest relative L2
    point: str = ""  # where
    departs: str = ""  # BF16: first point and row, end to end, that no close tie explains; information
    notes: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        return self.text.startswith("skipped")

    def line(self) -> str:
        if self.skipped:
            return f"{self.trace}: {self.text}"
        where = f", largest error {self.error:.2g} at {self.point}" if self.point else ""
        return f"{self.trace}: {WORDS[self.code]}{where}. {self.text}".rstrip()


@dataclass(frozen=True)
class Compared:
    """One point. `error` is relative L2 (0 or infinity for discrete points); `excess` above 1 means out of bounds."""

    name: str
    error: float
    excess: float
    detail: str
    entry: float = 0.0  # largest difference of one entry, relative to its own size plus the RMS


# --- float32 -----------------------------------------------------------------------------------------------------


def judge(name: str, points: dict[str, Tensor], graft: Graft | None, run: Run) -> Verdict:
    """Verdict in float32, where right implementations differ by 1e-6, or by a whole code where one rounding falls otherwise.

    Index queries and keys are quantized inside a module without being recorded, so flips are searched for in the graft too.
    A small error end to end that is absent from every module, and that a located flip makes less but few do not explain, is
    many of them. Without a located flip it is a small mistake, as of an epsilon. graft: None if the trace has no inputs of
    modules.
    """
    def modules(arbiter: Arbiter) -> Points:
        with arbiter.active():
            for point, value in graft(points, arbiter):
                arbiter.mark(point)
                yield point, value

    grafted: list[Compared] = []
    notes: list[str] = []
    if graft is not None:
        plain, grafted, taken = _with_flips(modules, points)
        _require_all(points, (one.name for one in plain))
        notes = [f"legitimate flip inside a module: {decision}" for decision in taken]
        if wrong := _first_wrong(grafted):
            return _diverged(name, "From recorded inputs", wrong, notes)

    plain, ended, taken = _with_flips(run, points)
    _require_all(points, (one.name for one in (*grafted, *plain)))
    text = f"{len(plain)} points end to end" + (f", {len(grafted)} from recorded inputs" if grafted else "")
    wrong, largest = _first_wrong(ended), max(one.error for one in plain)
    if wrong is None:
        notes += [f"legitimate flip: {decision}; taken the other way, all points agree" for decision in taken]
        text += f", {len(taken)} legitimate flip(s)" if taken else ""
    elif grafted and taken and largest <= FLIP_BOUND:
        notes += [f"legitimate flip: {decision}; taken the other way, more points agree" for decision in taken]
        notes += [f"end to end out of bounds from {_first_wrong(plain).name} on (largest error {largest:.2g}), with those "
                  f"flips from {wrong.name} on; absent from recorded inputs, so taken as more rounding flips, not located one "
                  "by one"]
        ended = plain
    else:  # some of the differences may be flips; what is left is the finding
        return _diverged(name, "End to end", wrong, [*notes, *(f"legitimate flip: {decision}" for decision in taken)])
    worst = max((*grafted, *ended), key=lambda one: one.error)
    return Verdict(name, EQUAL, f"{text}.", worst.error, worst.name, notes=notes)


def _with_flips(run: Run, points: dict[str, Tensor]) -> tuple[list[Compared], list[Compared], tuple[Decision, ...]]:
    """All points in float32 as they are; again with the flips that take agreement furthest; and those flips."""
    plain = list(_compare_each(run(Arbiter()), points, FLOAT32_BOUND))
    wrong = _first_wrong(plain)
    if wrong is None or wrong.error > SEARCH_BOUND:
        return plain, plain, ()
    _, taken = explain(lambda arbiter: _agreement(run(arbiter), points, FLOAT32_BOUND))
    return plain, list(_compare_each(run(Arbiter(taken)), points, FLOAT32_BOUND)) if taken else plain, taken


# --- BF16 --------------------------------------------------------------------------------------------------------


def judge_modules(name: str, points: dict[str, Tensor], graft: Graft, run: Run) -> Verdict:
    """Verdict in BF16: modules from recorded inputs, the run end to end from its own, and where that leaves the trace."""
    grafted, wrong, notes = _settled(lambda: graft(points, Arbiter()), points)
    _require_all(points, (one.name for one in grafted))
    if wrong is not None:
        return _diverged(name, "From recorded inputs", wrong, notes)
    own = dict(run(Arbiter()))
    _, wrong, _ = _settled(lambda: graft(own, Arbiter()), own)
    if wrong is not None:
        return _diverged(name, "Every module from recorded inputs agrees, but end to end they are put together in another way",
                         wrong, notes)
    departs, flips = _departure(points, run)
    notes += flips
    worst = max(grafted, key=lambda one: one.error)
    if departs and "logits" in points:
        error = relative_l2(own["logits"], points["logits"])
        notes.append(f"end to end, logits are {error:.2g} off; {_known(worst)}")
    text = f"{len(grafted)} points from recorded inputs; {_end_text(points, departs)}"
    return Verdict(name, EQUAL, text, worst.error, worst.name, departs, notes)


def judge_steps(name: str, points: dict[str, Tensor], own: dict[str, Tensor], joined: dict[str, Tensor], graft: Graft,
                redraft: Callable[[dict[str, Tensor]], dict[str, Tensor]], run: Run) -> Verdict:
    """Verdict on decode steps in BF16.

    own: the points of a run. joined: all it observed, by position over the whole prompt, which `graft` recomputes as one
    prompt: steps and caches may not change what a module computes. redraft(given): every draft again, from the conditioning
    in `given`, where it is complete; from the run's own too, where a mistake in the caches of the drafts would show. Drafts
    without recorded conditioning are judged end to end if the run stays within bounds, else not at all: not comparable.
    """
    _require_all(points, own)
    for point in points:
        _require_same_kind(point, own[point], points[point])
    compared, wrong, notes = _settled(lambda: graft(joined, Arbiter()), joined)
    if wrong is not None:
        return _diverged(name, "Step by step", wrong, notes)
    text = f"{len(compared)} points of the steps from their own inputs"
    drafts, wrong = _judge_drafts(redraft(points), points)
    if wrong is not None:
        return _diverged(name, "From recorded conditioning", wrong, notes)
    _, wrong = _judge_drafts(redraft(own), own)
    if wrong is not None:
        return _diverged(name, "From its own conditioning", wrong, notes)
    text += f", {len(drafts)} of drafts from recorded conditioning" if drafts else ""
    judged = {one.name for one in drafts}
    unjudged = [point for point in points if _is_draft(point) and point not in judged]
    worst = max((*compared, *drafts), key=lambda one: one.error)
    departs, flips = _departure(points, run)
    notes += flips
    for part in ("logits", "mtp.main_hidden"):
        known = [point for point in own if point.split(".", 1)[1] == part and point in points]
        if not known:
            continue
        actual, expected = (torch.cat([values[point].to(torch.float64).flatten(0, -2) for point in known])
                            for values in (own, points))
        error, row = relative_l2(actual, expected), float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        # Not `error > BOUND`: NaN is out of bounds.
        if not error <= NATIVE_END_BOUND or (part == "mtp.main_hidden" and not row <= OTHER_ROW):
            # The first point that is clearly off, not the first that rounding has moved.
            usual = min(error, NATIVE_END_BOUND)
            point = next((point for point in known if not relative_l2(own[point], points[point]) <= usual), known[0])
            detail = f"{worst_entry(own[point], points[point])}; all rows of {part} are {error:.2g} off, one row {row:.2g}"
            return _diverged(name, "End to end", Compared(point, error, math.inf, detail), notes, departs)
        if departs:
            notes.append(f"end to end, all rows of {part} are {error:.2g} off; {_known(worst)}")
    missing = next((point for point in own if point.endswith("mtp.main_hidden") and point not in points), "draft_ids")
    if departs and unjudged:
        raise NotComparable(f"drafts cannot be judged: {missing} is not recorded, which {unjudged[0]} ({len(unjudged)} such "
                            f"points) was computed from, and end to end the run departs at {departs}")
    if unjudged:
        notes.append(f"{len(unjudged)} points of drafts, {unjudged[0]} the first, could not be judged from recorded "
                     f"conditioning: {missing} is not recorded; end to end they agree")
    if departs:
        notes.append("this trace has no inputs of backbone modules; a prefill trace of the same numerics judges those")
    return Verdict(name, EQUAL, f"{text}; {_end_text(points, departs)}", worst.error, worst.name, departs, notes)


def _judge_drafts(drafts: dict[str, Tensor], points: dict[str, Tensor]) -> tuple[list[Compared], Compared | None]:
    """All points of drafts against `points`, and the first that is wrong.

    Five tokens through three stages: single drafts vary, so all of a trace are judged together, and each one by a wider bound.
    """
    compared = [compare(name, value, points[name], DRAFT_BOUND) for name, value in drafts.items()]
    for part in ("mtp.logits", "mtp.confidence"):
        names = [name for name in drafts if name.endswith(part)]
        if not names:
            continue
        error = relative_l2(*(torch.cat([values[name].flatten() for name in names]) for values in (drafts, points)))
        if not error <= DRAFT_BOUND:
            first = next(one for one in compared if one.name in names and not one.error <= DRAFT_BOUND)
            return compared, dataclasses.replace(first, detail=f"{first.detail}; all drafts are {error:.2g} off")
    return compared, next((one for one in compared if not one.error <= ONE_DRAFT or one.entry > ONE_ENTRY), None)


def _settled(compute: Callable[[], Points], points: dict[str, Tensor]) -> tuple[list[Compared], Compared | None, list[str]]:
    """Computed points against `points` in BF16: all comparisons, the first that is wrong, and rows that a rounding explains.

    Within one module an entry near a midpoint can fall to the other side, and a choice made from it differ. Such a row counts
    as equal only if runs with other close roundings (flips.Roundings) give the recorded one, and only where few are off.
    """
    values = {name: _in_order(name, value) for name, value in compute()}

    def judged(name: str, value: Tensor) -> Compared:
        scores = points.get(_scores(name), values.get(_scores(name))) if name.endswith(".topk") else None
        return compare(name, value, points[name], NATIVE_BOUND, scores)

    compared = {name: judged(name, value) for name, value in values.items() if name in points}
    wrong = [name for name, one in compared.items() if one.excess > 1]
    notes = []
    few = 0 < len(wrong) <= max(1, CLOSE_POINTS * len(compared)) and rows_off(
        values[wrong[0]], _in_order(wrong[0], points[wrong[0]]), NATIVE_BOUND).to(torch.float64).mean() <= CLOSE_ROWS
    for name in wrong if few else ():
        found = reproduce(compute, name, values[name], _in_order(name, points[name]),
                          lambda value, name=name: judged(name, value).excess <= 1)
        if found is None:
            break
        notes.append(f"legitimate rounding inside a module: {name} {compared[name].detail}; close roundings taken the other "
                     "way give the recorded row")
        compared[name] = judged(name, found)
    return list(compared.values()), _first_wrong(compared.values()), notes


def _departure(points: dict[str, Tensor], run: Run) -> tuple[str, list[str]]:
    """Where a run end to end leaves the trace although close ties were taken the other way ("" = nowhere), and those ties."""
    left, taken = explain(lambda arbiter: _agreement(run(arbiter), points, NATIVE_BOUND), tries=NATIVE_TRIES)
    notes = [f"legitimate flip: {decision}; taken the other way, {'all points agree' if left is None else 'more points agree'}"
             for decision in taken]
    if left is None:
        return "", notes
    actual = next(value for point, value in run(Arbiter(taken)) if point == left)
    off = rows_off(_in_order(left, actual), _in_order(left, points[left]), NATIVE_BOUND)
    row = torch.unravel_index(off.to(torch.int64).argmax(), actual.shape[:-1])
    return f"{left}, row {[int(i) for i in row][:2]}", notes


def _end_text(points: dict[str, Tensor], departs: str) -> str:
    return f"end to end departs at {departs}." if departs else f"{len(points)} points end to end."


# --- one point, one run ------------------------------------------------------------------------------------------


def compare(name: str, actual: Tensor, expected: Tensor, bound: float, scores: Tensor | None = None) -> Compared:
    """Compare one point. scores: what a selection was made from, to recognize exact ties, which any rule may decide.

    Raises NotComparable for another shape, or a float where an integer is expected.
    """
    _require_same_kind(name, actual, expected)
    if not expected.dtype.is_floating_point:
        if name.endswith(".topk"):
            verdict, detail = compare_selections(actual, expected, scores, 0.0)
            equal = verdict != "different"
        else:
            equal = torch.equal(actual.to(torch.int64), expected.to(torch.int64))
            detail = "" if equal else worst_entry(actual, expected)
        error = 0.0 if equal else math.inf
        return Compared(name, error, error, detail)
    error, entry = relative_l2(actual, expected), 0.0
    finite = torch.isfinite(expected)
    if math.isfinite(error) and finite.any():
        got, wanted = actual[finite].to(torch.float64), expected[finite].to(torch.float64)
        size = (wanted.square().mean().sqrt() + wanted.abs()).clamp_min(torch.finfo(torch.float64).tiny)
        entry = float(((got - wanted).abs() / size).max())
    excess = max(error, entry / ENTRY_FACTOR) / bound
    return Compared(name, error, excess, worst_entry(actual, expected) if excess > 1 else "", entry)


def _compare_each(computed: Iterable[tuple[str, Tensor]], points: dict[str, Tensor], bound: float) -> Iterator[Compared]:
    """Compare computed points with the recorded ones of the same name, in the order in which they are computed."""
    for name, value in computed:
        if name in points:
            yield compare(name, value, points[name], bound, points.get(_scores(name)) if name.endswith(".topk") else None)


def _agreement(computed: Points, points: dict[str, Tensor], bound: float) -> tuple[int, str | None]:
    """How many points agree before the first that does not, and its name; stops there."""
    agreed = 0
    with contextlib.closing(computed):
        for one in _compare_each(computed, points, bound):
            if one.excess > 1:
                return agreed, one.name
            agreed += 1
    return agreed, None


def _require_all(points: dict[str, Tensor], names: Iterable[str]) -> None:
    """Raise NotComparable if the trace has points that this model does not compute: they would go unjudged."""
    missed = sorted(set(points) - set(names))
    if missed:
        raise NotComparable(f"this model has no point called {missed[0]} ({len(missed)} such points)")


def _require_same_kind(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise NotComparable for another shape, or a float where an integer is expected."""
    if actual.shape != expected.shape:
        raise NotComparable(f"{name} has shape {list(expected.shape)} in the trace, this model gives {list(actual.shape)}")
    if expected.dtype.is_floating_point != actual.dtype.is_floating_point:
        raise NotComparable(f"{name} is {expected.dtype} in the trace, this model gives {actual.dtype}")


def _is_draft(point: str) -> bool:
    """Whether a point of a decode trace is a result of a draft, "stepN.mtp.logits" for example."""
    return ".mtp." in point and point.rpartition(".")[2] in DRAFT_PARTS


def _known(worst: Compared) -> str:
    """What is known of a run in BF16 that leaves the trace although its modules agree."""
    return (f"every module agrees from its inputs within {NATIVE_BOUND:g} (largest {worst.error:.2g} at {worst.name}), so "
            "roundings or a small systematic error; a float32 trace tells them apart")


def _first_wrong(compared: Iterable[Compared]) -> Compared | None:
    return next((one for one in compared if one.excess > 1), None)


def _diverged(name: str, how: str, wrong: Compared, notes: list[str], departs: str = "") -> Verdict:
    text = f"{how}, first out of bounds at {wrong.name}: {wrong.detail}."
    return Verdict(name, DIVERGED, text, wrong.error, wrong.name, departs, notes)


def _scores(name: str) -> str:
    """The point that the selection `name` was made from."""
    return name.removesuffix("topk") + "scores"


def _in_order(name: str, value: Tensor) -> Tensor:
    """`value`, a selection in ascending order: its rows are sets."""
    return value.sort(-1).values if name.endswith(".topk") else value
