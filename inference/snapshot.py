"""Writing the whole memory of a decoding run to disk, and reading it back into another process.

A snapshot is a folder
    state.safetensors  rings, tails, history, and the used rows of every store, exactly as they lie in memory
    state.json         lengths, kind, numerics, digests of configuration and weights, whatever the caller adds
Restored, the next call gives the same bits as it would have given without the interruption.
Refused
    A snapshot of another configuration, other weights, other numerics, another format version, or damaged files.
Mirrors
    report: prefix caching keeps compressed rows and index keys for long; a service would rebuild windows. Here all is kept.
Tests
    tests/test_snapshot.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.cache import Cache, RowStore
from inference.layers import Weight, weight_rows
from inference.model import Model
from inference.quant import PackedWeight
from inference.streaming import StreamedWeight

FORMAT = 1
SMALL = 2**22  # ours: values of a matrix that may be decoded whole for its first row
STATE, TENSORS = "state.json", "state.safetensors"


def save(folder: str | Path, model: Model, cache: Cache, extra: Mapping[str, Any] | None = None,
         tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a snapshot; an older one of that name is replaced, but only once the new one is whole.

    extra: JSON values; tensors: more tensors, both given back by `load`. Raises ValueError if the folder holds something else.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / STATE).is_file():
        raise ValueError(f"Saving a snapshot: {folder} exists and is no snapshot. Choose another name.")
    state, parts = cache.state, {}
    for name, rows in _rings(cache).items():
        parts[name] = rows
    for kind in ("compressed", "index_keys"):
        for source, store in getattr(cache, kind).items():
            used = max(state.lengths) // cache.ratios[source]
            parts[f"{kind}.{source}"] = store.stored[:, :used]
    parts.update({f"extra.{name}": value for name, value in (tensors or {}).items()})
    parts = {name: value.detach().cpu().contiguous() for name, value in parts.items()}
    description = {
        "format": FORMAT, "kind": cache.kind, "numerics": dataclasses.asdict(model.numerics)["name"],
        "fake_quant": model.numerics.fake_quant, "as_published_index_keys": model.as_published_index_keys,
        "configuration": _configuration_digest(model), "weights": weights_digest(model), "lengths": state.lengths,
        "published": state.published, "window_starts": {str(i): starts for i, starts in state.window_starts.items()},
        "extra": dict(extra or {}),
    }
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file(parts, new / TENSORS)
    description["tensors"] = hashlib.sha256((new / TENSORS).read_bytes()).hexdigest()
    (new / STATE).write_text(json.dumps(description, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(new, folder)


def load(folder: str | Path, model: Model) -> tuple[Cache, dict[str, Any], dict[str, Tensor]]:
    """The cache of a snapshot, on the device of `model`, and the caller's `extra` and `tensors`.

    Raises ValueError if the folder is no whole snapshot, or not one of this model.
    """
    folder = Path(folder)
    try:
        description = json.loads((folder / STATE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        digest = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
        found = description["format"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"Loading a snapshot: {folder} is not a readable snapshot ({error}).") from None
    if found != FORMAT:
        raise ValueError(f"Loading a snapshot: {folder} has format {found!r}, this program reads {FORMAT}.")
    if digest != description.get("tensors"):
        raise ValueError(f"Loading a snapshot: {folder / TENSORS} was changed or damaged after it was written.")
    wanted = {"configuration": _configuration_digest(model), "weights": weights_digest(model),
              "numerics": model.numerics.name, "fake_quant": model.numerics.fake_quant,
              "as_published_index_keys": model.as_published_index_keys}
    for name, value in wanted.items():
        if description.get(name) != value:
            raise ValueError(f"Loading a snapshot: {folder} was made with another {name.replace('_', ' ')} "
                             f"({description.get(name)!r:.20}, this model has {value!r:.20}), so it cannot be continued "
                             "here. Load the checkpoint and the settings that it was made with.")
    lengths = tuple(description["lengths"])
    cache = model.new_cache(len(lengths), description["kind"])
    device = cache.device
    for kind in ("compressed", "index_keys"):
        stores: dict[int, RowStore] = getattr(cache, kind)
        for source, store in stores.items():
            store.stored = tensors[f"{kind}.{source}"].to(device)

    def ring(old, name: str):
        return dataclasses.replace(old, stored=tensors[name].to(device))

    state = cache.state
    cache.state = dataclasses.replace(
        state, lengths=lengths, windows={i: ring(old, f"window.{i}") for i, old in state.windows.items()},
        tails={i: (ring(v, f"tail.{i}.v"), ring(g, f"tail.{i}.g")) for i, (v, g) in state.tails.items()},
        engram_history=ring(state.engram_history, "engram_history"), published=description["published"],
        window_starts={int(i): tuple(starts) for i, starts in description["window_starts"].items()})
    extras = {name.removeprefix("extra."): value for name, value in tensors.items() if name.startswith("extra.")}
    return cache, description["extra"], extras


def _rings(cache: Cache) -> dict[str, Tensor]:
    state = cache.state
    rings = {f"window.{i}": ring.stored for i, ring in state.windows.items()}
    for source, (v, g) in state.tails.items():
        rings[f"tail.{source}.v"], rings[f"tail.{source}.g"] = v.stored, g.stored
    return {**rings, "engram_history": state.engram_history.stored}


def _configuration_digest(model: Model) -> str:
    """Of what decides shapes and arithmetic; how the weights are stored does not."""
    values = {name: value for name, value in model.config.to_dict().items() if not name.startswith("quantization")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def weights_digest(model: Model) -> str:
    """SHA-256 of a sample of the weights: everything one-dimensional, and the first row of every matrix that is small or
    stored row by row. Values count, not bytes, so resident, packed and streamed weights of one checkpoint agree."""
    digest = hashlib.sha256()
    for name, weight in sorted(_weights(model)):
        is_row_wise = name.endswith(("embed.weight", "head.weight")) or ".experts.0." in name
        if len(weight.shape) < 2:
            sample = weight
        elif is_row_wise or weight.shape[0] * weight.shape[1] <= SMALL:
            sample = weight_rows(weight, torch.zeros(1, dtype=torch.int64, device=model.norm.weight.device), torch.float32)
        else:
            continue
        digest.update(name.encode() + sample.detach().to(torch.float32).cpu().numpy().tobytes())
    return digest.hexdigest()


def _weights(model: Model) -> Iterator[tuple[str, Weight]]:
    """All weights in memory or on disk by name; of the routed experts of a layer only the first."""
    for prefix, module in model.named_modules():
        if ".experts." in prefix and ".experts.0" not in prefix:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}", parameter
        weight = getattr(module, "weight", None)
        if isinstance(weight, (PackedWeight, StreamedWeight)):
            yield f"{prefix}.weight", weight
