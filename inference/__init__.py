"""DeepSeek-V4.1-Flash in plain PyTorch. `inference.load(folder)` gives the model; see model.py for the interface."""

from inference.checkpoint import load

__all__ = ["load"]
