"""Compare two traces and name the first wrong tensor.

    python -m reference.compare TESTED BASELINE [--ckpt DIR] [--json] [--plot FILE.png] [--details]

TESTED is the run in question, BASELINE the one to trust. Both are trace folders (reference/trace_format.py); one of
several traces in a folder is FOLDER/NAME.
How it decides
    1. Comparable: tokens, token types, pictures, configuration, revision, fake quantization and quirk switches agree,
       and float32 is not compared with BF16.
    2. Every point both have, in the order of execution of the baseline: decisions by what they were chosen from, floats
       by the bounds of reference/tolerances.py (compare_points.py). Traces cut into other calls are aligned by absolute
       position.
    3. After a proven rounding flip, later rows are held to the flip bound; a tie is listed and excuses nothing by
       itself.
    4. With --ckpt (needs torch): each module of the tested trace is rerun from its own recorded inputs
       (added_error.py). What agrees inherited its error; the first that does not adds it. If all agree, close rounding
       decisions are taken the other way one by one to prove that they explain the rest.
Exit codes
    0 equal within bounds, 1 diverged, 2 not comparable (or a whole concept is missing in TESTED), 3 bad input.
    A trace of nothing but weights.* is a check of the weights alone: no other concept is missed.
Imports numpy only; torch is loaded for --ckpt alone, matplotlib for --plot alone.
Tests: tests/test_compare.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reference import report
from reference.alignment import Unit, gather, pair_up, same_calls, widen
from reference.compare_points import (Result, judge_choice, judge_exact, judge_flips, judge_floats, judge_sets,
                                      recorded_margin, selection_margin)
from reference.points import DISCRETE, LEVELS, layer_number, layer_of, lookup
from reference.tolerances import Bound, bound_for
from reference.trace_format import Entry, OtherCheckpoint, Trace, open_trace

EQUAL, DIVERGED, NOT_COMPARABLE, BAD_INPUT = 0, 1, 2, 3
# Rows before and after the fake quantizer whose flips can be recognized.
_QUANTIZED = {"attn.kv_quant": "attn.kv", "attn.context_kv": "attn.context_kv_pre_quant"}
_INTEGERS = ("BOOL", "U8", "I8", "I32", "I64")
_STATE = ("cache", "weights")  # bookkeeping around the computation: may be absent
PLOT_FORMATS = (".png", ".pdf", ".svg")
_DRAFTED = ("mtp.markov_bias", "mtp.logits", "mtp.confidence")  # their row k depends on draft k - 1


@dataclass
class Added:
    """What rerunning the tested modules from their recorded inputs found (added_error.py)."""

    side: str  # the trace that was replayed: "tested" or "baseline"
    by_layer: dict[str, float] = field(default_factory=dict)  # largest relative L2 a layer adds
    results: list[Result] = field(default_factory=list)  # every replayed point
    replay_flips: list[str] = field(default_factory=list)  # rounding decisions that fell the other way in the replay
    flips: list[str] = field(default_factory=list)  # those that, taken the other way, explain the end-to-end difference
    error: str = ""  # why there is no answer

    @property
    def culprit(self) -> Result | None:
        return next((result for result in self.results if result.bad), None)


@dataclass
class Comparison:
    """Everything that a comparison found."""

    tested: str
    baseline: str
    code: int
    verdict: str  # one line
    bound: Bound | None = None
    results: list[Result] = field(default_factory=list)
    first: Result | None = None
    skipped: dict[str, list[str]] = field(default_factory=dict)  # concept -> points only the baseline has
    extra: dict[str, list[str]] = field(default_factory=dict)  # concept -> points only the tested trace has
    notes: list[str] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    receipt: list[str] = field(default_factory=list)


def growth_by_layer(comparison: Comparison) -> dict[str, float]:
    """End-to-end relative L2 of the streams that leave every layer, minus that of those that enter it."""
    growth, before = {}, 0.0
    for result in comparison.results:
        name = layer_of(result.path)
        if name is not None and result.path == f"{name}.out" and name.startswith("layers."):
            growth[name] = max(growth.get(name, 0.0), result.error - before)
            before = result.error
    return growth


# --- comparable at all? ------------------------------------------------------------------------------------------


def differing_fields(tested: Trace, baseline: Trace) -> list[str]:
    """What makes two runs incomparable, one line each."""
    found = []

    def differ(name: str, a: str, b: str, advice: str = "") -> None:
        found.append(f"{name}: tested {a}, baseline {b}{advice and f' ({advice})'}")

    def check(name: str, a: Any, b: Any, known: bool, advice: str = "") -> None:
        if known and a != b:
            differ(name, _short(a), _short(b), advice)

    covered = [_covered(trace) for trace in (tested, baseline)]
    common = sorted(set(covered[0]) & set(covered[1]))
    ids = [trace.input_ids for trace in (tested, baseline)]
    if len(ids[0]) != len(ids[1]):
        differ("sequences", str(len(ids[0])), str(len(ids[1])))
    elif not common:
        differ("tokens covered", *(f"{part[0]}..{part[-1]}" if part else "none" for part in covered))
    else:
        # A token is fed with everything before it, so the prefix must agree as well where both traces state it.
        end = min(ids[0].shape[1], ids[1].shape[1], common[-1] + 1)
        wrong = np.argwhere(ids[0][:, :end] != ids[1][:, :end])
        if len(wrong):
            row, position = (int(i) for i in wrong[0])
            a, b = (str(int(each[row, position])) for each in ids)
            differ(f"input_ids[{row}, {position}]", a, b, "different prompts")
        types = [trace.manifest["inputs"].get("token_types") for trace in (tested, baseline)]
        types = [np.full((len(ids[0]), end), -1) if value is None else np.asarray(value)[:, :end] for value in types]
        if not np.array_equal(*types):
            found.append("token_types: they mark other image positions")
    digests = [trace.manifest["inputs"].get("image_digests") or [] for trace in (tested, baseline)]
    check("image_digests", *digests, all(digests) or not any(digests))
    for name in ("config_digest", "revision"):
        values = [trace.manifest["model"].get(name, "") for trace in (tested, baseline)]
        check(name, *values, all(values))
    if tested.only_weights:
        return found
    for name, option in (("fake_quant", "--no-fake-quant"), ("as_published_index_keys", "--as-published-index-keys")):
        values = [trace.switch(name) for trace in (tested, baseline)]
        check(name, *values, None not in values, f"record both with or both without {option}")
    numerics = [trace.numerics for trace in (tested, baseline)]
    if ("float32" in numerics) and numerics[0] != numerics[1]:
        differ("numerics", *numerics, "float32 against BF16 says nothing about either: record both with one --numerics")
    return found


def _covered(trace: Trace) -> list[int]:
    ranges = (range(step["start"], step["start"] + step["count"]) for step in trace.steps)
    return sorted({position for positions in ranges for position in positions})


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


# --- the comparison ----------------------------------------------------------------------------------------------


class Comparer:
    """Walks over the points of two comparable traces."""

    def __init__(self, tested: Trace, baseline: Trace) -> None:
        self.tested, self.baseline = tested, baseline
        self.bound = bound_for(tested.numerics, baseline.numerics, bool(baseline.switch("fake_quant")))
        self.units, self.only_baseline, self.only_tested = pair_up(tested, baseline)
        self.assembled = not same_calls(tested, baseline)
        self.names = {unit.name: unit for unit in self.units}
        self.facts = {**baseline.manifest.get("facts", {}), **tested.manifest.get("facts", {})}
        self.exact = True  # every value so far is the same bit for bit
        self.flipped: dict[int, int] = {}  # sequence -> first position that a flip may have moved
        self.flipped_drafts: set[tuple[int, int]] = set()

    def results(self) -> Iterator[Result]:
        """One result per point both traces have, in execution order."""
        for unit in self.units:
            result = self.compare(unit)
            self.exact = self.exact and result.verdict in ("equal", "skipped")
            if result.verdict == "flip":
                self._remember(unit, result)
            yield result

    def compare(self, unit: Unit) -> Result:
        result = Result(unit.name, unit.path, ratio=ratio_of(self.facts, unit.path))
        if unit.point.how == "info":
            result.verdict = "skipped"
            return result
        if unit.point.how == "own" and (self.assembled or not self.exact or not self._same_producer()):
            # Private layouts, and digests of floats: they say something only while all else is the same bit for bit.
            result.verdict, result.detail = "skipped", "private to each producer"
            return result
        first_a, first_b = unit.tested[0], unit.baseline[0]
        if (first_a.dtype in _INTEGERS) != (first_b.dtype in _INTEGERS):
            return _shape_result(result, f"dtype {first_a.dtype}, wanted {first_b.dtype}")
        if len(unit.tested) == len(unit.baseline) == 1 and first_a.digest and first_a.digest == first_b.digest:
            return result  # the same bytes
        if not (self.tested.has_values(first_a) and self.baseline.has_values(first_b)):
            return self._compare_summaries(result, first_a, first_b)
        a, b, keys = self._both(unit)
        if unit.point.rows not in ("call", "image") and not len(keys):
            result.verdict, result.detail = "skipped", "no row in common"
            return result
        if unit.point.how in ("selection", "set", "mask") and a.shape[:2] == b.shape[:2]:
            width = max(a.shape[-1], b.shape[-1])
            blank = False if unit.point.how == "mask" else -1
            a, b = widen(a, width, blank), widen(b, width, blank)
        if unit.path.endswith("indexer.scores") and a.shape[:2] == b.shape[:2]:
            width = max(a.shape[-1], b.shape[-1])
            a, b = widen(a, width, -np.inf), widen(b, width, -np.inf)
        if a.shape != b.shape:
            return _shape_result(result, f"shape {list(a.shape)}, wanted {list(b.shape)}")
        return self._judge(unit, result, a, b, keys)

    def _judge(self, unit: Unit, result: Result, a: np.ndarray, b: np.ndarray, keys: np.ndarray) -> Result:
        how, path, bound = unit.point.how, unit.path.partition("#")[0], self.bound
        prefix = unit.name[:len(unit.name) - len(unit.path)]
        stem = path.rpartition(".")[0] + "."
        loose = self._loose(unit, a.shape, keys)
        score_bound = bound.of(path, flipped=loose is not None and bool(loose.any()))
        if how in ("exact", "own"):
            return judge_exact(result, a, b, keys)
        if how == "set":
            margins = self._other(prefix + stem + "margin", keys)
            return judge_sets(result, a, b, keys, recorded_margin(margins, score_bound))
        if how == "selection":
            scores = _either(self._other(prefix + stem + "scores", keys))
            return judge_sets(result, a, b, keys, selection_margin(scores, score_bound))
        if how == "mask":
            block = self.facts.get("candidate_block_size") or 1
            scores = _either(self._other(prefix + stem + "scores", keys))
            rows = [chosen_blocks(side, block) for side in (a, b)]
            return judge_sets(result, *rows, keys, selection_margin(scores, score_bound, block))
        if how == "choice":
            scores = "logits" if path == "argmax" else "mtp.logits"
            return judge_choice(result, a, b, keys, _either(self._other(prefix + scores, keys)), score_bound,
                                lead=0 if path == "argmax" else 1)
        if path.endswith("ffn.expert_weights"):
            a, b = self._by_expert(prefix + stem, keys, a, b)
        if path in _DRAFTED:
            a, b = self._same_drafts(prefix, keys, a, b)
        judge_floats(result, a, b, keys, loose, bound.of(path), bound.of(path, flipped=True))
        before = next((name for after, name in _QUANTIZED.items() if path.endswith(after)), None)
        if result.bad and before is not None and self.baseline.switch("fake_quant"):
            name = prefix + f"{path.rpartition('.attn.')[0]}.{before}"
            judge_flips(result, a, b, keys, self._other(name, keys), loose, bound)
        return result

    def _by_expert(self, stem: str, keys: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights in ascending order of their expert, whatever order each side wrote them in."""
        ids = self._other(stem + "expert_ids", keys)
        if any(side is None or side.shape != value.shape for side, value in zip(ids, (a, b))):
            return a, b
        return tuple(np.take_along_axis(value, np.argsort(side, -1, kind="stable"), -1)
                     for side, value in zip(ids, (a, b)))

    def _same_drafts(self, prefix: str, keys: np.ndarray, a: np.ndarray, b: np.ndarray,
                     ) -> tuple[np.ndarray, np.ndarray]:
        """Draft rows after the first draft that differs have another input; the baseline's values stand in for them."""
        ids = self._other(prefix + "mtp.draft_ids", keys)
        if any(side is None for side in ids):
            return a, b
        other_input = np.cumsum(ids[0] != ids[1], axis=-1)[..., :a.shape[2]] > 0
        mask = other_input.reshape(other_input.shape + (1,) * (a.ndim - 3))
        return np.where(mask, b, a), b

    def _both(self, unit: Unit) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values of both sides at the keys both have."""
        a, keys_a = gather(self.tested, unit.tested, self.assembled)
        b, keys_b = gather(self.baseline, unit.baseline, self.assembled)
        if unit.point.rows in ("call", "image"):
            return a, b, keys_a
        keys, where_a, where_b = np.intersect1d(keys_a, keys_b, return_indices=True)
        return a[:, where_a], b[:, where_b], keys

    def _other(self, name: str, keys: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Another point of both traces at these keys; None for a side that lacks it."""
        found = []
        for trace in (self.tested, self.baseline):
            unit = self.names.get(name)
            entries = (unit.tested if trace is self.tested else unit.baseline) if unit else self._alone(trace, name)
            if not entries or not trace.has_values(entries[0]):
                found.append(None)
                continue
            value, own = gather(trace, entries, self.assembled)
            place = {int(key): number for number, key in enumerate(own)}
            known = all(int(key) in place for key in keys)
            found.append(value[:, [place[int(key)] for key in keys]] if known else None)
        return found[0], found[1]

    def _alone(self, trace: Trace, name: str) -> tuple[Entry, ...]:
        if not self.assembled:
            return (trace.entries[name],) if name in trace.entries else ()
        return tuple(entry for entry in trace.entries.values() if entry.path == name)

    def _same_producer(self) -> bool:
        return self.tested.manifest["producer"].get("name") == self.baseline.manifest["producer"].get("name")

    def _remember(self, unit: Unit, result: Result) -> None:
        for sequence, key in result.decided:
            if unit.point.rows == "draft":
                self.flipped_drafts.add((sequence, key))
            else:
                self.flipped[sequence] = min(key, self.flipped.get(sequence, key))

    def _loose(self, unit: Unit, shape: tuple[int, ...], keys: np.ndarray) -> np.ndarray | None:
        """[B, R] rows that an earlier flip may have moved."""
        if not self.flipped and not self.flipped_drafts or not len(keys):
            return None
        mask = np.zeros(shape[:2], bool)
        for sequence, position in self.flipped.items():
            if unit.point.rows == "group":
                ratio = max(1, ratio_of(self.facts, unit.path))
                mask[sequence] |= (keys + 1) * ratio - 1 >= position
            else:
                mask[sequence] |= keys >= position + (unit.point.rows == "draft")
        for sequence, key in self.flipped_drafts:
            if unit.point.rows == "draft":
                mask[sequence] |= keys == key
        return mask

    def _compare_summaries(self, result: Result, a: Entry, b: Entry) -> Result:
        """Two points of which at least one is known by digest and statistics only."""
        if a.shape != b.shape:
            return _shape_result(result, f"shape {list(a.shape)}, wanted {list(b.shape)}")
        if a.dtype != b.dtype and a.path.startswith("weights."):
            return _shape_result(result, f"dtype {a.dtype}, wanted {b.dtype}")
        if lookup(a.path).kind == DISCRETE or not a.facts or not b.facts:
            result.verdict, result.error, result.excess = "different", np.inf, np.inf
            result.detail = f"digest {a.digest[:12]}, wanted {b.digest[:12]}"
            return result
        for name in ("nan", "inf"):
            if a.facts[name] != b.facts[name]:
                return _shape_result(result, f"{a.facts[name]} entries are {name}, wanted {b.facts[name]}")
        scale = max(abs(b.facts["rms"] or 0.0), np.finfo(np.float64).tiny)
        # RMS and mean move by at most the relative L2 of the tensors; an extreme by one entry.
        error = max(abs(a.facts[name] - b.facts[name]) / scale for name in ("rms", "mean")) if a.facts["rms"] else 0.0
        result.error, result.excess = error, error / self.bound.of(a.path)
        result.verdict = "different" if result.excess > 1 else "close"
        if a.facts["rms"]:
            result.detail = f"statistics only: RMS {a.facts['rms']:.8g}, wanted {b.facts['rms']:.8g}"
        return result


