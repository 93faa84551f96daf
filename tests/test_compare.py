"""The comparison: what it calls equal, what it names when something differs, and that it needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import inference
from inference.quant import fake_quant_fp8
from reference import compare as compare_module
from reference import noise, report, tolerances, trace_format
from reference.compare import BAD_INPUT, DIVERGED, EQUAL, NOT_COMPARABLE, Comparison, compare, growth_by_layer
from reference.compare_points import Result, fake_quant_fp8 as numpy_fake_quant_fp8, judge_floats, relative_l2
from reference.flips import Arbiter
from reference.points import layer_of
from reference.tolerances import FLOORS, bound_for
from reference.trace import Inputs, read_inputs, record
from reference.trace_format import Trace, TraceError, TraceWriter, engine_header, open_trace, parse_chunks

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def text(nano, nano_dir, traces_dir) -> Inputs:
    return read_inputs(traces_dir / "text_prefill.float32.safetensors", nano, nano_dir)


@pytest.fixture(scope="module")
def ours(nano, nano_dir, text, tmp_path_factory) -> Trace:
    with torch.no_grad():
        return record(nano, nano_dir, text, tmp_path_factory.mktemp("ours") / "trace", "module")


@pytest.fixture(scope="module")
def changed_dir(nano_dir, tmp_path_factory) -> Path:
    """The nano checkpoint with one bit pattern of one weight changed: layers.4.attn.wkv."""
    folder = tmp_path_factory.mktemp("changed") / "checkpoint"
    shutil.copytree(nano_dir, folder)
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["layers.4.attn.wkv.weight"]
    data = bytearray((folder / shard).read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    start, stop = json.loads(data[8:8 + length])["layers.4.attn.wkv.weight"]["data_offsets"]
    data[8 + length + (start + stop) // 2] ^= 0x18
    (folder / shard).write_bytes(bytes(data))
    return folder


@pytest.fixture(scope="module")
def changed(changed_dir, text, tmp_path_factory) -> Trace:
    with torch.no_grad():
        model = inference.load(changed_dir, numerics="float32")
        return record(model, changed_dir, text, tmp_path_factory.mktemp("run") / "trace", "module")


class Pair:
    """Two little traces that are written by hand. Points not named are left out."""

    def __init__(self, folder: Path, checkpoint: Path, tokens: int = 6, level: str = "module") -> None:
        self.folder, self.checkpoint, self.tokens, self.level = folder, checkpoint, tokens, level

    def compare(self, tested: dict, baseline: dict, **manifest) -> Comparison:
        sides = []
        for name, points in (("tested", tested), ("baseline", baseline)):
            ids = np.arange(self.tokens)[None] + 20
            header = engine_header(name, "1", self.checkpoint, ids, "float32", True, self.level)
            if name == "tested":
                header.update(manifest)
            with TraceWriter(self.folder / name, header) as writer:
                writer.step(0, self.tokens, draft=True)
                for path, value in points.items():
                    writer.add(path, np.asarray(value))
            sides.append(open_trace(self.folder / name))
        return compare(*sides)


@pytest.fixture
def pair(tmp_path, nano_dir) -> Pair:
    return Pair(tmp_path, nano_dir)


def floats(*shape: int) -> np.ndarray:
    return np.random.randn(*shape).astype(np.float32)


# --- golden data -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flipped(ours, tmp_path_factory) -> Trace:
    """Ours, with the one close code of the golden trace on the other side, as most processors round it anyway."""
    def flip(value: np.ndarray) -> np.ndarray:
        value[0, 7, 38] = -0.34375  # golden: -0.375
        return value

    return _with_value(ours, tmp_path_factory.mktemp("flipped") / "trace", "step0.layers.6.attn.kv_quant", flip)


def test_golden_trace_is_equal_and_its_flip_is_reported(ours, flipped, traces_dir) -> None:
    assert compare(ours, open_trace(traces_dir / "text_prefill.float32")).code == EQUAL
    found = compare(flipped, open_trace(traces_dir / "text_prefill.float32"))
    assert found.code == EQUAL and "1 legitimate flip" in found.verdict
    flips = [result for result in found.results if result.verdict == "flip"]
    assert [(flip.name, flip.position) for flip in flips] == [("step0.layers.6.attn.kv_quant", 7)]
    assert flips[0].margin <= 1e-5 and len(found.results) == 196


def test_every_golden_trace_is_equal(nano_dir, nano, nano_plain, traces_dir, tmp_path) -> None:
    """Drafts and decode steps need the checkpoint: their flip is not on record, so it has to be proved."""
    for name, model, options in (("vision_prefill.float32", nano, {}),
                                 ("text_prefill.float32_no_fake_quant", nano_plain, {}),
                                 ("draft_step.float32", nano, {"chunks": "23,1,1*", "draft": True}),
                                 ("decode.float32", nano, {"chunks": "23,1*", "draft": True})):
        inputs = read_inputs(traces_dir / f"{name}.safetensors", model, nano_dir)
        chunks = parse_chunks(options["chunks"], inputs.input_ids.shape[1]) if options else None
        trace = record(model, nano_dir, inputs, tmp_path / name, schedule=chunks, draft=bool(options))
        golden = open_trace(traces_dir / name)
        found = compare(trace, golden, nano_dir if options else None)
        assert found.code == EQUAL, (name, found.verdict)
        assert "flip" not in found.verdict or any("layers.6.attn.kv" in note for note in found.notes)


def test_golden_folder_with_several_traces_asks_for_a_name(traces_dir) -> None:
    with pytest.raises(TraceError, match="text_prefill.float32"):
        open_trace(traces_dir)
    assert open_trace(traces_dir / "draft_step.float32.safetensors").entries
    with pytest.raises(TraceError, match="holds several"):
        open_trace(traces_dir / "nothing")


def test_a_changed_weight_is_named(changed, ours, traces_dir) -> None:
    for baseline in (ours, open_trace(traces_dir / "text_prefill.float32")):
        found = compare(changed, baseline)
        assert found.code == DIVERGED
        assert found.verdict.startswith("DIVERGED at step0.layers.4.attn.kv") and found.first.position == 0
    assert any("weight files differ" in note for note in compare(changed, ours).notes)
    growth = growth_by_layer(found)
    assert max(growth[f"layers.{i}"] for i in range(4)) < 1e-6 < 1e-4 < growth["layers.4"]


def test_added_and_inherited(changed, ours, nano_dir, traces_dir) -> None:
    found = compare(changed, open_trace(traces_dir / "text_prefill.float32"), nano_dir)
    added = found.added[0]
    assert added.side == "tested" and added.culprit.path == "layers.4.attn.kv_quant"
    # All else is inherited.
    assert [result.path for result in added.results if result.bad] == ["layers.4.attn.kv_quant"]
    others = max(value for name, value in added.by_layer.items() if name != "layers.4")
    assert others < 1e-6 < added.by_layer["layers.4"]
    text = report.as_text(found)
    assert "ADDED here: from its recorded inputs this point is off by" in text
    assert "added by every layer of the tested trace, from its recorded inputs, log scale" in text
    # The same run as the baseline: the tested side is right, and the baseline is blamed.
    turned = compare(ours, changed, nano_dir)
    assert turned.code == DIVERGED and turned.added[0].culprit is None
    assert turned.added[1].side == "baseline" and turned.added[1].culprit.path == "layers.4.attn.kv_quant"
    assert "tested: every module agrees" in report.as_text(turned)
    # A later point of the changed run: off end to end, right from its recorded inputs.
    later = dataclasses.replace(found, first=next(r for r in found.results if r.path == "layers.7.attn.out"))
    assert "inherited: from its recorded inputs this point is right" in report.as_text(later)
    wrong = dataclasses.replace(added.culprit, path="layers.4.attn.indexer.topk", error=math.inf)
    named = dataclasses.replace(found, first=wrong, added=[dataclasses.replace(added, results=[wrong])])
    assert "ADDED here: from its recorded inputs this point is decided differently" in report.as_text(named)
    close = dataclasses.replace(wrong, verdict="close", error=1e-7)
    named = dataclasses.replace(found, first=wrong, added=[dataclasses.replace(added, results=[close])])
    assert "inherited: from its recorded inputs this point is off by 1.0e-07, within bounds" in report.as_text(named)


def test_coarse_traces_can_be_replayed(changed, nano_dir, ours, tmp_path, text, changed_dir) -> None:
    """Level layer alone: the wrong layer is still found."""
    model = inference.load(changed_dir, numerics="float32")
    coarse = record(model, changed_dir, text, tmp_path / "coarse", "layer")
    found = compare(coarse, ours, nano_dir)
    assert found.first.path == "layers.4.mid" and found.added[0].culprit.path == "layers.4.mid"


def test_a_module_error_hidden_by_bf16_needs_the_checkpoint(nano_dir, text, tmp_path) -> None:
    """End to end BF16 noise hides it; from recorded inputs it stands out."""
    short = Inputs(text.input_ids[:, :20])
    model = inference.load(nano_dir, numerics="dequantized")
    right = record(model, nano_dir, short, tmp_path / "right")
    for layer in model.layers:
        layer.ffn.gate.scale *= 1.05
    wrong = record(model, nano_dir, short, tmp_path / "wrong")
    assert compare(wrong, right).code == EQUAL
    assert "sanity check" in report.as_text(compare(wrong, right))
    found = compare(wrong, right, nano_dir)
    assert found.code == DIVERGED and found.first.path == "layers.0.ffn.expert_weights"


def test_a_proven_flip_needs_a_flip(nano, nano_dir, text, tmp_path, ours) -> None:
    """A row moved by a whole code for no reason is no flip."""
    close = Arbiter()
    images = {"images": None, "token_types": None}
    with close.active():
        nano(text.input_ids, nano.new_cache(1), observe=close.observe, **images)
    decision = min(close.close, key=lambda decision: abs(decision.nudge))
    with Arbiter((decision,)).active():
        flipped = record(nano, nano_dir, text, tmp_path / "flipped")
    found = compare(flipped, ours)
    assert found.code == EQUAL and "1 legitimate flip" in found.verdict
    assert compare(flipped, ours, nano_dir).code == EQUAL
    rewritten = _with_value(flipped, tmp_path / "moved", "step0.layers.0.attn.kv_quant", lambda value: _move_one(value))
    found = compare(rewritten, ours)
    assert found.code == DIVERGED and found.first.name == "step0.layers.0.attn.kv_quant"


def test_a_flip_excuses_only_what_comes_after_it(flipped, traces_dir, tmp_path) -> None:
    """The golden trace flips at position 7 of layer 6: small differences are fine from there on, nowhere else."""
    golden = open_trace(traces_dir / "text_prefill.float32")
    for row, code in ((3, DIVERGED), (30, EQUAL)):
        def change(value: np.ndarray, row: int = row) -> np.ndarray:
            value[0, row] *= np.float32(1.0005)
            return value

        found = compare(_with_value(flipped, tmp_path / str(row), "step0.layers.8.ffn.out", change), golden)
        assert found.code == code, found.verdict
    too_much = _with_value(flipped, tmp_path / "much", "step0.layers.8.ffn.out", lambda value: value * np.float32(1.005))
    assert compare(too_much, golden).first.name == "step0.layers.8.ffn.out"


def test_rejected_rows_are_left_out(tmp_path, nano_dir) -> None:
    """A call of four tokens of which two are accepted, then the rest: only accepted rows count."""
    value = floats(1, 6, 8)
    garbage = np.concatenate((value[:, :2], floats(1, 2, 8)), axis=1)
    header = engine_header("x", "1", nano_dir, np.arange(6)[None] + 20, "float32", True, "module")
    for name, calls in (("cut", ((0, 4, 2, garbage), (2, 4, 4, value[:, 2:]))), ("whole", ((0, 6, 6, value),))):
        with TraceWriter(tmp_path / name, header) as writer:
            for start, count, kept, rows in calls:
                writer.step(start, count, kept)
                writer.add("embed", rows)
    for pair in (("cut", "whole"), ("whole", "cut")):
        found = compare(*(open_trace(tmp_path / name) for name in pair))
        assert found.code == EQUAL and found.results[0].error == 0


def _move_one(value: np.ndarray) -> np.ndarray:
    value[0, 3, 5] += 0.25 * abs(value).max()
    return value


def _with_value(trace: Trace, folder: Path, name: str, change) -> Trace:
    """The same trace with one value changed."""
    header = {key: trace.manifest[key] for key in ("producer", "model", "facts", "run", "switches", "inputs", "level")}
    with TraceWriter(folder, header) as writer:
        for step in trace.steps:
            writer.step(**step)
        for entry in trace.entries.values():
            value = trace.read(entry)
            writer.add(entry.path, change(value.copy()) if entry.name == name else value)
    return open_trace(folder)


# --- comparable at all -------------------------------------------------------------------------------------------


def test_what_makes_runs_incomparable(nano, nano_dir, text, ours, tmp_path, nano_plain) -> None:
    other_ids = text.input_ids.clone()
    other_ids[0, 3] += 1
    other = record(nano, nano_dir, Inputs(other_ids), tmp_path / "ids", "layer")
    plain = record(nano_plain, nano_dir, text, tmp_path / "plain", "layer")
    found = compare(other, ours)
    ids = [int(side[0, 3]) for side in (other_ids, text.input_ids)]
    assert found.code == NOT_COMPARABLE
    assert found.verdict.endswith(f"input_ids[0, 3]: tested {ids[0]}, baseline {ids[1]} (different prompts)")
    found = compare(plain, ours)
    assert found.code == NOT_COMPARABLE and report.as_text(found).splitlines() == [
        "NOT COMPARABLE: fake_quant: tested false, baseline true (record both with or both without --no-fake-quant)",
        "  tested = plain, baseline = trace"]
    idle = dataclasses.replace(plain, manifest={**plain.manifest, "steps": []})
    found = compare(idle, ours)
    assert "tokens covered: tested none, baseline 0..44" in found.verdict and "fake_quant" in found.notes[0]
    native = dataclasses.replace(ours, manifest={**ours.manifest, "run": {"numerics": "native"}})
    for pair, code in (((ours, native), NOT_COMPARABLE), ((native, ours), NOT_COMPARABLE), ((native, native), EQUAL)):
        assert compare(*pair).code == code
    for section, name, value in (("model", "config_digest", "0" * 64), ("switches", "as_published_index_keys", True)):
        manifest = {**ours.manifest, section: {**ours.manifest[section], name: value}}
        found = compare(dataclasses.replace(ours, manifest=manifest), ours)
        assert found.code == NOT_COMPARABLE and name in found.verdict
    models = [{**ours.manifest["model"], "revision": name} for name in "ab"]
    revisions = [dataclasses.replace(ours, manifest={**ours.manifest, "model": model}) for model in models]
    assert "revision" in compare(*revisions).verdict
    assert compare(revisions[0], ours).code == EQUAL  # one side does not say


def test_prefix_of_a_prompt_is_comparable(nano, nano_dir, text, ours, tmp_path) -> None:
    short = record(nano, nano_dir, Inputs(text.input_ids[:, :20]), tmp_path / "short")
    found = compare(short, ours)
    assert found.code == EQUAL and len([r for r in found.results if r.verdict != "skipped"]) > 150


def test_a_missing_concept_is_not_equal(ours, tmp_path) -> None:
    header = {key: ours.manifest[key] for key in ("producer", "model", "facts", "run", "switches", "inputs", "level")}

    def without(concept: str, level: str) -> Comparison:
        with TraceWriter(tmp_path / concept, {**header, "level": level}) as writer:
            writer.step(0, 45)
            for entry in ours.entries.values():
                if concept not in entry.path:
                    writer.add(entry.path, ours.read(entry))
        return compare(open_trace(tmp_path / concept), ours)

    found = without("engram", "module")
    assert found.code == NOT_COMPARABLE
    assert found.verdict.startswith("NOT COMPARABLE: the tested trace has no point of engram")
    assert "engram" in report.as_text(found) and found.skipped["engram"]
    assert without(".attn.q_latent", "module").code == EQUAL  # one point less is listed, not refused
    assert without("engram.", "layer").code == EQUAL  # at level layer there is nothing of it to miss


def test_some_layers_are_judged_by_what_these_layers_have(ours, tmp_path, nano_dir) -> None:
    """A trace of layer 3 at level module need not have the indexer; one of layer 2 must."""
    def of_layer(layer: int, *left_out: str) -> Comparison:
        header = engine_header("x", "1", nano_dir, ours.input_ids, "float32", True, "module", layers=[layer])
        with TraceWriter(tmp_path / "t", header) as writer:
            writer.step(0, 45)
            for entry in ours.entries.values():
                kept = not any(part in entry.path for part in left_out)
                if kept and layer_of(entry.path) in (None, f"layers.{layer}"):
                    writer.add(entry.path, ours.read(entry))
        return compare(open_trace(tmp_path / "t"), ours)

    assert of_layer(3).code == EQUAL and of_layer(2).code == EQUAL
    found = of_layer(2, "indexer")
    assert found.code == NOT_COMPARABLE and "no point of indexer" in found.verdict


def test_a_trace_of_weights_alone_is_a_check_of_the_weights(nano, nano_dir, text, tmp_path) -> None:
    """As section 2 of PORTING.md has it: another engine's decoded weights, with whatever numerics."""
    ours = record(nano, nano_dir, Inputs(text.input_ids[:, :2]), tmp_path / "ours", "all", summary=True,
                  layers=frozenset({"layers.0"}), digest_weights=True)
    names = {path.removeprefix("weights."): entry.dtype for path, entry in ours.entries.items() if "weights." in path}
    assert {dtype for name, dtype in names.items() if "hc_" in name or name.endswith("attn_sink")} == {"F32"}

    def compare_with(change: dict[str, float], float32: str = "") -> Comparison:
        header = engine_header("x", "1", nano_dir, ours.input_ids, "native", False, "all")
        with TraceWriter(tmp_path / "theirs", header) as writer:
            writer.step(0, 2)
            for name, dtype in names.items():
                owner, _, last = name.rpartition(".")
                value = getattr(nano.get_submodule(owner), last).float() * change.get(name, 1.0)
                if dtype == "F32" or name == float32:
                    writer.add(f"weights.{name}", value.numpy(), keep=False)
                else:
                    writer.add(f"weights.{name}", value.bfloat16().view(torch.uint16).numpy(), "BF16", keep=False)
        return compare(open_trace(tmp_path / "theirs"), ours)

    found = compare_with({})
    assert found.code == EQUAL and "the same bits" in found.receipt[-1] and len(found.results) == len(names)
    assert compare_with({"layers.0.attn.wkv.weight": 2.0}).first.path == "weights.layers.0.attn.wkv.weight"
    assert compare_with({}, "layers.0.attn.wkv.weight").first.detail == "dtype F32, wanted BF16"


