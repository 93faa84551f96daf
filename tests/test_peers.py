"""Other implementations on the same checkpoint: the toy port and its bugs, torch hooks, mlx-lm if it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from reference import compare as compare_module
from reference import trace as trace_module
from reference.compare import DIVERGED, EQUAL, NOT_COMPARABLE, compare
from reference.peers import mlx_peer, text_checkpoint, torch_hooks, toy_port
from reference.peers.torch_hooks import Engine, Tap, match_taps, record_engine
from reference.points import POINTS
from reference.trace_format import TraceError, TraceWriter, open_trace

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "reference" / "PORTING.md"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A text checkpoint and our traces of it: `off` without fake quantization, `on` with, `steps` in several calls."""
    folder = tmp_path_factory.mktemp("text")
    assert text_checkpoint.main([str(folder / "ckpt")]) == 0
    common = [*shared(folder), "--numerics", "float32"]
    for name, options in (("off", ["--no-fake-quant"]), ("on", []), ("steps", ["--chunks", "22,1,3,1*"])):
        assert trace_module.main([*common, "--out", str(folder / name), *options]) == 0
    return folder


def shared(folder: Path) -> list[str]:
    return ["--ckpt", str(folder / "ckpt"), "--input-file", str(folder / "ckpt" / "prompt.json")]


def run_toy(folder: Path, name: str, *options: str) -> str:
    out = str(folder / name)
    factory = ["--factory", "reference.peers.toy_port:build"]
    assert torch_hooks.main([*factory, *shared(folder), "--out", out, *options]) == 0
    return out


# --- the toy port ------------------------------------------------------------------------------------------------


def test_the_three_bugs_are_found_one_after_the_other(text, capsys) -> None:
    """What PORTING.md has the reader do."""
    wanted = ("step0.layers.0.ffn.expert_weights, position 0: ",
              "step0.layers.2.attn.compressor.kv, row 1 (tokens 2..3): ",
              "step0.layers.6.attn.indexer.candidates, position 12: ")
    for fixed, point in enumerate(wanted):
        out = run_toy(text, f"toy{fixed}", "--no-fake-quant", "--option", f"fixed={fixed}")
        capsys.readouterr()
        assert compare_module.main([out, str(text / "off")]) == DIVERGED
        text_view = capsys.readouterr().out
        assert text_view.startswith(f"DIVERGED at {point}different")
    assert "only here block 2, only wanted block 3" in text_view  # the newest
    for options, baseline in ((["--no-fake-quant"], "off"), ([], "on")):
        out = run_toy(text, "toy3", *options, "--option", "fixed=3")
        assert compare_module.main([out, str(text / baseline)]) == EQUAL


def test_with_the_checkpoint_all_three_show_at_once(text) -> None:
    out = run_toy(text, "toy", "--no-fake-quant")
    found = compare(open_trace(out), open_trace(text / "off"), text / "ckpt")
    wrong = [result.path for result in found.added[0].results if result.bad]
    assert "layers.0.ffn.expert_weights" in wrong and "layers.2.attn.compressor.kv" in wrong
    assert "layers.6.attn.indexer.candidates" in wrong
    assert all(path.endswith(("expert_weights", "ffn.out", "compressor.kv", "candidates")) for path in wrong)


def test_a_right_port_in_bf16_is_equal_module_by_module(text, capsys) -> None:
    """Section 7 of the guide. End to end it is out of bounds, as a right port may be; with a bug it is not excused."""
    bf16 = ["--numerics", "dequantized"]
    assert trace_module.main([*shared(text), *bf16, "--out", str(text / "bf16")]) == 0
    right = run_toy(text, "right16", *bf16, "--option", "fixed=3")
    wrong = run_toy(text, "wrong16", *bf16, "--option", "fixed=2")
    assert compare_module.main([right, str(text / "bf16"), "--ckpt", str(text / "ckpt")]) == EQUAL
    assert "agree module by module (bound 1e-02)" in capsys.readouterr().out
    assert compare_module.main([wrong, str(text / "bf16"), "--ckpt", str(text / "ckpt")]) == DIVERGED
    assert "attn.indexer.candidates in layers.6" in capsys.readouterr().out
    assert compare_module.main([run_toy(text, "toy32"), str(text / "bf16")]) == NOT_COMPARABLE
    assert "numerics: tested float32, baseline dequantized" in capsys.readouterr().out
    # What is not replayed is not excused either.
    trace = open_trace(right)
    header = {key: trace.manifest[key] for key in ("producer", "model", "facts", "run", "switches", "inputs", "level")}
    with TraceWriter(text / "moved", header) as writer:
        writer.step(**trace.steps[0])
        for entry in trace.entries.values():
            writer.add(entry.path, trace.read(entry) + int(entry.path == "cache.position"))
    found = compare(open_trace(text / "moved"), open_trace(text / "bf16"), text / "ckpt")
    assert found.code == DIVERGED and any("cache.position" in result.name and result.bad for result in found.results)