def _shape_result(result: Result, detail: str) -> Result:
    result.verdict, result.error, result.excess, result.detail = "shape", np.inf, np.inf, detail
    return result


def _either(sides: tuple[np.ndarray | None, np.ndarray | None]) -> np.ndarray | None:
    return sides[1] if sides[1] is not None else sides[0]


def ratio_of(facts: dict[str, Any], path: str) -> int:
    """Tokens per compressed row in the layer of a path; 0 where that is not known."""
    layer, ratios = layer_number(path), facts.get("compress_ratios") or ()
    return ratios[layer] if layer is not None and layer < len(ratios) else 0


def chosen_blocks(mask: np.ndarray, block: int) -> np.ndarray:
    """Boolean columns [B, R, N] -> the numbers of the blocks that have one, -1 for the others."""
    padded = widen(mask.astype(bool), -(-mask.shape[-1] // block) * block, False)
    hit = padded.reshape(*mask.shape[:2], -1, block).any(-1)
    return np.where(hit, np.arange(hit.shape[-1]), -1)


def compare(tested: Trace, baseline: Trace, checkpoint: str | Path | None = None) -> Comparison:
    """Compare two open traces. checkpoint: for telling inherited from added errors (loads torch)."""
    report_of = Comparison(tested.origin, baseline.origin, NOT_COMPARABLE, "")
    differing = differing_fields(tested, baseline)
    if differing:
        more = f" (and {len(differing) - 1} more)" if differing[1:] else ""
        report_of.verdict = f"NOT COMPARABLE: {differing[0]}{more}"
        report_of.notes = differing[1:]
        return report_of
    comparer = Comparer(tested, baseline)
    report_of.bound = comparer.bound
    for name, entries in (("skipped", comparer.only_baseline), ("extra", comparer.only_tested)):
        _sort_by_concept(getattr(report_of, name), entries)
    report_of.results = list(comparer.results())
    compared = [result for result in report_of.results if result.verdict != "skipped"]
    report_of.first = next((result for result in compared if result.bad), None)
    weights = [trace.manifest["model"].get("weights_digest") for trace in (tested, baseline)]
    if all(weights) and weights[0] != weights[1]:
        report_of.notes.append("the weight files differ (other format, or other weights)")
    if not compared:
        report_of.verdict = "NOT COMPARABLE: the two traces have no point in common"
        return report_of
    if checkpoint is not None:
        from reference import added_error  # torch is needed from here on

        try:
            report_of.added = added_error.explain_difference(checkpoint, tested, baseline, report_of)
        except OtherCheckpoint as error:
            report_of.verdict = f"NOT COMPARABLE: --ckpt is not the checkpoint of these traces: {error}"
            return report_of
    _conclude(report_of, tested, baseline, compared)
    return report_of


def _sort_by_concept(found: dict[str, list[str]], names: list[str]) -> None:
    for name in names:
        point = lookup(name.partition(".")[2] if name.startswith("step") else name)
        if point is None or point.how != "info":
            found.setdefault("unknown" if point is None else point.concept, []).append(name)


def missing_concepts(comparison: Comparison, tested: Trace, baseline: Trace) -> list[str]:
    """Concepts of the baseline, at the level and in the layers both recorded, of which the tested trace has nothing."""
    if tested.only_weights:
        return []
    layers = tested.manifest.get("layers")
    depth = min(LEVELS.index(trace.manifest["level"]) for trace in (tested, baseline))
    wanted = set()
    for entry in baseline.entries.values():
        point, layer = lookup(entry.path), layer_of(entry.path)
        if layers is not None and layer is not None and layer not in layers:
            continue
        if point is not None and point.depth <= depth and point.how not in ("info", "own"):
            wanted.add(point.concept)
    got = {lookup(result.path).concept for result in comparison.results if result.verdict != "skipped"}
    return sorted(wanted - got - set(_STATE))


def _conclude(comparison: Comparison, tested: Trace, baseline: Trace, compared: list[Result]) -> None:
    """Code, verdict line and receipt."""
    listed = [result for result in compared if result.verdict in ("tie", "near-tie", "flip")]
    first, culprit = comparison.first, next((added.culprit for added in comparison.added if added.culprit), None)
    proven = [flip for added in comparison.added for flip in added.flips]
    missing = missing_concepts(comparison, tested, baseline)
    clean = bool(comparison.added) and all(not added.culprit and not added.error for added in comparison.added)
    small = max((result.error for result in compared), default=0.0) <= comparison.bound.flip
    # In BF16 modules decide: about points that were replayed, and ids chosen by their values.
    replayed = {result.path for added in comparison.added for result in added.results}
    decided = comparison.bound.is_loose and all(result.path in replayed or lookup(result.path).how == "choice"
                                                for result in compared if result.bad)
    if first is not None and not (clean and (proven or small or decided)):
        comparison.code = DIVERGED
        comparison.verdict = _headline("DIVERGED at", first, first.name)
        if culprit is not None and culprit.path != first.path:
            comparison.notes.append(f"from recorded inputs the first wrong point is {culprit.path}: {culprit.detail}")
        elif clean:
            comparison.notes.append("every module agrees from its recorded inputs, but no close rounding decision "
                                    "explains the end-to-end difference")
    elif culprit is not None:  # hidden behind the wide end-to-end bounds of BF16
        comparison.code, comparison.first = DIVERGED, culprit
        comparison.verdict = _headline("DIVERGED, from recorded inputs, at", culprit, culprit.path)
    elif missing:
        comparison.code = NOT_COMPARABLE
        comparison.verdict = (f"NOT COMPARABLE: the tested trace has no point of {', '.join(missing)}; what both have "
                              "agrees")
    else:
        comparison.code = EQUAL
        worst = max(compared, key=lambda result: result.error if np.isfinite(result.error) else 0.0)
        comparison.verdict = (f"EQUAL within bounds: {len(compared)} points, largest error {worst.error:.2g} at "
                              f"{worst.name}")
        if proven or any(result.verdict == "flip" for result in listed):
            comparison.verdict += f", {len(proven) or sum(r.verdict == 'flip' for r in listed)} legitimate flip(s)"
    if comparison.code == EQUAL:
        for result in compared:
            result.verdict = "explained" if result.bad else result.verdict  # by the flips that were proven
    if first is not None and comparison.code == EQUAL and comparison.bound.is_loose:
        comparison.notes.append(f"end to end out of bounds from {first.name} on, but every module agrees from its "
                                "recorded inputs, and in BF16 that decides")
    elif first is not None and comparison.code == EQUAL and not proven:
        comparison.notes.append(f"end to end out of bounds from {first.name} on, but no more than one flip moves a "
                                "point; every module agrees from its recorded inputs, so these are flips, not located "
                                "one by one")
    comparison.notes += [f"{result.label()} at {result.name}: {result.detail}" for result in listed]
    comparison.notes += [f"legitimate flip: {flip}; taken the other way, all points agree" for flip in proven]
    comparison.notes += [f"the {added.side} trace was not replayed: {added.error}" for added in comparison.added
                         if added.error]
    comparison.receipt = report.receipt(comparison, tested, baseline, compared)


def _headline(words: str, result: Result, name: str) -> str:
    row = "" if result.position is None else f", {result.row(result.position)}"
    return f"{words} {name}{row}: {result.label()}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference.compare", description=__doc__.splitlines()[0])
    parser.add_argument("tested", help="trace in question")
    parser.add_argument("baseline", help="trace to trust")
    parser.add_argument("--ckpt", metavar="DIR",
                        help="checkpoint of both: tells inherited from added errors (needs torch)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--details", action="store_true", help="list every point")
    parser.add_argument("--plot", metavar="FILE.png",
                        help=f"draw the error of every layer (needs matplotlib): {', '.join(PLOT_FORMATS)}")
    options = parser.parse_args(arguments)
    try:
        _check_plot(options.plot)
        comparison = compare(open_trace(options.tested), open_trace(options.baseline), options.ckpt)
        try:
            _show(comparison, options)
        except BrokenPipeError:  # the reader of a pipe stopped early; let the interpreter flush into nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:  # a trace, the checkpoint, or the picture
        print(f"BAD INPUT. {error}", file=sys.stderr)
        return BAD_INPUT
    return comparison.code


def _check_plot(path: str | None) -> None:
    """Before any work: a picture that cannot be written."""
    if path is not None and (Path(path).suffix not in PLOT_FORMATS or not Path(path).absolute().parent.is_dir()):
        raise ValueError(f"Drawing the plot: {path} must be a file in a folder that exists and end with one of "
                         f"{', '.join(PLOT_FORMATS)}.")


def _show(comparison: Comparison, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.as_json(comparison), indent=1, allow_nan=False))
    else:
        print(report.as_text(comparison, options.details, report.use_color(sys.stdout)))
    if options.plot:
        print(report.plot(comparison, options.plot), file=sys.stderr)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
