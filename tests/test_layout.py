"""Rules of the repository that reading alone would not keep."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INFERENCE = sorted((ROOT / "inference").rglob("*.py"))
REFERENCE = sorted((ROOT / "reference").rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", INFERENCE, ids=lambda path: path.name)
def test_inference_never_imports_reference(path) -> None:
    assert not any(name.split(".")[0] in ("reference", "tests") for name in imported_modules(path))


@pytest.mark.parametrize("path", sorted((ROOT / "reference" / "oracles").glob("*.py")), ids=lambda path: path.name)
def test_oracles_never_import_inference(path) -> None:
    assert not any(name.split(".")[0] == "inference" for name in imported_modules(path))


@pytest.mark.parametrize("path", INFERENCE + REFERENCE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_opens_with_its_map(path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path.name} has no module docstring"


@pytest.mark.parametrize("path", INFERENCE, ids=lambda path: path.name)
def test_layer_ids_are_tested_in_the_plan_only(path) -> None:
    """Everything that depends on which layer it is comes from config.layer_plan."""
    lists = {"kv_source_layer_ids", "index_source_layer_ids", "dspark_target_layer_ids", "compress_ratios"}
    if path.name == "config.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            names = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
            assert not names & lists, f"{path.name}:{node.lineno} tests a layer id; put the answer into LayerPlan"


def test_no_module_level_mutable_state() -> None:
    """Module-level lists, dicts and sets are constants (upper case) and are never written to."""
    for path in INFERENCE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)):
                    assert target.id.isupper() or target.id.startswith("__"), f"{path.name}:{node.lineno} {target.id}"
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno} uses global"


def test_ci_runs_the_command_of_the_readme() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[-1].split() == ["exec", "./run.sh", "pytest"]
    assert "./run.sh pytest" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_names_existing_files() -> None:
    """Every inference/, reference/ or tests/ path in the README exists."""
    import re

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"\b(?:inference|reference|tests|notebooks)/[\w./-]+\.(?:py|json|md|txt|ipynb)\b", text))
    assert len(paths) > 20
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_picture_of_the_example_is_the_drawn_one() -> None:
    import runpy

    from PIL import Image

    script = ROOT / "inference" / "examples" / "draw_shapes.py"
    drawn = runpy.run_path(str(script))["draw"]()
    stored = Image.open(script.with_name("shapes.png"))
    assert stored.size == drawn.size and stored.tobytes() == drawn.tobytes()


def run_sh(*command: str, **settings: str) -> subprocess.CompletedProcess:
    import os

    environment = {key: value for key, value in os.environ.items() if key not in ("CKPT", "INPUT_FILE", "SEED", "TEMPERATURE")}
    return subprocess.run([str(ROOT / "run.sh"), *command], env=environment | settings, capture_output=True, text=True, timeout=120,
                          cwd="/")


needs_environment = pytest.mark.skipif(
    not (ROOT / ".venv" / ".installed").exists(), reason="run.sh has not made .venv here; run the tests by ./run.sh pytest")


@needs_environment
def test_run_sh_settings_mean_the_flags() -> None:
    """Settings by environment; the second run installs nothing."""
    done = run_sh(INPUT_FILE="example.txt", MAX_NEW_TOKENS="2", TEMPERATURE="0", SEED="3", NUMERICS="float32", TOP_P="0.9",
                  DEVICE="cpu", CKPT=str(ROOT / "reference/golden/nano/checkpoint"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 new at") == 2 and "installing" not in done.stderr
    assert run_sh(INPUT_FILE="nowhere.txt").returncode == 3
    assert run_sh(TEMPERATURE="-1").returncode == 3


@needs_environment
def test_run_sh_runs_any_command() -> None:
    done = run_sh("python", "-c", "import inference, sys; print(sys.prefix)")
    assert done.returncode == 0 and done.stdout.strip() == str(ROOT / ".venv")
    assert run_sh("python", "-c", "raise SystemExit(7)").returncode == 7


def test_released_configurations_are_valid_json() -> None:
    for path in (ROOT / "inference" / "configs").glob("*.json"):
        assert json.loads(path.read_text())
