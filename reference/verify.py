"""Check this implementation, on any checkpoint, against recorded traces.

    python -m reference.verify CHECKPOINT_DIR TRACES_DIR [--only NAME] [--device cuda] [--weights packed] [--json]

A traces folder holds `manifest.json` ({"traces": {name: {"numerics", "fake_quant", "points", "inputs", ...}}}) and one
safetensors file per trace. What is checked depends on the name:
    text_prefill.*, vision_prefill.*   whole prompt: every point from the recorded values before it (graft.py), then end to end
    draft_step.*                       one token after a prompt, then one draft, likewise
    decode.*                           teacher-forced steps, end to end, a draft after each step
Bounds (relative L2; all of them and their sources: verdicts.py)
    float32: 2e-5 from recorded inputs and end to end. A larger end-to-end error is accepted only if close rounding decisions
    or ties, taken the other way, bring it below the bound (flips.py), or further along and it is at most 2e-3; they are listed.
    native, dequantized: every module decides, 1e-2 from recorded inputs. A row of it that is further off, or a choice that
    differs, is accepted only if close roundings, taken the other way, give the recorded one (flips.py); they are listed.
    End to end one rounding is amplified at will, and another device rounds some of them otherwise. So the run end to end must
    consist of the same modules: each of its points is recomputed from its own points before it, within the same bound. Where
    it leaves the recorded values is information, "end to end departs at POINT, row R"; close ties are looked for.
    A decode trace records no inputs of backbone modules. There the steps must agree with the modules of one whole prompt, every
    draft from recorded conditioning with the recorded one (4e-2 over all drafts), and logits and conditioning end to end
    within 0.35. Drafts without complete conditioning must agree end to end, else the trace is not comparable. What a module of
    the backbone computes is checked by a prefill trace of the same numerics.
    No single entry may differ by more than ten times the bound, relative to its own size plus the tensor's RMS: a single
    corrupted value would drown in a norm.
Notes say which decisions were taken the other way, by the point computed last before each and the place: "after
layers.6.attn.kv [0, 7, 32]" is the rounding that follows that point, row 0, position 7 of the call, scale group from channel
32 on. "of the prompt", "of the last token": in what comes before a draft, whose rows it reads and the trace does not record.
Exit codes
    0 equal, 1 diverged, 2 not comparable (other tokens, shapes or numerics), 3 bad input. Of several traces 1 before 2.
This file reads traces and knows how each kind is computed again; verdicts.py judges.
Tests: tests/test_verify.py
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
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
from reference.flips import Arbiter
from reference.graft import DRAFT_PARTS, Recorded, draft_points, drafts_again, prefill_points, steps_as_prompt
from reference.metrics import relative_l2
from reference.verdicts import (BAD_INPUT, CHOICE_GAP, DIVERGED, EQUAL, NOT_COMPARABLE, OTHER_ROW, OTHER_ROW_FLOAT32, SAME_ROW,
                                SAME_ROW_FLOAT32, WORDS, NotComparable, Points, Verdict, judge, judge_modules, judge_steps)

__all__ = ["BAD_INPUT", "DIVERGED", "EQUAL", "NOT_COMPARABLE", "Verdict", "main", "verify"]

SEARCH_VOCABULARY = 4096  # ours: largest vocabulary that is searched for the token a trace was made with


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
        checker = CHECKERS.get(name.split(".")[0])
        if checker is None:
            verdicts.append(Verdict(name, EQUAL, f"skipped: unknown kind, known are {', '.join(CHECKERS)}."))
            continue
        mode = (entry["numerics"], entry["fake_quant"])
        if mode not in models:
            models[mode] = inference.load(checkpoint, device, numerics=mode[0], fake_quant=mode[1], weights=weights)
        tensors, notes = _ascending({point: value.to(device) for point, value in _read_trace(folder, name, entry).items()})
        try:
            with torch.no_grad(), full_precision():
                _check_inputs(models[mode], tensors, entry)
                verdict = checker(name, models[mode], tensors, entry)
            verdicts.append(dataclasses.replace(verdict, notes=[*notes, *verdict.notes]))
        except NotComparable as error:
            verdicts.append(Verdict(name, NOT_COMPARABLE, f"{error}."))
        except torch.OutOfMemoryError:
            raise  # says nothing about the trace
        except (RuntimeError, LookupError) as error:
            verdicts.append(Verdict(name, NOT_COMPARABLE, f"{_stopped(error, 'the points')}."))
    if all(verdict.skipped for verdict in verdicts):
        raise ValueError(f"Verifying: nothing in {folder} could be compared. Known kinds of traces: {', '.join(CHECKERS)}.")
    return verdicts


# --- the kinds of traces: each gives the ways to compute it again to verdicts.py ----------------------------------


def _check_prefill(name: str, model: Model, tensors: dict[str, Tensor], entry: dict) -> Verdict:
    """A whole prompt, maybe with images."""
    input_ids, token_types = tensors["input_ids"], tensors.get("token_types")
    if token_types is not None and token_types.shape != input_ids.shape:
        raise ValueError(f"Verifying {name}: token_types are {list(token_types.shape)}, input_ids {list(input_ids.shape)}.")
    if token_types is not None and not bool((token_types >= 0).any()):
        token_types = None
    if token_types is not None and model.config.vision_config is None:
        raise NotComparable("token_types have images, and this checkpoint has no vision tower")
    images = None if token_types is None else [_images(name, tensors)]
    points = _points(tensors, entry)
    _check_tokens(model, input_ids, token_types, points)

    def graft(recorded: dict[str, Tensor], arbiter: Arbiter) -> Points:
        return _named(prefill_points(model, Recorded(recorded), input_ids, token_types, images))

    def run(arbiter: Arbiter) -> Points:
        seen = _Seen(arbiter)
        with arbiter.active():
            model(input_ids, model.new_cache(len(input_ids)), token_types=token_types, images=images, observe=seen.observe)
        yield from seen.points.items()

    return judge(name, points, graft, run) if _is_exact(model) else judge_modules(name, points, graft, run)


def _check_draft_step(name: str, model: Model, tensors: dict[str, Tensor], entry: dict) -> Verdict:
    """One draft after a prompt. Of the prompt only the conditioning of its last token is recorded."""
    if not model.mtp:
        raise NotComparable("this checkpoint has no draft stages")
    points = _points(tensors, entry)
    for point, known in (("anchor", tensors), ("mtp.main_hidden", points)):
        if point not in known:
            raise ValueError(f"Verifying {name}: a draft step needs {point}.")
    input_ids, anchor = tensors["input_ids"], tensors["anchor"]
    _check_ids(model, "anchor", anchor, (len(input_ids),))
    # The trace does not say after which token it drafted: it is the one whose draft conditioning was recorded.
    full = model(input_ids, model.new_cache(len(input_ids)))
    wanted = full.main_hidden[:, :1].shape
    if points["mtp.main_hidden"].shape != wanted:
        raise NotComparable(f"mtp.main_hidden has shape {list(points['mtp.main_hidden'].shape)} in the trace, this model gives "
                            f"{list(wanted)} for one token")
    distance = (full.main_hidden.to(torch.float64) - points["mtp.main_hidden"]).norm(dim=-1).sum(0)
    last = int(distance.argmin())
    other = OTHER_ROW_FLOAT32 if _is_exact(model) else OTHER_ROW
    if relative_l2(full.main_hidden[:, last:last + 1], points["mtp.main_hidden"]) > other:
        raise NotComparable("no position of input_ids has the recorded mtp.main_hidden, so they are other tokens")

    def before(cache: Cache, arbiter: Arbiter) -> None:
        if last > 0:
            model(input_ids[:, :last], cache, observe=lambda point, value: arbiter.mark(f"{point} of the prompt"))

    def graft(recorded: dict[str, Tensor], arbiter: Arbiter) -> Points:
        # The draft reads rows of all tokens before the last, and the trace has none of them. They are made anew each
        # time, so that a flip in them is found.
        cache = model.new_cache(len(input_ids))
        before(cache, arbiter)
        out = model(input_ids[:, last:last + 1], cache, observe=lambda point, value: arbiter.mark(f"{point} of the last token"))
        yield from _named(draft_points(model, Recorded(recorded), anchor, cache, out.main_hidden))

    def run(arbiter: Arbiter) -> Points:
        step, draft, cache = _Seen(arbiter), _Seen(arbiter), model.new_cache(len(input_ids))
        with arbiter.active():
            before(cache, arbiter)
            model(input_ids[:, last:last + 1], cache, observe=step.observe)
            model.draft(anchor, cache, observe=draft.observe)
        yield from (step.points | draft.points).items()

    return judge(name, points, graft, run) if _is_exact(model) else judge_modules(name, points, graft, run)


def _check_decode(name: str, model: Model, tensors: dict[str, Tensor], entry: dict) -> Verdict:
    """Teacher-forced steps after a prompt of `split` tokens, a draft after each; the trace has results only."""
    input_ids, split = tensors["input_ids"], entry.get("split")
    if not isinstance(split, int) or isinstance(split, bool) or not 1 <= split < input_ids.shape[1]:
        raise ValueError(f"Verifying {name}: the manifest gives split {split!r} for {input_ids.shape[1]} tokens.")
    points = _points(tensors, entry)
    size = model.config.text_config.dspark_block_size
    for point in points:
        if point.endswith(".mtp.draft_ids"):
            _check_ids(model, point, points[point], (len(input_ids), size + 1))

    def run(arbiter: Arbiter, calls: dict[str, list[Tensor]] | None = None) -> Points:
        """The recorded results, in order; all that the backbone observed goes into `calls`."""
        def seen(point: str, value: Tensor) -> None:
            arbiter.mark(point)
            if calls is not None:
                calls.setdefault(point, []).append(value)

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
                recorded = [part for part in DRAFT_PARTS if f"{prefix}.mtp.{part}" in points]
                if recorded and model.mtp:
                    anchor = _anchor(model, points, prefix, f"{prefix}.mtp.{recorded[0]}", len(input_ids))
                    draft = model.draft(anchor, cache, observe=arbiter.observe)
                    for part, value in zip(DRAFT_PARTS, (draft.logits, draft.confidence, draft.ids)):
                        yield f"{prefix}.mtp.{part}", value

    def graft(recorded: dict[str, Tensor], arbiter: Arbiter) -> Points:
        return prefill_points(model, Recorded(recorded), input_ids, None, None)

    def redraft(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return drafts_again(model, given, split, input_ids.shape[1], CHOICE_GAP) if model.mtp else {}

    if _is_exact(model):
        verdict = judge(name, points, None, run)
    else:
        calls: dict[str, list[Tensor]] = {}
        own = dict(run(Arbiter(), calls))
        verdict = judge_steps(name, points, own, steps_as_prompt(calls), graft, redraft, run)
    if verdict.code == DIVERGED:
        _search_token(model, input_ids, split, points)
    return verdict


CHECKERS: dict[str, Callable[[str, Model, dict[str, Tensor], dict], Verdict]] = {
    "text_prefill": _check_prefill, "vision_prefill": _check_prefill, "draft_step": _check_draft_step,
    "decode": _check_decode,
}


def _anchor(model: Model, points: dict[str, Tensor], call: str, point: str, batch: int) -> Tensor:
    """The token [B] that the draft of `point` started from: the best of the logits of `call`, else the first draft id."""
    if f"{call}.logits" in points:
        anchor, source = points[f"{call}.logits"].argmax(-1), f"{call}.logits"
    elif f"{call}.mtp.draft_ids" in points:
        anchor, source = points[f"{call}.mtp.draft_ids"][:, 0].to(torch.int64), f"{call}.mtp.draft_ids"
    else:
        raise NotComparable(f"{point} is the draft after an unknown token: the trace has neither {call}.logits nor "
                            f"{call}.mtp.draft_ids")
    _check_ids(model, f"the best token of {source}", anchor, (batch,))
    return anchor


class _Seen:
    """The points of a run, as it observes them; the second of a name, as that of a second image, is called NAME#1."""

    def __init__(self, arbiter: Arbiter) -> None:
        self.arbiter = arbiter
        self.points: dict[str, Tensor] = {}

    def observe(self, point: str, value: Tensor) -> None:
        stem, number = point, 0
        while point in self.points:
            number += 1
            point = f"{stem}#{number}"
        self.arbiter.mark(point)
        self.points[point] = value


