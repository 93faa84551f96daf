"""Writing a checkpoint folder piece by piece, so that it can be stopped at any moment and is never half accepted.

What it does
    `write(output, target)` takes a plan (every shard with the names, types and shapes of its tensors, known before any
    value) and writes it with little memory: each `Job` yields pieces of its tensors, which go to their places in the
    file.
How an interruption is survived
    1. A shard is written as `NAME.partial`, flushed to disk, read back for its SHA-256, and renamed: a shard either
       exists whole or not at all.
    2. `conversion.inprogress.json` (UNFINISHED; the name that oMLX uses) lists the finished shards with size and
       digest. While it exists the folder is unfinished, and no loader accepts it.
    3. config.json and other small files come after the shards, the index last, and then the state file goes.
    The same command again finishes the work: finished shards are verified by their digest and kept, everything else is
    written again. Pieces are a pure function of the source, so the bytes do not depend on interruptions.
What it refuses
    A target that holds anything but the unfinished result of the same conversion; a second process on the same folder.
Tests
    tests/test_convert.py
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from inference.checkpoint import INDEX, UNFINISHED
from inference.shards import DTYPES

PARTIAL = ".partial"
KEPT = "kept.inprogress."  # prefix of intermediate results, which go when the conversion is complete
SHARD_BYTES = 5_000_000_000  # oMLX; also the habit of Hugging Face
_HASH_BLOCK = 1 << 24  # bytes read at once when a file is hashed


class ConversionStopped(RuntimeError):
    """The conversion could not go on, through no fault of the input; what is finished is kept and can be continued."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the output, before it has values."""

    name: str
    dtype: str  # safetensors tag
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


# Tensor name, first, values [n, *slice]: slices first .. first + n - 1 of that shape, counted over the whole tensor.
Piece = tuple[str, int, Tensor]


@dataclass(frozen=True)
class Job:
    """Tensors that are computed together and lie in one shard. `pieces()` covers each of them exactly once."""

    specs: tuple[TensorSpec, ...]
    pieces: Callable[[], Iterator[Piece]]

    @property
    def size(self) -> int:
        return sum(spec.size for spec in self.specs)


@dataclass(frozen=True)
class Shard:
    file: str
    jobs: tuple[Job, ...]

    @property
    def specs(self) -> list[TensorSpec]:
        """In file order. Wide types first, otherwise as planned: every tensor is then aligned to its element size."""
        return sorted((spec for job in self.jobs for spec in job.specs), key=lambda spec: -DTYPES[spec.dtype].itemsize)


