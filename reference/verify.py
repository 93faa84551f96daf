"""Check this implementation, on any checkpoint, against recorded traces.

    python -m reference.verify CHECKPOINT_DIR TRACES_DIR [--only NAME] [--device cuda] [--weights packed] [--json]

A traces folder holds `manifest.json` ({"traces": {name: {"numerics", "fake_quant", "points", "inputs", ...}}}) and one
safetensors file per trace. What is checked depends on the name:
    text_prefill.*, vision_prefill.*   whole prompt: every point from the recorded values before it (graft.py), then end to end
    draft_step.*                       one token after a prompt, then one draft, likewise
    decode.*                           teacher-forced steps, end to end, a draft after each step
Bounds (relative L2)
    float32: 2e-5 from recorded inputs and end to end. A larger end-to-end error is accepted only if close rounding decisions
    or ties, taken the other way, bring it below the bound (flips.py); they are listed.
    native, dequantized: every module decides, 1e-2 from recorded inputs. A row of it that is further off, or a choice that
    differs, is accepted only if close roundings, taken the other way, give the recorded one (flips.py); they are listed.
    End to end one rounding is amplified at will, and another device rounds some of them otherwise. So the run end to end must
    consist of the same modules: each of its points is recomputed from its own points before it, within the same bound. Where
    it leaves the recorded values is information, "end to end departs at POINT, row R"; close ties are looked for.
    A decode trace records no inputs of backbone modules. There the steps must agree with the modules of one whole prompt, every
    draft from recorded conditioning with the recorded one (4e-2 over all drafts), and logits and conditioning end to end
    within 0.35.
    What a module of the backbone computes is checked by a prefill trace of the same numerics.
    No single entry may differ by more than ten times the bound, relative to its own size plus the tensor's RMS: a single
    corrupted value would drown in a norm.
Exit codes
    0 equal, 1 diverged, 2 not comparable (other tokens, shapes or numerics), 3 bad input. The worst of all traces, 3 before 1 before 2.
Tests: tests/test_verify.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

import inference
from inference.cache import Cache
from inference.checkpoint import WEIGHT_MODES
from inference.command import Parser, run
from inference.image_processor import ImageInput
from inference.model import Model
from inference.numerics import MODES, full_precision
from reference.flips import Arbiter, Decision, Roundings, explain
from reference.graft import Recorded, draft_cache, draft_points, prefill_points
from reference.metrics import compare_selections, relative_l2, worst_entry

EQUAL, DIVERGED, NOT_COMPARABLE, BAD_INPUT = 0, 1, 2, 3
WORDS = {EQUAL: "equal", DIVERGED: "DIVERGED", NOT_COMPARABLE: "NOT COMPARABLE", BAD_INPUT: "BAD INPUT"}

FLOAT32_BOUND = 2e-5  # golden data: largest error of a right implementation that differs in summation order only
NATIVE_BOUND = 1e-2  # golden data: BF16 rounding and summation order of one module
# golden data: sanity only, all rows together; ours: up to 0.31 measured on nano when close roundings fall anyhow
NATIVE_END_BOUND = 0.35
# ours: drafts from recorded conditioning, all of a trace together. Measured on nano: 0.006 with other orders of summation, 0.031
# when close roundings fall anyhow; mistakes of reference/mutants.py in a draft from 0.044 on (comb-transposed).
DRAFT_BOUND = 4e-2
ONE_DRAFT = 0.25  # ours: one draft of them; up to 0.12 measured when close roundings fall anyhow
ONE_ENTRY = 1.0  # ours: one entry of them, relative to its size plus the RMS; up to 0.44 measured in the same way
# ours: how far the logit of a drafted id may be from the best, in RMS of the logits; up to 0.01 measured from recorded conditioning
# when close roundings fall anyhow, above 0.25 between two such runs
CHOICE_GAP = 0.5
# ours: one row of the draft conditioning; up to 0.69 measured when close roundings fall anyhow, from 1.17 on with another token
OTHER_ROW = 0.9
# ours: seeds, and the shares of close roundings that are moved. More rows of a point, or points, than these shares are no
# close calls and not searched: when all close roundings of nano fall anyhow, 1 of 91 points goes out of bounds, in one row.
ROUNDINGS = tuple(enumerate((1.0,) * 6 + (0.5,) * 2 + (0.25,) * 2))
CLOSE_ROWS, CLOSE_POINTS = 0.25, 0.1
NATIVE_TRIES = 8  # ours: ties that are taken the other way one by one, end to end
FLIP_BOUND = 2e-3  # golden data: how far one rounding flip may move an end-to-end float32 point
SEARCH_BOUND = 5e-2  # ours: a flip inside attention was seen to move its first point by 2e-2; a larger error is not searched
ENTRY_FACTOR = 10  # ours: one entry against the bound of its tensor
SEARCH_VOCABULARY = 4096  # ours: largest vocabulary that is searched for the token a trace was made with


Points = Iterator[tuple[str, Tensor]]  # point name and tensor, in the order of computation
Graft = Callable[[dict[str, Tensor]], Points]  # every point computed from the given ones before it


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

    def line(self) -> str:
        if self.text.startswith("skipped"):
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


def compare(name: str, actual: Tensor, expected: Tensor, bound: float, scores: Tensor | None = None) -> Compared:
    """Compare one point. scores: what a selection was made from, to recognize ties."""
    if actual.shape != expected.shape:
        raise NotComparable(f"{name} has shape {list(expected.shape)} in the trace, this model gives {list(actual.shape)}")
    if expected.dtype.is_floating_point != actual.dtype.is_floating_point:
        raise NotComparable(f"{name} is {expected.dtype} in the trace, this model gives {actual.dtype}")
    if not expected.dtype.is_floating_point:
        if name.endswith(".topk"):
            verdict, detail = compare_selections(actual, expected, scores, 0.0)
            equal = verdict != "different"
        else:
            equal = torch.equal(actual.to(torch.int64), expected.to(torch.int64))
            detail = "" if equal else worst_entry(actual, expected)
        return Compared(name, 0.0 if equal else math.inf, 0.0 if equal else math.inf, detail)
    error = relative_l2(actual, expected)
    wide, wanted = actual.to(torch.float64), expected.to(torch.float64)
    finite = torch.isfinite(wanted)
    entry = 0.0
    if math.isfinite(error) and finite.any():
        rms = wanted[finite].square().mean().sqrt()
        size = (rms + wanted[finite].abs()).clamp_min(torch.finfo(torch.float64).tiny)
        entry = float(((wide[finite] - wanted[finite]).abs() / size).max())
    excess = max(error, entry / ENTRY_FACTOR) / bound
    return Compared(name, error, excess, worst_entry(actual, expected) if excess > 1 else "", entry)


def verify(checkpoint: str | Path, traces: str | Path, only: str | None = None, device: str = "cpu",
           weights: str = "resident") -> list[Verdict]:
    """One verdict per trace of the folder. Raises ValueError for input that cannot be read.

    device, weights: as for `inference.load`. On CUDA, float32 products are full float32 while this runs (no TF32).
    """
    folder = Path(traces)
    manifest = _read_manifest(folder)
    names = [name for name in manifest if only is None or only in name]
    if not names:
        raise ValueError(f"Verifying: no trace of {folder} has {only!r} in its name; there are {', '.join(manifest)}.")
    models: dict[tuple[str, bool], Model] = {}
    verdicts = []
    for name in tqdm(names, desc="verifying", unit="trace", disable=None, leave=False):
        entry = manifest[name]
        checker = next((check for kind, check in CHECKERS.items() if name.split(".")[0] == kind), None)
        if checker is None:
            verdicts.append(Verdict(name, EQUAL, f"skipped: unknown kind, known are {', '.join(CHECKERS)}."))
            continue
        mode = (entry["numerics"], entry["fake_quant"])
        if mode not in models:
            models[mode] = inference.load(checkpoint, device, numerics=mode[0], fake_quant=mode[1], weights=weights)
        tensors = {point: value.to(device) for point, value in _read_trace(folder, name, entry).items()}
        try:
            with torch.no_grad(), full_precision():
                _check_inputs(models[mode], tensors)
                verdicts.append(checker(name, models[mode], tensors, entry))
        except NotComparable as error:
            verdicts.append(Verdict(name, NOT_COMPARABLE, f"{error}."))
    if all(verdict.text.startswith("skipped") for verdict in verdicts):
        raise ValueError(f"Verifying: nothing in {folder} could be compared. Known kinds of traces: {', '.join(CHECKERS)}.")
    return verdicts


# --- the kinds of traces ---------------------------------------------------------------------------------------


def _check_prefill(name: str, model: Model, tensors: dict[str, Tensor], entry: dict) -> Verdict:
    input_ids, token_types = tensors["input_ids"], tensors.get("token_types")
    images = None if token_types is None else [_images(tensors)]
    points = _points(tensors, entry)
    _check_tokens(model, input_ids, token_types, points)

    def graft(recorded: dict[str, Tensor]) -> Points:
        return prefill_points(model, Recorded(recorded), input_ids, token_types, images)

    missed = set(points) - {name for name, _ in graft(points)}
    if missed:
        raise NotComparable(f"this model has no point called {sorted(missed)[0]} ({len(missed)} such points)")

    def run(arbiter: Arbiter) -> Points:
        seen: dict[str, Tensor] = {}

        def observe(point: str, value: Tensor) -> None:
            arbiter.observe(point, value)
            while point in seen:  # the second image of a prompt is called vision.out#1
                stem, _, number = point.partition("#")
                point = f"{stem}#{int(number or 0) + 1}"
            seen[point] = value

        with arbiter.active():
            model(input_ids, model.new_cache(len(input_ids)), token_types=token_types, images=images, observe=observe)
        yield from seen.items()

    return _judge(name, model, points, graft, run)


def _check_draft_step(name: str, model: Model, tensors: dict[str, Tensor], entry: dict) -> Verdict:
    if not model.mtp:
        raise NotComparable("this checkpoint has no draft stages")
    input_ids, anchor = tensors["input_ids"], tensors["anchor"]
    points = _points(tensors, entry)
    points.pop("anchor", None)
    # The trace does not say after which token it drafted: it is the one whose draft conditioning was recorded.
    full = model(input_ids, model.new_cache(len(input_ids)))
    distance = (full.main_hidden.to(torch.float64) - points["mtp.main_hidden"]).norm(dim=-1).sum(0)
    last = int(distance.argmin())
    other = 0.1 if model.numerics.dtype == torch.float32 else OTHER_ROW
    if relative_l2(full.main_hidden[:, last:last + 1], points["mtp.main_hidden"]) > other:
        raise NotComparable("no position of input_ids has the recorded mtp.main_hidden, so they are other tokens")

    def graft(recorded: dict[str, Tensor]) -> Points:
        # The context rows before the last are in no trace. They are made anew each time, so that a flip in them is found.
        cache = model.new_cache(len(input_ids))
        model(input_ids[:, :last], cache)
        out = model(input_ids[:, last:last + 1], cache)
        yield from draft_points(model, Recorded(recorded), anchor, cache, out.main_hidden)

    def run(arbiter: Arbiter) -> Points:
        seen: dict[str, Tensor] = {}

        def observe(point: str, value: Tensor) -> None:
            arbiter.observe(point, value)
            seen[point] = value

        cache = model.new_cache(len(input_ids))
        with arbiter.active():
            model(input_ids[:, :last], cache, observe=arbiter.observe)
            model(input_ids[:, last:last + 1], cache, observe=observe)
            model.draft(anchor, cache, observe=observe)
        yield from seen.items()

    return _judge(name, model, points, graft, run)


def _check_decode(name: str, model: Model, tensors: dict[str, Tensor], entry: dict) -> Verdict:
    input_ids, split = tensors["input_ids"], entry.get("split")
    if not isinstance(split, int) or isinstance(split, bool) or not 1 <= split < input_ids.shape[1]:
        raise ValueError(f"Verifying {name}: the manifest gives split {split!r} for {input_ids.shape[1]} tokens.")
    points = {point: value for point, value in tensors.items() if point != "input_ids"}

    def run(arbiter: Arbiter, observe: Callable[[str, Tensor], None] = lambda point, value: None) -> Points:
        def seen(point: str, value: Tensor) -> None:
            arbiter.observe(point, value)
            observe(point, value)

        cache = model.new_cache(len(input_ids))
        with arbiter.active():
            for step in range(split - 1, input_ids.shape[1]):
                prefix = "prefill" if step == split - 1 else f"step{step}"
                ids = input_ids[:, :split] if step == split - 1 else input_ids[:, step:step + 1]
                out = model(ids, cache, observe=seen)
                arbiter.mark(f"{prefix}.logits")
                yield f"{prefix}.logits", out.logits[:, -1]
                if out.main_hidden is not None:
                    arbiter.mark(f"{prefix}.mtp.main_hidden")
                    yield f"{prefix}.mtp.main_hidden", out.main_hidden
                if f"{prefix}.mtp.logits" in points:
                    draft = model.draft(points[f"{prefix}.logits"].argmax(-1), cache, observe=arbiter.observe)
                    for part, value in (("logits", draft.logits), ("confidence", draft.confidence), ("draft_ids", draft.ids)):
                        yield f"{prefix}.mtp.{part}", value

    calls: dict[str, list[Tensor]] = {}
    own = dict(run(Arbiter(), lambda point, value: calls.setdefault(point, []).append(value)))
    missed = set(points) - set(own)
    if missed:
        raise NotComparable(f"this model has no point called {sorted(missed)[0]} ({len(missed)} such points)")
    if model.numerics.dtype == torch.float32:
        verdict = _judge(name, model, points, None, run)
    else:
        verdict = _judge_steps(name, model, input_ids, split, points, own, _joined(calls), run)
    if verdict.code == DIVERGED:
        _search_token(model, input_ids, split, points)
    return verdict


def _judge_steps(name: str, model: Model, input_ids: Tensor, split: int, points: dict[str, Tensor],
                 own: dict[str, Tensor], joined: dict[str, Tensor], run: Callable[[Arbiter], Points]) -> Verdict:
    """Verdict on decode steps in BF16. own: the run's points; joined: all it observed, by position over the whole prompt."""
    def prompt() -> Points:
        return prefill_points(model, Recorded(joined), input_ids, None, None)

    compared, wrong, notes = _settled(prompt, joined, NATIVE_BOUND)
    if wrong is not None:
        return Verdict(name, DIVERGED, f"Step by step, first out of bounds at {wrong.name}: {wrong.detail}.",
                       wrong.error, wrong.name, notes=notes)
    text = f"{len(compared)} points of the steps from their own inputs"
    drafts: list[Compared] = []
    if model.mtp:
        for given, source in ((points, "recorded"), (own, "its own")):
            found, wrong = _draft_check(model, input_ids, split, given)
            if wrong is not None:
                text = f"From {source} conditioning, first out of bounds at {wrong.name}: {wrong.detail}."
                return Verdict(name, DIVERGED, text, wrong.error, wrong.name, notes=notes)
            drafts = drafts or found
        text += f", {len(drafts)} of drafts from recorded conditioning"
    departs, flips = _departure(points, run)
    notes += flips
    for part in ("logits", "mtp.main_hidden"):
        known = [point for point in own if point.split(".", 1)[1] == part and point in points]
        if not known:
            continue
        rows = [torch.cat([values[point].to(torch.float64).flatten(0, -2) for point in known]) for values in (own, points)]
        error, worst = relative_l2(*rows), (rows[0] - rows[1]).norm(dim=-1) / rows[1].norm(dim=-1)
        if not error <= NATIVE_END_BOUND or (part != "logits" and not float(worst.max()) <= OTHER_ROW):
            # The first point that is clearly off, not the first that rounding has moved.
            usual = min(error, NATIVE_END_BOUND)
            point = next((point for point in known if not relative_l2(own[point], points[point]) <= usual), known[0])
            text = (f"End to end, first out of bounds at {point}: {worst_entry(own[point], points[point])}; all rows of {part} "
                    f"are {error:.2g} off, one row {float(worst.max()):.2g}.")
            return Verdict(name, DIVERGED, text, error, point, departs, notes)
        if departs:
            notes.append(f"end to end, all rows of {part} are {error:.2g} off: roundings that fell the other way, amplified")
    if departs:
        notes.append("this trace has no inputs of backbone modules; a prefill trace of the same numerics judges those")
    worst_point = max((*compared, *drafts), key=lambda one: one.error)
    text = f"{text}; {_end_text(len(points), departs)}"
    return Verdict(name, EQUAL, text, worst_point.error, worst_point.name, departs, notes)