def test_the_checkpoint_must_be_that_of_the_traces(ours, traces_dir, nano_dir, tmp_path) -> None:
    golden = open_trace(traces_dir / "text_prefill.float32")  # states no configuration
    other = tmp_path / "other"
    shutil.copytree(nano_dir, other)
    shard = json.loads((other / "model.safetensors.index.json").read_text())["weight_map"]["embed.weight"]
    data = bytearray((other / shard).read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    start, stop = json.loads(data[8:8 + length])["embed.weight"]["data_offsets"]
    rows = slice(8 + length + start, 8 + length + stop)
    data[rows] = data[rows][1024:] + data[rows][:1024]  # every token gets another one's row
    (other / shard).write_bytes(bytes(data))
    for pair in ((golden, golden), (ours, golden)):
        found = compare(*pair, other)
        assert found.code == NOT_COMPARABLE and "both have the same embeddings" in found.verdict
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["rope_theta"] = 12345.0
    (other / "config.json").write_text(json.dumps(config))
    found = compare(golden, ours, other)
    assert found.code == NOT_COMPARABLE and found.verdict.startswith("NOT COMPARABLE: --ckpt is not the checkpoint")
    assert "another configuration" in found.verdict


def test_values_without_their_axes_are_bad_input(pair, monkeypatch, capsys) -> None:
    """Written by something else than TraceWriter."""
    monkeypatch.setattr(trace_format, "check_axes", lambda path, shape: None)
    with pytest.raises(TraceError, match=r"embed has shape \[8\], wanted \[B, S, D\]"):
        pair.compare({"embed": floats(8)}, {"embed": floats(1, 6, 8)})
    assert compare_module.main([str(pair.folder / "tested"), str(pair.folder / "baseline")]) == BAD_INPUT
    assert capsys.readouterr().err.startswith("BAD INPUT. ")


# --- decisions ---------------------------------------------------------------------------------------------------


def test_ties_of_selections(pair) -> None:
    scores = np.full((1, 6, 5), -np.inf, np.float32)
    scores[0, 5] = [3.0, 1.0, 1.0, 1.00001, 0.0]
    topk = np.full((1, 6, 3), -1)

    def verdict(*columns: int) -> Result:
        path = "layers.2.attn.indexer."
        sides = [topk.copy(), topk.copy()]
        sides[0][0, 5], sides[1][0, 5] = columns, (0, 1, 3)
        found = pair.compare(*({path + "scores": scores, path + "topk": side} for side in sides))
        return next(result for result in found.results if result.path.endswith("topk"))

    assert verdict(3, 1, 0).verdict == "equal"  # order is free
    assert verdict(0, 2, 3).verdict == "tie"
    assert verdict(0, 1, 2).verdict == "near-tie" and verdict(0, 1, 2).margin == pytest.approx(1e-5, rel=0.1)
    assert verdict(0, 1, 4).verdict == "different" and verdict(0, 1, 4).position == 5
    assert verdict(0, 1, 4).detail.endswith("position 5 only here row 4, only wanted row 3")
    assert verdict(0, 1, -1).verdict == "different"  # one fewer
    assert verdict(0, 1, 1).verdict == "different"  # a duplicate is not a third column


def test_ties_of_experts(pair) -> None:
    def verdict(margin: float | None, wrong: tuple[int, ...] = (0, 2)) -> str:
        sides = []
        for ids in (wrong, (0, 1)):
            points = {"layers.0.ffn.expert_ids": np.array([[ids] * 6])}
            if margin is not None:
                points["layers.0.ffn.margin"] = np.full((1, 6), margin, np.float32)
            sides.append(points)
        return pair.compare(*sides).results[0].verdict

    assert verdict(0.0) == "tie" and verdict(1e-6) == "near-tie" and verdict(0.1) == "different"
    assert verdict(None) == "different"  # nothing on record that could excuse it
    assert verdict(-0.1) == "different"  # not what its own scores ask for
    assert verdict(0.0, (2, 3)) == "different"  # two exchanges are no boundary case
    assert verdict(0.0, (1, 0)) == "equal"


def test_expert_weights_are_compared_by_expert(pair) -> None:
    ids, weights = np.array([[[1, 4]] * 6]), np.array([[[0.25, 0.75]] * 6], np.float32)
    path = "layers.0.ffn.expert_"
    turned = {path + "ids": ids[..., ::-1], path + "weights": weights[..., ::-1]}
    found = pair.compare(turned, {path + "ids": ids, path + "weights": weights})
    assert all(result.verdict == "equal" for result in found.results)
    found = pair.compare({path + "ids": ids, path + "weights": weights[..., ::-1]},
                         {path + "ids": ids, path + "weights": weights})
    assert found.first.path.endswith("weights")


def test_candidate_blocks(pair) -> None:
    """Blocks of 4 (nano): columns beyond what exists do not matter, another block does."""
    scores = np.zeros((1, 6, 6), np.float32)
    scores[..., :2] = 1.0
    mask = np.array([[[True] * 4 + [False] * 2] * 6])
    path = "layers.6.attn.indexer."

    def verdict(other: np.ndarray, scored: np.ndarray = scores) -> str:
        found = pair.compare({path + "scores": scored, path + "candidates": other},
                             {path + "scores": scored, path + "candidates": mask})
        return next(result for result in found.results if result.path.endswith("candidates")).verdict

    assert verdict(np.array([[[True] * 3 + [False] * 3] * 6])) == "equal"  # the same block
    assert verdict(~mask) == "different"
    found = pair.compare({path + "candidates": ~mask & False}, {path + "candidates": mask})
    assert found.first.detail.endswith("only here none, only wanted block 0")
    assert verdict(~mask, np.zeros((1, 6, 6), np.float32)) == "tie"


def test_argmax_and_drafts(pair) -> None:
    logits = np.zeros((1, 6, 4), np.float32)
    logits[0, :, 1], logits[0, :, 2], logits[0, :, 3] = 1.0, 1.0, 0.5
    ids = np.full((1, 6), 1)

    def argmax(value: int) -> str:
        other = ids.copy()
        other[0, 4] = value
        found = pair.compare({"logits": logits, "argmax": other}, {"logits": logits, "argmax": ids})
        return found.results[-1].verdict

    assert (argmax(1), argmax(2), argmax(3)) == ("equal", "tie", "different")

    drafts, rows = np.array([[7, 1, 1, 1]]), np.tile(logits[:, :1], (1, 3, 1))

    def draft(*values: int, change: int = 3) -> Comparison:
        other = rows.copy()
        other[0, change:] += 1.0  # rows behind another draft are computed from another token
        return pair.compare({"mtp.logits": other, "mtp.draft_ids": np.array([[7, *values]])},
                            {"mtp.logits": rows, "mtp.draft_ids": drafts})

    assert draft(1, 2, 3, change=2).code == EQUAL  # a tie, then whatever follows from it
    assert draft(1, 3, 1, change=2).first.path == "mtp.draft_ids"
    assert draft(1, 2, 3, change=1).first.path == "mtp.logits"  # row 1 still had the same input


def test_compressed_rows_are_named_with_their_tokens(pair) -> None:
    value = floats(1, 3, 8)
    other = value.copy()
    other[0, 1] += 1
    for layer, words in ((2, "row 1 (tokens 2..3)"), (6, "row 1 (token 1)")):  # ratio 2 and ratio 1
        path = f"layers.{layer}.attn.compressor.kv"
        found = pair.compare({path: other}, {path: value})
        assert f", {words}: different" in found.verdict and f"at sequence 0, {words} [" in found.first.detail


def test_exact_points_have_no_tolerance(pair) -> None:
    ids = np.arange(36).reshape(1, 6, 6)
    other = ids.copy()
    other[0, 4, 2] += 1
    found = pair.compare({"layers.1.engram.hash_ids": other}, {"layers.1.engram.hash_ids": ids})
    assert found.first.position == 4 and "27, wanted 26" in found.first.detail


# --- floats ------------------------------------------------------------------------------------------------------


def test_float_numbers(pair) -> None:
    value = floats(1, 6, 32)
    other = value * np.float32(1 + 1e-6)
    found = pair.compare({"embed": other}, {"embed": value})
    numbers = found.results[0].numbers
    assert found.code == EQUAL and found.results[0].verdict == "close"
    assert found.results[0].error == pytest.approx(1e-6, rel=0.1) and numbers["nmse_db"] == pytest.approx(-120, abs=2)
    assert numbers["cosine"] == pytest.approx(1.0) and numbers["max_abs"] == pytest.approx(np.abs(other - value).max())


@pytest.mark.parametrize("change", [1e-3, math.nan, math.inf])
def test_one_wrong_entry_does_not_drown(pair, change) -> None:
    pair.tokens = 500
    value = floats(1, 500, 200)
    other = value.copy()
    other[0, 333, 17] += change
    found = pair.compare({"embed": other}, {"embed": value})
    assert found.code == DIVERGED and found.first.position == 333 and found.first.index == [0, 333, 17]


def test_infinities_must_be_the_same(pair) -> None:
    value = floats(1, 6, 8)
    value[0, :, 3] = -np.inf
    assert pair.compare({"norm": value}, {"norm": value.copy()}).code == EQUAL
    other = value.copy()
    other[0, 2, 3] = np.inf
    assert pair.compare({"norm": other}, {"norm": value}).first.position == 2


def test_shape_and_dtype_are_verdicts_of_their_own(pair) -> None:
    value = floats(1, 6, 8)
    assert pair.compare({"embed": value[..., :7]}, {"embed": value}).first.verdict == "shape"
    assert pair.compare({"embed": np.zeros((1, 6, 8), np.int64)}, {"embed": value}).first.verdict == "shape"
    assert pair.compare({"embed": value.astype(np.float64)}, {"embed": value}).code == EQUAL


def test_relative_l2_edges() -> None:
    zero = np.zeros(3)
    assert relative_l2(zero, zero) == 0 and relative_l2(zero + 1, zero) == math.inf
    assert relative_l2(np.array([np.nan]), np.array([np.nan])) == 0
    assert judge_floats(Result("x", "x"), zero, zero, np.zeros(0, int), None, 1e-5, 1e-5).verdict == "equal"


def test_numpy_quantizer_is_the_models() -> None:
    """Midpoints, power-of-two edges, zeros, subnormal codes."""
    values = torch.randn(64, 64) * torch.exp2(torch.randint(-30, 12, (64, 1)).float())
    values[0], values[1, ::2], values[2] = 0, 448 * 2.0**-3, torch.linspace(-1, 1, 64)
    values[3] = torch.arange(64) / 64 + 1 / 128
    assert np.array_equal(numpy_fake_quant_fp8(values.numpy()), fake_quant_fp8(values).numpy())


# --- summaries, bounds, noise ------------------------------------------------------------------------------------


def test_summaries_are_compared_by_statistics(nano, nano_dir, text, ours, changed, changed_dir, tmp_path) -> None:
    summary = record(nano, nano_dir, text, tmp_path / "summary", "module", summary=True)
    assert compare(summary, ours).code == EQUAL
    found = compare(changed, summary)
    assert found.code == DIVERGED and found.first.path.startswith("layers.4.attn.kv") and "RMS" in found.first.detail


def test_bounds_stand_above_the_measured_noise() -> None:
    assert len(FLOORS) == 12
    for pair, floors in FLOORS.items():
        names, _, quant = pair.partition(",")
        bound = bound_for(*names.split(" / "), quant.endswith("on"))
        assert bound.pair == pair and bound.reason
        for name, floor in floors.items():
            if name != "logits":
                assert 1.5 * floor <= getattr(bound, name) , (pair, name)
    float32 = FLOORS["float32 / float32, fake quant off"]
    assert float32["end"] > 1e-8  # a floor of nothing would mean that nothing was measured


def test_noise_is_measured_and_written(nano, nano_dir, text, tmp_path) -> None:
    linear, einsum = torch.nn.functional.linear, torch.einsum
    plain = noise.run(nano, text)
    with noise.summed_in_float64():
        other = noise.run(nano, text)
    assert torch.nn.functional.linear is linear and torch.einsum is einsum
    found = noise.worst(noise.errors(other, plain))
    assert 1e-8 < found["end"] < 1e-2 and found["logits"] <= found["end"]
    assert noise.worst(noise.errors(plain, plain)) == {"end": 0.0, "attention": 0.0, "logits": 0.0}
    path = tmp_path / "tolerances.py"
    shutil.copyfile(tolerances.__file__, path)
    noise.write_floors({"float32 / native, fake quant on": found}, path)
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "copy", "__builtins__": __builtins__}, names)
    assert list(names["FLOORS"]) == ["float32 / native, fake quant on"]
    assert noise.main(["--ckpt", str(tmp_path)]) == 3


