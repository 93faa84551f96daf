"""Collects dump points and rounding margins of one sequence, in execution order; can graft recorded values in.

A graft replaces a point by a given value before anything downstream reads it. It separates an error that a module adds
from one that it inherits: with the recorded value grafted in, everything after it must agree again.
"""

import numpy as np


class Recorder:
    """points: name -> array. margins: name -> how far the nearest discrete decision is from turning (see model.py)."""

    def __init__(self, grafts: dict[str, np.ndarray] | None = None) -> None:
        self.points: dict[str, np.ndarray] = {}
        self.margins: dict[str, float] = {}
        self.grafts = dict(grafts or {})

    def record(self, name: str, value: np.ndarray) -> np.ndarray:
        """Keep one tensor under its point name (a second one of that name gets "#1", ...); returns the value to go on
        with: `value` itself, or the graft in its place. The recorded tensor is always the computed one."""
        unique, count = name, 0
        while unique in self.points:
            count += 1
            unique = f"{name}#{count}"
        self.points[unique] = np.array(value)
        return np.asarray(self.grafts[unique], np.asarray(value).dtype) if unique in self.grafts else value

    def margin(self, name: str, value: float) -> None:
        """Keep the smallest margin seen under this name."""
        self.margins[name] = min(value, self.margins.get(name, np.inf))