def _draft_check(model: Model, input_ids: Tensor, split: int, points: dict[str, Tensor],
                 ) -> tuple[list[Compared], Compared | None]:
    """Every draft again, from the conditioning in `points` and with the ids chosen there; and the first that is wrong."""
    calls = ["prefill", *(f"step{step}" for step in range(split, input_ids.shape[1]))]
    drafted = [call for call in calls if all(f"{call}.mtp.{part}" in points for part in ("logits", "confidence", "draft_ids"))]
    if any(f"{call}.mtp.main_hidden" not in points for call in calls) or not drafted:
        return [], None
    hidden = torch.cat([points[f"{call}.mtp.main_hidden"] for call in calls], dim=1)
    drafts: dict[str, Tensor] = {}
    for call in drafted:
        cache = draft_cache(model, hidden[:, :split + calls.index(call)])
        drafts.update(_draft_again(model, cache, points[f"{call}.mtp.draft_ids"].to(torch.int64), call))
    compared = [compare(name, value, points[name], DRAFT_BOUND) for name, value in drafts.items()]
    for part in ("logits", "confidence"):
        names = [f"{call}.mtp.{part}" for call in drafted]
        error = relative_l2(*(torch.cat([values[name].flatten() for name in names]) for values in (drafts, points)))
        if not error <= DRAFT_BOUND:
            first = next(one for one in compared if one.name in names and not one.error <= DRAFT_BOUND)
            return compared, dataclasses.replace(first, detail=f"{first.detail}; all drafts are {error:.2g} off")
    return compared, next((one for one in compared if not one.error <= ONE_DRAFT or one.entry > ONE_ENTRY), None)


