"""Fixtures of the oracle tests: the golden checkpoint, the golden traces and a comparison with one bound."""

from pathlib import Path

import numpy as np
import pytest

from reference.oracles.checkpoint import load_checkpoint, read_safetensors
from reference.oracles.quantizers import decode_bf16

GOLDEN = Path(__file__).resolve().parents[2] / "reference" / "golden"


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """File -> name -> array; BF16 widened to float32."""
    if path.name == "ops.safetensors":  # holds float64, which the oracle's reader of weights does not know
        from safetensors.torch import load_file

        return {name: tensor.double().numpy() for name, tensor in load_file(path).items()}
    tensors = read_safetensors(path)
    return {name: decode_bf16(raw) if tag == "BF16" else raw for name, (tag, raw) in tensors.items()}


def relative_l2(value: np.ndarray, golden: np.ndarray) -> float:
    """Relative L2 over the finite entries; infinite when the shapes or the non-finite patterns differ."""
    value, golden = np.asarray(value, np.float64), np.asarray(golden, np.float64)
    if value.shape != golden.shape or (np.isfinite(value) != np.isfinite(golden)).any():
        return np.inf
    kept = np.isfinite(golden)
    return float(np.linalg.norm(value[kept] - golden[kept]) / max(np.linalg.norm(golden[kept]), 1e-300))


def differences(points: dict, golden: dict, bound: float = 2e-5) -> list[str]:
    """Names of the golden points that `points` lacks or misses, in execution order. Discrete points must be equal."""
    wrong = []
    for name in points:
        if name in golden and golden[name].dtype.kind in "ib":
            if not np.array_equal(points[name], golden[name]):
                wrong.append(name)
        elif name in golden and not relative_l2(points[name], golden[name]) < bound:
            wrong.append(name)
    return wrong + [name for name in golden if name not in points]


@pytest.fixture(scope="session")
def ops():
    return read_tensors(GOLDEN / "ops.safetensors")


@pytest.fixture(scope="session")
def nano_folder():
    return GOLDEN / "nano" / "checkpoint"


@pytest.fixture(scope="session")
def nano(nano_folder):
    return load_checkpoint(nano_folder)


@pytest.fixture(scope="session")
def golden_trace():
    """name -> (inputs, points) of a golden trace."""

    def read(name: str) -> tuple[dict, dict]:
        tensors = read_tensors(GOLDEN / "nano" / "traces" / f"{name}.safetensors")
        names = [key for key in tensors if key.startswith(("input_ids", "token_types", "image"))]
        return {key: tensors.pop(key) for key in names}, tensors

    return read


@pytest.fixture(scope="session")
def compare():
    return differences


@pytest.fixture(scope="session")
def error_of():
    return relative_l2
