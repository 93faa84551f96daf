"""The verifier: passes on the golden data, and fails, at the right point and with the right code, on anything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import inference.attention
from inference.quant import fake_quant_fp4_e8m0
from reference.metrics import compare_selections, relative_l2
from reference.verify import main, verify


@pytest.fixture
def traces(traces_dir, tmp_path) -> Path:
    folder = tmp_path / "traces"
    shutil.copytree(traces_dir, folder)
    return folder


def edit(folder: Path, trace: str, change) -> None:
    path = folder / f"{trace}.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def run(checkpoint, traces, only, capsys) -> tuple[int, str]:
    code = main([str(checkpoint), str(traces), "--only", only])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_golden_traces_pass(nano_dir, traces_dir, capsys) -> None:
    """Every trace, end to end and from recorded inputs; the two known close decisions are listed."""
    code = main([str(nano_dir), str(traces_dir)])
    out = capsys.readouterr().out
    assert code == 0
    assert out.count(": equal") == 7
    flips = [line for line in out.splitlines() if "legitimate flip:" in line]
    assert all("layers.6.attn.kv [0, 7" in flip or "(tie)" in flip for flip in flips), flips


def test_json(nano_dir, traces_dir, capsys) -> None:
    assert main([str(nano_dir), str(traces_dir), "--only", "no_fake_quant", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "equal" and result["traces"][0]["error"] < 2e-5


CORRUPTED = [
    ("text_prefill.float32", "layers.4.attn.q"), ("text_prefill.float32", "layers.6.attn.kv_quant"),
    ("text_prefill.float32", "layers.2.attn.compressor.latent"), ("text_prefill.float32", "layers.8.attn.indexer.scores"),
    ("text_prefill.float32", "layers.5.hc_ffn.comb"), ("text_prefill.float32", "layers.1.engram.gate"),
    ("text_prefill.float32", "layers.3.ffn.expert_weights"), ("text_prefill.float32", "layers.9.out"),
    ("text_prefill.float32", "embed"), ("text_prefill.native", "layers.4.mid"), ("text_prefill.native", "layers.7.ffn.out"),
    ("text_prefill.float32_no_fake_quant", "logits"), ("vision_prefill.float32", "aligner.out#1"),
    ("draft_step.float32", "mtp.1.attn.out"), ("decode.float32", "step30.logits"),
]


@pytest.mark.parametrize("trace, point", CORRUPTED, ids=lambda value: str(value))
def test_one_corrupted_value_is_named(nano_dir, traces, capsys, trace, point) -> None:
    def corrupt(tensors) -> None:
        value = tensors[point]
        finite = torch.isfinite(value).flatten().nonzero().flatten()
        entry = int(finite[len(finite) // 2])
        value.view(-1)[entry] += 1.0

    edit(traces, trace, corrupt)
    code, out = run(nano_dir, traces, trace, capsys)
    first = next(line for line in out.splitlines() if line.startswith(f"{trace}:"))
    assert code == 1 and "DIVERGED" in first
    assert f"first out of bounds at {point}:" in first


@pytest.mark.parametrize("point", ["layers.3.ffn.expert_ids", "layers.4.attn.indexer.topk", "layers.6.attn.indexer.candidates",
                                   "layers.4.engram.hash_ids"])
def test_one_corrupted_decision_is_named(nano_dir, traces, capsys, point) -> None:
    def corrupt(tensors) -> None:
        value = tensors[point][0, 40]
        value[0] = ~value[0] if value.dtype == torch.bool else (value[0] + 1 if value[0] + 1 != value[1] else value[0] - 1)

    edit(traces, "text_prefill.float32", corrupt)
    code, out = run(nano_dir, traces, "text_prefill.float32", capsys)
    assert code == 1 and f"first out of bounds at {point}:" in out


@pytest.mark.parametrize("trace, position", [("text_prefill.float32", 20), ("text_prefill.native", 44), ("decode.float32", 7),
                                             ("draft_step.float32", 5), ("vision_prefill.float32", 1)])
def test_a_changed_token_is_not_comparable(nano_dir, traces, capsys, trace, position) -> None:
    def change(tensors) -> None:
        ids = tensors["input_ids"]
        ids[0, position] = (ids[0, position] + 31) % 768

    edit(traces, trace, change)
    code, out = run(nano_dir, traces, trace, capsys)
    line = next(line for line in out.splitlines() if line.startswith(f"{trace}:"))
    assert code == 2 and "NOT COMPARABLE" in line and "token" in line


def test_a_wrong_model_diverges(nano_dir, traces_dir, capsys, monkeypatch) -> None:
    """A planted bug: the window is one position short. Named at the first module that sees it."""
    right = inference.attention.window_indices

    def short(positions, starts, window, *rest):
        indices = right(positions, starts, window, *rest)
        return torch.where((indices >= 0).sum(-1, keepdim=True) == window, indices.index_fill(-1, torch.tensor([0]), -1), indices)

    monkeypatch.setattr(inference.attention, "window_indices", short)
    code, out = run(nano_dir, traces_dir, "text_prefill.float32_no", capsys)
    assert code == 1 and "first out of bounds at layers.0." in out
    code, out = run(nano_dir, traces_dir, "text_prefill.native", capsys)
    assert code == 1 and "first out of bounds at layers.0.attn.out:" in out


def test_flips_do_not_excuse_a_wrong_quantizer(nano_dir, traces_dir, capsys, monkeypatch) -> None:
    """Window rows in FP4 instead of FP8 move many codes: no set of close decisions explains it."""
    monkeypatch.setattr(inference.attention, "fake_quant_fp8", fake_quant_fp4_e8m0)
    code, out = run(nano_dir, traces_dir, "decode.float32", capsys)
    assert code == 1 and "DIVERGED" in out


def test_another_checkpoint_is_not_comparable(traces_dir, nano_dir, tmp_path, capsys) -> None:
    """A trace of another vocabulary or with unknown points cannot be judged."""
    folder = tmp_path / "traces"
    shutil.copytree(traces_dir, folder)
    edit(folder, "text_prefill.native", lambda t: t["input_ids"].fill_(900))
    code, out = run(nano_dir, folder, "text_prefill.native", capsys)
    assert code == 2 and "900" in out
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["traces"]["text_prefill.float32_no_fake_quant"]["points"].append("layers.0.attn.bias")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    edit(folder, "text_prefill.float32_no_fake_quant", lambda t: t.update({"layers.0.attn.bias": torch.zeros(3)}))
    code, out = run(nano_dir, folder, "no_fake_quant", capsys)
    assert code == 2 and "layers.0.attn.bias" in out
    edit(folder, "text_prefill.float32", lambda t: t.update({"layers.2.out": t["layers.2.out"][:, :-1].contiguous()}))
    code, out = run(nano_dir, folder, "text_prefill.float32", capsys)
    assert code == 2 and "layers.2.out has shape" in out


def test_bad_input(nano_dir, traces, tmp_path, capsys) -> None:
    assert run(tmp_path, traces, "text", capsys)[0] == 3
    assert run(nano_dir, tmp_path, "text", capsys)[0] == 3
    assert run(nano_dir, traces, "no such trace", capsys)[0] == 3
    path = traces / "text_prefill.native.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    code, out = run(nano_dir, traces, "text_prefill.native", capsys)
    assert code == 3 and path.name in out
    edit(traces, "decode.native", lambda t: t.pop("input_ids"))
    assert run(nano_dir, traces, "decode.native", capsys)[0] == 3
    edit(traces, "text_prefill.float32", lambda t: t.pop("layers.5.out"))
    code, out = run(nano_dir, traces, "text_prefill.float32", capsys)
    assert code == 3 and "layers.5.out" in out
    manifest = json.loads((traces / "manifest.json").read_text())
    for key, value in (("inputs", 3), ("points", None), ("split", True), ("numerics", "fp16")):
        changed = json.loads(json.dumps(manifest))
        changed["traces"]["decode.native"][key] = value
        (traces / "manifest.json").write_text(json.dumps(changed))
        assert run(nano_dir, traces, "decode.native", capsys)[0] == 3, key
    (traces / "manifest.json").write_text("[" * 100_000)
    assert run(nano_dir, traces, "text", capsys)[0] == 3
    (traces / "manifest.json").write_text("{}")
    assert run(nano_dir, traces, "text", capsys)[0] == 3


def test_truncated_checkpoint_shard_is_bad_input(nano_dir, traces_dir, tmp_path, capsys) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(nano_dir, folder)
    path = folder / "model-00003-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, out = run(folder, traces_dir, "text_prefill.native", capsys)
    assert code == 3 and path.name in out


def test_metrics() -> None:
    a = torch.tensor([3.0, 4.0])
    assert relative_l2(a, a) == 0
    assert relative_l2(a + torch.tensor([0.0, 0.05]), a) == pytest.approx(0.01, rel=1e-5)
    assert relative_l2(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == float("inf")
    assert relative_l2(torch.tensor([float("inf")]), torch.tensor([-float("inf")])) == float("inf")
    assert relative_l2(torch.zeros(2), torch.zeros(2)) == 0
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.5]])
    assert compare_selections(torch.tensor([[1, 3]]), torch.tensor([[3, 1]]), scores, 0)[0] == "equal"
    assert compare_selections(torch.tensor([[1, 3]]), torch.tensor([[2, 3]]), scores, 0)[0] == "tie"
    assert compare_selections(torch.tensor([[0, 3]]), torch.tensor([[2, 3]]), scores, 0)[0] == "different"
    assert compare_selections(torch.tensor([[0, 3]]), torch.tensor([[2, 3]]), scores, 1.5)[0].startswith("near-tie")
    assert compare_selections(torch.tensor([[-1, 3]]), torch.tensor([[2, 3]]), scores, 9)[0] == "different"


def test_verdicts_of_the_library(nano_dir, traces_dir) -> None:
    verdicts = verify(nano_dir, traces_dir, only="no_fake_quant")
    assert len(verdicts) == 1 and verdicts[0].code == 0 and verdicts[0].point


def test_other_shapes_against_the_float64_oracle(tmp_path, capsys) -> None:
    """Groups of four tokens, two streams, six heads in three groups, no candidate source, Engram on layer 0.

    The traces are made by the naive float64 implementation, which shares no code with the model.
    """
    from reference.oracles.write import write_traces
    from reference.tiny import make_tiny, tiny_prompts

    checkpoint, traces = make_tiny(tmp_path / "checkpoint", "ratio4"), tmp_path / "traces"
    config = json.loads((checkpoint / "config.json").read_text())
    write_traces(checkpoint, traces, *tiny_prompts(config))
    assert main([str(checkpoint), str(traces)]) == 0
    assert capsys.readouterr().out.count(": equal") == 3