def test_noise_prints_and_writes_only_when_told(nano_dir, tmp_path, monkeypatch, capsys) -> None:
    text_only = tmp_path / "text"
    text_only.mkdir()
    config = json.loads((nano_dir / "config.json").read_text())
    (text_only / "config.json").write_text(json.dumps({**config, "vision_config": None}))
    measured = []
    monkeypatch.setattr(noise, "measure", lambda _checkpoint, files: measured.append(list(files)) or FLOORS)
    original, path = tolerances.__file__, tmp_path / "tolerances.py"
    monkeypatch.setattr(tolerances, "__file__", str(path))
    path.write_text("untouched\n# floors: begin\n# floors: end\n")
    for checkpoint in (nano_dir, text_only):
        assert noise.main(["--ckpt", str(checkpoint)]) == 0
    assert [len(files) for files in measured] == [2, 1] and "text_prefill" in str(measured[1][0])
    assert "FLOORS" not in path.read_text() and "behind one flip" in capsys.readouterr().out
    assert noise.main(["--ckpt", str(nano_dir), "--write"]) == 3  # nothing between begin and end
    shutil.copyfile(original, path)
    path.write_text(path.read_text().replace("6.1e-07", "9.9e-01"))
    assert noise.main(["--ckpt", str(nano_dir), "--write"]) == 0
    assert path.read_text() == Path(original).read_text()


