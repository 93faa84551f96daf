"""The packaged golden data: the manifest tells what changed, and our own data comes out the same again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reference import golden_data
from reference.golden_data import (GOLDEN, MANIFEST, ORIGINS, TRACES, check, check_summaries, files_of, make, origin_of,
                                   read_manifest)
from reference.trace_format import open_trace

ROOT = Path(__file__).parent.parent


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A golden folder with one outside and one own file, its manifest, and a maker that copies."""
    folder = tmp_path / "golden"
    shutil.copytree(GOLDEN / golden_data.SUMMARIES, folder / golden_data.SUMMARIES)
    (folder / "ops.safetensors").write_bytes(b"outside")
    monkeypatch.setattr(golden_data, "make_summaries", lambda to: shutil.copytree(
        GOLDEN / golden_data.SUMMARIES, to, dirs_exist_ok=True))
    assert make(folder, ["."]) == []
    return folder


def test_packaged_files_are_those_of_the_manifest() -> None:
    known = read_manifest(GOLDEN)
    assert {path for path in files_of(GOLDEN)} == set(known)
    assert [path for path, entry in known.items() if golden_data.sha256(GOLDEN / path) != entry["sha256"]] == []
    assert all(origin_of(path).key == entry["source"] for path, entry in known.items())
    assert {entry["source"] for entry in known.values()} == {origin.key for origin in ORIGINS}


def test_our_own_data_comes_out_the_same() -> None:
    assert check_summaries(GOLDEN / golden_data.SUMMARIES) == []


def test_summaries_are_small_and_say_what_they_are() -> None:
    for name in TRACES:
        trace = open_trace(GOLDEN / golden_data.SUMMARIES / name)
        assert trace.summary and trace.manifest["level"] == "layer" and trace.numerics == "float32"
        assert (GOLDEN / golden_data.SUMMARIES / name / "manifest.json").stat().st_size < 150_000


def test_check_names_what_changed(small) -> None:
    assert check(small) == []
    (small / "ops.safetensors").write_bytes(b"changed")
    assert check(small) == ["ops.safetensors: its bytes are not those of the manifest (tensors)"]
    (small / "ops.safetensors").unlink()
    assert check(small) == ["ops.safetensors: missing"]
    (small / "ops.safetensors").write_bytes(b"outside")
    (small / "stray.txt").write_text("x")
    assert [problem.partition(":")[0] for problem in check(small)] == ["stray.txt"]


def test_check_compares_our_own_data(small) -> None:
    """A summary whose numbers are not those of the model: its digest is in order, its content is not."""
    path = small / golden_data.SUMMARIES / "text" / "manifest.json"
    manifest = json.loads(path.read_text())
    entry = next(point for point in manifest["points"] if point["name"] == "step0.layers.5.out")
    entry.update(rms=entry["rms"] * 1.001, digest="0" * 64)
    path.write_text(json.dumps(manifest))
    problems = golden_data.check_summaries(small / golden_data.SUMMARIES)
    assert len(problems) == 1 and "step0.layers.5.out" in problems[0]


def test_make_does_not_take_over_changed_outside_files(small) -> None:
    before = (small / MANIFEST).read_text()
    (small / "ops.safetensors").write_bytes(b"changed")
    (small / "engram_released.json").write_text("{}")
    problems = make(small)
    assert [problem.partition(":")[0] for problem in problems] == ["engram_released.json", "ops.safetensors"]
    assert (small / MANIFEST).read_text() == before
    assert make(small, ["ops.safetensors", "engram_released.json"]) == [] and check(small) == []
    (small / "ops.safetensors").unlink()
    assert "gone" in make(small)[0] and make(small, ["ops.safetensors"]) == []
    (small / "stray.txt").write_text("x")
    assert "has no origin" in make(small, ["."])[0]


def test_command_line(small, monkeypatch, capsys) -> None:
    monkeypatch.setattr(golden_data, "GOLDEN", small)
    assert golden_data.main(["check"]) == 0 and "4 files" in capsys.readouterr().out
    (small / "ops.safetensors").write_bytes(b"changed")
    assert golden_data.main(["check"]) == 1 and golden_data.main(["make"]) == 1
    (small / MANIFEST).write_text("{}")
    assert golden_data.main(["check"]) == 3
    done = subprocess.run([sys.executable, "-m", "reference.golden", "--help"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0 and "make" in done.stdout