def test_the_toy_says_what_it_cannot_run(nano_dir, tmp_path, capsys) -> None:
    with pytest.raises(ValueError, match="text_checkpoint"):
        toy_port.build(nano_dir, True)
    with pytest.raises(ValueError, match="fixed"):
        toy_port.build(nano_dir, True, fixed="4")
    (tmp_path / "p.json").write_text('{"input_ids": [3, 4]}')
    (tmp_path / "far.json").write_text('{"input_ids": [3, 99999]}')
    (tmp_path / "p.txt").write_text("hello")

    def refused(words: str, *options: str, factory: str = "reference.peers.toy_port:build", file: str = "p.json"):
        base = ["--ckpt", str(nano_dir), "--input-file", str(tmp_path / file), "--out", str(tmp_path / "t")]
        assert torch_hooks.main(["--factory", factory, *base, *options]) == 3
        error = capsys.readouterr().err
        assert error.startswith("BAD INPUT. ") and words in error and error.count("\n") == 1, error

    refused("there is no module nowhere", factory="nowhere:build")
    refused("wanted MODULE:FUNCTION", factory="reference.peers.toy_port")
    refused("has no function nothing", factory="reference.peers.toy_port:nothing")
    refused("'colour'", "--option", "colour=red")
    refused("fixed must be", "--option", "fixed=4")
    refused("numerics float32 or dequantized", "--numerics", "native")
    refused("text_checkpoint")
    refused("outside the vocabulary", file="far.json")
    refused("Of a text, give", file="p.txt")
    refused("no readable config.json", "--ckpt", str(tmp_path))


# --- hooks -------------------------------------------------------------------------------------------------------


