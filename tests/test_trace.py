"""Recording: what is in a trace, that it does not depend on how it was made, and that a damaged one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import inference
from inference.context import Context
from reference import trace as trace_module
from reference.compare import EQUAL, compare
from reference.points import LEVELS, POINTS, layer_of, lookup
from reference.trace import Inputs, parse_layers, read_inputs, record
from reference.trace_format import (TraceError, TraceWriter, digest, engine_header, open_trace, parse_chunks, read_ids,
                                    widen_bfloat16)


@pytest.fixture(scope="module")
def text(traces_dir: Path) -> Inputs:
    return Inputs(torch.from_numpy(read_ids(traces_dir / "text_prefill.float32.safetensors")))


@pytest.fixture(scope="module")
def decode(nano, nano_dir, traces_dir, tmp_path_factory):
    """Prompt, six drafted tokens of which two are accepted, single tokens, the rest; drafts; level all."""
    inputs = read_inputs(traces_dir / "decode.float32.safetensors", nano, nano_dir)
    with torch.no_grad():
        return record(nano, nano_dir, inputs, tmp_path_factory.mktemp("decode"), "all", draft=True,
                      schedule=parse_chunks("22,6/2,1,1,19", 45), digest_weights=True)


@pytest.fixture(scope="module")
def pictures(nano, nano_dir, traces_dir, tmp_path_factory):
    inputs = read_inputs(traces_dir / "vision_prefill.float32.safetensors", nano, nano_dir)
    with torch.no_grad():
        return record(nano, nano_dir, inputs, tmp_path_factory.mktemp("pictures"), "all")


SIZES = {"BOOL": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8}


def header(checkpoint: Path, level: str = "all", tokens: int = 4) -> dict:
    return engine_header("test", "1", checkpoint, np.arange(tokens)[None] + 20, "float32", False, level)


# --- the format --------------------------------------------------------------------------------------------------


def test_values_come_back_as_written(tmp_path, nano_dir) -> None:
    values = {"embed": np.random.randn(1, 3, 5).astype(np.float32), "ids": np.arange(3)[None],
              "image_mask": np.array([[True, False, True]]), "head.collapsed": np.zeros((1, 0, 7), np.float32),
              "norm": np.random.randn(1, 3, 2).astype(np.float16), "logits": np.random.randn(1, 3, 2)}
    bits = torch.randn(1, 3, 2, 2).bfloat16()
    with TraceWriter(tmp_path / "t", header(nano_dir)) as writer:
        writer.step(0, 3)
        for path, value in values.items():
            writer.add(path, value)
        writer.add("layers.0.in", bits.view(torch.uint16).numpy(), "BF16")
    trace = open_trace(tmp_path / "t")
    assert list(trace.entries) == [f"step0.{path}" for path in (*values, "layers.0.in")]
    for path, value in values.items():
        read = trace.read(trace.entries[f"step0.{path}"])
        assert np.array_equal(read, value) and (read.dtype == value.dtype or value.dtype == np.float16)
    assert np.array_equal(trace.read(trace.entries["step0.layers.0.in"]), bits.float().numpy())
    data = (tmp_path / "t" / "tensors.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for entry in json.loads(data[8:8 + length]).values():  # readers that map the file need aligned tensors
        assert (8 + length + entry["data_offsets"][0]) % SIZES[entry["dtype"]] == 0
    with safe_open(tmp_path / "t" / "tensors.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("step0.layers.0.in"), bits)
        assert set(file.keys()) == set(trace.entries)
    statistics = trace.entries["step0.embed"].facts
    assert statistics["rms"] == pytest.approx(np.sqrt(np.square(values["embed"].astype(np.float64)).mean()))
    assert statistics["nan"] == statistics["inf"] == 0


def test_statistics_count_what_is_not_finite(tmp_path, nano_dir) -> None:
    with TraceWriter(tmp_path / "t", header(nano_dir)) as writer:
        writer.step(0, 1)
        writer.add("embed", np.array([[[np.nan, np.inf, -np.inf, 2.0]]], np.float32))
        writer.add("norm", np.array([[[np.nan]]], np.float32))
    entries = open_trace(tmp_path / "t").entries
    assert entries["step0.embed"].facts["nan"] == 1 and entries["step0.embed"].facts["inf"] == 2
    assert entries["step0.embed"].facts["max"] == 2.0 and entries["step0.norm"].facts["rms"] is None


def test_digest_covers_dtype_shape_and_bytes() -> None:
    value = np.arange(6, dtype=np.float32)
    digests = {digest(value, "F32"), digest(value.reshape(2, 3), "F32"), digest(value.view(np.int32), "I32"),
               digest(value + np.float32(1e-30), "F32"), digest(np.nextafter(value, np.float32(9)), "F32")}
    assert len(digests) == 5 and digest(value.copy(), "F32") in digests
    assert np.array_equal(widen_bfloat16(np.array([0x3F80, 0xC000], np.uint16)), [1.0, -2.0])


def test_an_interrupted_run_leaves_no_trace(tmp_path, nano_dir) -> None:
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "t", header(nano_dir)) as writer:
        writer.step(0, 1)
        writer.add("embed", np.zeros((1, 1, 2), np.float32))
        raise RuntimeError
    assert not any((tmp_path / "t").iterdir())
    with pytest.raises(TraceError, match="no trace"):
        open_trace(tmp_path / "t")


def test_nothing_disappears_unseen(tmp_path, nano_dir, capsys) -> None:
    """Unknown names, missing axes and calls that were never begun are errors; deeper points are counted."""
    value = np.zeros((1, 4, 2), np.float32)
    with TraceWriter(tmp_path / "t", header(nano_dir, "layer")) as writer:
        with pytest.raises(TraceError, match=r"step\(start, count\)"):
            writer.add("embed", value)
        writer.step(0, 4)
        with pytest.raises(TraceError, match="'layers.0.attn.query' is no point"):
            writer.add("layers.0.attn.query", value)
        with pytest.raises(TraceError, match=r"embed has shape \[4, 2\], wanted \[B, S, D\]"):
            writer.add("embed", value[0])
        writer.add("embed", value)
        writer.add("layers.0.attn.in", value)
        writer.add("layers.0.attn.q_latent", value)
    assert "2 point(s) of a deeper level were dropped, layers.0.attn.in first" in capsys.readouterr().err
    assert list(open_trace(tmp_path / "t").entries) == ["step0.embed"]
    with pytest.raises(TraceError, match="no call was recorded"), TraceWriter(tmp_path / "none", header(nano_dir)):
        pass
    assert not any((tmp_path / "none").iterdir())


def test_headers_of_engines(tmp_path, nano_dir) -> None:
    ids = np.array([[3, 4]])
    some = engine_header("x", "1", nano_dir, ids, "float32", True, "module", layers=[4, "mtp.0"])
    assert some["layers"] == ["layers.4", "mtp.0"] and header(nano_dir)["layers"] is None
    for wrong in (768, -1):
        with pytest.raises(TraceError, match=f"token {wrong} is outside the vocabulary"):
            engine_header("x", "1", nano_dir, np.array([[3, wrong]]), "float32", True, "module")
    folder = small_trace(tmp_path / "t", nano_dir)
    assert read_ids(folder / "manifest.json").tolist() == [[20, 21, 22, 23]]  # the tokens of a trace
    (tmp_path / "p.txt").write_text("hello")
    with pytest.raises(TraceError, match="Of a text, give the manifest"):
        read_ids(tmp_path / "p.txt")


def test_values_are_on_disk_while_the_run_goes_on(tmp_path, nano_dir) -> None:
    writer = TraceWriter(tmp_path / "t", header(nano_dir))
    writer.step(0, 4)
    writer.add("embed", np.zeros((1, 4, 1 << 16), np.float32))
    assert not [value for value in vars(writer).values() if isinstance(value, np.ndarray)]
    assert (tmp_path / "t" / ".part4").stat().st_size == 1 << 20
    writer.close()


@pytest.mark.parametrize("damage, words", [
    (lambda folder: (folder / "tensors.safetensors").write_bytes(b"x"), "not a readable safetensors"),
    (lambda folder: (folder / "tensors.safetensors").unlink(), "not a readable safetensors"),
    (lambda folder: truncate(folder / "tensors.safetensors"), "not a readable safetensors"),
    (lambda folder: edit(folder, version=9), "version 9"),
    (lambda folder: edit(folder, steps=[]), "damaged"),
    (lambda folder: edit(folder, points="no"), "damaged"),
    (lambda folder: edit(folder, inputs={}), "damaged"),
    (lambda folder: remove(folder, "switches"), "lacks switches"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "not readable JSON"),
    (lambda folder: (folder / "manifest.json").write_text("[]"), "no JSON object"),
    (lambda folder: (folder / "manifest.json").unlink(), "no trace"),
])
def test_damaged_traces_are_refused(tmp_path, nano_dir, damage, words) -> None:
    folder = small_trace(tmp_path / "t", nano_dir)
    damage(folder)
    with pytest.raises(TraceError, match=words):
        open_trace(folder)


def test_changed_bytes_are_noticed_when_read(tmp_path, nano_dir) -> None:
    folder = small_trace(tmp_path / "t", nano_dir)
    path = folder / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    trace = open_trace(folder)
    with pytest.raises(TraceError, match="digest"):
        trace.read(trace.entries["step0.embed"])


def test_a_folder_with_other_files_is_not_overwritten(tmp_path, nano_dir) -> None:
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(TraceError, match="other files"):
        TraceWriter(tmp_path, header(nano_dir))
    folder = small_trace(tmp_path / "t", nano_dir)
    small_trace(folder, nano_dir)  # an earlier trace is
    assert open_trace(folder).entries


def small_trace(folder: Path, checkpoint: Path) -> Path:
    with TraceWriter(folder, header(checkpoint)) as writer:
        writer.step(0, 4)
        writer.add("embed", np.ones((1, 4, 2), np.float32))
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def edit(folder: Path, **changes) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def remove(folder: Path, key: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[key]
    (folder / "manifest.json").write_text(json.dumps(manifest))


# --- what a run records ------------------------------------------------------------------------------------------


def test_every_point_of_the_table_is_recorded(decode, pictures) -> None:
    seen = {lookup(entry.path).path for trace in (decode, pictures) for entry in trace.entries.values()}
    assert seen >= {point.path for point in POINTS}


def test_names_kinds_and_order(decode) -> None:
    paths = [entry.path for entry in decode.entries.values() if entry.step == 0]
    for entry in decode.entries.values():
        point = lookup(entry.path)
        assert point is not None and entry.facts["kind"] == point.kind, entry.name
        assert (entry.dtype in ("I64", "BOOL")) == (point.kind == "discrete") or point.concept == "weights"
    order = ["ids", "embed", "layers.0.in", "layers.0.hc_attn.pre_used", "layers.0.attn.in", "layers.0.attn.kv_quant",
             "layers.0.mid", "layers.0.ffn.out", "layers.0.out", "layers.1.engram.folded_ids", "layers.1.engram.out",
             "layers.6.attn.indexer.candidates", "layers.6.attn.indexer.topk", "layers.9.out", "head.collapsed",
             "logits", "argmax", "cache.position", "mtp.block_ids", "mtp.0.attn.in", "mtp.draft_ids", "mtp.accepted"]
    assert [path for path in paths if path in order] == order


def test_levels_are_nested(nano, nano_dir, text, tmp_path) -> None:
    short = Inputs(text.input_ids[:, :9])
    names = [set(record(nano, nano_dir, short, tmp_path / level, level).entries) for level in LEVELS]
    assert names[0] < names[1] < names[2] and len(names[0]) < 45
    some = record(nano, nano_dir, short, tmp_path / "some", "module", layers=parse_layers("2-3,9"))
    assert {layer_of(entry.path) for entry in some.entries.values()} == {None, "layers.2", "layers.3", "layers.9"}
    assert {name for name in names[1] if layer_of(name) in (None, "layers.3")} <= set(some.entries)


def test_a_summary_has_no_values(nano, nano_dir, text, tmp_path) -> None:
    full = record(nano, nano_dir, text, tmp_path / "full", "layer")
    summary = record(nano, nano_dir, text, tmp_path / "summary", "layer", summary=True)
    assert summary.summary and [path.name for path in (tmp_path / "summary").iterdir()] == ["manifest.json"]
    assert {name: entry.digest for name, entry in full.entries.items()} == {
        name: entry.digest for name, entry in summary.entries.items()}
    assert compare(summary, full).code == EQUAL


def test_derived_points(decode, nano) -> None:
    def read(name: str) -> np.ndarray:
        return decode.read(decode.entries[name])

    assert np.array_equal(read("step0.argmax"), read("step0.logits").argmax(-1))
    # Position 23 after 22 + 2 tokens: the window is 16 .. 23, whatever lies in the ring and what in the call.
    assert read("step2.layers.0.attn.window_index").tolist() == [[list(range(17, 25))]] * 2
    assert read("step0.layers.0.attn.window_index")[0, 3].tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    bias = read("step0.mtp.logits") - read("step0.mtp.base_logits")
    assert np.allclose(read("step0.mtp.markov_bias"), bias, atol=1e-5)
    ids, scores = read("step0.layers.0.ffn.expert_ids"), read("step0.layers.0.ffn.gate_scores")
    biased = scores + nano.layers[0].ffn.gate.bias.numpy()
    best = -np.sort(-biased, axis=-1)
    assert np.array_equal(np.sort(np.take_along_axis(biased, ids, -1), -1)[..., ::-1], best[..., :2])
    assert np.allclose(read("step0.layers.0.ffn.margin"), best[..., 1] - best[..., 2], atol=1e-7)
    drafts, ids = read("step0.mtp.draft_ids"), decode.input_ids[:, 22:28]
    agreed = [int(np.cumprod(row == wanted).sum()) for row, wanted in zip(drafts, ids)]
    assert read("step0.mtp.accepted").tolist() == agreed
    assert read("step1.cache.position").tolist() == [24, 24]
    # The open group of layer 2 after 25 tokens is token 24.
    tail = read("step2.layers.2.attn.compressor.tail")
    assert tail.shape[2] == 1 and np.allclose(tail[:, 1, 0], read("step2.layers.2.attn.compressor.score")[:, 0])


def test_calls_do_not_change_what_is_recorded(decode, nano, nano_dir, traces_dir, tmp_path) -> None:
    """Rejected tokens, single tokens and long calls against one call, aligned by position."""
    inputs = read_inputs(traces_dir / "decode.float32.safetensors", nano, nano_dir)
    whole = record(nano, nano_dir, inputs, tmp_path / "whole", "all")
    found = compare(decode, whole)
    assert found.code == EQUAL, found.verdict
    concepts = {lookup(result.path).concept for result in found.results}
    assert concepts >= {"attention", "compressor", "indexer", "experts", "engram", "head", "streams"}


def test_weight_modes_give_the_same_bytes(nano_dir, text, tmp_path) -> None:
    short = Inputs(text.input_ids[:, :6])
    digests = {}
    for weights in ("resident", "packed", "stream"):
        model = inference.load(nano_dir, weights=weights)
        trace = record(model, nano_dir, short, tmp_path / weights, "all", draft=True, weights=weights,
                       schedule=parse_chunks("5,1", 6), digest_weights=True)
        digests[weights] = {name: entry.digest for name, entry in trace.entries.items()}
        assert trace.manifest["run"]["weights"] == weights and trace.manifest["switches"]["input_fp8"]
    assert digests["resident"] == digests["packed"] == digests["stream"]


def test_pictures_in_separate_calls(nano, nano_dir, traces_dir, pictures, tmp_path) -> None:
    inputs = read_inputs(traces_dir / "vision_prefill.float32.safetensors", nano, nano_dir)
    cut = record(nano, nano_dir, inputs, tmp_path / "cut", "module", schedule=parse_chunks("18,25,1*", 50))
    assert compare(cut, pictures).code == EQUAL
    assert cut.read(cut.entries["step1.vision.grid"]).tolist() == pictures.read(
        pictures.entries["step0.vision.grid#1"]).tolist()
    with pytest.raises(ValueError, match="token types"):  # a call that ends inside a picture
        record(nano, nano_dir, inputs, tmp_path / "bad", schedule=parse_chunks("10,40", 50))


def test_manifest_says_what_was_run(decode) -> None:
    manifest = decode.manifest
    assert manifest["producer"]["name"] == "reference" and len(manifest["model"]["weights_digest"]) == 64
    assert manifest["run"]["numerics"] == "float32" and manifest["run"]["threads"] == torch.get_num_threads()
    assert manifest["switches"] == {"fake_quant": True, "input_fp8": False, "as_published_index_keys": False}
    assert manifest["steps"][1] == {"start": 22, "count": 6, "kept": 2, "draft": True}


def test_hooks_are_removed(nano, nano_dir, text, tmp_path) -> None:
    record(nano, nano_dir, Inputs(text.input_ids[:, :2]), tmp_path / "t")
    assert not any(module._forward_hooks for name, module in nano.named_modules() if name)
    assert Context.record.__module__ == "inference.context"


# --- inputs and options ------------------------------------------------------------------------------------------


def test_input_files(nano, nano_dir, tmp_path, golden_dir) -> None:
    (tmp_path / "a.json").write_text('{"input_ids": [0, 20, 30]}')
    (tmp_path / "b.txt").write_text("hello")
    (tmp_path / "c.json").write_text('{"prompt": "hello"}')
    picture = golden_dir / "nano" / "images" / "image0.png"
    (tmp_path / "d.json").write_text(json.dumps({"input_ids": [0, 5, 30], "images": [str(picture)]}))
    assert read_inputs(tmp_path / "a.json", nano, nano_dir).input_ids.tolist() == [[0, 20, 30]]
    ids = read_inputs(tmp_path / "b.txt", nano, nano_dir).input_ids
    assert torch.equal(ids, read_inputs(tmp_path / "c.json", nano, nano_dir).input_ids) and ids.shape[1] > 0
    image = read_inputs(tmp_path / "d.json", nano, nano_dir)
    assert len(image.images) == 1 and image.input_ids.shape == image.token_types.shape and image.input_ids.shape[1] > 5


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"input_ids": ["a"]}', '{"input_ids": [1], "prompt": "x"}',
                                  '{"input_ids": [1], "temperature": 0}', '{"input_ids": [[1], [2, 3]]}',
                                  '{"input_ids": []}'])
def test_bad_input_files(nano, nano_dir, tmp_path, text) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match="Reading the input"):
        read_inputs(tmp_path / "bad.json", nano, nano_dir)


def test_chunks() -> None:
    assert parse_chunks("3,2/1,1*", 6) == [(3, 3), (2, 1), (1, 1), (1, 1)]
    assert parse_chunks("4*", 6) == [(4, 4), (2, 2)]
    for text in ("", "0", "3", "3,x", "1*,3", "7", "3,2/3", "3,2/0,1*", "-1", "1.5"):
        with pytest.raises(ValueError, match="--chunks"):
            parse_chunks(text, 6)


def test_layers() -> None:
    assert parse_layers(None) is None
    assert parse_layers("1-2,mtp.0") == {"layers.1", "layers.2", "mtp.0"}
    for text in ("", "a", "3-1", "mtp", "1-"):
        with pytest.raises(ValueError, match="--layers"):
            parse_layers(text)


def test_command_line(nano_dir, tmp_path, capsys) -> None:
    (tmp_path / "p.json").write_text('{"input_ids": [0, 20, 30]}')
    base = ["--ckpt", str(nano_dir), "--input-file", str(tmp_path / "p.json"), "--out", str(tmp_path / "t")]
    assert trace_module.main([*base, "--numerics", "float32", "--level", "layer", "--chunks", "2,1"]) == 0
    assert "2 call(s)" in capsys.readouterr().out and open_trace(tmp_path / "t").numerics == "float32"
    assert trace_module.main([*base, "--chunks", "9"]) == 3
    assert trace_module.main([*base, "--threads", "0"]) == 3
    assert trace_module.main([*base, "--layers", "0-99"]) == 3
    assert "no layers.10, layers.11" in capsys.readouterr().err
    for out in (tmp_path / "p.json", "/proc/x"):
        assert trace_module.main([*base[:-1], str(out)]) == 3
    assert trace_module.main(["--ckpt", str(tmp_path), *base[2:]]) == 3
    (tmp_path / "p.json").write_text('{"input_ids": [0, 99999]}')
    assert trace_module.main(base) == 3
    assert "BAD INPUT" in capsys.readouterr().err
