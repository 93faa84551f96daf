"""Which rows of two traces belong together.

Two runs that were cut into the same calls are paired call by call, in the order of execution. Other runs are put
together by absolute position first: every row of a point once, rows of rejected tokens left out, points of a whole call
(cache state) not at all.
Imports numpy only. Tests: tests/test_compare.py, tests/test_trace.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.points import Point, lookup
from reference.trace_format import Entry, Trace, check_axes


@dataclass(frozen=True)
class Unit:
    """One point of both traces: the entries that hold its rows."""

    name: str
    path: str
    point: Point
    tested: tuple[Entry, ...]
    baseline: tuple[Entry, ...]


def same_calls(tested: Trace, baseline: Trace) -> bool:
    """Whether both runs were cut into the same calls."""
    return [(step["start"], step["count"], step["kept"]) for step in tested.steps] == [
        (step["start"], step["count"], step["kept"]) for step in baseline.steps]


def pair_up(tested: Trace, baseline: Trace) -> tuple[list[Unit], list[str], list[str]]:
    """The points both have, in the order of the baseline; names only the baseline has; names only the tested has."""
    if same_calls(tested, baseline):
        sides = [{entry.name: (entry,) for entry in trace.entries.values()} for trace in (tested, baseline)]
    else:
        sides = [_by_path(trace) for trace in (tested, baseline)]
    units = []
    for name, entries in sides[1].items():
        point = lookup(entries[0].path)
        if name in sides[0] and point is not None:
            units.append(Unit(name, entries[0].path, point, sides[0][name], entries))
    return (units, [name for name in sides[1] if name not in sides[0]],
            [name for name in sides[0] if name not in sides[1]])


def _by_path(trace: Trace) -> dict[str, tuple[Entry, ...]]:
    """Entries of all calls under one path; pictures are numbered through the run. Points of a call are left out."""
    found: dict[str, list[Entry]] = {}
    pictures: dict[str, int] = {}
    for entry in trace.entries.values():
        point = lookup(entry.path)
        if point is None or point.rows == "call" and point.concept != "weights":
            continue
        path = entry.path
        if point.rows == "image":
            stem = path.partition("#")[0]
            number = pictures[stem] = pictures.get(stem, -1) + 1
            path = f"{stem}#{number}" if number else stem
        found.setdefault(path, []).append(entry)
    order = sorted(found, key=_execution_order(trace))
    return {path: tuple(found[path]) for path in order}


def _execution_order(trace: Trace) -> Callable[[str], float]:
    """Sort key that merges the calls of a run: a path's place in the call with most points, later ones after it."""
    counts = [0] * len(trace.steps)
    for entry in trace.entries.values():
        if entry.step is not None:
            counts[entry.step] += 1
    longest = counts.index(max(counts)) if counts else 0
    places: dict[str, float] = {}
    for number, entry in enumerate(trace.entries.values()):
        if entry.step == longest or entry.step is None:
            places.setdefault(entry.path, number)
    return lambda path: places.get(path, float("inf"))


def gather(trace: Trace, entries: tuple[Entry, ...], drop_rejected: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values [B, R, ...] and keys [R] of a point over all its entries; no keys where a point has no rows."""
    point = lookup(entries[0].path)
    if point.rows in ("call", "image"):
        return trace.read(entries[0]), np.zeros(0, np.int64)
    values, keys = [], []
    for entry in entries:
        value = trace.read(entry)
        check_axes(entry.path, value.shape)
        value = value[:, None] if point.rows == "draft" else value
        key = trace.keys(entry, value.shape[1])
        kept = trace.kept(entry, key) if drop_rejected else np.ones(len(key), bool)
        values.append(value[:, kept])
        keys.append(key[kept])
    fill = {"indexer.scores": -np.inf, "indexer.candidates": False, "indexer.topk": -1}
    blank = next((value for name, value in fill.items() if entries[0].path.endswith(name)), None)
    if blank is not None and len(values) > 1:  # later calls see more groups
        width = max(value.shape[-1] for value in values)
        values = [widen(value, width, blank) for value in values]
    return np.concatenate(values, axis=1), np.concatenate(keys)


def widen(value: np.ndarray, width: int, blank: Any) -> np.ndarray:
    pad = [(0, 0)] * (value.ndim - 1) + [(0, width - value.shape[-1])]
    return np.pad(value, pad, constant_values=blank)