# --- command line ------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(ours, changed, traces_dir, tmp_path, capsys, monkeypatch) -> None:
    golden = str(traces_dir / "text_prefill.float32")
    assert compare_module.main([ours.origin, golden]) == EQUAL
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("EQUAL within bounds") and "this run supports" in lines[-1]
    assert sum(line.startswith("layers.") for line in lines) == 10  # a bar per layer
    assert compare_module.main([changed.origin, golden, "--json"]) == DIVERGED
    found = json.loads(capsys.readouterr().out)
    assert found["code"] == 1 and found["first"]["name"] == "step0.layers.4.attn.kv_quant"
    assert found["points"][0].keys() >= {"name", "verdict", "error", "position", "margin"}
    assert compare_module.main([ours.origin, str(traces_dir / "vision_prefill.float32")]) == NOT_COMPARABLE
    assert compare_module.main([ours.origin, str(tmp_path / "nowhere")]) == BAD_INPUT
    assert compare_module.main([ours.origin, golden, "--ckpt", str(tmp_path / "nowhere")]) == BAD_INPUT
    for wrong in ("/nowhere/x.png", str(tmp_path / "x.foo")):
        capsys.readouterr()
        assert compare_module.main([ours.origin, golden, "--plot", wrong]) == BAD_INPUT
        shown = capsys.readouterr()
        assert "Drawing the plot" in shown.err and not shown.out  # said before the work
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare_module.main([ours.origin, golden, "--plot", str(tmp_path / "x.png"), "--details"]) == EQUAL
    assert "pip install matplotlib" in capsys.readouterr().err


