"""Weights that stay on disk and are read when a layer runs.

What it does
    `StreamedWeight` stands where a dense parameter or a `quant.PackedWeight` would. `dequantize` reads the whole
    weight, `rows` only some rows, so an Engram table is never read whole. Each read gives the BF16 values of the other
    modes.
    `Stream` is what all streamed weights of a model share: the experts that were used last, packed, within a limit in
    bytes, and a progress bar.
Memory
    What is read is dropped after use, except for cached experts. Reads are positional (shards.py), so the file pages
    that the operating system keeps belong to it and not to the process.
Checks
    Codes that no weight may have (`weight_problems`) are looked for in everything that is read, since nothing was read
    at load.
Tests
    tests/test_streaming.py
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from tqdm import tqdm

from inference.quant import FORMATS, PackedWeight
from inference.shards import StoredTensor

# Bytes. ours: a token of the released model uses 240 experts of 18.8 MB, 4.2 GiB; the next one uses many of them again.
DEFAULT_EXPERT_CACHE = 4 * 2**30
_SLICE = 1 << 20  # ours: values that are checked at once


# Bits that are all set in a value that no weight may have, as integers of the same size: NaN, infinity where it exists.
_INVALID = {
    "F8_E8M0": (torch.uint8, 0xFF, "scale byte 255 (NaN)"), "F8_E4M3": (torch.uint8, 0x7F, "code 0x7F (NaN)"),
    "BF16": (torch.int16, 0x7F80, "NaN or infinity"), "F16": (torch.int16, 0x7C00, "NaN or infinity"),
    "F32": (torch.int32, 0x7F800000, "NaN or infinity"), "F64": (torch.int64, 0x7FF << 52, "NaN or infinity"),
}


def _invalid_value(stored: StoredTensor, tensor: Tensor, role: str, rows: Tensor | None) -> str | None:
    """Where a value is that no weight may have. None if nowhere.

    role: the tag of what the tensor holds, where its own does not say it (MLX: bytes and words).
    """
    if (role or stored.dtype) not in _INVALID or not tensor.numel():
        return None
    integers, mask, what = _INVALID[role or stored.dtype]
    bits = tensor.view(integers)
    # A maximum, of slices that stay in a processor's cache, is much faster than a comparison of every value.
    if all(int((part & mask).max()) != mask for part in bits.flatten().split(_SLICE)):
        return None
    where = [int(i) for i in ((bits & mask) == mask).nonzero()[0]]
    if rows is not None:
        where[0] = int(rows[where[0]])
    return f"{stored.name}: {what} at {where} in {stored.shard.name}"


def weight_problems(key: str | None, stored: tuple[StoredTensor, ...], tensors: tuple[Tensor, ...],
                    rows: Tensor | None = None) -> list[str]:
    """Values that no weight may have, in one weight that was read.

    key: of quant.FORMATS or None; stored, tensors: in the order of its decoder; rows: which rows `tensors` are, None
    for all.
    """
    roles = [""] * len(stored)
    if key in ("mxfp4", "mxfp8"):  # tags of MLX: U32 words, U8 scales
        roles = ["F8_E4M3" if key == "mxfp8" else "", "F8_E8M0"]
    found = (_invalid_value(*entry, rows) for entry in zip(stored, tensors, roles))
    return [problem for problem in found if problem is not None]


class Stream:
    """Shared by the streamed weights of one model. Not safe for calls of one model from several threads."""

    def __init__(self, layers: int, cache_bytes: int = DEFAULT_EXPERT_CACHE, progress: bool | None = None) -> None:
        """layers: backbone layers, the bar's length. progress: a bar on stderr; None shows it on a terminal only."""
        self.layers, self.cache_bytes, self.progress = layers, cache_bytes, progress
        self.cached: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()  # least recently used first
        self.cached_bytes = self.read_bytes = self.hits = self.misses = 0
        self.bar: tqdm | None = None

    def read(self, name: str, key: str | None, stored: tuple[StoredTensor, ...]) -> tuple[Tensor, ...]:
        """The tensors of one weight, from the cache or the disk.

        Raises ValueError for values that no weight may have, and for files that have changed.
        """
        is_expert = ".ffn.experts." in name
        if is_expert and name in self.cached:
            self.hits += 1
            self.cached.move_to_end(name)
            return self.cached[name]
        tensors = tuple(part.read() for part in stored)
        self._account(name, key, stored, tensors)
        if is_expert:
            self.misses += 1
            self._keep(name, tensors)
        return tensors

    def read_rows(self, name: str, key: str | None, stored: tuple[StoredTensor, ...], index: Tensor,
                  ) -> tuple[Tensor, ...]:
        """Rows `index` [n], ascending and unique, of every tensor of one row-wise weight."""
        tensors = tuple(part.read_rows(index) for part in stored)
        self._account(name, key, stored, tensors, index)
        return tensors

    def _account(self, name: str, key: str | None, stored: tuple[StoredTensor, ...], tensors: tuple[Tensor, ...],
                 rows: Tensor | None = None) -> None:
        problems = weight_problems(key, stored, tensors, rows)
        if problems:
            raise ValueError("Reading weights while the model runs:\n  " + "\n  ".join(problems)
                             + "\nCopy the named shards again.")
        self.read_bytes += sum(tensor.nbytes for tensor in tensors)
        if self.bar is not None:
            area, _, rest = name.partition(".")
            if area == "layers":
                self.bar.n = int(rest.partition(".")[0])
            kept = f"{len(self.cached)} expert weights kept"
            self.bar.set_postfix_str(f"{self.read_bytes / 2**30:.2f} GiB read, {kept}")

    def _keep(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self.cache_bytes:
            return
        self.cached[name] = tensors
        self.cached_bytes += size
        while self.cached_bytes > self.cache_bytes:
            _, oldest = self.cached.popitem(last=False)
            self.cached_bytes -= sum(tensor.nbytes for tensor in oldest)

    def show_progress(self, model: nn.Module) -> None:
        """A bar over the layers during every call of `model`."""
        disable = None if self.progress is None else not self.progress

        def start(*_: object) -> None:
            self.bar = tqdm(total=self.layers, desc="layers", unit="layer", disable=disable, leave=False)

        def stop(*_: object) -> None:
            if self.bar is not None:
                self.bar.close()
            self.bar = None

        model.register_forward_pre_hook(start)
        model.register_forward_hook(stop, always_call=True)


class StreamedWeight:
    """One weight on disk.

    key: of quant.FORMATS, or None for a weight stored as BF16 or F32. stored: the weight and its companions, in the
    order of the format's decoder. shape: logical [rows, columns].
    """

    def __init__(self, name: str, key: str | None, stored: tuple[StoredTensor, ...], shape: tuple[int, ...],
                 stream: Stream, device: torch.device | str = "cpu") -> None:
        self.name, self.key, self.stored, self.shape = name, key, stored, shape
        self.stream, self.device = stream, device

    def dequantize(self) -> Tensor:
        """The whole weight [rows, columns] on the device: BF16, or as stored if it is not packed."""
        return self._values(self.stream.read(self.name, self.key, self.stored), self.shape)

    def rows(self, index: Tensor) -> Tensor:
        """Rows `index` [...] int64 -> [..., columns] on the device. Every row is read once, in ascending order."""
        if self.key is not None and not FORMATS[self.key].rowwise:
            return self.dequantize()[index]
        low, high = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
        if low < 0 or high >= self.shape[0]:
            raise IndexError(f"Reading {self.name}: row {low if low < 0 else high} of {self.shape[0]}")
        ids, position = index.cpu().unique(sorted=True, return_inverse=True)
        tensors = self.stream.read_rows(self.name, self.key, self.stored, ids)
        return self._values(tensors, (len(ids), self.shape[1]))[position.to(self.device)]

    def to(self, device: torch.device | str) -> StreamedWeight:
        return StreamedWeight(self.name, self.key, self.stored, self.shape, self.stream, device)

    def _values(self, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        tensors = tuple(tensor.to(self.device) for tensor in tensors)
        return tensors[0] if self.key is None else PackedWeight(FORMATS[self.key], tensors, shape).dequantize()
