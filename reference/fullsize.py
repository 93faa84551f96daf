"""A checkpoint of the released size without the weights: names, shapes, shards and sizes are true, values are not.

    python -m reference.fullsize make DIR --format FORMAT [--seed N]    half a minute; 0.5 TB listed, 2.5 GB on disk
    python -m reference.fullsize check DIR                              load it, run it, measure: fullsize_check.py

What `make` writes
    Every shard as a sparse file: a true header (fullsize_layout.py, which lists the formats), then a hole as long as
    its tensors, which reads as zeros; into the holes a few real random weights (fullsize_data.py). fullsize.json in DIR
    says which.
Safety
    DIR must be new or empty. Until it is complete it has conversion.inprogress.json, which no loader accepts, and no
    index; what fails or is interrupted is removed again. After a kill, delete DIR.
Exit codes
    0 fine; 1 the check found problems; 3 the input cannot be used or the system refused; 130 interrupted.
Leaves out
    Images.
Tests
    tests/test_fullsize.py
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from inference.checkpoint import INDEX, UNFINISHED
from inference.command import Parser, run
from inference.streaming import DEFAULT_EXPERT_CACHE
from inference.tokenizer import Tokenizer
from reference.fullsize_check import check, describe
from reference.fullsize_data import RealData
from reference.fullsize_layout import FORMATS, RECORD, RELEASED, Layout, Release, disk_bytes, place, plan_output
from reference.shard_writer import json_bytes


def make(folder: Path, format_name: str, seed: int = 0, config_json: dict[str, Any] | None = None,
         tokenizer_json: bytes | None = None) -> dict[str, Any]:
    """Write a checkpoint and return what fullsize.json says about it.

    config_json, tokenizer_json: of another configuration than the released one, which needs no tokenizer.json.
    Raises ValueError for a folder that holds anything or a file system without sparse files.
    """
    if format_name not in FORMATS:
        raise ValueError(f"Making a full-size checkpoint: wanted a format among {', '.join(FORMATS)}, got "
                         f"{format_name!r}.")
    config_json = json.loads(RELEASED.read_text(encoding="utf-8")) if config_json is None else config_json
    is_new = not folder.exists()
    if not is_new and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"Making a full-size checkpoint: {folder} is not an empty folder. Name a new or an empty one.")
    release = Release.of(config_json, folder)
    layout = place(release, plan_output(release, format_name))
    written: list[Path] = []

    def small(name: str, content: bytes) -> None:
        written.append(folder / name)
        written[-1].write_bytes(content)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        small(UNFINISHED, json_bytes({"about": "Half made by reference.fullsize. Delete this folder."}))
        _check_sparse(folder, written)
        if tokenizer_json is not None:
            small("tokenizer.json", tokenizer_json)
        real = RealData.choose(layout.config, Tokenizer.load(folder), seed)
        for shard in layout.output.shards:
            written.append(folder / shard.file)
            with written[-1].open("xb") as file:
                file.write(layout.headers[shard.file])
                file.truncate(len(layout.headers[shard.file]) + sum(spec.size for spec in shard.specs))
        record = _record(layout, real, format_name, _write_data(layout, real))
        small(RECORD, json_bytes(record))
        for name, content in layout.output.files.items():
            small(name, content)
        small(INDEX, layout.output.index())
        (folder / UNFINISHED).unlink()
    except BaseException:  # Ctrl-C too: nothing may stay that looks like a checkpoint
        for path in reversed(written):  # the mark of an unfinished folder goes last
            path.unlink(missing_ok=True)
        if is_new and folder.is_dir():
            folder.rmdir()
        raise
    return record


def _check_sparse(folder: Path, written: list[Path]) -> None:
    probe = folder / f"{RECORD}.probe"
    written.append(probe)
    with probe.open("wb") as file:
        file.truncate(1 << 26)
    used = probe.stat().st_blocks * 512
    probe.unlink()
    if used > 1 << 24:
        raise ValueError(f"Making a full-size checkpoint: the file system of {folder} has no sparse files (64 MiB of "
                         f"nothing take {used:,} bytes), so this would take half a terabyte. Name a folder on another "
                         "disk.")


def _write_data(layout: Layout, real: RealData) -> list[str]:
    """Put all real weights into their places; returns the names of the parameters."""
    names, files = [], {}
    with contextlib.ExitStack() as stack:
        for name, plan in layout.plans.items():
            tensors = real.stored(layout, name)
            if tensors is None:
                continue
            rows = real.rows.get(name)
            for stored, values in zip(plan.tensors, tensors, strict=True):
                if stored.shard not in files:
                    files[stored.shard] = stack.enter_context(stored.shard.open("r+b"))
                file = files[stored.shard]
                data = memoryview(values.contiguous().flatten().view(torch.uint8).numpy())
                count = 1 if rows is None else len(rows)
                step = stored.size if rows is None else stored.size // stored.shape[0]
                assert len(data) == count * step, f"{stored.name}: {len(data)} bytes of data for {count} times {step}"
                for index in range(count):
                    file.seek(stored.offset + (0 if rows is None else int(rows[index]) * step))
                    file.write(data[index * step:(index + 1) * step])
            names.append(name)
    return names


def _record(layout: Layout, real: RealData, format_name: str, names: Sequence[str]) -> dict[str, Any]:
    return {
        "about": "Made by python -m reference.fullsize. The values mean nothing; what is not listed here is a hole, "
                 "which reads as zeros.",
        "format": format_name, "seed": real.seed, "tensors": layout.output.tensor_count,
        "bytes": layout.output.tensor_bytes, "tokens": list(real.tokens), "real_layers": list(real.layers),
        "real_experts": {layer: list(ids) for layer, ids in real.experts.items()},
        "real_rows": {name: len(rows) for name, rows in real.rows.items()},
        "real_parameters": [name for name in names if name not in real.rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module docstring."""
    parser = Parser(prog="python -m reference.fullsize", description="Full-size checkpoints without the weights.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write a sparse checkpoint")
    making.add_argument("folder", metavar="DIR", type=Path)
    making.add_argument("--format", required=True, choices=FORMATS)
    making.add_argument("--seed", type=int, default=0)
    checking = commands.add_parser("check", help="load and run one, and measure")
    checking.add_argument("folder", metavar="DIR", type=Path)
    checking.add_argument("--expert-cache", type=float, default=DEFAULT_EXPERT_CACHE / 2**30, metavar="GIB",
                          help="memory for packed experts (default %(default)g)")
    options = parser.parse_args(arguments)
    return run(lambda: _make(options.folder, options.format, options.seed) if options.command == "make"
               else _check(options.folder, options.expert_cache))


def _make(folder: Path, format_name: str, seed: int) -> int:
    start = time.perf_counter()
    try:
        record = make(folder, format_name, seed)
    except OSError as error:
        raise ValueError(f"Making a full-size checkpoint in {folder}: {error}. What was written is removed again. Name a "
                         "folder that can be written, on a disk with about 3 GB free.") from None
    print(f"{folder}: {format_name}, {record['tensors']:,} tensors, {record['bytes']:,} bytes, of which "
          f"{disk_bytes(folder):,} on disk; {time.perf_counter() - start:.1f} s")
    return 0


def _check(folder: Path, expert_cache: float) -> int:
    if not 0 <= expert_cache <= 2**20:
        raise ValueError(f"Checking {folder}: --expert-cache must be 0 to 2^20 GiB, got {expert_cache}.")
    result = check(folder, int(expert_cache * 2**30), progress=None)
    print(describe(folder, result))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
