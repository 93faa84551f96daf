"""Notebooks: executed afresh, compared with what is committed, and kept to their house rules."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TOTAL_BYTES, PICTURE_BYTES = 3_000_000, 120_000
# What a notebook leaves behind in a kernel: its names, our modules, and the path that it added. Packages that take long to
# import stay; they are frozen, because `reset` collects garbage and would look at all of their objects every time.
RESET = f"""
import gc
import sys
if "torch" not in sys.modules:
    import matplotlib.pyplot
    import torch
    gc.freeze()
for name in [name for name in sys.modules if name.partition(".")[0] in ("inference", "reference")]:
    del sys.modules[name]
sys.path[:] = [folder for folder in sys.path if folder != {str(ROOT)!r}]
get_ipython().run_line_magic("reset", "-f")
"""
PATH = re.compile(r"`((?:inference|reference|tests)/[\w./-]+)`")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(cell: nbformat.NotebookNode) -> list[str]:
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


def difference(new: str, old: str) -> str | None:
    """What differs between two outputs; None if only the last digits of fractions do, as between two computers."""
    for a, b in zip(new.splitlines() + [""], old.splitlines() + [""]):
        if NUMBER.sub("#", a) != NUMBER.sub("#", b):
            return f"printed {a!r}, committed is {b!r}"
        for x, y in zip(NUMBER.findall(a), NUMBER.findall(b)):
            exact = x.isdigit() and y.isdigit()
            if x != y and (exact or not math.isclose(float(x), float(y), rel_tol=0.02, abs_tol=1e-3)):
                return f"printed {a!r}, committed is {b!r}: {x} is not {y}"
    lines = [len(text.splitlines()) for text in (new, old)]
    return None if lines[0] == lines[1] else f"printed {lines[0]} lines, committed are {lines[1]}"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Iterator[KernelManager]:
    """One kernel for all notebooks, not started yet.

    It is this interpreter, whatever kernels are installed, and it is not told where the library is.
    """
    home = tmp_path_factory.mktemp("jupyter")
    spec = home / "kernels" / "tested"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tested", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("PYTHONPATH", raising=False)
        manager = KernelManager(kernel_name="tested")
        yield manager
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


def execute(notebook: nbformat.NotebookNode, kernel: KernelManager) -> None:
    """Run all cells as in a new kernel: only packages that take long to import, torch and matplotlib, stay loaded."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell(RESET))
    client = NotebookClient(notebook, km=kernel, timeout=60, resources={"metadata": {"path": str(FOLDER)}})
    try:
        client.execute()
    finally:
        del notebook.cells[0]
        if client.kc is not None:
            client.kc.stop_channels()


@each_notebook
def test_runs_and_prints_what_is_committed(path, kernel) -> None:
    committed, notebook = read(path), read(path)
    for cell in code_cells(notebook):
        cell.outputs = []
    execute(notebook, kernel)
    for new, old in zip(code_cells(notebook), code_cells(committed)):
        first_line = next((line for line in new.source.splitlines() if line), "")
        where = f"the cell that begins {first_line!r}"
        assert not any(output.get("name") == "stderr" for output in new.outputs), f"{where}: {printed(new)}"
        assert len(pictures(new)) == len(pictures(old)), f"{where} draws another number of pictures"
        if "varies" not in new.metadata.get("tags", ()):
            problem = difference(printed(new), printed(old))
            assert problem is None, f"{where} {problem}. Execute it again (notebooks/README.md)."


def test_difference_sees_what_matters() -> None:
    assert difference("shape [1, 34] 0.120 ok\n", "shape [1, 34] 0.121 ok\n") is None
    assert "not 34" in difference("shape [1, 35]\n", "shape [1, 34]\n")
    assert difference("error 0.2\n", "error 0.3\n") is not None
    assert difference("equal\n", "different\n") is not None
    assert difference("one\n", "one\ntwo\n") is not None and difference("one\ntwo\n", "one\n") is not None


def test_all_begin_with_one_setup_cell_that_works_anywhere(tmp_path) -> None:
    setups = {code_cells(read(path))[0].source for path in NOTEBOOKS}
    assert len(setups) == 1, "the setup cells differ"
    code = setups.pop() + "\nimport inference.model, reference.compare\nprint(NANO, TOY, sep='\\n')"
    environment = {"MPLBACKEND": "agg", "PATH": "", "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    folders = done.stdout.splitlines()
    assert len(folders) == 2 and all((Path(folder) / "config.json").is_file() for folder in folders)


@each_notebook
def test_is_committed_with_its_outputs(path) -> None:
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "not executed in one go"
    assert all(cell.outputs for cell in cells[1:]), "every cell but the setup shows something"
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    drawn = [picture for cell in cells for picture in pictures(cell)]
    assert drawn and all(len(picture) * 3 // 4 < PICTURE_BYTES for picture in drawn)


def test_all_of_them_are_small() -> None:
    assert len(NOTEBOOKS) == 13
    assert sum(path.stat().st_size for path in NOTEBOOKS) < TOTAL_BYTES


@each_notebook
def test_has_a_question_an_agreement_exercises_and_a_way_on(path) -> None:
    notebook = read(path)
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    assert re.match(rf"# {path.stem[:2]} \S", first) and re.search(r"\*\*Question\.\*\* [^?]+\?", first)
    assert len(re.findall(r"(?m)^\d\. ", last.partition("## Exercises")[2])) == 3
    assert "**Onward:**" in last
    tree = ast.parse("\n".join(cell.source for cell in code_cells(notebook)))
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    checks += [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "assert_close"]
    assert len(checks) >= 3


@each_notebook
def test_links_and_files_exist(path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    missing = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not (FOLDER / link).exists()]
    missing += [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    assert not missing


@each_notebook
def test_imports_the_library_and_does_not_redefine_it(path) -> None:
    files = [ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "inference").glob("*.py")]
    library = {node.name for file in files for node in file.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    tree = ast.parse("\n".join(cell.source for cell in code_cells(read(path))))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert not defined & library
    assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not any(name.startswith("_") for name in imported)


def test_readme_lists_every_notebook() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"\((\d\d_\w+\.ipynb)\)", text)] == [path.name for path in NOTEBOOKS]
    assert not [name for name in PATH.findall(text) if not (ROOT / name).exists()]