def pack_shards(alone: Sequence[Job], jobs: Sequence[Job], limit: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """Shards for jobs in their order: each of `alone` in a shard of its own, then shards of at most `limit` bytes.

    A larger job stands alone too. Files are named model-00001-of-0000N.safetensors and so on.
    """
    groups: list[list[Job]] = [[job] for job in alone]
    size = limit + 1  # so that the first job opens a shard
    for job in jobs:
        if size + job.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += job.size
    return tuple(Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
                 for number, group in enumerate(groups, 1))


@dataclass(frozen=True)
class Output:
    """A whole checkpoint folder, planned.

    identity: JSON values that name source, format and options; a started folder is only continued by an equal identity.
    """

    shards: tuple[Shard, ...]
    files: Mapping[str, bytes]  # small files, config.json among them; written in this order, after the shards
    identity: Mapping[str, Any] = field(default_factory=dict)
    shard_metadata: Mapping[str, str] = field(default_factory=dict)  # `__metadata__` of every shard header
    total_size: bool = True  # whether the index carries metadata.total_size
    summary: str = ""  # what else is worth saying when it is complete

    @property
    def tensor_count(self) -> int:
        return sum(len(job.specs) for shard in self.shards for job in shard.jobs)

    @property
    def tensor_bytes(self) -> int:
        return sum(job.size for shard in self.shards for job in shard.jobs)

    def index(self) -> bytes:
        weight_map = {spec.name: shard.file for shard in self.shards for spec in shard.specs}
        values: dict[str, Any] = {"metadata": {"total_size": self.tensor_bytes}} if self.total_size else {}
        return json_bytes({**values, "weight_map": dict(sorted(weight_map.items()))})


def json_bytes(values: Any) -> bytes:
    """JSON as it is written everywhere in a checkpoint folder."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def write(output: Output, target: Path) -> None:
    """Write `output` to the folder `target`, or finish what an interrupted call began there.

    Raises ValueError if `target` may not be used, ConversionStopped if the disk or its permissions end the work.
    """
    with target_folder(target, output.identity) as folder:
        folder.write(output)


@contextlib.contextmanager
def target_folder(target: Path, identity: Mapping[str, Any]) -> Iterator[TargetFolder]:
    """The target, locked against other processes, with a state file of this identity in it. Errors as in `write`."""
    with _reporting(target):
        target.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system when the process dies
            except BlockingIOError:
                raise ValueError(f"Writing to {target}: another process is converting into it. Wait for its "
                                 "end.") from None
            yield TargetFolder(target, identity)
        finally:
            os.close(descriptor)


class TargetFolder:
    """A folder in which a conversion has begun. Made by `target_folder`."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Start or continue; refuses a folder with anything else in it."""
        self.path = path
        self._identity = json.loads(json.dumps(dict(identity)))
        found = read_state(path)
        present = {entry.name for entry in path.iterdir()} - {UNFINISHED + PARTIAL}
        if found is None and present:
            raise ValueError(f"Writing to {path}: the folder already holds {len(present)} entries, {min(present)!r} "
                             f"among them, and no {UNFINISHED} of this conversion. Name a new or an empty folder.")
        if found is not None and found["identity"] != self._identity:
            finished = {name for name in present if name in found["shards"] or name.startswith(KEPT)}
            theirs = found["identity"]
            keys = sorted(k for k in theirs.keys() | self._identity.keys() if theirs.get(k) != self._identity.get(k))
            if finished:
                raise ValueError(f"Writing to {path}: it holds an unfinished conversion that differs in "
                                 f"{', '.join(keys)}. Repeat the command that began it, or name another folder.")
            found = None  # a start that came to nothing, with a wrong option perhaps
        self._shards = {} if found is None else dict(found["shards"])
        self._facts = {} if found is None else dict(found["facts"])
        for partial in path.glob(f"*{PARTIAL}"):
            partial.unlink()
        if found is None:
            self._save()

    def fact(self, name: str, value: Any) -> Any:
        """A JSON value that may differ between runs but must not differ in the result: the first run's value."""
        if name not in self._facts:
            self._facts[name] = value
            self._save()
        return self._facts[name]

    def keep(self, name: str, content: bytes) -> None:
        """Keep an intermediate result until the end; `kept(name)` gives its path in this and later runs."""
        _write_file(self.kept(name), content)

    def kept(self, name: str) -> Path:
        return self.path / (KEPT + name)

    def write(self, output: Output) -> None:
        """Write what is not finished yet, then the small files, then the index; the folder is then complete."""
        planned = {shard.file for shard in output.shards} | set(output.files) | {UNFINISHED, INDEX}
        present = {entry.name for entry in self.path.iterdir()}
        foreign = {name for name in present - planned if not name.startswith(KEPT)}
        if foreign:
            raise ValueError(f"Continuing in {self.path}: {min(foreign)!r} is no part of this conversion. Move it "
                             "away.")
        noted = tqdm([shard for shard in output.shards if shard.file in self._shards], desc="checking finished shards",
                     unit="shard", disable=None if self._shards else True)
        finished = {shard.file for shard in noted if self._is_finished(shard)}
        left = [shard for shard in output.shards if shard.file not in finished]
        _check_space(self.path, left)
        total = sum(job.size for shard in left for job in shard.jobs)
        with tqdm(total=total, desc="writing", unit="B", unit_scale=True, disable=None) as progress:
            for shard in left:
                self._shards[shard.file] = _write_shard(self.path, shard, output.shard_metadata, progress)
                self._save()
        for name, content in output.files.items():
            _write_file(self.path / name, content)
        _write_file(self.path / INDEX, output.index())
        # From here on the folder is complete; a crash now at most leaves an intermediate result lying in it.
        (self.path / UNFINISHED).unlink()
        for entry in list(self.path.iterdir()):
            if entry.name.startswith(KEPT):
                entry.unlink()
        _sync_folder(self.path)

    def _is_finished(self, shard: Shard) -> bool:
        """Whether the shard is there, with the size and digest that were noted."""
        noted, path = self._shards[shard.file], self.path / shard.file
        return path.is_file() and path.stat().st_size == noted["bytes"] and _sha256(path) == noted["sha256"]

    def _save(self) -> None:
        about = "An unfinished conversion. Run the same command again to finish it; no loader may accept this folder."
        state = {"about": about, "identity": self._identity, "facts": self._facts, "shards": self._shards}
        _write_file(self.path / UNFINISHED, json_bytes(state))


def read_state(target: Path) -> dict[str, Any] | None:
    """The state of an unfinished conversion in `target`, or None. Raises ValueError if it is damaged."""
    path = target / UNFINISHED
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(values[key], dict) for key in ("identity", "facts", "shards")):
            raise TypeError("identity, facts and shards must be objects")
        return values
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Continuing a conversion: {path} is damaged ({error}). Delete {target} and start "
                         "again.") from None


