"""Reading the packaged golden traces as if they were traces of our own format.

A folder of them has one manifest.json, {"traces": {name: {"numerics", "fake_quant", "points", "inputs", ...}}}, and one
safetensors file per trace with the points and, beside them, the inputs. Which calls were made follows from the name:
    text_prefill.*, vision_prefill.*   the whole prompt in one call
    draft_step.*                       the token after `split` prompt tokens, and one draft
    decode.*                           `split` tokens, then one at a time, a draft after each of those; points are
                                       called prefill.X and step{position}.X, and logits have no axis of tokens
Imports numpy only. Tests: tests/test_compare.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reference.trace_format import Entry, Trace, TraceError, digest, read_tensors


def open_golden(folder: Path, name: str | None, manifest: dict[str, Any]) -> Trace:
    """One trace of a folder of golden traces: a whole prompt, one draft, or decode steps."""
    traces = manifest["traces"]
    if name is None and len(traces) == 1:
        name = next(iter(traces))
    if name not in traces:
        raise TraceError(f"Opening a trace: {folder} holds several. Give one of "
                         f"{', '.join(str(folder / each) for each in traces)}.")
    entry = traces[name]
    header, read = read_tensors(folder / f"{name}.safetensors")
    if "input_ids" not in header:
        raise TraceError(f"Opening a trace: {folder / name} has no input_ids.")
    ids = read("input_ids")
    inputs = {"input_ids": ids.tolist(), "token_types": None, "image_digests": []}
    if "token_types" in header:
        inputs["token_types"] = read("token_types").tolist()
    while f"image{len(inputs['image_digests'])}.patches" in header:
        patches = f"image{len(inputs['image_digests'])}.patches"
        inputs["image_digests"].append(digest(read(patches), header[patches]["dtype"]))
    kind = name.partition(".")[0]
    split = entry.get("split") or next((other["split"] for other in traces.values() if "split" in other), None)
    skip = {"input_ids", "token_types", "anchor", *entry.get("inputs", ())}
    names = [point for point in entry["points"] or header if point not in skip]
    absent = [point for point in names if point not in header]
    if absent:
        raise TraceError(f"Opening a trace: {folder / name} lacks {absent[0]}, which the manifest lists.")
    if kind == "decode":
        steps, entries = _golden_decode(names, header, split, ids.shape[1])
    else:
        # The one token before the draft stands after `split` prompt tokens.
        start, count = (split, 1) if kind == "draft_step" else (0, ids.shape[1])
        steps = [{"start": start, "count": count, "kept": count, "draft": kind == "draft_step"}]
        entries = {f"step0.{point}": Entry(f"step0.{point}", point, 0, tuple(header[point]["shape"]),
                                           header[point]["dtype"], stored=point) for point in names}
    own = {"producer": {"name": manifest.get("producer", "golden"), "version": str(manifest.get("format", ""))},
           "model": {"id": "", "revision": "", "config_digest": "", "weights_digest": ""}, "facts": {},
           "run": {"numerics": entry["numerics"]},
           "switches": {"fake_quant": entry["fake_quant"], "input_fp8": entry["numerics"] == "native",
                        "as_published_index_keys": False},
           "inputs": inputs, "level": "module", "steps": steps}
    return Trace(str(folder / name), own, entries, read)


def _golden_decode(names: Iterable[str], header: dict[str, Any], split: int, tokens: int,
                   ) -> tuple[list[dict[str, Any]], dict[str, Entry]]:
    """Names are `prefill.X` and `step{position}.X`; logits are those of the last token, without an axis of tokens."""
    steps = [{"start": 0, "count": split, "kept": split, "draft": False}]
    steps += [{"start": position, "count": 1, "kept": 1, "draft": True} for position in range(split, tokens)]
    entries = {}
    for stored in names:
        prefix, _, path = stored.partition(".")
        position = split - 1 if prefix == "prefill" else int(prefix.removeprefix("step"))
        step = position - split + 1
        last_row = path == "logits"
        entry = Entry(f"step{step}.{path}", path, step, tuple(header[stored]["shape"]), header[stored]["dtype"],
                      stored=stored, first=position if last_row else None, add_axis=last_row)
        entries[entry.name] = entry
    order = sorted(entries.values(), key=lambda entry: entry.step)
    return steps, {entry.name: entry for entry in order}
