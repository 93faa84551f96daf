"""Which module adds an error: every point of a trace recomputed from the values that the same trace recorded before it.

A point that agrees with that recomputation was computed rightly from what it was given: its error is inherited. One
that does not agree adds error of its own. The recomputation is reference/graft.py. A run in chunks or single steps is
first put together by position, because a right model gives the same rows however the tokens are cut.
What is left when every module agrees can only be rounding: reference/flips.py then looks for the close decisions that,
taken the other way, explain it.
Tests: tests/test_compare.py
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import inference
from inference.image_processor import ImageInput
from inference.model import Model
from inference.numerics import MODES
from reference.alignment import gather, pair_up, widen
from reference.compare import Added, Comparison, chosen_blocks, ratio_of
from reference.compare_points import Result, judge_exact, judge_floats, judge_sets, recorded_margin, selection_margin
from reference.flips import Arbiter, Decision, explain
from reference.graft import Recorded, draft_points, prefill_points
from reference.points import layer_of, lookup
from reference.tolerances import Bound, bound_for
from reference.trace import Inputs, Tracer, config_digest
from reference.trace_format import OtherCheckpoint, Trace, facts, widen_bfloat16

MOST = 8  # ours: flips that a replay may contain
NONE = Decision(-1, 0, 0.0, "no decision")  # taken: the arbiter decides nothing and does not search
RESIDENT_BYTES = 2**30  # ours: larger checkpoints stay on disk while modules are replayed
SEARCH_PARAMETERS = 5e7  # ours: largest model that is run again and again to explain a flip end to end
Points = dict[str, np.ndarray]  # by path: [B, R, ...] in ascending order of rows


class Replay:
    """One trace, its points put together by position, and the model that should have made it."""

    def __init__(self, model: Model, trace: Trace, other: Trace) -> None:
        self.model, self.trace = model, trace
        self.facts = facts(model.config.to_dict())
        self.bound = bound_for(trace.numerics, trace.numerics, bool(trace.switch("fake_quant")))
        self.points, self.tokens = whole_prompt(trace)
        self.ids = torch.from_numpy(trace.input_ids[:, :self.tokens].copy())
        types = trace.manifest["inputs"].get("token_types")
        self.all_types = None if types is None or np.asarray(types).max() < 0 else torch.tensor(types)
        self.types = None if self.all_types is None else self.all_types[:, :self.tokens]
        self.images = None if self.types is None else [find_images(trace) or find_images(other)]
        if self.images == [[]]:
            raise ValueError("its pictures are not on record; record it at level module")

    def grafted(self, arbiter: Arbiter | None = None) -> Iterator[Result]:
        """Every recorded backbone point against what the model makes of the recorded ones before it."""
        recorded = Recorded({path: torch.from_numpy(value) for path, value in self.points.items()})
        with torch.no_grad(), contextlib.nullcontext() if arbiter is None else arbiter.active():
            for path, value in prefill_points(self.model, recorded, self.ids, self.types, self.images):
                if arbiter is not None:
                    arbiter.observe(path, value)
                if path in self.points:
                    computed = value.float().numpy() if value.is_floating_point() else value.numpy()
                    yield judge(path, self.points[path], computed, self.points, self.bound.module, self.facts)

    def embeds(self) -> bool:
        """Whether the recorded embeddings are the model's; True where none are on record."""
        if "embed" not in self.points:
            return True
        with contextlib.closing(self.grafted()) as results:
            return not next(result for result in results if result.path == "embed").bad

    def first_bad(self, arbiter: Arbiter) -> tuple[int, str | None]:
        """How many replayed points agree before the first that does not, and that one."""
        agreed = 0
        with contextlib.closing(self.grafted(arbiter)) as results:
            for result in results:
                if result.bad:
                    return agreed, result.path
                agreed += 1
        return agreed, None

    def run_again(self, arbiter: Arbiter, bound: Bound) -> tuple[int, str | None]:
        """The calls of the trace once more, end to end: how many points agree, and the first that does not."""
        sink = _LiveComparison(self.trace, arbiter, bound, self.facts)
        images = () if self.images is None else tuple(self.images[0])
        inputs = Inputs(torch.from_numpy(self.trace.input_ids.copy()), self.all_types, images)
        calls = [(step["count"], step["kept"], step["draft"]) for step in self.trace.steps]
        start = self.trace.steps[0]["start"]
        try:
            with arbiter.active():
                Tracer(self.model, sink).run(inputs, [(start, start, False), *calls] if start else calls)
        except _Disagrees as disagrees:
            return sink.agreed, str(disagrees)
        return sink.agreed, None

    def drafted(self, key: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(path, recomputed, recorded) of the draft whose anchor stands at position `key`."""
        points = draft_at(self.trace, key)
        anchor = torch.from_numpy(points["mtp.draft_ids"][:, 0].astype(np.int64))
        ids = torch.from_numpy(self.trace.input_ids[:, :key].copy())
        types = None if self.types is None else self.types[:, :key]
        with torch.no_grad():
            cache = self.model.new_cache(len(ids))
            out = self.model(ids, cache, token_types=types, images=self.images)
            recorded = Recorded({path: torch.from_numpy(value) for path, value in points.items()})
            for path, value in draft_points(self.model, recorded, anchor, cache, out.main_hidden[:, -1:]):
                if path in points and points[path].shape == tuple(value.shape):
                    yield path, value.float().numpy() if value.is_floating_point() else value.numpy(), points[path]


class _Disagrees(Exception):
    """A run was stopped at its first point that is out of bounds; the text is its name."""


class _LiveComparison:
    """Sink of a run that compares every point with a trace at once and stops at the first that is out of bounds."""

    def __init__(self, trace: Trace, arbiter: Arbiter, bound: Bound, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.trace, self.arbiter, self.bound, self.agreed = trace, arbiter, bound, 0
        self.number: int | None = None  # of the call in the trace; None for tokens before it
        self.points: Points = {}  # of this call, as computed

    def step(self, start: int, count: int, kept: int | None = None, draft: bool = False) -> None:
        begins = [(step["start"], step["count"]) for step in self.trace.steps]
        self.number = begins.index((start, count)) if (start, count) in begins else None
        self.points = {}

    def wants(self, path: str) -> bool:
        point = lookup(path)
        return point is not None and point.how != "own"

    def add(self, path: str, value: np.ndarray, tag: str | None = None, keep: bool = True) -> None:
        stem, number = path, 0
        while path in self.points:
            number += 1
            path = f"{stem}#{number}"
        value = self.points[path] = widen_bfloat16(value) if tag == "BF16" else value
        name = f"step{self.number}.{path}"
        self.arbiter.observe(name, value)
        entry = self.trace.entries.get(name)
        if entry is None or not self.trace.has_values(entry) or lookup(path).how == "info":
            return
        recorded, computed = self.trace.read(entry), value
        if entry.first is not None:  # only some rows are on record
            rows = self.trace.keys(entry, recorded.shape[1]) - self.trace.steps[self.number]["start"]
            computed = computed[:, rows]
        if judge(path, recorded, computed, self.points, self.bound.of(path), self.facts).bad:
            raise _Disagrees(name)
        self.agreed += 1


def whole_prompt(trace: Trace) -> tuple[Points, int]:
    """Points of the backbone by path, every row once, and the number of tokens they cover from position 0 on."""
    units, _, _ = pair_up(trace, _cut_differently(trace))
    tokens = max(step["start"] + step["kept"] for step in trace.steps)
    points: Points = {}
    for unit in units:
        if unit.point.rows == "draft" or unit.point.how in ("own",) or unit.path.startswith("weights."):
            continue
        value, keys = gather(trace, unit.tested, drop_rejected=True)
        if unit.point.rows in ("token", "group"):
            order = np.argsort(keys, kind="stable")
            whole = np.array_equal(keys[order], np.arange(len(keys)))
            if not whole or unit.point.rows == "token" and len(keys) != tokens:
                continue  # only part of the prompt: cannot be grafted
            value = value[:, order]
        points[unit.path] = value
    return points, tokens


def _cut_differently(trace: Trace) -> Trace:
    """The same trace, seen by `pair_up` as one with other calls, so that it is put together by position."""
    manifest = {**trace.manifest, "steps": [*trace.steps, {"start": -1, "count": 0, "kept": 0, "draft": False}]}
    return Trace(trace.origin, manifest, trace.entries, trace.read_bytes)


def draft_at(trace: Trace, key: int) -> Points:
    """Points of one draft by path, [B, ...] as draft_points gives them, and the context row before it."""
    points: Points = {}
    for entry in trace.entries.values():
        point = lookup(entry.path)
        if entry.step is None or point is None or point.concept != "draft" or not trace.has_values(entry):
            continue
        value = trace.read(entry)
        if point.rows == "draft" and int(trace.keys(entry, 1)[0]) == key:
            points[entry.path] = value
        elif point.rows == "token":
            keys = trace.keys(entry, value.shape[1])
            if key - 1 in keys:
                points[entry.path] = value[:, keys == key - 1]
    return points


def find_images(trace: Trace) -> list[ImageInput]:
    """The pictures of a run from its points, [] if they are not on record."""
    stems = {path: [entry for entry in trace.entries.values() if entry.path.partition("#")[0] == path]
             for path in ("vision.patches", "vision.grid")}
    images = []
    for patches, grid in zip(*stems.values()):
        if trace.has_values(patches):
            value = torch.from_numpy(trace.read(patches).astype(np.float32)).to(torch.bfloat16)
            images.append(ImageInput(value, *(int(number) for number in trace.read(grid))))
    return images


def judge(path: str, recorded: np.ndarray, computed: np.ndarray, points: Points, bound: float,
          facts: dict[str, Any]) -> Result:
    """A recorded point against its recomputation. facts: those of the configuration (trace_format.facts)."""
    result, point, block = Result(path, path, ratio=ratio_of(facts, path)), lookup(path), facts["candidate_block_size"]
    stem = path.rpartition(".")[0] + "."
    keys = np.zeros(0, np.int64) if point.rows in ("call", "image") else np.arange(recorded.shape[1])
    if point.how in ("set", "selection", "mask") and recorded.shape[:-1] == computed.shape[:-1]:
        width = max(recorded.shape[-1], computed.shape[-1])
        blank = False if point.how == "mask" else -1
        recorded, computed = widen(recorded, width, blank), widen(computed, width, blank)
    if recorded.shape != computed.shape:
        result.verdict, result.error, result.excess = "shape", math.inf, math.inf
        result.detail = f"shape {list(recorded.shape)}, wanted {list(computed.shape)}"
        return result
    if point.how == "set":
        return judge_sets(result, recorded, computed, keys, recorded_margin((points.get(stem + "margin"), None), bound))
    if point.how == "selection":
        return judge_sets(result, recorded, computed, keys, selection_margin(points.get(stem + "scores"), bound))
    if point.how == "mask":
        rows = [chosen_blocks(side, block) for side in (recorded, computed)]
        return judge_sets(result, *rows, keys, selection_margin(points.get(stem + "scores"), bound, block))
    if point.kind == "discrete":
        return judge_exact(result, recorded, computed, keys)
    ids = points.get(stem + "expert_ids")
    if path.endswith("ffn.expert_weights") and ids is not None and ids.shape == recorded.shape:
        recorded = np.take_along_axis(recorded, np.argsort(ids, -1, kind="stable"), -1)
    return judge_floats(result, recorded, computed, keys, None, bound, bound)


# --- the answers -------------------------------------------------------------------------------------------------


def explain_difference(checkpoint: str | Path, tested: Trace, baseline: Trace, comparison: Comparison) -> list[Added]:
    """Replay the tested trace, then, if it is clean, the baseline; then look for flips that explain what is left.

    Raises ValueError where the checkpoint cannot be loaded, OtherCheckpoint where it is not that of the traces.
    """
    models: dict[tuple[str, bool], Model] = {}
    found, replays = [], {}
    sides = (("tested", tested, baseline), ("baseline", baseline, tested))
    _check_checkpoint(checkpoint, sides, models, comparison)
    for side, trace, other in sides:
        added = Added(side)
        found.append(added)
        model = _model_for(checkpoint, trace, models)
        try:
            replays[side] = Replay(model, trace, other)
            _replay(replays[side], added)
            first = comparison.first
            if first is not None and not added.culprit and lookup(first.path).rows == "draft":
                _replay_draft(replays[side], first, added)
        except ValueError as error:
            added.error = str(error)
        if added.culprit or comparison.first is None:
            break
    clean = len(found) == 2 and not any(added.culprit or added.error for added in found)
    if comparison.first is not None and clean:
        found[0].flips += explain_flips(replays["tested"], replays["baseline"], comparison.bound)
    return found


def _model_for(checkpoint: str | Path, trace: Trace, models: dict[tuple[str, bool], Model]) -> Model:
    mode = (trace.numerics if trace.numerics in MODES else "dequantized", bool(trace.switch("fake_quant")))
    if mode not in models:
        small = sum(path.stat().st_size for path in Path(checkpoint).glob("*.safetensors")) < RESIDENT_BYTES
        models[mode] = inference.load(checkpoint, numerics=mode[0], fake_quant=mode[1],
                                      weights="resident" if small else "stream")
    model = models[mode]
    vocabulary, highest = model.config.text_config.vocab_size, int(trace.input_ids.max())
    if highest >= vocabulary:
        raise OtherCheckpoint(f"token {highest} of {trace.origin} is outside the vocabulary of {checkpoint}")
    return model


def _check_checkpoint(checkpoint: str | Path, sides: Sequence[tuple[str, Trace, Trace]],
                      models: dict[tuple[str, bool], Model], comparison: Comparison) -> None:
    """Raise OtherCheckpoint where a trace states another configuration, or both have other embeddings."""
    for _, trace, _ in sides:
        model, stated = _model_for(checkpoint, trace, models), trace.manifest["model"].get("config_digest")
        pictures = trace.manifest["inputs"].get("image_digests") and model.config.vision_config is None
        if pictures or stated and stated != config_digest(model):
            raise OtherCheckpoint(f"{trace.origin} was recorded with another configuration than {checkpoint} has")
    if any(result.bad for result in comparison.results if result.path == "embed"):
        return
    try:
        known = any(Replay(_model_for(checkpoint, trace, models), trace, other).embeds() for _, trace, other in sides)
    except ValueError:
        return  # a trace that cannot be replayed is reported where that is tried
    if not known:
        raise OtherCheckpoint(f"both have the same embeddings, and {checkpoint} makes others of these tokens")


def _replay(replay: Replay, added: Added) -> None:
    """Every module from its recorded inputs. What one close decision inside the replay explains is a flip, no error."""
    added.results = list(replay.grafted())
    if added.culprit is not None:
        taken = _flips_inside(replay)
        if taken:
            added.replay_flips = [str(decision) for decision in taken]
            added.results = list(replay.grafted(Arbiter(taken)))
    for result in added.results:
        layer = layer_of(result.path)
        if layer is not None:
            added.by_layer[layer] = max(result.error, added.by_layer.get(layer, 0.0))


def _flips_inside(replay: Replay) -> tuple[Decision, ...]:
    """Close decisions of the replay that, taken the other way, make bad points agree.

    A replayed point depends on recorded values up to its own layer, so only decisions of that layer before it can
    matter.
    """
    watcher, taken = Arbiter(), ()
    for _ in replay.grafted(watcher):
        pass
    agreed, path = replay.first_bad(Arbiter((NONE,)))
    while path is not None and len(taken) < MOST:
        begin, end = watcher.calls.get(f"{layer_of(path)}.in", 0), watcher.calls.get(path, 0)
        for decision in watcher.close:
            if begin <= decision.call < end and decision not in taken:
                further, where = replay.first_bad(Arbiter((*taken, decision)))
                if further > agreed:
                    agreed, path, taken = further, where, (*taken, decision)
                    break
        else:
            break
    return taken


def _replay_draft(replay: Replay, first: Result, added: Added) -> None:
    for path, computed, recorded in replay.drafted(first.position):
        added.results.append(judge(path, recorded, computed, draft_at(replay.trace, first.position),
                                   replay.bound.module, replay.facts))


def explain_flips(tested: Replay, baseline: Replay, bound: Bound) -> list[str]:
    """Decisions that, taken the other way, turn one trace into the other; [] if none do.

    The model reproduces one side as it is; the other side is the one to be explained.
    """
    parameters = sum(parameter.numel() for parameter in tested.model.parameters())
    if parameters > SEARCH_PARAMETERS:
        return []
    for replay in (baseline, tested):
        left, taken = explain(lambda arbiter, replay=replay: replay.run_again(arbiter, bound))
        if left is not None:
            return []
        if taken:
            return [str(decision) for decision in taken]
    return []
