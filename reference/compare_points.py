"""The verdict on one recorded point of two traces.

Floats: max abs, relative L2, cosine, NMSE (also in dB), the worst entry with both values, NaN and infinity counts.
Decisions, by what was chosen from:
    equal          the same
    tie            they differ among members whose scores are exactly equal
    near-tie (m)   they differ, and the scores are only m apart, below the bound of those scores
    different      they differ by more than rounding can explain
    m is how far apart the scores of the exchanged members are, in the unit of those scores.
Rounding flips: a fake-quantized row that differs is a `flip (n)` when the recorded value before quantization, moved by
the relative amount n <= 1e-5, rounds to exactly what either side has. Without that value on record it is `different`.
Arrays are [B, R, ...] with one key per row R (see trace_format.py), or of any shape where a point has no rows.
Imports numpy only. Tests: tests/test_compare.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reference.points import lookup
from reference.tolerances import ENTRY_FACTOR, Bound

# ours: relative nudges tried at a rounding midpoint. Far above float32 noise, far below the distance of codes (6e-2).
NUDGES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5)
FP8_GROUP = 32  # official: channels that share the scale of a window row

OUT_OF_BOUNDS = ("different", "shape")
_MEMBERS = {"indexer.candidates": "block", "indexer.topk": "row", "ffn.expert_ids": "expert"}  # what a set is made of


@dataclass
class Result:
    """The comparison of one point."""

    name: str
    path: str
    verdict: str = "equal"  # equal, close, tie, near-tie, flip, different, shape, skipped
    error: float = 0.0  # relative L2; 0 or infinity for decisions
    excess: float = 0.0  # above 1 means out of bounds
    margin: float | None = None
    position: int | None = None  # key of the first row that is out of bounds
    index: list[int] = field(default_factory=list)  # of the worst entry, with the row as its place in the tensor
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    decided: list[tuple[int, int]] = field(default_factory=list)  # (sequence, key) of ties and flips
    ratio: int = 0  # tokens per row of a compressed point; 0 = not known

    @property
    def bad(self) -> bool:
        return self.verdict in OUT_OF_BOUNDS

    def row(self, key: int) -> str:
        """A row in words: an absolute position, or a compressed row with the tokens it is made of."""
        point = lookup(self.path)
        if point is None or point.rows != "group":
            return f"position {key}"
        first, last = key * self.ratio, (key + 1) * self.ratio - 1
        tokens = "" if not self.ratio else f" (token {first})" if first == last else f" (tokens {first}..{last})"
        return f"row {key}{tokens}"

    def label(self) -> str:
        return self.verdict if self.margin is None else f"{self.verdict} ({self.margin:.3g})"


# --- floats ------------------------------------------------------------------------------------------------------


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    """|a - b| / |b| over finite entries, float64; infinity when the non-finite entries are not the same ones."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(finite, 0, b), np.where(np.isfinite(a), 0, a), equal_nan=True):
        return math.inf
    norm, difference = float(np.linalg.norm(b[finite])), float(np.linalg.norm(a[finite] - b[finite]))
    return difference / norm if norm > 0 else (0.0 if difference == 0 else math.inf)