def test_runs_without_torch(changed, traces_dir) -> None:
    """In an interpreter that can import numpy but neither torch nor safetensors nor the model."""
    blocker = ("import sys\n"
               "class Block:\n"
               "    def find_spec(self, name, *rest):\n"
               "        if name.split('.')[0] in ('torch', 'safetensors', 'inference', 'tqdm', 'matplotlib'):\n"
               "            raise ImportError(name)\n"
               "sys.meta_path.insert(0, Block())\n"
               "from reference.compare import main\n"
               "sys.exit(main(sys.argv[1:]))\n")
    golden = str(traces_dir / "text_prefill.float32")
    done = subprocess.run([sys.executable, "-c", blocker, changed.origin, golden], cwd=ROOT, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == DIVERGED, done.stderr
    assert done.stdout.startswith("DIVERGED at step0.layers.4.attn.kv_quant, position 0")


def test_text_view(changed, ours) -> None:
    found = compare(changed, ours)
    plain, colored = report.as_text(found), report.as_text(found, color=True)
    assert "\x1b[" not in plain and "\x1b[31" in colored and all(len(line) < 240 for line in plain.splitlines())
    assert plain.count("after the first") == 3 and "█" in plain
    assert plain.splitlines()[1] == f"  tested = {changed.origin}, baseline = {ours.origin}"
    assert "increase of the error per layer, log scale" in plain
    assert report.bar(1e-12) == "▏" and report.bar(0) == "" and len(report.bar(5.0)) == report.BAR_WIDTH
    assert len(report.bar(1e-3)) > len(report.bar(1e-6)) > 0
