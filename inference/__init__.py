"""DeepSeek-V4.1-Flash in plain PyTorch. `inference.load(folder)` gives the model; see model.py for the interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.checkpoint import load

__all__ = ["load"]


def __getattr__(name: str):
    # Imported on first use, so that `python -m inference.<module>` does not import that module twice.
    if name == "load":
        from inference.checkpoint import load
        return load
    raise AttributeError(f"module 'inference' has no attribute {name!r}")