def _draft_again(model: Model, cache: Cache, ids: Tensor, call: str) -> dict[str, Tensor]:
    """The draft whose anchor and choices are ids [B, 1 + G]; as its draft_ids those, where they are as good as the best."""
    chosen, given = [ids[:, 0]], iter(ids[:, 1:].unbind(1))

    def choose(logits: Tensor) -> Tensor:
        known = next(given)
        short = logits.amax(-1) - logits.gather(-1, known[:, None])[:, 0]
        close = short <= CHOICE_GAP * logits.square().mean(-1).sqrt()
        chosen.append(torch.where(close, known, logits.argmax(-1)))
        return known

    draft = model.draft(ids[:, 0], cache, choose=choose)
    return {f"{call}.mtp.logits": draft.logits, f"{call}.mtp.confidence": draft.confidence,
            f"{call}.mtp.draft_ids": torch.stack(chosen, dim=1)}


def _joined(calls: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """What calls on consecutive tokens observed, as one call on all of them would have.

    Tensors of all calls are put one after the other along axis 1. Rows over compressed rows (scores, selections) grow from call
    to call: columns that an earlier call did not have are unseen, -inf or -1. Candidates are left out: in one prompt a block
    also has the columns that come later. The selections show them.
    """
    joined = {}
    for point, values in calls.items():
        width, kind = max(value.shape[-1] for value in values), point.rpartition(".")[2]
        if kind == "candidates":
            continue
        if kind in ("scores", "topk"):
            values = [torch.nn.functional.pad(value, (0, width - value.shape[-1]), value=-1 if kind == "topk" else -math.inf)
                      for value in values]
        if all(value.dim() > 1 and value.shape[-1] == width for value in values):
            joined[point] = torch.cat(values, dim=1)
    return joined


CHECKERS: dict[str, Callable[[str, Model, dict[str, Tensor], dict], Verdict]] = {
    "text_prefill": _check_prefill, "vision_prefill": _check_prefill, "draft_step": _check_draft_step,
    "decode": _check_decode,
}


def _judge(name: str, model: Model, points: dict[str, Tensor], graft: Graft | None,
           run: Callable[[Arbiter], Points]) -> Verdict:
    """Verdict from the module-by-module comparison (`graft`, if the trace allows one) and from end-to-end runs."""
    if model.numerics.dtype != torch.float32:
        return _judge_modules(name, points, graft, run)
    bound = FLOAT32_BOUND
    grafted, notes = [], []
    if graft is not None:
        grafted, left, taken = _from_recorded(lambda: graft(points), points, bound)
        notes = [f"legitimate flip inside a module: {decision}" for decision in taken]
        if left is not None:
            return Verdict(name, DIVERGED, f"From recorded inputs, first out of bounds at {left.name}: {left.detail}.",
                           left.error, left.name, notes=notes)

    def attempt(arbiter: Arbiter) -> tuple[int, str | None]:
        return _agreement(run(arbiter), points, bound)

    plain = list(_compare_each(run(Arbiter()), points, bound))
    first = next((compared for compared in plain if compared.excess > 1), None)
    text = f"{len(plain)} points end to end"
    if grafted:
        text += f", {len(grafted)} from recorded inputs"
    if first is not None:
        left, taken = explain(attempt) if first.error <= SEARCH_BOUND else (first.name, ())
        if left is None:
            plain = list(_compare_each(run(Arbiter(taken)), points, bound))
            notes += [f"legitimate flip: {decision}; taken the other way, all points agree" for decision in taken]
            text += f", {len(taken)} legitimate flip(s)"
        elif grafted and max(compared.error for compared in plain) <= FLIP_BOUND:
            notes += [f"end to end out of bounds from {first.name} on (largest error {max(c.error for c in plain):.2g}); "
                     "absent from recorded inputs, so rounding flips, not located one by one"]
        else:
            if taken:  # some of the differences were flips; what is left is the finding
                rest = _compare_each(run(Arbiter(taken)), points, bound)
                first = next(compared for compared in rest if compared.excess > 1)
                notes += [f"legitimate flip: {decision}" for decision in taken]
            return Verdict(name, DIVERGED, f"End to end, first out of bounds at {first.name}: {first.detail}.",
                           first.error, first.name, notes=notes)
    worst = max((*grafted, *plain), key=lambda compared: compared.error)
    return Verdict(name, EQUAL, text + ".", worst.error, worst.name, notes=notes)


def _judge_modules(name: str, points: dict[str, Tensor], graft: Graft, run: Callable[[Arbiter], Points]) -> Verdict:
    """Verdict in BF16: modules from recorded inputs, the run end to end from its own, and where that leaves the trace."""
    grafted, wrong, notes = _settled(lambda: graft(points), points, NATIVE_BOUND)
    if wrong is not None:
        return Verdict(name, DIVERGED, f"From recorded inputs, first out of bounds at {wrong.name}: {wrong.detail}.",
                       wrong.error, wrong.name, notes=notes)
    own = dict(run(Arbiter()))
    _, wrong, _ = _settled(lambda: graft(own), own, NATIVE_BOUND)
    if wrong is not None:
        text = ("Every module from recorded inputs agrees, but end to end they are put together in another way, first out of "
                f"bounds at {wrong.name}: {wrong.detail}.")
        return Verdict(name, DIVERGED, text, wrong.error, wrong.name, notes=notes)
    departs, flips = _departure(points, run)
    if departs and "logits" in points:
        error = relative_l2(own["logits"], points["logits"])
        flips.append(f"end to end, logits are {error:.2g} off: roundings that fell the other way, amplified; every module from "
                     "recorded inputs agrees")
    worst = max(grafted, key=lambda compared: compared.error)
    text = f"{len(grafted)} points from recorded inputs; {_end_text(len(points), departs)}"
    return Verdict(name, EQUAL, text, worst.error, worst.name, departs, notes + flips)


def _end_text(count: int, departs: str) -> str:
    return f"end to end departs at {departs}." if departs else f"{count} points end to end."


def _departure(points: dict[str, Tensor], run: Callable[[Arbiter], Points]) -> tuple[str, list[str]]:
    """Where a run end to end leaves the trace although close ties were taken the other way ("" = nowhere), and those ties."""
    left, taken = explain(lambda arbiter: _agreement(run(arbiter), points, NATIVE_BOUND), tries=NATIVE_TRIES)
    notes = [f"legitimate flip: {decision}; taken the other way, {'all points agree' if left is None else 'more points agree'}"
             for decision in taken]
    if left is None:
        return "", notes
    actual = next(value for point, value in run(Arbiter(taken)) if point == left)
    rows, expected = actual.to(torch.float64).flatten(0, -2), points[left].to(torch.float64).flatten(0, -2)
    off = (rows - expected).nan_to_num().norm(dim=-1) > NATIVE_BOUND * expected.nan_to_num().norm(dim=-1)
    row = int(off.to(torch.int64).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(row), actual.shape[:-1])]
    return f"{left}, row {index[:2]}", notes