def _is_exact(model: Model) -> bool:
    """Whether right implementations agree to the last bits but for single roundings: float32. All else is BF16."""
    return model.numerics.dtype == torch.float32


# --- inputs ----------------------------------------------------------------------------------------------------


def _check_inputs(model: Model, tensors: dict[str, Tensor], entry: dict) -> None:
    """Raise ValueError for a trace without tokens or points, NotComparable for tokens that this model does not have."""
    ids = tensors.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise ValueError("Verifying: a trace needs input_ids [B, S] of int64.")
    if not _points(tensors, entry):
        raise ValueError("Verifying: a trace has input_ids and no point to compare.")
    vocabulary = model.config.text_config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise NotComparable(f"input_ids go up to {int(ids.max())}, the vocabulary of this checkpoint to {vocabulary - 1}")


def _check_ids(model: Model, name: str, ids: Tensor, shape: tuple[int, ...]) -> None:
    """Raise NotComparable unless `ids` are tokens of this model in this shape."""
    vocabulary = model.config.text_config.vocab_size
    if tuple(ids.shape) != shape or ids.dtype.is_floating_point:
        raise NotComparable(f"{name} must be integers of shape {list(shape)}, the trace has {ids.dtype} {list(ids.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise NotComparable(f"{name} goes from {int(ids.min())} to {int(ids.max())}, the vocabulary of this checkpoint from 0 "
                            f"to {vocabulary - 1}")


