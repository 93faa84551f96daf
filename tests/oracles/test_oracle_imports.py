"""The oracles share no code with the model: their imports are walked."""

import ast
from pathlib import Path

import reference.oracles

ALLOWED = {"__future__", "collections", "json", "math", "numpy", "pathlib", "re", "typing", "unicodedata"}
ALLOWED_TO_WRITE = ALLOWED | {"torch", "safetensors"}


def imported_roots(source: str) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(node.module if node.module.startswith("reference") else node.module.split(".")[0])
    return roots


def test_oracles_import_numpy_and_each_other_only():
    files = sorted(Path(reference.oracles.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        allowed = ALLOWED_TO_WRITE if file.name == "write.py" else ALLOWED
        foreign = {
            root for root in imported_roots(file.read_text())
            if root not in allowed and root != "reference.oracles" and not root.startswith("reference.oracles.")
        }
        assert not foreign, f"{file.name} imports {foreign}"


def test_the_walk_sees_a_forbidden_import():
    assert imported_roots("def f():\n    from inference.rope import rotate") == {"inference"}