def _settled(compute: Callable[[], Points], points: dict[str, Tensor], bound: float,
             ) -> tuple[list[Compared], Compared | None, list[str]]:
    """Computed points against `points` in BF16: all comparisons, the first that is wrong, and rows that a rounding explains.

    A row that is out of bounds may be replaced by that of a run in which close roundings fall otherwise (flips.Roundings).
    """
    values = dict(compute())

    def judged(names: Iterable[str]) -> dict[str, Compared]:
        own = {name: values[name] for name in names}
        scores = {name: values.get(name.removesuffix("topk") + "scores") for name in own if name.endswith(".topk")}
        known = {**points, **{name.removesuffix("topk") + "scores": value for name, value in scores.items()
                              if value is not None and name.removesuffix("topk") + "scores" not in points}}
        return {one.name: one for one in _compare_each(own.items(), known, bound) if one.name in points}

    compared = judged(name for name in values if name in points)
    wrong = [name for name, one in compared.items() if one.excess > 1]
    notes = []
    few = wrong and len(wrong) <= max(1, CLOSE_POINTS * len(compared))
    if few and _rows_off(values[wrong[0]], points[wrong[0]], bound).to(torch.float64).mean() <= CLOSE_ROWS:
        before = {name: compared[name].detail for name in wrong}
        while wrong and _search_roundings(compute, wrong[0], values, points, lambda name: judged([name])[name].excess <= 1):
            compared.update(judged(wrong))
            wrong = [name for name in wrong if compared[name].excess > 1]
        notes = [f"legitimate rounding inside a module: {name} {detail}; close roundings taken the other way give "
                 "the recorded row" for name, detail in before.items() if name not in wrong]
    return list(compared.values()), compared[wrong[0]] if wrong else None, notes