def float_numbers(actual: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """max_abs, cosine, nmse, nmse_db, NaN and infinity counts of both sides, over entries that are finite in both."""
    a, b = actual.astype(np.float64).reshape(-1), expected.astype(np.float64).reshape(-1)
    both = np.isfinite(a) & np.isfinite(b)
    x, y = a[both], b[both]
    power, noise = float(np.square(y).sum()), float(np.square(x - y).sum())
    lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
    nmse = noise / power if power > 0 else (0.0 if noise == 0 else None)
    return {"max_abs": float(np.abs(x - y).max()) if x.size else 0.0,
            "cosine": float(x @ y) / lengths if lengths > 0 else None, "nmse": nmse,
            "nmse_db": 10 * math.log10(nmse) if nmse else None,
            "nan": [int(np.isnan(a).sum()), int(np.isnan(b).sum())],
            "inf": [int(np.isinf(a).sum()), int(np.isinf(b).sum())]}


def judge_floats(result: Result, actual: np.ndarray, expected: np.ndarray, keys: np.ndarray, loose: np.ndarray | None,
                 bound: float, flip_bound: float) -> Result:
    """Fill in `result`. loose [B, R] bool: rows that an earlier flip may have moved, held to `flip_bound`."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    result.error = relative_l2(a, b)
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(a - b), nan=math.inf, posinf=math.inf)
        difference[~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))] = 0
    if result.error == 0 or not a.size:
        result.numbers = float_numbers(a, b)
        return result
    finite = b[np.isfinite(b)]
    rms = float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0
    size = np.maximum(rms + np.abs(np.nan_to_num(b, nan=0.0, posinf=0.0, neginf=0.0)), np.finfo(np.float64).tiny)
    entry = difference / size / (ENTRY_FACTOR * bound)
    if loose is not None and loose.any():
        entry[loose] = 0  # one flipped code may move one channel by its whole distance
    result.excess = float(entry.max())
    for rows, limit in _row_classes(loose, bound, flip_bound):
        part = relative_l2(a[rows], b[rows]) if rows is not None else result.error
        result.excess = max(result.excess, part / limit)
    result.verdict = "different" if result.excess > 1 else "close"
    result.numbers = float_numbers(a, b)
    flat = int(np.argmax(entry if entry.any() else difference))
    result.index = [int(i) for i in np.unravel_index(flat, a.shape)]
    result.numbers["worst"] = [float(a.reshape(-1)[flat]), float(b.reshape(-1)[flat])]
    if len(keys):
        over = entry.reshape(*entry.shape[:2], -1).max((0, 2)) > min(1.0, float(entry.max()))
        first = int(np.flatnonzero(over)[0]) if over.any() else result.index[1]
        result.position = int(keys[first])
        if result.bad:  # the worst entry of the first bad row says more than the worst of all
            row = entry[:, first]
            place = np.unravel_index(int(np.argmax(row)), row.shape)
            result.index = [int(place[0]), first, *(int(i) for i in place[1:])]
            result.numbers["worst"] = [float(side[tuple(result.index)]) for side in (a, b)]
    result.detail = "at {} {:.8g}, wanted {:.8g}".format(_place(result, result.index, keys), *result.numbers["worst"])
    return result


def _row_classes(loose: np.ndarray | None, bound: float, flip_bound: float) -> list[tuple[np.ndarray | None, float]]:
    if loose is None or not loose.any():
        return [(None, bound)]
    return [(rows, limit) for rows, limit in ((loose, flip_bound), (~loose, bound)) if rows.any()]


def _place(result: Result, index: list[int], keys: np.ndarray) -> str:
    """Index of an entry in words: the sequence, the row, then the channels."""
    if not len(keys):
        return str(index)
    channels = f" {index[2:]}" if index[2:] else ""
    return f"sequence {index[0]}, {result.row(int(keys[index[1]]))}{channels}"


# --- decisions ---------------------------------------------------------------------------------------------------


def judge_exact(result: Result, actual: np.ndarray, expected: np.ndarray, keys: np.ndarray) -> Result:
    wrong = np.argwhere(actual.astype(np.int64) != expected.astype(np.int64))
    if len(wrong):
        order = np.lexsort(wrong.T[::-1] if not len(keys) else (wrong[:, 0], wrong[:, 1]))
        index = [int(i) for i in wrong[order[0]]]
        _differs(result, index, keys)
        values = int(actual[tuple(index)]), int(expected[tuple(index)])
        place = _place(result, index, keys)
        result.detail = f"at {place} {values[0]}, wanted {values[1]} ({len(wrong)} entries differ)"
    return result


def _differs(result: Result, index: list[int], keys: np.ndarray) -> None:
    result.verdict, result.error, result.excess, result.index = "different", math.inf, math.inf, index
    if len(keys):
        result.position = int(keys[index[1]])


MarginOf = Callable[[tuple[int, ...], set[int], set[int]], tuple[float, float]]


def judge_sets(result: Result, actual: np.ndarray, expected: np.ndarray, keys: np.ndarray, margin_of: MarginOf,
               ) -> Result:
    """Sets along the last axis [B, R, ..., k], -1 = none.

    margin_of(index of the set, only here, only wanted) -> how far apart the exchanged members are, and what is close.
    """
    worst = 0.0
    a, b = np.sort(actual, -1), np.sort(expected, -1)
    wrong = np.argwhere((a != b).any(-1)).tolist()
    for index in sorted(wrong, key=lambda index: (index[1], index)):
        left, right = set(a[tuple(index)].tolist()) - {-1}, set(b[tuple(index)].tolist()) - {-1}
        margin, tolerance = margin_of(tuple(index), left - right, right - left)
        text = (f"at {_place(result, index, keys)} only here {_members(result, left - right)}, only wanted "
                f"{_members(result, right - left)}")
        if not _near_tie(result, index, keys, len(left) == len(right) and margin <= tolerance, margin, text):
            return result
        worst = max(worst, margin)
    _conclude(result, worst)
    return result


def _near_tie(result: Result, index: Any, keys: np.ndarray, near: bool, margin: float, text: str) -> bool:
    """Note a decision that differs at `index`: if it is `near` as one more near-tie, else as what ends the comparison."""
    if not near:
        _differs(result, index, keys)
        result.margin, result.detail = (None if math.isinf(margin) else margin), text
        return False
    result.decided.append((index[0], int(keys[index[1]])))
    result.detail = result.detail or text
    return True


def _members(result: Result, numbers: set[int]) -> str:
    """Members of a set in words: blocks 1 and 4 as "block 1, 4"."""
    word = next((word for end, word in _MEMBERS.items() if result.path.endswith(end)), "")
    return f"{word} {', '.join(map(str, sorted(numbers)))}".lstrip() if numbers else "none"


def _conclude(result: Result, worst: float) -> None:
    """The verdict when every difference was close: `worst` is the largest margin."""
    if result.decided:
        result.verdict, result.margin = ("tie", None) if worst == 0 else ("near-tie", worst)
        result.position = min(key for _, key in result.decided)


def selection_margin(scores: np.ndarray | None, bound: float, block: int = 1) -> MarginOf:
    """For columns chosen by scores [B, R, N] (or blocks of `block` columns, by their maximum)."""
    def margin(index: tuple[int, ...], left: set[int], right: set[int]) -> tuple[float, float]:
        if scores is None:
            return math.inf, 0.0
        values = scores[index].astype(np.float64)
        if block > 1:
            padded = np.full(-(-len(values) // block) * block, -math.inf)
            padded[:len(values)] = values
            values = padded.reshape(-1, block).max(-1)
        swapped = values[sorted(left | right)]
        if not np.isfinite(swapped).all():
            return math.inf, 0.0
        return float(swapped.max() - swapped.min()), bound * float(np.abs(values[np.isfinite(values)]).max())
    return margin


def recorded_margin(margins: tuple[np.ndarray | None, np.ndarray | None], bound: float) -> MarginOf:
    """For ids whose margin [B, R, ...] is on record (either side): one exchange at the boundary can be a tie."""
    def margin(index: tuple[int, ...], left: set[int], right: set[int]) -> tuple[float, float]:
        known = [float(side[index]) for side in margins if side is not None]
        if not known or len(left) != 1 or len(right) != 1:
            return math.inf, 0.0
        return max(abs(value) for value in known), bound  # below zero: not the choice its own scores ask for
    return margin


def judge_choice(result: Result, actual: np.ndarray, expected: np.ndarray, keys: np.ndarray, scores: np.ndarray | None,
                 bound: float, lead: int = 0) -> Result:
    """One id per entry, chosen by scores [..., V]. lead: leading ids of a row that no score belongs to (the anchor)."""
    wrong = np.argwhere(actual != expected)
    worst = 0.0
    for index in sorted(([int(i) for i in index] for index in wrong), key=lambda index: (index[1], index)):
        here, wanted = int(actual[tuple(index)]), int(expected[tuple(index)])
        text = f"at {_place(result, index, keys)} {here}, wanted {wanted}"
        if (index[0], int(keys[index[1]])) in result.decided:
            continue  # a later draft of a row whose first difference was a tie
        margin = tolerance = math.inf
        place = (*index[:-1], index[-1] - lead) if lead else tuple(index)
        if scores is not None and place[-1] >= 0:
            values = scores[place].astype(np.float64)
            margin, tolerance = abs(float(values[wanted] - values[here])), bound * float(np.abs(values).max())
        if not _near_tie(result, index, keys, not math.isinf(margin) and margin <= tolerance, margin, text):
            return result
        worst = max(worst, margin)
    _conclude(result, worst)
    return result


# --- rounding flips ----------------------------------------------------------------------------------------------


def fake_quant_fp8(values: np.ndarray) -> np.ndarray:
    """float32 [..., n] rounded to E4M3, one power-of-two scale per 32 channels (official: act_quant), for judging."""
    grouped = values.astype(np.float32).reshape(*values.shape[:-1], -1, FP8_GROUP)
    amax = np.maximum(np.abs(grouped).max(-1, keepdims=True), np.float32(1e-4)) * np.float32(1 / 448)
    fraction, exponent = np.frexp(amax)
    scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
    scaled = np.clip(grouped / scale, -448, 448)
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(scaled)[1] - 1, -6) - 3)  # distance of neighbouring codes
    return (np.round(scaled / step) * step * scale).reshape(values.shape).astype(np.float32)


def judge_flips(result: Result, actual: np.ndarray, expected: np.ndarray, keys: np.ndarray,
                before: tuple[np.ndarray | None, np.ndarray | None], loose: np.ndarray | None, bound: Bound) -> Result:
    """Turn `different` into `flip` where every differing group is one rounding decision taken the other way.

    before: the rows before quantization on both sides, as far as recorded. Rows that may have moved are left alone.
    """
    tight = np.ones(actual.shape[:2], bool) if loose is None else ~loose
    shape = (*actual.shape[:2], -1, FP8_GROUP)
    a, b = actual.astype(np.float32).reshape(shape), expected.astype(np.float32).reshape(shape)
    wrong = (a != b).any(-1)
    if not (wrong.any(-1) & tight).any():
        return result
    sources = [value.astype(np.float32).reshape(shape) for value in before if value is not None]
    found: list[tuple[int, int, float]] = []
    for place in map(tuple, np.argwhere(wrong & tight[..., None]).tolist()):
        nudge = next((size for size in NUDGES for source in sources
                      if _both_round(source[place], a[place], b[place], size)), None)
        if nudge is None:
            return result
        found.append((place[0], int(keys[place[1]]), nudge))
    result.decided = [(sequence, key) for sequence, key, _ in found]
    result.position = min(key for _, key in result.decided)
    rest = judge_floats(Result(result.name, result.path), actual, expected, keys,
                        _moved(actual.shape[:2], keys, result.decided, loose), bound.attention, 1.0)
    if not rest.bad:
        result.verdict, result.margin = "flip", max(nudge for *_, nudge in found)
    return result


def _both_round(source: np.ndarray, a: np.ndarray, b: np.ndarray, size: float) -> bool:
    """Whether both groups are roundings of `source` moved by at most the relative amount `size`."""
    rounded = [fake_quant_fp8(source * np.float32(1 + move)) for move in (0.0, size, -size)]
    return all(any(np.array_equal(value, each) for each in rounded) for value in (a, b))


def _moved(shape: tuple[int, int], keys: np.ndarray, decided: list[tuple[int, int]], loose: np.ndarray | None,
           ) -> np.ndarray:
    mask = np.zeros(shape, bool) if loose is None else loose.copy()
    for sequence, key in decided:
        mask[sequence] |= keys == key
    return mask
