"""Everything the model remembers between calls, as one explicit object.

What it holds, per batch row
    window rings      one per layer (draft stages too): the last W rows, slot = position mod W
    compressor tails  one per source of ratio > 1: v and g of the open group, slot = position mod ratio, float32
    compressed rows   one store per source layer: one row per finished group
    index keys        one store per source layer: one row per finished group
    Engram history    folded ids of the last n-gram-size - 1 positions
    length            tokens so far; the only counter, advanced once per call, by `commit`
How a call uses it
    Rows of finished groups are written past the known length while the call runs (`RowStore.stage`); rings, tails and
    history are written by `commit` after the last layer, because ring slots still hold rows that earlier tokens of the same
    call attend to. So a call that is interrupted, or whose tokens are rejected, leaves the cache as it was, and
    `commit` may take fewer tokens than the call had.
Mirrors
    official: the per-layer buffers of the official code; keeping them under the source's layer id is ours.
Tests
    tests/test_cache.py, tests/test_decode.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.config import Config, LayerPlan

DEAD = -1  # ours: history mark of image positions and of positions before the sequence; n-grams stop at it


@dataclass(frozen=True)
class Pending:
    """What a call would add to rings, tails and history; `Cache.commit` takes all of it or a prefix of every row."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    windows: Mapping[int, Tensor] = field(default_factory=dict)  # layer id -> [B, S, K]
    tails: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # source id -> v, g [B, S, K] float32
    folded_ids: Tensor | None = None  # [B, S] int64
    published: int | None = None  # source that published index keys last, for `as_published_index_keys`


class Ring:
    """The last `size` rows of every sequence; position p lies in slot p mod size."""

    def __init__(self, batch_size: int, size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros(batch_size, size, width, dtype=dtype, device=device)

    def write(self, rows: Tensor, starts: tuple[int, ...], counts: tuple[int, ...]) -> None:
        """Store the first counts[b] of rows [B, S, width], which stand at positions starts[b], starts[b] + 1, ..."""
        size = self.rows.shape[1]
        for batch, (start, count) in enumerate(zip(starts, counts)):
            kept = min(count, size)
            positions = torch.arange(start + count - kept, start + count, device=self.rows.device)
            self.rows[batch, positions % size] = rows[batch, count - kept:count].detach()


class RowStore:
    """One row per finished group of a source layer. The capacity doubles, so appending copies O(1) rows on average."""

    def __init__(self, batch_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros(batch_size, 0, width, dtype=dtype, device=device)

    def stage(self, rows: Tensor, firsts: list[int], counts: list[int]) -> Tensor:
        """Write counts[b] of rows [B, G, width] at row firsts[b] on and give all rows [B, max(first + count), width].

        What lies behind a sequence's length is never visible, so writing early needs no undoing. With gradients on, the
        rows are joined by functional operations instead, so that autograd can go back through them.
        """
        total = max(first + count for first, count in zip(firsts, counts))
        self._reserve(total)
        for batch, (first, count) in enumerate(zip(firsts, counts)):
            self.rows[batch, first:first + count] = rows[batch, :count].detach()
        if rows.requires_grad:
            joined = [torch.cat((self.rows[batch, :first], rows[batch, :count], self.rows[batch, first + count:total]))
                      for batch, (first, count) in enumerate(zip(firsts, counts))]
            return torch.stack(joined)
        return self.rows[:, :total]

    def _reserve(self, total: int) -> None:
        capacity = self.rows.shape[1]
        if total > capacity:
            batch_size, _, width = self.rows.shape
            grown = self.rows.new_zeros(batch_size, max(total, 2 * capacity), width)
            grown[:, :capacity] = self.rows
            self.rows = grown


class Cache:
    """The memory of `batch_size` sequences. Made by `Model.new_cache`; read and written by the model's forward."""

    def __init__(self, config: Config, plan: tuple[LayerPlan, ...], batch_size: int, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        if batch_size < 1:
            raise ValueError(f"Making a cache: batch_size must be at least 1, got {batch_size}.")
        text, device = config.text_config, torch.device(device)
        self.batch_size, self.device = batch_size, device
        self.lengths: tuple[int, ...] = (0,) * batch_size
        self.windows = {layer.layer_id: Ring(batch_size, text.sliding_window, text.head_dim, dtype, device)
                        for layer in plan}
        sources = [layer for layer in plan if layer.owns_compressor]
        self.ratios = {layer.layer_id: layer.compress_ratio for layer in sources}
        self.tails = {layer.layer_id: tuple(Ring(batch_size, layer.compress_ratio, text.head_dim, torch.float32, device)
                                            for _ in ("v", "g"))
                      for layer in sources if layer.compress_ratio > 1}
        self.compressed = {i: RowStore(batch_size, text.head_dim, dtype, device) for i in self.ratios}
        self.index_keys = {i: RowStore(batch_size, text.index_head_dim, dtype, device) for i in self.ratios}
        look_back = max(1, text.engram_max_ngram_size - 1)
        self.engram_history = Ring(batch_size, look_back, 1, torch.int64, device)
        self.published: int | None = None

    def commit(self, pending: Pending, counts: tuple[int, ...] | None = None) -> None:
        """Take the first counts[b] tokens (all by default) of a call into the memory and advance the lengths."""
        counts = pending.counts if counts is None else tuple(counts)
        if pending.starts != self.lengths:
            raise ValueError(f"Committing a call: it started at {list(pending.starts)} but the cache is at "
                             f"{list(self.lengths)}. Commit a call before the next one runs.")
        if len(counts) != self.batch_size or any(not 0 <= c <= had for c, had in zip(counts, pending.counts)):
            raise ValueError(f"Committing a call: counts {list(counts)} for a call of {list(pending.counts)} tokens.")
        for layer_id, rows in pending.windows.items():
            self.windows[layer_id].write(rows, pending.starts, counts)
        for layer_id, projections in pending.tails.items():
            for ring, rows in zip(self.tails[layer_id], projections):
                ring.write(rows, pending.starts, counts)
        if pending.folded_ids is not None:
            self.engram_history.write(pending.folded_ids.unsqueeze(-1), pending.starts, counts)
        self.published = pending.published
        self.lengths = tuple(length + count for length, count in zip(self.lengths, counts))

    def engram_look_back(self) -> Tensor:
        """[B, n-1] int64 folded ids of the positions before the next token, oldest first; DEAD before the sequence."""
        ring = self.engram_history.rows.squeeze(-1)
        size = ring.shape[1]
        starts = torch.tensor(self.lengths, device=self.device)
        positions = starts[:, None] - size + torch.arange(size, device=self.device)
        return torch.where(positions < 0, DEAD, ring.gather(1, positions % size))

    def bytes_allocated(self) -> dict[str, int]:
        """Bytes by kind of memory, capacity included (not only the used rows)."""
        def size(*tensors: Tensor) -> int:
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        return {
            "window rings": size(*(ring.rows for ring in self.windows.values())),
            "compressor tails": size(*(ring.rows for pair in self.tails.values() for ring in pair)),
            "compressed rows": size(*(store.rows for store in self.compressed.values())),
            "index keys": size(*(store.rows for store in self.index_keys.values())),
            "Engram history": size(self.engram_history.rows),
        }

    def bytes_per_token(self) -> float:
        """Bytes that one more token adds to one sequence: compressed rows and index keys, which alone grow."""
        return sum((self.compressed[i].rows[0, :0].element_size() * self.compressed[i].rows.shape[2]
                    + self.index_keys[i].rows.element_size() * self.index_keys[i].rows.shape[2]) / ratio
                   for i, ratio in self.ratios.items())