def _ascending(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Expert ids in ascending order, their weights along with them, and a note if any were not: experts are a set."""
    ordered, moved = dict(tensors), []
    for name, ids in tensors.items():
        if not name.endswith(".expert_ids") or ids.dtype.is_floating_point or ids.dim() == 0:
            continue
        ascending, order = ids.sort(-1)
        if torch.equal(ascending, ids):
            continue
        moved.append(name)
        ordered[name], weights = ascending, name.removesuffix("ids") + "weights"
        if weights in tensors and tensors[weights].shape == ids.shape:
            ordered[weights] = tensors[weights].gather(-1, order)
    return ordered, [f"{moved[0]} ({len(moved)} such points) is not in ascending order: compared as sets, expert_weights "
                     "reordered along with it"] if moved else []


def _named(points: Points) -> Points:
    """The points of a graft; raises NotComparable with the last of them if a recorded value brings it to a stop."""
    last = "the inputs"
    try:
        for last, value in points:
            yield last, value
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError) as error:
        raise NotComparable(_stopped(error, f"what follows {last}")) from error


def _stopped(error: Exception, what: str) -> str:
    """For a computation that a trace brought to a stop: the reason and the place, so that a defect here can be found."""
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if Path(frame.filename).parent.name in ("inference", "reference")][-1]
    reason = str(error).splitlines()[0] if str(error) else "no message"
    return (f"nothing was judged: computing {what} stopped at {Path(place.filename).name}:{place.lineno} "
            f"({type(error).__name__}: {reason}), so the trace has odd values or is of another model, or this one is defective")


def _check_tokens(model: Model, input_ids: Tensor, token_types: Tensor | None, points: dict[str, Tensor]) -> None:
    """Raise NotComparable if the recorded embedding of a text position is the table row of another token."""
    recorded = points.get("embed")
    if recorded is None and "layers.0.in" in points and points["layers.0.in"].dim() == 4:
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
            _require_token(input_ids, row, position, same[0])


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
    other, same = (OTHER_ROW_FLOAT32, SAME_ROW_FLOAT32) if _is_exact(model) else (OTHER_ROW, SAME_ROW)
    off = (actual - recorded).norm(dim=-1) / recorded.norm(dim=-1) > other
    if not off.any():
        return
    position = int(off.any(0).nonzero()[0])
    row = int(off[:, position].nonzero()[0])
    candidates = torch.arange(vocabulary, device=input_ids.device)
    if model.config.vision_config is not None:
        candidates = candidates[candidates != model.config.image_token_id]  # cannot stand in a text prompt
    tried = []
    for tokens in candidates.split(128):
        ids = torch.cat((input_ids[row, :position].expand(len(tokens), -1), tokens[:, None]), dim=1)
        tried.append(model(ids, model.new_cache(len(ids))).main_hidden[:, -1].to(torch.float64))
    wanted = recorded[row, position]
    error, best = ((torch.cat(tried) - wanted).norm(dim=-1) / wanted.norm()).min(0)
    _require_token(input_ids, row, position, int(candidates[best]) if error < same else int(input_ids[row, position]))


def _require_token(input_ids: Tensor, row: int, position: int, token: int) -> None:
    """Raise NotComparable if the trace was computed from another token than input_ids has."""
    if token != int(input_ids[row, position]):
        raise NotComparable(f"input_ids[{row}, {position}] is {int(input_ids[row, position])}, but the trace was "
                            f"computed from token {token} there")


def _points(tensors: dict[str, Tensor], entry: dict) -> dict[str, Tensor]:
    """What of a trace is to be compared: all but its inputs."""
    inputs = {*entry.get("inputs", ()), "input_ids", "token_types", "anchor"}
    return {name: value for name, value in tensors.items() if name not in inputs}


def _images(name: str, tensors: dict[str, Tensor]) -> list[ImageInput]:
    """The images of a prompt, from image0.patches and image0.grid on."""
    images = []
    while not images or any(f"image{len(images)}.{part}" in tensors for part in ("patches", "grid")):
        patches, grid = f"image{len(images)}.patches", f"image{len(images)}.grid"
        for point in (patches, grid):
            if point not in tensors:
                raise ValueError(f"Verifying {name}: token_types have images, and the trace lacks {point}.")
        if tensors[grid].shape != (5,):
            raise ValueError(f"Verifying {name}: {grid} must have shape [5], got {list(tensors[grid].shape)}.")
        _, rows, columns, llm_rows, llm_columns = (int(number) for number in tensors[grid])
        images.append(ImageInput(tensors[patches], rows, columns, llm_rows, llm_columns))
    return images


def _read_manifest(folder: Path) -> dict[str, dict]:
    """{trace: entry} of manifest.json; raises ValueError for anything that the checks could stumble over later."""
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
    """All tensors of a trace; raises ValueError if one is missing that the manifest lists."""
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
    """The command line; returns the exit code."""
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
    """Print the verdicts; the exit code of the worst. Bad input never gets here: it ends the run (inference.command.run)."""
    code = next((code for code in (DIVERGED, NOT_COMPARABLE) if any(v.code == code for v in verdicts)), EQUAL)
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
