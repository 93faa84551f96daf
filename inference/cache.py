"""Everything the model remembers between calls, as one explicit object.

What it holds, per batch row
    window rings      one per layer (draft stages too): the last W rows, slot = position mod W
    compressor tails  one per source of ratio > 1: v and g of the open group, slot = position mod ratio, float32
    compressed rows   one store per source layer: one row per finished group
    index keys        one store per source layer: one row per finished group
    Engram history    folded ids of the last W positions (n-gram size - 1 are read; the others let `rollback` go back)
    length            tokens so far; the only counter, advanced once per call, by `commit`
Kinds
    "packed": window rows, compressed rows and index keys as codes and scales (packing.py), decoded where they are read.
    "bf16":   the same values as the model computes them (float32 in float32 numerics). Both give the same bits.
How a call uses it
    Rows of finished groups are written past the known length while the call runs (`RowStore.stage`); rings, tails and
    history are replaced by `commit` after the last layer, because ring slots still hold rows that earlier tokens of the
    same call attend to. So a call that is interrupted, or whose tokens are rejected, leaves the cache as it was, and
    `commit` may take fewer tokens than the call had. All that `commit` changes is one reference to a new `State`.
    Rows that cannot be packed (NaN) are found by `commit` too, all at once: asking earlier would stop the host in every layer.
Mirrors
    official: the per-layer buffers of the official code; keeping them under the source's layer id is ours.
Tests
    tests/test_cache.py, tests/test_cache_packed.py, tests/test_decode.py, tests/test_snapshot.py
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference.config import Config, LayerPlan
from inference.packing import COMPRESSED, INDEX_KEY, WINDOW, Packing

DEAD = -1  # ours: history mark of image positions and of positions before the sequence; n-grams stop at it
KINDS = ("packed", "bf16")


@dataclass(frozen=True)
class Pending:
    """What a call would add to rings, tails and history; `Cache.commit` takes all of it or a prefix of every row."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    windows: Mapping[int, Tensor] = field(default_factory=dict)  # layer id -> [B, S, K]
    tails: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # source id -> v, g [B, S, K] float32
    folded_ids: Tensor | None = None  # [B, S] int64
    published: int | None = None  # source that published index keys last, for `as_published_index_keys`
    # Layer id -> first tokens of the call, per batch row, that the layer did not run; `windows` lacks them (prefill skip).
    skipped: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ring:
    """The last `size` rows of every sequence; position p lies in slot p mod size. Never changed: `write` gives a new one."""

    stored: Tensor  # [B, size, width], or bytes [B, size, packed width]
    packing: Packing | None
    dtype: torch.dtype  # of the values

    @classmethod
    def empty(cls, batch_size: int, size: int, width: int, dtype: torch.dtype, device: torch.device,
              packing: Packing | None = None) -> Ring:
        return cls(_zeros(batch_size, size, width, dtype, device, packing), packing, dtype)

    @property
    def rows(self) -> Tensor:
        """Values of all slots [B, size, width]."""
        return self.stored if self.packing is None else self.packing.unpack(self.stored, self.dtype)

    def write(self, rows: Tensor, starts: Sequence[int], counts: Sequence[int]) -> Ring:
        """With the first counts[b] of rows [B, S, width], which stand at positions starts[b], starts[b] + 1, ..."""
        new, fits = self.try_write(rows, starts, counts)
        _check([(self.packing, fits)])
        return new

    def try_write(self, rows: Tensor, starts: Sequence[int], counts: Sequence[int]) -> tuple[Ring, Tensor | None]:
        """As `write`, and whether the rows could be packed, [] bool, for a check later; None if nothing was packed."""
        if not any(counts):
            return self, None
        size, device = self.stored.shape[1], self.stored.device
        first = _on_device(tuple(starts), device).unsqueeze(1)
        last = first + _on_device(tuple(counts), device).unsqueeze(1) - 1
        newest = last - (last - torch.arange(size, device=device)) % size  # newest position that each slot stands for
        source = newest - first  # [B, size]: row of this call, negative where the slot keeps its row
        if rows.shape[1] > size:
            new, fits = _stored(_take(rows, source), self.packing)
        else:
            new, fits = _stored(rows, self.packing)
            new = _take(new, source)
        return dataclasses.replace(self, stored=torch.where((source >= 0).unsqueeze(-1), new, self.stored)), fits


