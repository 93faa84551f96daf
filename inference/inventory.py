"""What a checkpoint folder holds, what it lacks, and the memory that each way of running it needs.

What it computes
    From headers and config.json alone, per format and per part of the model: stored tensors, logical weights (values
    that the weights stand for; scales are no weights), bytes on disk, and bits per weight = 8 * bytes / logical
    weights, which counts scales and biases. The tables have the columns of the publishers' cards.
    Memory: weights by mode (checkpoint.py). Caches of a conversation and activations come on top.
Interface
    `take_inventory(folder)` returns an `Inventory`; `python -m inference.checkpoint DIR` prints it.
Tests
    tests/test_families.py
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from inference.checkpoint import Checkpoint, Match, WeightPlan, match_weights
from inference.config import Config
from inference.families import SKIPPED
from inference.layers import Embedding, Linear
from inference.model import Model
from inference.numerics import Numerics
from inference.quant import FORMATS
from inference.streaming import DEFAULT_EXPERT_CACHE

PARTS = ("Engram tables", "routed experts", "draft stages", "vision", "everything else")


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    weights: int  # parameters of the model
    tensors: int  # stored tensors, companions included
    logical: int  # values
    bytes: int

    @property
    def bits(self) -> float | None:
        return 8 * self.bytes / self.logical if self.logical else None


@dataclass(frozen=True)
class Inventory:
    folder: str
    family: str
    engram: str | None  # format of the Engram tables
    shards: int
    tensors: int
    bytes: int
    formats: tuple[Row, ...]
    parts: tuple[Row, ...]
    problems: tuple[str, ...]  # missing, unexpected and contradictory things, absent or damaged shards
    memory: dict[str, dict[str, int]]  # mode -> numerics -> bytes of weights
    largest_decode: int  # bytes, on top of packed and stream: the largest weight while it is decoded in float32

    def to_dict(self) -> dict:
        """Plain JSON values."""
        values = dataclasses.asdict(self)
        for name in ("formats", "parts"):
            values[name] = [{**dataclasses.asdict(row), "bits_per_weight": row.bits} for row in getattr(self, name)]
        return values


def empty_model(config: Config, numerics: str = "native") -> Model:
    """The model on the meta device, without weights and without a tokenizer: for shapes only, not to be run."""
    text = config.text_config
    # any map with the right number of classes
    classes = torch.arange(text.vocab_size).clamp_max(text.engram_compressed_vocab_size - 1)
    with torch.device("meta"):
        return Model(config, Numerics.of(numerics), classes if text.engram_layer_ids else None)


def take_inventory(folder: str | Path, engram_dir: str | Path | None = None) -> Inventory:
    """What the headers and the configuration of a folder say.

    Raises ValueError if it is no checkpoint of this model; what is merely missing, damaged or contradictory is listed
    in `problems`.
    """
    checkpoint, problems = Checkpoint.survey(folder, engram_dir)
    model = empty_model(Config.from_file(checkpoint.folder))
    match = match_weights(model, checkpoint)
    stored = checkpoint.tensors.values()
    table = next((plan for plan in match.plans.values() if plan.name.endswith(".engram.embed.weight")), None)
    parts = _rows(match, checkpoint, _part)
    experts = sum(row.bytes for row in parts if row.name in ("routed experts", "draft stages"))
    memory, largest = _memory(model, match, min(experts, DEFAULT_EXPERT_CACHE))
    return Inventory(
        str(checkpoint.folder), match.family.title, None if table is None else _label(table),
        len({tensor.shard for tensor in stored}), len(stored), sum(tensor.size for tensor in stored),
        _rows(match, checkpoint, _label), parts, (*problems, *match.problems), memory, largest)


def _label(plan: WeightPlan) -> str:
    return FORMATS[plan.format].name if plan.format else plan.tensors[0].dtype


def _part(plan: WeightPlan) -> str:
    if ".engram.embed." in plan.name:
        return "Engram tables"
    if plan.name.startswith("mtp."):
        return "draft stages"
    if plan.name.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    return "routed experts" if ".ffn.experts." in plan.name else "everything else"


def _rows(match: Match, checkpoint: Checkpoint, group) -> tuple[Row, ...]:
    """One row per value of `group`, then what is stored without being a weight; they add up to the whole checkpoint."""
    counts: dict[str, list[int]] = {}
    names: dict[str, set[str]] = {}
    for plan in match.plans.values():
        key = group(plan)
        count = counts.setdefault(key, [0, 0, 0])
        count[0] += 1
        count[1] += math.prod(plan.shape)
        count[2] += sum(tensor.size for tensor in plan.tensors)
        names.setdefault(key, set()).update(tensor.name.partition("[")[0] for tensor in plan.tensors)
    rows = [Row(key, weights, len(names[key]), logical, size) for key, (weights, logical, size) in counts.items()]
    rows.sort(key=lambda row: PARTS.index(row.name) if row.name in PARTS else -row.bytes)
    for suffix in SKIPPED:
        skipped = [tensor for name, tensor in match.skipped.items() if name.endswith(f".{suffix}")]
        if skipped:
            rows.append(Row(f"{suffix} (not used)", 0, len(skipped), 0, sum(tensor.size for tensor in skipped)))
    left = len(checkpoint.tensors) - sum(row.tensors for row in rows)
    if left:
        size = sum(tensor.size for tensor in checkpoint.tensors.values()) - sum(row.bytes for row in rows)
        rows.append(Row("not matched (see below)", 0, left, 0, size))
    return tuple(rows)


def _memory(model: Model, match: Match, cached: int) -> tuple[dict[str, dict[str, int]], int]:
    """Bytes of weights by mode and numerics, and the largest decode. cached: bytes of experts that stream keeps."""
    modules = dict(model.named_modules())
    memory = {mode: {"native": 0, "float32": 0} for mode in ("resident", "packed", "stream")}
    largest = 0
    for plan in match.plans.values():
        owner, _, attribute = plan.name.rpartition(".")
        module, logical = modules[owner], math.prod(plan.shape)
        stored = sum(tensor.size for tensor in plan.tensors)
        for numerics in ("native", "float32"):
            wide = isinstance(module, Linear) and (module.float32 or numerics == "float32")
            dense = 4 * logical if wide else 2 * logical if plan.format else stored
            memory["resident"][numerics] += dense
            memory["packed"][numerics] += stored if plan.format else dense
            if not (attribute == "weight" and isinstance(module, Linear | Embedding)):
                memory["stream"][numerics] += dense
        if isinstance(module, Linear) and attribute == "weight":
            # codes, scaled values and their product in float32, then BF16; a dense one is read and widened
            largest = max(largest, stored + logical * (12 + 2 if plan.format else 4))
    for numerics in ("native", "float32"):
        memory["stream"][numerics] += cached
    return memory, largest


def describe(inventory: Inventory) -> str:
    """The inventory as text."""
    engram = f"; Engram tables as {inventory.engram}" if inventory.engram else ""
    blocks = [f"Checkpoint {inventory.folder}\nFamily     {inventory.family}{engram}\n"
              f"Files      {inventory.shards} shards, {inventory.tensors:,} tensors, {_size(inventory.bytes)}"]
    for title, rows in (("format", inventory.formats), ("part", inventory.parts)):
        columns = ("weights", "tensors", "logical", "bytes")
        total = Row("total", *(sum(getattr(row, name) for row in rows) for name in columns))
        rest = [row for row in rows if row.name == "Engram tables"]
        rest = [Row("total without Engram tables", total.weights - row.weights, total.tensors - row.tensors,
                    total.logical - row.logical, total.bytes - row.bytes) for row in rest]
        blocks.append(_table(title, [*rows, total, *rest]))
    lines = [f"{'memory for weights':<28}{'native':>16}{'float32':>16}"]
    lines += [f"{mode:<28}{_gib(sizes['native']):>16}{_gib(sizes['float32']):>16}"
              for mode, sizes in inventory.memory.items()]
    lines.append("stream includes the experts that it keeps (4 GiB unless load is told otherwise).")
    lines.append(f"packed and stream also need up to {_gib(inventory.largest_decode)} while the largest weight is "
                 "decoded.")
    blocks.append("\n".join(lines))
    problems = inventory.problems
    if problems:
        more = f"\n  ... and {len(problems) - 100} more" if len(problems) > 100 else ""
        blocks.append(f"{len(problems)} problem(s):\n  " + "\n  ".join(problems[:100]) + more)
    else:
        blocks.append("Complete: every parameter of the model is here, nothing is left over.")
    return "\n\n".join(blocks)


def _table(title: str, rows: list[Row]) -> str:
    lines = [f"{title:<36}{'weights':>9}{'tensors':>9}{'logical weights':>18}{'bytes':>18}{'bits/weight':>13}"]
    for row in rows:
        bits = "-" if row.bits is None else f"{row.bits:.4f}"
        lines.append(f"{row.name:<36}{row.weights:>9,}{row.tensors:>9,}{row.logical:>18,}{row.bytes:>18,}{bits:>13}")
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count:,} bytes ({_gib(count)})"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.2f} MiB"
