"""What one forward call passes down to every module, and what its layers hand to later layers.

`Context` is fixed for a call: numerics, positions, image positions, the observer. `Shared` is what layers publish for later
layers of the same call: compressed rows, index keys, selections, candidate blocks, each under the id of its source
layer. Nothing here outlives the call; what does is in `cache.py`.

Memory: what grows with tokens times known rows (scores, masks, gathered rows) is made for slices of tokens only, within
`memory_budget`. A call with an observer is the exception: it holds whole matrices, because they are what is observed.

Mirrors official: the process-wide slots of the official code, made explicit. Tests: tests/test_model.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.cache import Rows
from inference.numerics import Numerics

# ours: bytes of one score or gather matrix above which rows are processed in slices; bounds memory at long prompts.
DEFAULT_MEMORY_BUDGET = 256 * 2**20
GPU_MEMORY_BUDGET = 2**31  # ours: a GPU needs larger slices to be busy, and has the memory


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
    memory_budget: int = DEFAULT_MEMORY_BUDGET  # bytes
    window_starts: Tensor | None = None  # [B] int64: first position that has a window row; None = 0

    def record(self, name: str, value: Tensor) -> None:
        """Show a tensor to the observer, if there is one."""
        if self.observe is not None:
            self.observe(name, value)

    @property
    def ends(self) -> tuple[int, ...]:
        """Per batch row: tokens known after this call."""
        return tuple(start + count for start, count in zip(self.starts, self.counts))

    @functools.cached_property
    def real_tokens(self) -> Tensor:
        """[n] int64: where the tokens that are no padding lie in the B * S of this call."""
        tokens = self.positions.shape[1]
        index = [torch.arange(row * tokens, row * tokens + count) for row, count in enumerate(self.counts)]
        index, device = torch.cat(index), self.positions.device
        return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index  # no host stop

    @functools.cached_property
    def valid(self) -> Tensor:
        """[B, S] bool, False on padding."""
        counts = torch.tensor(self.counts, device=self.positions.device)
        return torch.arange(self.positions.shape[1], device=self.positions.device) < counts[:, None]

    @property
    def is_padded(self) -> bool:
        """Whether any row of the batch has fewer than S tokens."""
        return any(count != self.positions.shape[1] for count in self.counts)

    def later(self, firsts: Sequence[int]) -> Context:
        """The same call without the tokens of each batch row that stand before position firsts[b]."""
        starts = tuple(min(max(start, first), end) for start, first, end in zip(self.starts, firsts, self.ends))
        counts = tuple(end - start for end, start in zip(self.ends, starts))
        device = self.positions.device
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(max(counts), device=device)
        later = dataclasses.replace(self, positions=positions, starts=starts, counts=counts)
        mask = None if self.image_mask is None else later.pick(self.image_mask, self)
        return dataclasses.replace(later, image_mask=mask)

    def pick(self, x: Tensor, earlier: Context) -> Tensor:
        """Of x [B, S, ...], which belongs to the tokens of `earlier`, the rows of this context's tokens."""
        if self.starts == earlier.starts and self.positions.shape == earlier.positions.shape:
            return x
        offset = torch.tensor([a - b for a, b in zip(self.starts, earlier.starts)], device=x.device)
        index = offset[:, None] + torch.arange(self.positions.shape[1], device=x.device)
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        return x[batch, index.clamp_max(x.shape[1] - 1)]

    def without_padding(self) -> Context:
        """All real tokens as one batch row, for what treats every token alone. Goes with `real_tokens`."""
        mask = None if self.image_mask is None else self.image_mask.flatten()[self.real_tokens].unsqueeze(0)
        return dataclasses.replace(self, positions=self.positions.flatten()[self.real_tokens].unsqueeze(0), image_mask=mask,
                                   starts=(0,), counts=(sum(self.counts),), window_starts=None)


@dataclass(frozen=True)
class Shared:
    """Published by source layers for later layers of the same call, keyed by the source's layer id."""

    compressed: Mapping[int, Rows] = field(default_factory=dict)  # [B, N, K] rows of all finished groups
    index_keys: Mapping[int, Rows] = field(default_factory=dict)  # [B, N, X]
    selections: Mapping[int, Tensor] = field(default_factory=dict)  # [B, S, k] int64 ascending, -1 = none
    candidates: Mapping[int, Tensor] = field(default_factory=dict)  # [B, S, n] int64 kept blocks, ascending, -1 = none
    published: int | None = None  # source that published index keys last; read by `as_published_index_keys` alone

    def publish(self, name: str, layer_id: int, value: Tensor | Rows) -> Shared:
        """A copy with `value` under `layer_id` in the mapping called `name`."""
        return dataclasses.replace(self, **{name: {**getattr(self, name), layer_id: value}})

    def pick(self, context: Context, later: Context) -> Shared:
        """What belongs to the tokens of `context`, for those of `later`; what belongs to rows of a source stays."""
        return dataclasses.replace(self, **{name: {i: later.pick(value, context) for i, value in getattr(self, name).items()}
                                            for name in ("selections", "candidates")})


def row_slices(rows: int, bytes_per_row: int, budget: int) -> Iterator[slice]:
    """Slices that cover range(rows), each of at most `budget` bytes, at least one row each."""
    step = max(1, budget // max(1, bytes_per_row))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