def _search_roundings(compute: Callable[[], Points], wrong: str, values: dict[str, Tensor], points: dict[str, Tensor],
                      agrees: Callable[[str], bool]) -> bool:
    """Whether close roundings explain the point `wrong`: its rows in `values` are replaced by closer ones until it agrees."""
    for seed, share in ROUNDINGS:
        with Roundings(seed, share), contextlib.closing(compute()) as attempt:
            value = next(value for name, value in attempt if name == wrong)
        values[wrong] = _closer_rows(value, values[wrong], points[wrong])
        if agrees(wrong):
            return True
    return False


def _distance(actual: Tensor, expected: Tensor) -> Tensor:
    """How far every row (last axis) is from the expected one, [rows]. Integer rows are sets: the number of others."""
    a, b = (value.flatten(0, -2) if value.dim() > 1 else value[None] for value in (actual, expected))
    if not a.dtype.is_floating_point:
        a, b = a.to(torch.int64).sort(-1).values, b.to(torch.int64).sort(-1).values
        return (a != b).sum(-1).to(torch.float64)
    a, b = a.to(torch.float64), b.to(torch.float64)
    return torch.where(a == b, 0.0, (a - b).nan_to_num(math.inf, math.inf, math.inf)).norm(dim=-1)


def _rows_off(actual: Tensor, expected: Tensor, bound: float) -> Tensor:
    """Which rows are out of bounds on their own, [rows] bool."""
    if not actual.dtype.is_floating_point:
        return _distance(actual, expected) > 0
    norm = expected.to(torch.float64).nan_to_num(0.0, 0.0, 0.0).flatten(0, -2).norm(dim=-1)
    return _distance(actual, expected) > bound * norm


