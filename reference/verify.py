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
    native, dequantized: 1e-2 from recorded inputs; end to end rounding is amplified at will, so only 0.35 is asked.
    No single entry may differ by more than ten times the bound, relative to its own size plus the tensor's RMS: a single
    corrupted value would drown in a norm.
Exit codes
    0 equal, 1 diverged, 2 not comparable (other tokens, shapes or numerics), 3 bad input. The worst of all traces, 3 before 1 before 2.
Tests: tests/test_verify.py
"""

from __future__ import annotations

import contextlib
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
from inference.checkpoint import WEIGHT_MODES
from inference.command import Parser, run
from inference.image_processor import ImageInput
from inference.model import Model
from inference.numerics import MODES, full_precision
from reference.flips import Arbiter, Decision, explain
from reference.graft import Recorded, draft_points, prefill_points
from reference.metrics import compare_selections, relative_l2, worst_entry

EQUAL, DIVERGED, NOT_COMPARABLE, BAD_INPUT = 0, 1, 2, 3
WORDS = {EQUAL: "equal", DIVERGED: "DIVERGED", NOT_COMPARABLE: "NOT COMPARABLE", BAD_INPUT: "BAD INPUT"}

FLOAT32_BOUND = 2e-5  # golden data: largest error of a right implementation that differs in summation order only
NATIVE_BOUND = 1e-2  # golden data: BF16 rounding and summation order of one module
NATIVE_END_BOUND = 0.35  # golden data: sanity only; random weights amplify one rounding to a few percent
FLIP_BOUND = 2e-3  # golden data: how far one rounding flip may move an end-to-end float32 point
SEARCH_BOUND = 5e-2  # ours: a flip inside attention was seen to move its first point by 2e-2; a larger error is not searched
ENTRY_FACTOR = 10  # ours: one entry against the bound of its tensor
SEARCH_VOCABULARY = 4096  # ours: largest vocabulary that is searched for the token a trace was made with


class NotComparable(Exception):
    """The trace was not made from these tokens, this configuration or these settings."""


@dataclass
class Verdict:
    trace: str
    code: int
    text: str
    error: float = 0.0  # largest relative L2
    point: str = ""  # where
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


def compare(name: str, actual: Tensor, expected: Tensor, bound: float, scores: Tensor | None = None) -> Compared:
    """Compare one point. scores: what a selection was made from, to recognize ties."""
    if actual.shape != expected.shape:
        raise NotComparable(f"{name} has shape {list(expected.shape)} in the trace, this model gives {list(actual.shape)}")
    if expected.dtype.is_floating_point != actual.dtype.is_floating_point:
        raise NotComparable(f"{name} is {expected.dtype} in the trace, this model gives {actual.dtype}")
    if not expected.dtype.is_floating_point:
        if name.endswith(".topk"):
            verdict, detail = compare_selections(actual, expected, scores, 0.0 if bound == FLOAT32_BOUND else 2**-7)
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
    return Compared(name, error, excess, worst_entry(actual, expected) if excess > 1 else "")


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
    def graft() -> Iterator[tuple[str, Tensor]]:
        return prefill_points(model, Recorded(points), input_ids, token_types, images)

    missed = set(points) - {name for name, _ in graft()}
    if missed:
        raise NotComparable(f"this model has no point called {sorted(missed)[0]} ({len(missed)} such points)")

    def run(arbiter: Arbiter) -> Iterator[tuple[str, Tensor]]:
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
    if relative_l2(full.main_hidden[:, last:last + 1], points["mtp.main_hidden"]) > 0.1:
        raise NotComparable("no position of input_ids has the recorded mtp.main_hidden, so they are other tokens")

    def prompt(arbiter: Arbiter):
        cache = model.new_cache(len(input_ids))
        with arbiter.active():
            model(input_ids[:, :last], cache, observe=arbiter.observe)
            out = model(input_ids[:, last:last + 1], cache, observe=arbiter.observe)
        return cache, out

    cache, out = prompt(Arbiter())

    def graft() -> Iterator[tuple[str, Tensor]]:
        return draft_points(model, Recorded(points), anchor, cache, out.main_hidden)

    def run(arbiter: Arbiter) -> Iterator[tuple[str, Tensor]]:
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

    def run(arbiter: Arbiter) -> Iterator[tuple[str, Tensor]]:
        cache = model.new_cache(len(input_ids))
        with arbiter.active():
            for step in range(split - 1, input_ids.shape[1]):
                prefix = "prefill" if step == split - 1 else f"step{step}"
                ids = input_ids[:, :split] if step == split - 1 else input_ids[:, step:step + 1]
                out = model(ids, cache, observe=arbiter.observe)
                arbiter.mark(f"{prefix}.logits")
                yield f"{prefix}.logits", out.logits[:, -1]
                if out.main_hidden is not None:
                    arbiter.mark(f"{prefix}.mtp.main_hidden")
                    yield f"{prefix}.mtp.main_hidden", out.main_hidden
                if f"{prefix}.mtp.logits" in points:
                    draft = model.draft(points[f"{prefix}.logits"].argmax(-1), cache, observe=arbiter.observe)
                    for part, value in (("logits", draft.logits), ("confidence", draft.confidence), ("draft_ids", draft.ids)):
                        yield f"{prefix}.mtp.{part}", value

    missed = set(points) - {point for point, _ in run(Arbiter())}
    if missed:
        raise NotComparable(f"this model has no point called {sorted(missed)[0]} ({len(missed)} such points)")
    verdict = _judge(name, model, points, None, run)
    if verdict.code == DIVERGED:
        _search_token(model, input_ids, split, points)
    return verdict


CHECKERS: dict[str, Callable[[str, Model, dict[str, Tensor], dict], Verdict]] = {
    "text_prefill": _check_prefill, "vision_prefill": _check_prefill, "draft_step": _check_draft_step,
    "decode": _check_decode,
}


def _judge(name: str, model: Model, points: dict[str, Tensor], graft: Callable[[], Iterator[tuple[str, Tensor]]] | None,
           run: Callable[[Arbiter], Iterator[tuple[str, Tensor]]]) -> Verdict:
    """Verdict from the module-by-module comparison (`graft`, if the trace allows one) and from end-to-end runs."""
    exact = model.numerics.dtype == torch.float32
    bound = FLOAT32_BOUND if exact else NATIVE_END_BOUND
    grafted, notes = [], []
    if graft is not None:
        grafted, left, taken = _from_recorded(graft, points, _bound(model), exact)
        notes = [f"legitimate flip inside a module: {decision}" for decision in taken]
        if left is not None:
            return Verdict(name, DIVERGED, f"From recorded inputs, first out of bounds at {left.name}: {left.detail}.",
                           left.error, left.name, notes)

    def attempt(arbiter: Arbiter) -> tuple[int, str | None]:
        return _agreement(run(arbiter), points, bound)

    plain = list(_compare_each(run(Arbiter()), points, bound))
    first = next((compared for compared in plain if compared.excess > 1), None)
    text = f"{len(plain)} points end to end"
    if grafted:
        text += f", {len(grafted)} from recorded inputs"
    if first is not None:
        # In float32 one flip moves a point by a little; in BF16 the draft head amplifies a tie without limit.
        small = not exact or first.error <= SEARCH_BOUND
        left, taken = explain(attempt) if small else (first.name, ())
        backbone = [compared for compared in plain if "mtp." not in compared.name]
        if left is None:
            plain = list(_compare_each(run(Arbiter(taken)), points, bound))
            notes += [f"legitimate flip: {decision}; taken the other way, all points agree" for decision in taken]
            text += f", {len(taken)} legitimate flip(s)"
        elif grafted and max(compared.error for compared in plain) <= FLIP_BOUND:
            notes += [f"end to end out of bounds from {first.name} on (largest error {max(c.error for c in plain):.2g}); "
                     "absent from recorded inputs, so rounding flips, not located one by one"]
        elif not exact and all(compared.excess <= 1 for compared in backbone):
            notes += [f"drafts differ from {first.name} on: rounding in the backbone, amplified by the draft head"]
            plain = backbone
        else:
            if taken:  # some of the differences were flips; what is left is the finding
                rest = _compare_each(run(Arbiter(taken)), points, bound)
                first = next(compared for compared in rest if compared.excess > 1)
                notes += [f"legitimate flip: {decision}" for decision in taken]
            return Verdict(name, DIVERGED, f"End to end, first out of bounds at {first.name}: {first.detail}.",
                           first.error, first.name, notes)
    worst = max((*grafted, *plain), key=lambda compared: compared.error)
    return Verdict(name, EQUAL, text + ".", worst.error, worst.name, notes)


def _from_recorded(graft: Callable[[], Iterator[tuple[str, Tensor]]], points: dict[str, Tensor], bound: float, exact: bool,
                   ) -> tuple[list[Compared], Compared | None, tuple[Decision, ...]]:
    """The module-by-module comparison, the first point that is wrong in it, and the flips inside modules that were proved.

    Index queries and keys are quantized inside a module without being recorded, so a flip is possible even here.
    """
    def run(arbiter: Arbiter) -> Iterator[tuple[str, Tensor]]:
        with arbiter.active():
            for name, value in graft():
                arbiter.mark(name)
                yield name, value

    compared = list(_compare_each(run(Arbiter()), points, bound))
    wrong = next((one for one in compared if one.excess > 1), None)
    if wrong is None or not exact or wrong.error > SEARCH_BOUND:
        return compared, wrong, ()
    left, taken = explain(lambda arbiter: _agreement(run(arbiter), points, bound))
    if taken:
        compared = list(_compare_each(run(Arbiter(taken)), points, bound))
        wrong = next((one for one in compared if one.excess > 1), None)
    return compared, wrong, taken


def _agreement(computed: Iterator[tuple[str, Tensor]], points: dict[str, Tensor], bound: float) -> tuple[int, str | None]:
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


def _bound(model: Model) -> float:
    return FLOAT32_BOUND if model.numerics.dtype == torch.float32 else NATIVE_BOUND


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
    off = (actual - recorded).norm(dim=-1) / recorded.norm(dim=-1) > 0.05
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
    if float(torch.cat(errors)[smallest]) < 1e-2 and best != int(input_ids[row, position]):
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
