"""Other implementations on the same checkpoint: the toy port and its bugs, torch hooks, mlx-lm if it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from reference import compare as compare_module
from reference import trace as trace_module
from reference.compare import DIVERGED, EQUAL, compare
from reference.peers import mlx_peer, text_checkpoint, torch_hooks, toy_port
from reference.peers.torch_hooks import Engine, Tap, match_taps, record_engine
from reference.trace_format import TraceError, open_trace

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
    wanted = ("step0.layers.0.ffn.expert_weights", "step0.layers.2.attn.compressor.kv",
              "step0.layers.6.attn.indexer.candidates")
    for fixed, point in enumerate(wanted):
        out = run_toy(text, f"toy{fixed}", "--no-fake-quant", "--option", f"fixed={fixed}")
        capsys.readouterr()
        assert compare_module.main([out, str(text / "off")]) == DIVERGED
        assert capsys.readouterr().out.startswith(f"DIVERGED at {point}, position")
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


def test_the_toy_says_what_it_cannot_run(nano_dir, tmp_path, capsys) -> None:
    with pytest.raises(ValueError, match="text_checkpoint"):
        toy_port.build(nano_dir, True)
    with pytest.raises(ValueError, match="fixed"):
        toy_port.build(nano_dir, True, fixed="4")
    base = ["--ckpt", str(nano_dir), "--input-file", str(tmp_path / "p.json"), "--out", str(tmp_path / "t")]
    assert torch_hooks.main(["--factory", "nowhere:build", *base]) == 3
    assert torch_hooks.main(["--factory", "reference.peers.toy_port:nothing", *base]) == 3
    assert torch_hooks.main(["--factory", "reference.peers.toy_port:build", *base, "--option", "colour=red"]) == 3
    assert capsys.readouterr().err.count("BAD INPUT") == 3


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
    import re

    text = GUIDE.read_text(encoding="utf-8") + (ROOT / "reference" / "README.md").read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m ((?:reference|inference)[\w.]*)", text))
    assert len(modules) >= 8
    for name in modules:
        assert importlib.util.find_spec(name) or (ROOT / name.replace(".", "/") / "__main__.py").exists(), name
    paths = set(re.findall(r"\b(?:inference|reference|tests)/[\w./-]+\.(?:py|json|md)\b", text))
    assert not [path for path in paths if not (ROOT / path).exists()]