class Little(nn.Module):
    """Two layers with two results each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(800, 4)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(2))
        self.router = Router()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.router(x)[0]


class Router(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.bfloat16(), x.argsort(-1).to(torch.int32)


def test_hooks_record_inputs_outputs_and_leave_nothing(tmp_path, nano_dir) -> None:
    model = Little()
    taps = {"embed": Tap(output="embed"),
            "layers.{i}": Tap("layers.{i}.ffn.in", "layers.{i}.ffn.out",
                              change=lambda name, x: -x if "out" in name else x),
            "router": Tap(None, ("head.collapsed", "layers.1.ffn.expert_ids"))}
    engine = Engine("little", "1", model, taps, lambda model, ids: model(ids))
    record_engine(engine, nano_dir, np.array([[3, 4, 5]]), tmp_path / "t", False)
    trace = open_trace(tmp_path / "t")
    assert list(trace.entries) == [f"step0.{name}" for name in (
        "ids", "embed", "layers.0.ffn.in", "layers.0.ffn.out", "layers.1.ffn.in", "layers.1.ffn.out", "head.collapsed",
        "layers.1.ffn.expert_ids", "logits", "argmax", "cache.position")]
    x = model.embed(torch.tensor([[3, 4, 5]])).detach()
    assert np.array_equal(trace.read(trace.entries["step0.layers.1.ffn.out"]), -x.numpy())
    assert trace.entries["step0.head.collapsed"].dtype == "BF16"
    assert np.array_equal(trace.read(trace.entries["step0.head.collapsed"]), x.bfloat16().float().numpy())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("where", ["import", "factory", "forward"])
def test_errors_of_a_port_are_shown_as_they_are(tmp_path, nano_dir, monkeypatch, where) -> None:
    """Their traceback is what a porter needs; only a TraceError of the factory is a mistake of the user."""
    (tmp_path / "own_port.py").write_text(
        "from reference.peers.torch_hooks import Engine\nimport torch\n"
        f"{'import not_there' if where == 'import' else ''}\n"
        "def build(checkpoint, fake_quant):\n"
        f"    {'int(None)' if where == 'factory' else ''}\n"
        "    return Engine('x', '1', torch.nn.Identity(), {}, lambda model, ids: int('no number'))\n")
    (tmp_path / "p.json").write_text('{"input_ids": [3, 4]}')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_port", raising=False)
    expected = {"import": ModuleNotFoundError, "factory": TypeError, "forward": ValueError}[where]
    base = ["--ckpt", str(nano_dir), "--input-file", str(tmp_path / "p.json")]
    with pytest.raises(expected):
        torch_hooks.main(["--factory", "own_port:build", *base, "--out", str(tmp_path / "t")])
    if where == "forward":
        assert torch_hooks.main(["--factory", "own_port:build", *base, "--out", str(tmp_path / "p.json")]) == 3


def test_wrong_taps_are_named() -> None:
    with pytest.raises(TraceError, match="no submodule called 'layer.{i}'"):
        match_taps(Little(), {"layer.{i}": Tap(output="layers.{i}.out")})
    with pytest.raises(TraceError, match="'layers.{i}.attention' is no point"):
        match_taps(Little(), {"layers.{i}": Tap(output="layers.{i}.attention")})


# --- mlx-lm ------------------------------------------------------------------------------------------------------


def mlx_python() -> str | None:
    """A Python with mlx-lm: MLX_PYTHON, or this one."""
    if os.environ.get("MLX_PYTHON"):
        return os.environ["MLX_PYTHON"]
    return sys.executable if importlib.util.find_spec("mlx_lm") else None


needs_mlx = pytest.mark.skipif(
    mlx_python() is None, reason="mlx-lm is not installed: pip install 'mlx[cpu]' mlx-lm==0.32.2 numpy into an "
    "environment of its own and set MLX_PYTHON to its Python")


@needs_mlx
@pytest.mark.parametrize("baseline, options", [("off", ["--no-fake-quant"]), ("on", []),
                                               ("steps", ["--chunks", "22,1,3,1*"])])
def test_mlx_lm_agrees(text, tmp_path, baseline, options) -> None:
    """Adapter and comparison both run by the Python of mlx-lm, which has no torch."""
    def run(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run([mlx_python(), "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = run("reference.peers.mlx_peer", *shared(text), "--out", str(tmp_path / "mlx"), *options)
    assert done.returncode == 0, done.stderr
    done = run("reference.compare", str(tmp_path / "mlx"), str(text / baseline), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == EQUAL, found["verdict"]
    logits = [point for point in found["points"] if point["name"].endswith("logits")]
    assert max(point["max_abs"] for point in logits) < 2e-5 and len(found["points"]) > 200


def test_mlx_adapter_says_what_is_missing(text, tmp_path, capsys, monkeypatch) -> None:
    def absent(name: str) -> None:
        raise mlx_peer.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(mlx_peer.metadata, "version", absent)
    assert mlx_peer.main([*shared(text), "--out", str(tmp_path / "t")]) == 3
    assert "mlx-lm==0.32.2" in capsys.readouterr().err


# --- the guide ---------------------------------------------------------------------------------------------------


def test_commands_of_the_guide_exist() -> None:
    """Every `python -m reference.X` of the guide is a module, and every file it names is there."""
    text = GUIDE.read_text(encoding="utf-8") + (ROOT / "reference" / "README.md").read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m ((?:reference|inference)[\w.]*)", text))
    assert len(modules) >= 8
    for name in modules:
        assert importlib.util.find_spec(name) or (ROOT / name.replace(".", "/") / "__main__.py").exists(), name
    paths = set(re.findall(r"\b(?:inference|reference|tests)/[\w./-]+\.(?:py|json|md)\b", text))
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_points_of_the_guide_exist() -> None:
    """Every name in the first column of the table of section 4 is a point, or the end of one."""
    table = GUIDE.read_text(encoding="utf-8").partition("| first wrong point |")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [re.sub(r"layers\.\w+\.", "{layer}.", name) for row in rows for name in re.findall(r"`([\w.*]+)`", row)]
    known = [point.path.replace("{n}", "0") for point in POINTS]
    assert len(names) > 40
    for name in names:
        pattern = re.escape(name.lstrip(".")).replace(r"\*", r"\w+")
        assert any(re.search(rf"(^|\.){pattern}(\.|$)", path) for path in known), name