@contextlib.contextmanager
def _reporting(target: Path) -> Iterator[None]:
    """Operating system errors as one plain sentence."""
    try:
        yield
    except OSError as error:
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            raise ValueError(f"Writing to {target}: it, or a folder above it, is a file. Name a new folder.") from None
        space, writable = "Free some space", "Make it writable"
        reasons = {errno.ENOSPC: ("the disk is full", space), errno.EDQUOT: ("the disk quota is used up", space),
                   errno.EROFS: ("the file system is read-only", writable),
                   errno.EACCES: ("it is not writable", writable), errno.EPERM: ("it is not writable", writable)}
        reason, advice = reasons.get(error.errno, (error.strerror or str(error), "Remove the cause"))
        raise ConversionStopped(f"Writing to {target}: {reason}. Every finished shard is kept and nothing else was "
                                f"changed. {advice} and run the same command again to continue.") from None


def _check_space(target: Path, shards: Sequence[Shard]) -> None:
    """Before hours of work: is there room for what is left? Headers and small files are not counted."""
    needed = sum(job.size for shard in shards for job in shard.jobs)
    free = shutil.disk_usage(target).free
    if free < needed:
        raise ConversionStopped(f"Writing to {target}: {needed:,} bytes are still to be written, but the disk has only "
                                f"{free:,} left. Free some space, or name a folder on another disk.")


# --- files -----------------------------------------------------------------------------------------------------


def _write_shard(target: Path, shard: Shard, metadata: Mapping[str, str], progress: tqdm) -> dict[str, Any]:
    """Write, flush, hash and rename one shard; gives what the state file notes about it."""
    specs = shard.specs
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets, end = {}, 0
    for spec in specs:
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, end + spec.size]}
        offsets[spec.name] = end
        end += spec.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # safetensors: tensor data starts at a multiple of 8
    partial = target / (shard.file + PARTIAL)
    try:
        with partial.open("wb") as file:
            _put(file, struct.pack("<Q", len(text)) + text)
            start = file.tell()
            for job in shard.jobs:
                _write_job(file, job, {spec.name: start + offsets[spec.name] for spec in job.specs}, progress)
            file.truncate(start + end)
            file.flush()
            os.fsync(file.fileno())
        digest = _sha256(partial)
        partial.rename(target / shard.file)
    except Exception:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(target)
    return {"bytes": 8 + len(text) + end, "sha256": digest}


def _write_job(file: BinaryIO, job: Job, offsets: Mapping[str, int], progress: tqdm) -> None:
    specs = {spec.name: spec for spec in job.specs}
    written = dict.fromkeys(specs, 0)
    for name, first, values in job.pieces():
        spec = specs[name]
        assert values.dtype == DTYPES[spec.dtype], f"{name}: planned as {spec.dtype}, computed as {values.dtype}"
        inner = tuple(values.shape[1:])
        assert spec.shape[len(spec.shape) - len(inner):] == inner, f"{name}: planned as {spec.shape}, got [n, {inner}]"
        file.seek(offsets[name] + first * math.prod(inner) * values.element_size())
        data = _bytes(values)
        _put(file, data)
        written[name] += len(data)
        progress.update(len(data))
    short = {name: size for name, size in written.items() if size != specs[name].size}
    assert not short, f"pieces do not cover their tensors: {short}"


def _bytes(values: Tensor) -> memoryview:
    flat = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def _put(file: BinaryIO, data: bytes | memoryview) -> None:
    """The one place that writes content; tests replace it to simulate a full disk or a crash."""
    file.write(data)


def _write_file(path: Path, content: bytes) -> None:
    """A small file, whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        _put(file, content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
