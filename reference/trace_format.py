"""Trace folders: writing one as a run goes on, reading one whatever wrote it.

Layout
    manifest.json        who ran what (see `TraceWriter`), and an ordered list of points: name, kind, shape, dtype,
                         digest, counts of NaN and infinity, min, max, mean, RMS and sum of the finite entries. Its
                         order is the order of execution.
    tensors.safetensors  the values, by name; absent in a summary
    A digest is the SHA-256 of "dtype shape" and the raw little-endian bytes, so equality can be told without the
    values.
Rows
    `steps` says which tokens every call had. A row of a point is keyed by the absolute position (or compressed row) it
    is about, never by its place in a call.
Also read
    Folders in the format of the packaged golden traces: one manifest {"traces": {name: ...}} for several files. Name
    one trace as FOLDER/NAME.
Memory
    Values go to disk when they are added, and are read when they are asked for.
Imports numpy and the standard library only, so that any engine can write traces and compare them.
Tests: tests/test_trace.py
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reference.points import LEVELS, layer_of, lookup, split_name

FORMAT, VERSION = "trace", 1
TENSORS = "tensors.safetensors"
_DTYPES = {"BOOL": "?", "U8": "<u1", "I8": "<i1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
           "BF16": "<u2"}
_TAGS = {np.dtype(code): tag for tag, code in _DTYPES.items() if tag != "BF16"}
REQUIRED = ("producer", "model", "run", "switches", "inputs", "steps", "level", "points")


class TraceError(ValueError):
    """A trace that cannot be read or written."""


class OtherCheckpoint(ValueError):
    """A checkpoint that is not the one of the traces; the text says by what it shows."""


# --- values ------------------------------------------------------------------------------------------------------


def digest(value: np.ndarray, tag: str) -> str:
    """SHA-256 of dtype, shape and bytes."""
    checksum = hashlib.sha256(f"{tag} {list(value.shape)} ".encode())
    checksum.update(np.ascontiguousarray(value).data if value.size else b"")
    return checksum.hexdigest()


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """BF16 bit patterns (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def statistics(value: np.ndarray) -> dict[str, Any]:
    """Counts of NaN and infinity; min, max, mean, RMS and sum of the finite entries (None if there are none)."""
    wide = value.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    counts = {"nan": int(np.isnan(wide).sum()), "inf": int(np.isinf(wide).sum())}
    if not finite.size:
        return {**counts, **dict.fromkeys(("min", "max", "mean", "rms", "sum"))}
    return {**counts, "min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean()),
            "rms": float(np.sqrt(np.square(finite).mean())), "sum": float(finite.sum())}


# --- writing -----------------------------------------------------------------------------------------------------


_NO_CALL = "Call writer.step(start, count) before the first value of every call."


def check_axes(path: str, shape: Sequence[int]) -> None:
    """Raise TraceError where a value has not as many axes as its point; a missing batch axis is the usual reason."""
    point = lookup(path)
    axes, _, _ = point.shape.partition("]")
    if point.concept != "weights" and len(shape) != axes.count(",") + 1:
        raise TraceError(f"Writing or reading a trace: {path} has shape {list(shape)}, wanted {axes}] "
                         "(reference/points.py); B is the batch, 1 for a single prompt.")


class TraceWriter:
    """Writes one trace folder.

    folder: new, empty, or an earlier trace, which is replaced. header: the manifest without steps and points, namely
        producer  {"name", "version"}
        model     {"id", "revision", "config_digest", "weights_digest"}; unknown ones are ""
        facts     numbers that the comparison needs: compress_ratios, candidate_block_size, ...
        run       {"numerics": native | dequantized | float32, "dtype", "device", "threads", ...}
        switches  {"fake_quant", "input_fp8", "as_published_index_keys"}
        inputs    {"input_ids": [[...]], "token_types", "image_digests"}
        level     the level this producer recorded; points of a deeper level are dropped, and `close` says how many
        layers    names of the layers this producer recorded, None (or absent) for all
    Use it as a context manager: only `close` makes a readable trace; after an exception nothing is left.
    """

    def __init__(self, folder: str | Path, header: dict[str, Any], summary: bool = False,
                 layers: frozenset[str] | None = None) -> None:
        self.folder, self.header, self.summary, self.layers = Path(folder), dict(header), summary, layers
        if self.header.get("level") not in LEVELS:
            raise TraceError(f"Writing a trace: level must be one of {', '.join(LEVELS)}, got {header.get('level')!r}.")
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / "manifest.json").is_file():
            raise TraceError(f"Writing a trace: {self.folder} holds other files. Give a new folder.")
        self.depth, self.dropped = LEVELS.index(self.header["level"]), []
        self.steps: list[dict[str, Any]] = []
        self.points: dict[str, dict[str, Any]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in ("manifest.json", TENSORS):
                (self.folder / old).unlink(missing_ok=True)
            # One file per element size, joined at the end: so that every tensor is aligned in the result.
            self._parts = {} if summary else {size: (self.folder / f".part{size}").open("w+b") for size in (8, 4, 2, 1)}
        except OSError as error:
            raise TraceError(f"Writing a trace: {self.folder} cannot be a folder of ours ({error}). Give a new "
                             "folder.") from None
        self._places: dict[str, tuple[int, int]] = {}  # name -> element size, offset in that part

    def step(self, start: int, count: int, kept: int | None = None, draft: bool = False) -> None:
        """Begin a call of `count` tokens at position `start`, of which `kept` are accepted (all by default)."""
        self.steps.append({"start": start, "count": count, "kept": count if kept is None else kept, "draft": draft})

    def wants(self, path: str) -> bool:
        """Whether a point would be kept; ask before computing an expensive one."""
        point = lookup(path)
        if point is None or point.depth > self.depth:
            return False
        layer = layer_of(path)
        return self.layers is None or layer is None or layer in self.layers

    def add(self, path: str, value: np.ndarray, tag: str | None = None, keep: bool = True) -> None:
        """Record one value of the current call. BF16 is passed as uint16 bits with tag "BF16".

        keep=False records digest and statistics only. Raises TraceError for a name that is no point, or a value that
        has not its axes: nothing disappears unseen.
        """
        point, value = lookup(path), np.asarray(value)
        if point is None:
            raise TraceError(f"Writing a trace: {path!r} is no point; reference/points.py lists them.")
        if point.depth > self.depth:
            self.dropped.append(path)
        if not self.wants(path):
            return
        if not self.steps and point.concept != "weights":
            raise TraceError(f"Writing a trace: {path} belongs to no call. {_NO_CALL}")
        check_axes(path, value.shape)
        tag = _TAGS.get(value.dtype) if tag is None else tag
        if tag is None:
            raise TraceError(f"Writing a trace: {path} has dtype {value.dtype}, wanted one of {', '.join(_DTYPES)}.")
        prefix = f"step{len(self.steps) - 1}." if self.steps and not path.startswith("weights.") else ""
        name, number = f"{prefix}{path}", 0
        while name in self.points:
            number += 1
            name = f"{prefix}{path}#{number}"
        value = np.ascontiguousarray(value, dtype=_DTYPES[tag]).reshape(value.shape)
        if keep and not self.summary:
            part = self._parts[value.itemsize]
            self._places[name] = (value.itemsize, part.tell())
            part.write(value.data if value.size else b"")
        self.points[name] = {"kind": lookup(path).kind, "shape": list(value.shape), "dtype": tag,
                             "digest": digest(value, tag),
                             **statistics(widen_bfloat16(value) if tag == "BF16" else value)}

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def close(self) -> None:
        """Join the parts and write the manifest, last."""
        if not self.steps:
            self._discard()
            raise TraceError(f"Writing a trace: no call was recorded. {_NO_CALL}")
        if not self.summary:
            self._join()
        self._discard()
        if self.dropped:
            print(f"note: {self.folder} has level {self.header['level']!r}: {len(self.dropped)} point(s) of a deeper "
                  f"level were dropped, {self.dropped[0]} first. The header's level keeps them.", file=sys.stderr)
        manifest = {"format": FORMAT, "version": VERSION, **self.header, "summary": self.summary, "steps": self.steps,
                    "points": [{"name": name, **entry} for name, entry in self.points.items()]}
        (self.folder / "manifest.json").write_text(_one_line_each(manifest), encoding="utf-8")

    def _join(self) -> None:
        base, bases = 0, {}
        for size, part in self._parts.items():
            bases[size], base = base, base + part.tell()
        header = {}
        for name, (size, offset) in sorted(self._places.items(), key=lambda item: (-item[1][0], item[1][1])):
            entry = self.points[name]
            start = bases[size] + offset
            header[name] = {"dtype": entry["dtype"], "shape": entry["shape"],
                            "data_offsets": [start, start + size * math.prod(entry["shape"])]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (self.folder / TENSORS).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for part in self._parts.values():
                part.seek(0)
                shutil.copyfileobj(part, file, 1 << 22)

    def _discard(self) -> None:
        for size, part in self._parts.items():
            part.close()
            (self.folder / f".part{size}").unlink(missing_ok=True)


def _one_line_each(manifest: dict[str, Any]) -> str:
    """JSON with one line per field, step and point, so that two summaries make a readable diff."""
    lines = []
    for key, value in manifest.items():
        if key in ("steps", "points"):
            items = ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value)
            lines.append(f" {json.dumps(key)}: [\n{items}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def facts(config: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a config.json (Hugging Face form) that the comparison needs."""
    text = config.get("text_config") or {}
    return {"compress_ratios": list(text.get("compress_ratios") or ()),
            "candidate_block_size": text.get("candidate_block_size"), "layers": text.get("num_hidden_layers"),
            "stages": text.get("num_nextn_predict_layers") or 0}


def engine_header(name: str, version: str, checkpoint: str | Path, input_ids: np.ndarray, numerics: str,
                  fake_quant: bool, level: str, dtype: str = "", layers: Iterable[int | str] | None = None,
                  ) -> dict[str, Any]:
    """The header of a trace of another engine on a text prompt. Raises TraceError for ids outside the vocabulary.

    numerics: "float32" for float32 activations, "dequantized" for BF16 ones, "native" if it also rounds the inputs of
    FP8 and FP4 products to FP8. level: the deepest one of which it records something for every concept it has. layers:
    those it records, as numbers or names ("mtp.0"), if not all; nothing of the others is missed.
    """
    try:
        config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError(f"Reading the configuration: {checkpoint} has no readable config.json ({error}).") from None
    ids, size = np.asarray(input_ids), (config.get("text_config") or {}).get("vocab_size", np.inf)
    if ids.size and not 0 <= ids.min() <= ids.max() < size:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise TraceError(f"Reading the input: token {wrong} is outside the vocabulary of {checkpoint} ({size} ids).")
    return {"producer": {"name": name, "version": version},
            "model": {"id": Path(checkpoint).resolve().name, "revision": "", "config_digest": "", "weights_digest": ""},
            "facts": facts(config), "run": {"numerics": numerics, "dtype": dtype, "device": "cpu"},
            "switches": {"fake_quant": fake_quant, "input_fp8": numerics == "native", "as_published_index_keys": False},
            "inputs": {"input_ids": ids.tolist(), "token_types": None, "image_digests": []}, "level": level,
            "layers": None if layers is None else [each if isinstance(each, str) else f"layers.{each}"
                                                   for each in layers]}


def read_ids(path: str | Path) -> np.ndarray:
    """[B, S] int64 from {"input_ids": ...} in a .json file, or from the input_ids of a .safetensors file.

    The manifest.json of a trace is such a file, too: so any engine can run exactly the tokens of a trace.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            ids = read_tensors(path)[1]("input_ids")
        else:
            values = json.loads(path.read_text(encoding="utf-8"))
            ids = values.get("inputs", values)["input_ids"]
        ids = np.atleast_2d(np.asarray(ids, np.int64))
        if ids.ndim != 2 or not ids.size:
            raise ValueError(f"input_ids has shape {list(ids.shape)}")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"Reading the input: {path} must be a .json or .safetensors file with input_ids ({error}). Of "
                         "a text, give the manifest.json of the trace that reference.trace made of it.") from None
    return ids


def parse_chunks(text: str, tokens: int) -> list[tuple[int, int]]:
    """"23,1*" -> [(23, 23), (1, 1), ...] that accept exactly `tokens` tokens. Raises ValueError otherwise."""
    schedule, position = [], 0
    parts = [part.strip() for part in text.split(",")]
    for number, part in enumerate(parts):
        repeat = part.endswith("*")
        count, _, kept = part.removesuffix("*").partition("/")
        if not count.isdigit() or not (kept or "0").isdigit() or int(count) < 1 or repeat and number < len(parts) - 1:
            raise ValueError(f"Reading --chunks {text!r}: {part!r} is no number of tokens. Write for instance 23,1* or "
                             "8,6/2,1*.")
        while position < tokens if repeat else True:
            size = min(int(count), tokens - position) if repeat else int(count)
            accepted = int(kept) if kept and not repeat else size
            if not 1 <= accepted <= size or position + size > tokens:
                raise ValueError(f"Reading --chunks {text!r}: {part!r} at position {position} runs {size} and accepts "
                                 f"{accepted} of {tokens} tokens.")
            schedule.append((size, accepted))
            position += accepted
            if not repeat:
                break
    if position != tokens:
        raise ValueError(f"Reading --chunks {text!r}: they accept {position} of {tokens} tokens. End with \",1*\".")
    return schedule


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One recorded point of a trace."""

    name: str
    path: str  # without the step, with "#1"
    step: int | None
    shape: tuple[int, ...]
    dtype: str
    digest: str = ""  # "" = not stated
    facts: dict[str, Any] = field(default_factory=dict)  # statistics
    first: int | None = None  # row key of its first row, where the step does not say it
    stored: str = ""  # name of the tensor, if another
    add_axis: bool = False  # stored without the axis of rows


@dataclass(frozen=True)
class Trace:
    """A trace that is open for reading."""

    origin: str
    manifest: dict[str, Any]
    entries: dict[str, Entry]  # by name, in the order of execution
    read_bytes: Callable[[str], np.ndarray] | None  # None: a summary

    @property
    def input_ids(self) -> np.ndarray:
        return np.asarray(self.manifest["inputs"]["input_ids"], np.int64)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.manifest["steps"]

    @property
    def summary(self) -> bool:
        return self.read_bytes is None

    @property
    def only_weights(self) -> bool:
        """Whether it is a check of the weights and of nothing else."""
        return all(entry.path.startswith("weights.") for entry in self.entries.values())

    @property
    def numerics(self) -> str:
        return self.manifest["run"].get("numerics", "float32")

    def switch(self, name: str) -> bool | None:
        return self.manifest["switches"].get(name)

    def has_values(self, entry: Entry) -> bool:
        """Whether the tensor is stored (a summary has none, and some points are digests only)."""
        return self.read_bytes is not None and not entry.path.startswith("weights.")

    def read(self, entry: Entry) -> np.ndarray:
        """The value: floats as float32 or float64. Raises TraceError if its bytes do not have the stated digest."""
        assert self.read_bytes is not None, "a summary has no values"
        raw = self.read_bytes(entry.stored or entry.name)
        if entry.digest and digest(raw, entry.dtype) != entry.digest:
            raise TraceError(f"Reading {self.origin}: the bytes of {entry.name} do not have the digest that the "
                             "manifest states. The folder was changed or cut off; record it again.")
        value = widen_bfloat16(raw) if entry.dtype == "BF16" else raw
        value = value.astype(np.float32) if value.dtype == np.float16 else value
        return value[:, None] if entry.add_axis else value

    def keys(self, entry: Entry, rows: int) -> np.ndarray:
        """Key of every row of the point, [rows] int64: positions, compressed rows, or the draft's anchor position."""
        point = lookup(entry.path)
        if point is None or point.rows in ("call", "image") or entry.step is None:
            return np.zeros(0, np.int64)
        step = self.steps[entry.step]
        if point.rows == "draft":
            return np.array([step["start"] + step["kept"] if entry.first is None else entry.first])
        start = step["start"] if entry.first is None else entry.first
        if point.rows == "group":
            start //= self._ratio(entry.path)
        return np.arange(start, start + rows)

    def kept(self, entry: Entry, keys: np.ndarray) -> np.ndarray:
        """[rows] bool: False for rows of tokens that were run and then rejected."""
        point = lookup(entry.path)
        if point is None or point.rows not in ("token", "group") or entry.step is None:
            return np.ones(len(keys), bool)
        step = self.steps[entry.step]
        end = step["start"] + step["kept"]
        return keys < (end // self._ratio(entry.path) if point.rows == "group" else end)

    def _ratio(self, path: str) -> int:
        ratios = self.manifest.get("facts", {}).get("compress_ratios") or []
        layer = int(path.split(".")[1])
        return max(1, ratios[layer]) if layer < len(ratios) else 1


def open_trace(path: str | Path) -> Trace:
    """A trace folder, FOLDER/NAME of a folder with several traces, or the safetensors file of one of those.

    Raises TraceError naming what is wrong and what to give instead.
    """
    path = Path(path)
    folder, name = (path, None) if path.is_dir() else (path.parent, path.name.removesuffix(".safetensors"))
    manifest = _read_manifest(folder, path)
    if "traces" in manifest:
        from reference.golden_traces import open_golden  # it imports this module

        return open_golden(folder, name, manifest)
    if name is not None and name != Path(TENSORS).stem:
        raise TraceError(f"Opening a trace: {path} does not exist; {folder} holds a single trace. Give {folder}.")
    return _open_own(folder, manifest)


def _read_manifest(folder: Path, path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(f"Opening a trace: {path} is no trace, there is no {folder / 'manifest.json'}. Give a "
                         "folder that reference.trace or an adapter wrote.") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"Opening a trace: {folder / 'manifest.json'} is not readable JSON ({error}).") from None
    if not isinstance(manifest, dict):
        raise TraceError(f"Opening a trace: {folder / 'manifest.json'} is no JSON object.")
    return manifest


def _open_own(folder: Path, manifest: dict[str, Any]) -> Trace:
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise TraceError(f"Opening a trace: {folder} has format {manifest.get('format')!r}, version "
                         f"{manifest.get('version')!r}; wanted {FORMAT!r}, version {VERSION}. Record it again.")
    absent = [key for key in REQUIRED if key not in manifest]
    if absent:
        raise TraceError(f"Opening a trace: the manifest of {folder} lacks {', '.join(absent)}.")
    try:
        steps = len(manifest["steps"])
        entries = {}
        for entry in manifest["points"]:
            step, path = split_name(entry["name"])
            if step is not None and step >= steps:
                raise ValueError(f"{entry['name']} belongs to no step")
            entries[entry["name"]] = Entry(entry["name"], path, step, tuple(entry["shape"]), entry["dtype"],
                                           entry["digest"], entry)
        np.asarray(manifest["inputs"]["input_ids"], np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"Opening a trace: the manifest of {folder} is damaged ({error!r}).") from None
    if manifest.get("summary"):
        return Trace(str(folder), manifest, entries, None)
    header, read = read_tensors(folder / TENSORS)
    for entry in entries.values():
        if entry.name not in header and not entry.path.startswith("weights."):
            raise TraceError(f"Opening a trace: {folder / TENSORS} lacks {entry.name}, which the manifest lists.")
    return Trace(str(folder), manifest, entries, read)


def read_tensors(path: Path) -> tuple[dict[str, dict[str, Any]], Callable[[str], np.ndarray]]:
    """Header of a safetensors file, and a function that reads one tensor as stored."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > path.stat().st_size - 8:
                raise ValueError("it is cut off")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"{path.stat().st_size} bytes, its header describes {8 + length + end}")
        unknown = {entry["dtype"] for entry in header.values()} - set(_DTYPES)
        if unknown:
            raise ValueError(f"unknown dtype {unknown.pop()}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise TraceError(f"Opening a trace: {path} is not a readable safetensors file ({error}).") from None

    def read(name: str) -> np.ndarray:
        entry = header[name]
        start, stop = entry["data_offsets"]
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        value = np.fromfile(path, dtype, (stop - start) // dtype.itemsize, offset=8 + length + start)
        return value.reshape(entry["shape"])

    return header, read
