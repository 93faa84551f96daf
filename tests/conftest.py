"""Shared fixtures: one thread (tiny tensors are slower with more), seeds from the test's name, the bundled golden data."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import inference
from inference.config import Config
from inference.model import Model

GOLDEN = Path(__file__).parent.parent / "reference" / "golden"

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def nano_dir() -> Path:
    return GOLDEN / "nano" / "checkpoint"


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    return GOLDEN / "nano" / "traces"


@pytest.fixture(scope="session")
def nano_config(nano_dir: Path) -> Config:
    return Config.from_file(nano_dir)


@pytest.fixture(scope="session")
def nano() -> Model:
    """The nano model in float32 with fake quantization. Shared: do not change it."""
    return inference.load(GOLDEN / "nano" / "checkpoint", numerics="float32")


@pytest.fixture(scope="session")
def nano_plain() -> Model:
    """The nano model in float32 without fake quantization. Shared: do not change it."""
    return inference.load(GOLDEN / "nano" / "checkpoint", numerics="float32", fake_quant=False)


@pytest.fixture(autouse=True)
def _no_grad(request: pytest.FixtureRequest):
    """Tests run without gradients unless they are marked `grad`."""
    if request.node.get_closest_marker("grad"):
        yield
    else:
        with torch.no_grad():
            yield