@dataclass(frozen=True)
class Rows:
    """Rows of a store as a call sees them: decoded only where they are read."""

    stored: Tensor  # [B, N, width], or bytes [B, N, packed width]
    packing: Packing | None
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return self.stored.shape[1]

    def columns(self, first: int, last: int) -> Tensor:
        """Values of rows first .. last - 1: [B, last - first, width]."""
        return self._values(self.stored[:, first:last])

    def gather(self, index: Tensor) -> Tensor:
        """Values of rows index [B, n] int64: [B, n, width]."""
        return self._values(_take(self.stored, index))

    def _values(self, stored: Tensor) -> Tensor:
        return stored if self.packing is None else self.packing.unpack(stored, self.dtype)

    @classmethod
    def of(cls, rows: Tensor | Rows) -> Rows:
        """Plain values [B, N, width] as `Rows`; `Rows` pass."""
        return rows if isinstance(rows, Rows) else cls(rows, None, rows.dtype)


class RowStore:
    """One row per finished group of a source layer. The capacity doubles, so appending copies O(1) rows on average."""

    def __init__(self, batch_size: int, width: int, dtype: torch.dtype, device: torch.device,
                 packing: Packing | None = None) -> None:
        self.stored = _zeros(batch_size, 0, width, dtype, device, packing)  # [B, capacity, width or bytes]
        self.packing, self.dtype = packing, dtype
        self.fits: Tensor | None = None  # whether the rows staged last could be packed, [] bool; looked at by `commit`

    @property
    def rows(self) -> Tensor:
        """Values of the whole capacity [B, capacity, width]."""
        return self.view(self.stored.shape[1]).columns(0, self.stored.shape[1])

    def view(self, count: int) -> Rows:
        """The first `count` rows."""
        return Rows(self.stored[:, :count], self.packing, self.dtype)

    def stage(self, rows: Tensor, firsts: Sequence[int], counts: Sequence[int]) -> Rows:
        """Write counts[b] of rows [B, G, width] at row firsts[b] on and give all rows, max(first + count) of them.

        What lies behind a sequence's length is never visible, so writing early needs no undoing. With gradients on, the
        rows are joined by functional operations instead, so that autograd can go back through them.
        """
        total = max(first + count for first, count in zip(firsts, counts))
        self.reserve(total)
        if rows.requires_grad:
            before = self.view(total).columns(0, total)
        new, self.fits = _stored(rows, self.packing)
        alike = len(set(firsts)) == len(set(counts)) == 1
        spans = [(slice(None), firsts[0], counts[0])] if alike else [
            (slice(batch, batch + 1), first, count) for batch, (first, count) in enumerate(zip(firsts, counts))]
        for batch, first, count in spans:
            self.stored[batch, first:first + count] = new[batch, :count]
        if rows.requires_grad:
            joined = [torch.cat((before[batch, :first], rows[batch, :count], before[batch, first + count:]), dim=1)
                      for batch, first, count in spans]
            return Rows.of(torch.cat(joined))
        return self.view(total)

    def reserve(self, total: int) -> None:
        """Room for `total` rows per sequence; at least twice the old room if there was too little."""
        capacity = self.stored.shape[1]
        if total > capacity:
            batch_size, _, width = self.stored.shape
            grown = self.stored.new_zeros(batch_size, max(total, 2 * capacity), width)
            grown[:, :capacity] = self.stored
            self.stored = grown


@dataclass(frozen=True)
class State:
    """What `commit` replaces as a whole. Row stores are not part of it: their rows below the length never change."""

    lengths: tuple[int, ...]
    windows: Mapping[int, Ring]  # layer id ->
    tails: Mapping[int, tuple[Ring, Ring]]  # source id -> v, g
    engram_history: Ring
    published: int | None
    # Layer id -> per batch row, first position whose window row exists; only for layers that skipped prompt rows.
    window_starts: Mapping[int, tuple[int, ...]]
    owner: object  # of the cache, for `restore`
    returns: int  # how often that cache had gone back before


