"""Safetensors shards: headers, and reading tensors, experts and rows by position in the file.

What it does
    `read_header(path)` lists the tensors of one shard and checks that the file is exactly header plus tensors.
    `StoredTensor` is one entry; it reads itself, one slice of its leading axis, or some of its rows.
Layout
    8 bytes header length (little endian), JSON header, tensors back to back. Nothing but `dtype`, `shape` and
    `data_offsets` of an entry means anything here.
Memory
    Every read is positional into fresh memory. Files are not mapped: touched pages of a mapping count as memory of the
    process, and the two Engram tables alone are 190 GiB.
Tests
    tests/test_checkpoint.py, tests/test_families.py, tests/test_streaming.py
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from inference.config import unique_pairs

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool, "U32": torch.uint32,
}
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a shard header, or one slice of it."""

    name: str
    dtype: str  # safetensors tag
    shape: tuple[int, ...]
    shard: Path
    offset: int  # bytes from the start of the file
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def slice(self, index: int) -> StoredTensor:
        """Element `index` of the leading axis: one expert of a stacked tensor [E, ...]."""
        step = self.size // self.shape[0]
        return dataclasses.replace(self, name=f"{self.name}[{index}]", shape=self.shape[1:],
                                   offset=self.offset + index * step, size=step)

    def read(self) -> Tensor:
        """The tensor, in fresh memory. Raises ValueError if the file has become shorter or is gone."""
        with _open(self) as file:
            data = torch.empty(self.size, dtype=torch.uint8)
            self._fill(file, data, 0)
        return data.view(DTYPES[self.dtype]).view(self.shape)

    def read_rows(self, index: Tensor) -> Tensor:
        """Rows `index` [n] int64, ascending and without repetition, of a tensor [R, ...] -> [n, ...].

        One pass through the file; neighboring rows are read together.
        """
        width = self.size // self.shape[0]
        data = torch.empty(len(index) * width, dtype=torch.uint8)
        ids = index.tolist()
        with _open(self) as file:
            first = 0
            for end in range(1, len(ids) + 1):
                if end == len(ids) or ids[end] != ids[end - 1] + 1:
                    self._fill(file, data[first * width:end * width], ids[first] * width)
                    first = end
        return data.view(DTYPES[self.dtype]).view(len(ids), *self.shape[1:])

    def _fill(self, file: BinaryIO, data: Tensor, start: int) -> None:
        """Read bytes `start` .. of this tensor into `data` [n] uint8."""
        file.seek(self.offset + start)
        view, done = memoryview(data.numpy()), 0
        while done < len(view):  # one system call reads at most 2 GiB
            count = file.readinto(view[done:])
            if not count:
                raise ValueError(f"Reading {self.name}: {self.shard} ended after {start + done} of {self.size} bytes. "
                                 "The file changed since it was opened; copy it again.")
            done += count


def _open(stored: StoredTensor) -> BinaryIO:
    try:
        return stored.shard.open("rb", buffering=0)
    except OSError as error:
        raise ValueError(f"Reading {stored.name}: {stored.shard} cannot be opened ({error.strerror}). Was it moved, or "
                         "is its disk gone?") from None


def read_header(path: Path, problems: list[str]) -> list[StoredTensor]:
    """Entries of one shard, in the order of the header. Appends to `problems`.

    A file that is not exactly header plus tensors is a problem, found before any tensor is read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            problems.append(f"{path.name}: {size} bytes, too short for a safetensors header or not a safetensors file")
            return []
        try:
            header = json.loads(file.read(length), object_pairs_hook=unique_pairs)
            if not isinstance(header, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            problems.append(f"{path.name}: its header is not valid JSON ({error})")
            return []
    tensors, end, before = [], 0, len(problems)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            wanted = math.prod(shape) * DTYPES[dtype].itemsize
            numbers = (*shape, start, stop)
            if not all(isinstance(number, int) and number >= 0 for number in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            problems.append(f"{name}: {path.name} describes it as {entry}, which this reader does not know")
            continue
        if stop - start != wanted:
            problems.append(f"{name}: {path.name} gives it {stop - start} bytes, but {dtype} {list(shape)} needs "
                            f"{wanted}")
        end = max(end, stop)
        tensors.append(StoredTensor(name, dtype, shape, path, 8 + length + start, stop - start))
    if size != 8 + length + end:
        state = "truncated" if size < 8 + length + end else "too long"
        problems.append(f"{path.name}: {state}, {size} bytes, its header describes {8 + length + end}")
    if len(problems) == before:
        problems += _placement_problems(tensors, 8 + length)
    return tensors


def _placement_problems(tensors: list[StoredTensor], position: int) -> list[str]:
    """Tensors must lie back to back from `position` on: one that overlaps another shares its bytes."""
    problems = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            problems.append(f"{tensor.name}: {tensor.shard.name} places it at byte {tensor.offset}, which {what}; "
                            f"wanted byte {position}")
        position = tensor.offset + tensor.size
    return problems
