"""The packaged golden data: which files there are, where they come from, and whether they are still the same.

    python -m reference.golden check                   digests of all files; our own data made again and compared
    python -m reference.golden make [--accept PATH]    make our own data, and reference/golden/MANIFEST.json

Two kinds
    outside   made elsewhere, with other software or by hand, so that they can prove us wrong. They are never made here;
              a changed or new one enters the manifest only when its path is named with --accept (a file or a folder).
    ours      summaries of our traces on the packaged checkpoint: digests and statistics of every layer, small enough to
              read in a diff. A change in what the model computes shows in them.
MANIFEST.json has for every file its SHA-256, size and source, and for every source what made it.
Exit codes
    0 all as it should be, 1 something differs (each thing is named), 3 bad options or an unreadable manifest.
Tests: tests/test_golden_data.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = "MANIFEST.json"
SUMMARIES = "summaries"


@dataclass(frozen=True)
class Origin:
    """Where files come from. paths: files and folders inside reference/golden."""

    key: str
    ours: bool
    text: str
    paths: tuple[str, ...]


ORIGINS = (
    Origin("tensors", False,
           "random weights and fixed seeds, computed once on a CPU with an independent transcription of the "
           "publisher's inference arithmetic (revision dba1be0a); text path checked against mlx-lm 0.32.2, the whole "
           "model against NeMo Automodel 0.7.0",
           ("nano", "pico", "pico-nvfp4", "pico-nvfp4-mxfp4-engram", "ops.safetensors")),
    Origin("mlx-layouts", False, "weights of pico written by MLX 0.32.4 in the oMLX layout; logits as in `tensors`",
           ("pico-oq3e-mtp", "pico-oq3e-ngram-mtp")),
    Origin("mlx-quantize", False, "arrays written by mx.quantize of MLX 0.32.4 on a CPU",
           ("mlx_quantize.safetensors",)),
    Origin("hash-ids", False,
           "hash ids of short texts with the released tokenizer and hash layout, from the transcription of `tensors`",
           ("engram_released.json",)),
    Origin("chat", False, "written out by hand after prompts of the publisher's prompt library 0.2.0",
           ("chat_vectors.json",)),
    Origin("summaries", True,
           "python -m reference.golden make: traces of nano at level layer, float32, fake quantization off",
           (SUMMARIES,)),
)
# name -> prompt, options of reference.trace
TRACES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("text_prefill.float32", {}),
    "images": ("vision_prefill.float32", {}),
    "decode": ("decode.float32", {"chunks": "22,6/2,1,1,1,18", "draft": True}),
}


def origin_of(path: str) -> Origin | None:
    """The origin of a file, by its path inside reference/golden."""
    return next((origin for origin in ORIGINS for place in origin.paths
                 if path == place or path.startswith(f"{place}/")), None)


def files_of(folder: Path) -> list[str]:
    """Data files inside a golden folder, as POSIX paths."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found
                  if path.suffix not in (".py", ".pyc") and path.as_posix() != MANIFEST
                  and not any(part.startswith((".", "__")) for part in path.parts))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """path -> {"sha256", "bytes", "source"}. Raises ValueError if it is not there or no manifest."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {entry["path"]: {key: entry[key] for key in ("sha256", "bytes", "source")} for entry in files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Reading {folder / MANIFEST}: not a manifest of golden data ({error!r}). Make it with: "
                         "python -m reference.golden make --accept .") from None


def make_summaries(folder: Path) -> None:
    """Our own data: one summary per entry of TRACES."""
    import inference  # torch is not needed to check digests
    from reference.trace import read_inputs, record
    from reference.trace_format import parse_chunks

    checkpoint = GOLDEN / "nano" / "checkpoint"
    model = inference.load(checkpoint, numerics="float32", fake_quant=False)
    for name, (prompt, options) in TRACES.items():
        inputs = read_inputs(GOLDEN / "nano" / "traces" / f"{prompt}.safetensors", model, checkpoint)
        tokens = inputs.input_ids.shape[1]
        schedule = parse_chunks(options["chunks"], tokens) if "chunks" in options else None
        record(model, checkpoint, inputs, folder / name, "layer", schedule=schedule, draft=options.get("draft", False),
               summary=True)


def make(folder: Path, accept: Sequence[str] = ()) -> list[str]:
    """Make our own data and the manifest. Returns what kept it from being written: outside files that differ."""
    try:
        known = read_manifest(folder)
    except ValueError:
        known = {}
    make_summaries(folder / SUMMARIES)
    entries, problems = [], []
    for path in files_of(folder):
        origin, entry = origin_of(path), {"path": path, "sha256": sha256(folder / path),
                                          "bytes": (folder / path).stat().st_size}
        accepted = any(place in (".", path) or path.startswith(f"{place.rstrip('/')}/") for place in accept)
        if origin is None:
            problems.append(f"{path}: has no origin; add one to ORIGINS in reference/golden_data.py")
        elif not origin.ours and known.get(path, {}).get("sha256") != entry["sha256"] and not accepted:
            problems.append(f"{path}: {'changed' if path in known else 'new'}; if that is meant, add --accept {path}")
        else:
            entries.append({**entry, "source": origin.key})
    gone = [path for path in known if not (folder / path).exists() and not origin_of(path).ours]
    problems += [f"{path}: gone; if that is meant, add --accept {path}" for path in gone
                 if path not in accept and "." not in accept]
    if not problems:
        sources = {origin.key: {"ours": origin.ours, "made": origin.text} for origin in ORIGINS}
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
        text = json.dumps(sources, indent=2).replace("\n", "\n ")
        (folder / MANIFEST).write_text(f'{{\n "sources": {text},\n "files": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    return problems


def check(folder: Path) -> list[str]:
    """Everything that is not as the manifest says, and our own data where it no longer comes out the same."""
    known, present = read_manifest(folder), files_of(folder)
    problems = []
    for path, entry in known.items():
        if path not in present:
            problems.append(f"{path}: missing")
        elif sha256(folder / path) != entry["sha256"]:
            problems.append(f"{path}: its bytes are not those of the manifest ({entry['source']})")
    problems += [f"{path}: not in the manifest; python -m reference.golden make --accept {path}" for path in present
                 if path not in known]
    if not problems:
        problems += check_summaries(folder / SUMMARIES)
    return problems


def check_summaries(folder: Path) -> list[str]:
    """Our own data made again and compared with what is packaged."""
    from reference.compare import EQUAL, compare
    from reference.trace_format import open_trace

    problems = []
    with tempfile.TemporaryDirectory() as fresh:
        make_summaries(Path(fresh))
        for name in TRACES:
            comparison = compare(open_trace(Path(fresh) / name), open_trace(folder / name))
            if comparison.code != EQUAL:
                problems.append(f"{SUMMARIES}/{name}: made again it differs. {comparison.verdict}")
    return problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference.golden", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="compare all files with the manifest, and make our own again")
    making = commands.add_parser("make", help="make our own data and the manifest")
    making.add_argument("--accept", action="append", default=[], metavar="PATH",
                        help="outside file or folder that may change or is new, inside reference/golden; . for all")
    options = parser.parse_args(arguments)
    try:
        problems = check(GOLDEN) if options.command == "check" else make(GOLDEN, options.accept)
    except ValueError as error:
        print(f"BAD INPUT. {error}", file=sys.stderr)
        return 3
    for problem in problems:
        print(problem)
    files = files_of(GOLDEN)
    size = sum((GOLDEN / path).stat().st_size for path in files)
    good = f"{len(files)} files, {size / 1e6:.1f} MB, all as in {MANIFEST}"
    print(f"{len(problems)} problem(s)" if problems else good)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