def _closer_rows(new: Tensor, old: Tensor, expected: Tensor) -> Tensor:
    """Rows of `new` where they are closer to the expected ones, of `old` elsewhere."""
    closer = _distance(new, expected) < _distance(old, expected)
    return torch.where(closer.view(*old.shape[:-1], 1), new, old)


def _from_recorded(graft: Callable[[], Points], points: dict[str, Tensor], bound: float,
                   ) -> tuple[list[Compared], Compared | None, tuple[Decision, ...]]:
    """The module-by-module comparison in float32, the first point that is wrong in it, and the proven flips inside modules.

    Index queries and keys are quantized inside a module without being recorded, so a flip is possible even here.
    """
    def run(arbiter: Arbiter) -> Points:
        with arbiter.active():
            for name, value in graft():
                arbiter.mark(name)
                yield name, value

    compared = list(_compare_each(run(Arbiter()), points, bound))
    wrong = next((one for one in compared if one.excess > 1), None)
    if wrong is None or wrong.error > SEARCH_BOUND:
        return compared, wrong, ()
    left, taken = explain(lambda arbiter: _agreement(run(arbiter), points, bound))
    if taken:
        compared = list(_compare_each(run(Arbiter(taken)), points, bound))
        wrong = next((one for one in compared if one.excess > 1), None)
    return compared, wrong, taken