class Cache:
    """The memory of `batch_size` sequences. Made by `Model.new_cache`; read and written by the model's forward."""

    def __init__(self, config: Config, plan: tuple[LayerPlan, ...], batch_size: int, dtype: torch.dtype,
                 device: torch.device | str, kind: str = "bf16") -> None:
        if batch_size < 1:
            raise ValueError(f"Making a cache: batch_size must be at least 1, got {batch_size}.")
        if kind not in KINDS:
            raise ValueError(f"Making a cache: kind must be one of {', '.join(KINDS)}, got {kind!r}.")
        text, device = config.text_config, torch.device(device)
        self.config, self.plan, self.dtype, self.kind = text, plan, dtype, kind
        self.batch_size, self.device = batch_size, device
        sources = [layer for layer in plan if layer.owns_compressor]
        self.ratios = {layer.layer_id: layer.compress_ratio for layer in sources}
        window, compressed, key = (WINDOW, COMPRESSED, INDEX_KEY) if kind == "packed" else (None, None, None)
        self.compressed = {i: RowStore(batch_size, text.head_dim, dtype, device, compressed) for i in self.ratios}
        self.index_keys = {i: RowStore(batch_size, text.index_head_dim, dtype, device, key) for i in self.ratios}
        size, width = text.sliding_window, text.head_dim
        self.state = State(
            lengths=(0,) * batch_size,
            windows={layer.layer_id: Ring.empty(batch_size, size, width, dtype, device, window) for layer in plan},
            tails={i: tuple(Ring.empty(batch_size, ratio, width, torch.float32, device) for _ in ("v", "g"))
                   for i, ratio in self.ratios.items() if ratio > 1},
            engram_history=Ring.empty(batch_size, max(size, self._look_back), 1, torch.int64, device),
            published=None, window_starts={}, owner=object(), returns=0)
        self._returns: list[tuple[int, ...]] = []  # lengths that were gone back to, in order

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.state.lengths

    @property
    def windows(self) -> Mapping[int, Ring]:
        return self.state.windows

    @property
    def tails(self) -> Mapping[int, tuple[Ring, Ring]]:
        return self.state.tails

    @property
    def published(self) -> int | None:
        return self.state.published

    @property
    def _look_back(self) -> int:
        return max(1, self.config.engram_max_ngram_size - 1)

    def window_starts(self, layer_id: int) -> tuple[int, ...]:
        """Per batch row: the first position whose window row the layer has (0 unless it skipped prompt rows)."""
        return self.state.window_starts.get(layer_id, (0,) * self.batch_size)

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` tokens per sequence, exactly, where there was less; saves copies when the end is known."""
        for source, ratio in self.ratios.items():
            self.compressed[source].reserve(tokens // ratio)
            self.index_keys[source].reserve(tokens // ratio)

    def commit(self, pending: Pending, counts: Sequence[int] | None = None) -> None:
        """Take the first counts[b] tokens (all by default) of a call into the memory and advance the lengths."""
        counts = pending.counts if counts is None else tuple(int(count) for count in counts)
        if pending.starts != self.lengths:
            raise ValueError(f"Committing a call: it started at {list(pending.starts)} but the cache is at "
                             f"{list(self.lengths)}. Commit a call before the next one runs.")
        if len(counts) != self.batch_size or any(not 0 <= c <= had for c, had in zip(counts, pending.counts)):
            raise ValueError(f"Committing a call: counts {list(counts)} for a call of {list(pending.counts)} tokens.")
        starts, state = pending.starts, self.state
        windows, window_starts = dict(state.windows), dict(state.window_starts)
        packed = [(store.packing, store.fits) for stores in (self.compressed, self.index_keys) for store in stores.values()]
        for layer_id, skipped in pending.skipped.items():
            # The ring lacks the skipped rows, so whatever it holds from before them must not be seen any more.
            window_starts[layer_id] = tuple(start + min(skip, count) if skip else old for start, skip, count, old in
                                            zip(starts, skipped, counts, self.window_starts(layer_id)))
        for layer_id, rows in pending.windows.items():
            skipped = pending.skipped.get(layer_id, (0,) * self.batch_size)
            ring = windows[layer_id]
            windows[layer_id], fits = ring.try_write(rows, [start + skip for start, skip in zip(starts, skipped)],
                                                     [max(0, count - skip) for count, skip in zip(counts, skipped)])
            packed.append((ring.packing, fits))
        _check(packed)
        tails = {**state.tails, **{source: tuple(ring.write(rows, starts, counts) for ring, rows in
                                                 zip(state.tails[source], projections))
                                   for source, projections in pending.tails.items()}}
        history = state.engram_history
        if pending.folded_ids is not None:
            history = history.write(pending.folded_ids.unsqueeze(-1), starts, counts)
        lengths = tuple(length + count for length, count in zip(self.lengths, counts))
        self.state = dataclasses.replace(state, lengths=lengths, windows=windows, tails=tails, engram_history=history,
                                         published=pending.published, window_starts=window_starts)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Go back to the first lengths[b] tokens of every sequence, if the memory still has all that they need.

        A ring forgets: past `sliding_window` tokens only the present length is left (without draft stages also the one
        before it), and an open group may be lost earlier. To go back further keep `cache.state` and use `restore`.
        Raises ValueError and changes nothing if any sequence cannot go back.
        """
        lengths = tuple(int(length) for length in lengths)
        if len(lengths) != self.batch_size or any(not 0 <= new <= old for new, old in zip(lengths, self.lengths)):
            raise ValueError(f"Rolling back: wanted one length per sequence, at most {list(self.lengths)}, got "
                             f"{list(lengths)}.")
        for row, (new, old) in enumerate(zip(lengths, self.lengths)):
            lost = self._lost(row, new, old)
            if lost:
                raise ValueError(f"Rolling back sequence {row} from {old} to {new} tokens: {lost}. Roll back less, or keep "
                                 "cache.state before the tokens that may be dropped and use cache.restore.")
        self._go_back(dataclasses.replace(self.state, lengths=lengths))

    def _lost(self, row: int, new: int, old: int) -> str | None:
        """What is no longer there of the memory that a sequence needs at length `new`; None if all is there."""
        if new == old:
            return None
        window = self.config.sliding_window
        needs = [(f"the window of layer {layer.layer_id}", window, window if layer.is_draft else window - 1,
                  self.window_starts(layer.layer_id)[row]) for layer in self.plan]
        needs += [(f"the open group of layer {source}", ratio, new % ratio, 0)
                  for source, ratio in self.ratios.items() if ratio > 1]
        needs.append(("the Engram history", self.state.engram_history.stored.shape[1], self._look_back, 0))
        for what, size, needed, start in needs:
            if needed and max(0, new - needed) < max(start, old - size):
                return f"{what} no longer has position {max(0, new - needed)}"
        return None

    def restore(self, state: State) -> None:
        """Go back to a `cache.state` of this cache that was kept earlier: exact, whatever followed it.

        Raises ValueError for the state of another cache, and for one whose tokens were given up by going back further.
        """
        if state.owner is not self.state.owner:
            raise ValueError("Restoring a state: it belongs to another cache. Keep `state` of this one, or use snapshot.py.")
        if any(kept > back for lengths in self._returns[state.returns:] for kept, back in zip(state.lengths, lengths)):
            raise ValueError(f"Restoring a state: it is at {list(state.lengths)}, but this cache went back to "
                             f"{list(min(self._returns[state.returns:]))} since then, so its rows may be overwritten. "
                             "Compute those tokens again.")
        self._go_back(state)

    def _go_back(self, state: State) -> None:
        self._returns = [*self._returns, state.lengths]
        self.state = dataclasses.replace(state, returns=len(self._returns))

    def select(self, rows: Sequence[int]) -> Cache:
        """A new cache of these sequences, in this order; one may occur several times."""
        picked = copy.copy(self)
        picked.batch_size = len(rows)
        index = torch.tensor(rows, device=self.device)

        def ring(old: Ring) -> Ring:
            return dataclasses.replace(old, stored=old.stored[index])

        for name in ("compressed", "index_keys"):
            stores = {i: copy.copy(store) for i, store in getattr(self, name).items()}
            for store in stores.values():
                store.stored = store.stored[index]
            setattr(picked, name, stores)
        state = self.state
        picked._returns = []
        picked.state = State(
            tuple(state.lengths[row] for row in rows), {i: ring(old) for i, old in state.windows.items()},
            {i: (ring(v), ring(g)) for i, (v, g) in state.tails.items()}, ring(state.engram_history), state.published,
            {i: tuple(starts[row] for row in rows) for i, starts in state.window_starts.items()}, object(), 0)
        return picked

    def lengths_on_device(self) -> Tensor:
        """[B] int64: `lengths` as a tensor."""
        return _on_device(self.lengths, self.device)

    def engram_look_back(self) -> Tensor:
        """[B, n-1] int64 folded ids of the positions before the next token, oldest first; DEAD before the sequence."""
        ring = self.state.engram_history.rows.squeeze(-1)
        positions = self.lengths_on_device()[:, None] - self._look_back + torch.arange(self._look_back, device=self.device)
        return torch.where(positions < 0, DEAD, ring.gather(1, positions % ring.shape[1]))

    def bytes_allocated(self) -> dict[str, int]:
        """Bytes by kind of memory, capacity included (not only the used rows)."""
        def size(*parts: Ring | RowStore) -> int:
            return sum(part.stored.numel() * part.stored.element_size() for part in parts)

        backbone = {layer.layer_id for layer in self.plan if not layer.is_draft}
        return {
            "window rings": size(*(ring for i, ring in self.windows.items() if i in backbone)),
            "draft rings": size(*(ring for i, ring in self.windows.items() if i not in backbone)),
            "compressor tails": size(*(ring for pair in self.tails.values() for ring in pair)),
            "compressed rows": size(*self.compressed.values()),
            "index keys": size(*self.index_keys.values()),
            "Engram history": size(self.state.engram_history),
        }

    def bytes_per_token(self) -> float:
        """Bytes that one more token adds to one sequence: compressed rows and index keys, which alone grow."""
        return sum(store.stored.shape[2] * store.stored.element_size() / ratio for i, ratio in self.ratios.items()
                   for store in (self.compressed[i], self.index_keys[i]))


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B, N, w], index [B, n] int64 -> [B, n, w]; an index outside is clamped (its row is not used)."""
    return rows.gather(1, index.clamp(0, rows.shape[1] - 1).unsqueeze(-1).expand(-1, -1, rows.shape[2]))


def _zeros(batch_size: int, rows: int, width: int, dtype: torch.dtype, device: torch.device,
           packing: Packing | None) -> Tensor:
    if packing is None:
        return torch.zeros(batch_size, rows, width, dtype=dtype, device=device)
    return torch.zeros(batch_size, rows, packing.width(width), dtype=torch.uint8, device=device)


def _stored(rows: Tensor, packing: Packing | None) -> tuple[Tensor, Tensor | None]:
    """What is stored of rows, and whether they could be packed (None if there was nothing to pack)."""
    return (rows.detach(), None) if packing is None else packing.try_pack(rows)


def _check(packed: Sequence[tuple[Packing | None, Tensor | None]]) -> None:
    """Raise ValueError if any rows could not be packed. One look at the device for all of them."""
    tried = [(packing, fits) for packing, fits in packed if fits is not None]
    if tried and not bool(torch.stack([fits for _, fits in tried]).all()):
        for packing, fits in tried:
            packing.check(fits)


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int64. Remembered, so that the rings of all layers share one copy to the device."""
    return torch.tensor(numbers, device=device)
