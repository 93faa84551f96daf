"""What one forward call passes down to every module, and what its layers hand to later layers.

`Context` is fixed for a call: numerics, positions, image positions, the observer. `Shared` is what layers publish for later
layers of the same call: compressed rows, index keys, selections, candidate blocks, each under the id of its source
layer. Nothing here outlives the call; what does is in `cache.py`.

Mirrors official: the process-wide slots of the official code, made explicit. Tests: tests/test_model.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.numerics import Numerics

# ours: bytes of one score or gather matrix above which rows are processed in slices; bounds memory at long prompts.
DEFAULT_MEMORY_BUDGET = 256 * 2**20


@dataclass(frozen=True)
class Context:
    """One call. B rows of the batch, S tokens in this call (rows with fewer are padded on the right)."""

    numerics: Numerics
    positions: Tensor  # [B, S] int64, absolute; padding continues the count and is ignored
    starts: tuple[int, ...]  # per batch row: position of its first token in this call
    counts: tuple[int, ...]  # per batch row: tokens in this call that are no padding
    image_mask: Tensor | None = None  # [B, S] bool, True on every position of an image span; None = text only
    observe: Callable[[str, Tensor], None] | None = None  # called with a point name and a tensor
    as_published_index_keys: bool = False
    memory_budget: int = DEFAULT_MEMORY_BUDGET

    def record(self, name: str, value: Tensor) -> None:
        """Show a tensor to the observer, if there is one."""
        if self.observe is not None:
            self.observe(name, value)

    @property
    def ends(self) -> tuple[int, ...]:
        """Per batch row: tokens known after this call."""
        return tuple(start + count for start, count in zip(self.starts, self.counts))

    @property
    def valid(self) -> Tensor:
        """[B, S] bool, False on padding."""
        counts = torch.tensor(self.counts, device=self.positions.device)
        return torch.arange(self.positions.shape[1], device=self.positions.device) < counts[:, None]


@dataclass(frozen=True)
class Shared:
    """Published by source layers for later layers of the same call, keyed by the source's layer id."""

    compressed: Mapping[int, Tensor] = field(default_factory=dict)  # [B, N, K] rows of all finished groups
    index_keys: Mapping[int, Tensor] = field(default_factory=dict)  # [B, N, X]
    selections: Mapping[int, Tensor] = field(default_factory=dict)  # [B, S, k] int64 ascending, -1 = none
    candidates: Mapping[int, Tensor] = field(default_factory=dict)  # [B, S, N] bool
    published: int | None = None  # source that published index keys last; read by `as_published_index_keys` alone

    def publish(self, name: str, layer_id: int, value: Tensor) -> Shared:
        """A copy with `value` under `layer_id` in the mapping called `name`."""
        return dataclasses.replace(self, **{name: {**getattr(self, name), layer_id: value}})


def row_slices(rows: int, bytes_per_row: int, budget: int) -> Iterator[slice]:
    """Slices that cover range(rows), each of at most `budget` bytes, at least one row each."""
    step = max(1, budget // max(1, bytes_per_row))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