def _agreement(computed: Points, points: dict[str, Tensor], bound: float) -> tuple[int, str | None]:
    """How many points agree before the first that does not, and its name; stops there."""
    agreed = 0
    with contextlib.closing(computed):
        for compared in _compare_each(computed, points, bound):
            if compared.excess > 1:
                return agreed, compared.name
            agreed += 1
    return agreed, None


def _compare_each(computed: Iterable[tuple[str, Tensor]], points: dict[str, Tensor], bound: float) -> Iterator[Compared]:
    """Compare computed points with the recorded ones of the same name, in the order in which they are computed."""
    for point, value in computed:
        if point in points:
            scores = points.get(point.removesuffix("topk") + "scores") if point.endswith(".topk") else None
            yield compare(point, value, points[point], bound, scores)


# --- inputs ----------------------------------------------------------------------------------------------------


def _check_inputs(model: Model, tensors: dict[str, Tensor]) -> None:
    ids = tensors.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise ValueError("Verifying: a trace needs input_ids [B, S] of int64.")
    if len(tensors) == 1:
        raise ValueError("Verifying: a trace has input_ids and no point to compare.")
    vocabulary = model.config.text_config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise NotComparable(f"input_ids go up to {int(ids.max())}, the vocabulary of this checkpoint to {vocabulary - 1}")


def _check_tokens(model: Model, input_ids: Tensor, token_types: Tensor | None, points: dict[str, Tensor]) -> None:
    """Raise NotComparable if the recorded embedding of a text position is the table row of another token."""
    recorded = points.get("embed")
    if recorded is None and "layers.0.in" in points:
        recorded = points["layers.0.in"][:, :, 0]
    if recorded is None or recorded.shape[:2] != input_ids.shape:
        return
    table = model.embed(torch.arange(model.config.text_config.vocab_size, device=input_ids.device), model.numerics)
    if recorded.shape[-1] != table.shape[-1]:
        raise NotComparable(f"embed is {recorded.shape[-1]} wide in the trace, this model is {table.shape[-1]} wide")
    differs = (recorded.to(table.dtype) != table[input_ids]).any(-1)
    if token_types is not None:
        differs &= token_types < 0
    for row, position in differs.nonzero().tolist():
        same = (table == recorded[row, position].to(table.dtype)).all(-1).nonzero().flatten().tolist()
        if same:
            raise NotComparable(f"input_ids[{row}, {position}] is {int(input_ids[row, position])}, but the trace was "
                                f"computed from token {same[0]} there")


def _search_token(model: Model, input_ids: Tensor, split: int, points: dict[str, Tensor]) -> None:
    """Raise NotComparable if a diverging decode trace is explained by another token than input_ids has.

    A trace of decode steps has no embedding to look at. The first position that disagrees is the only one that can hold
    another token, so all tokens are tried there.
    """
    vocabulary = model.config.text_config.vocab_size
    if vocabulary > SEARCH_VOCABULARY:
        return
    hidden = [points.get("prefill.mtp.main_hidden")]
    hidden += [points.get(f"step{step}.mtp.main_hidden") for step in range(split, input_ids.shape[1])]
    if any(part is None for part in hidden):
        return
    recorded = torch.cat(hidden, dim=1).to(torch.float64)
    actual = model(input_ids, model.new_cache(len(input_ids))).main_hidden.to(torch.float64)
    exact = model.numerics.dtype == torch.float32
    off = (actual - recorded).norm(dim=-1) / recorded.norm(dim=-1) > (0.05 if exact else OTHER_ROW)
    if not off.any():
        return
    position = int(off.any(0).nonzero()[0])
    row = int(off[:, position].nonzero()[0])
    errors = []
    candidates = torch.arange(vocabulary, device=input_ids.device)
    if model.config.vision_config is not None:
        candidates = candidates[candidates != model.config.image_token_id]  # cannot stand in a text prompt
    for tokens in candidates.split(128):
        ids = torch.cat((input_ids[row, :position].expand(len(tokens), -1), tokens[:, None]), dim=1)
        tried = model(ids, model.new_cache(len(ids))).main_hidden[:, -1].to(torch.float64)
        errors.append((tried - recorded[row, position]).norm(dim=-1) / recorded[row, position].norm())
    smallest = int(torch.cat(errors).argmin())
    best = int(candidates[smallest])
    if float(torch.cat(errors)[smallest]) < (1e-2 if exact else 0.5) and best != int(input_ids[row, position]):
        raise NotComparable(f"input_ids[{row}, {position}] is {int(input_ids[row, position])}, but the trace was "
                            f"computed from token {best} there")


def _points(tensors: dict[str, Tensor], entry: dict) -> dict[str, Tensor]:
    inputs = set(entry.get("inputs", ())) | {"input_ids", "token_types"}
    return {name: value for name, value in tensors.items() if name not in inputs}


def _images(tensors: dict[str, Tensor]) -> list[ImageInput]:
    images = []
    while f"image{len(images)}.patches" in tensors:
        number = len(images)
        _, rows, columns, llm_rows, llm_columns = tensors[f"image{number}.grid"].tolist()
        images.append(ImageInput(tensors[f"image{number}.patches"], rows, columns, llm_rows, llm_columns))
    return images


def _read_manifest(folder: Path) -> dict[str, dict]:
    path = folder / "manifest.json"
    try:
        traces = json.loads(path.read_text(encoding="utf-8"))["traces"]
        for name, entry in traces.items():
            if entry["numerics"] not in MODES or not isinstance(entry["fake_quant"], bool):
                raise ValueError(f"{name}: numerics {entry['numerics']!r}, fake_quant {entry['fake_quant']!r}")
            for key in ("points", "inputs"):
                names = entry[key] if key == "points" else entry.get(key, [])
                if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
                    raise ValueError(f"{name}: {key} must be a list of names, got {names!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"Verifying: {path} is not a readable manifest of traces ({error}).") from None
    return traces


def _read_trace(folder: Path, name: str, entry: dict) -> dict[str, Tensor]:
    path = folder / f"{name}.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"Verifying: {path} is not readable ({error}). Copy it again.") from None
    absent = [point for point in (*entry["points"], *entry.get("inputs", ())) if point not in tensors]
    if absent:
        raise ValueError(f"Verifying: {path} lacks {absent[0]} and {len(absent) - 1} more points that the manifest lists.")
    return tensors


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.verify", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder with config.json and the weights")
    parser.add_argument("traces", help="folder with manifest.json and one safetensors file per trace")
    parser.add_argument("--only", help="check only traces whose name contains this")
    parser.add_argument("--device", default="cpu", help="where the model runs (default: cpu)")
    parser.add_argument("--weights", default="resident", choices=WEIGHT_MODES, help="where the weights are")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    options = parser.parse_args(arguments)
    return run(lambda: _report(verify(options.checkpoint, options.traces, options.only, options.device, options.weights),
                               options.json))


def _report(verdicts: list[Verdict], as_json: bool) -> int:
    """Print the verdicts; the exit code of the worst."""
    code = next((code for code in (BAD_INPUT, DIVERGED, NOT_COMPARABLE) if any(v.code == code for v in verdicts)), EQUAL)
    if as_json:
        print(json.dumps({"verdict": WORDS[code], "code": code, "traces": [vars(verdict) for verdict in verdicts]}, indent=1))
        return code
    for verdict in verdicts:
        print(verdict.line())
        for note in verdict.notes:
            print(f"    {note}")
    return code


if __name__ == "__main__":
    sys.exit(main())
