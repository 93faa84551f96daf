"""The checkpoint that a conversion reads: its weights by parameter name, whatever the family, in bounded pieces.

What it does
    `Source.open(folder)` reads headers and config.json only and checks that nothing is missing or left over. A weight
    is then read whole or in pieces of rows, and every value that no weight may have (NaN codes) is an error. Files are
    opened for reading only.
Tests
    tests/test_convert.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference.checkpoint import Checkpoint, CheckpointError
from inference.config import Config
from inference.context import row_slices
from inference.inventory import empty_model
from inference.layers import Linear
from inference.matching import Match, WeightPlan, match_weights
from inference.quant import FORMATS
from inference.shards import StoredTensor
from inference.streaming import weight_problems
from reference.oq_allocation import Weight

PIECE_BYTES = 1 << 24  # stored bytes read at once; packing a decoded piece takes up to 32 times as much for a moment
TILE = 32  # rows that share a scale in FP8 blocks
COMPANION_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
                   "chat_template.jinja", "LICENSE")


@dataclass(frozen=True)
class Source:
    checkpoint: Checkpoint
    config_json: dict[str, Any]  # in the Hugging Face form
    match: Match
    quantized_inputs: frozenset[str]  # names of the linear weights whose input the release rounds to FP8

    @classmethod
    def open(cls, folder: Path) -> Source:
        """Raises ValueError, naming everything that is missing or does not fit."""
        checkpoint = Checkpoint.open(folder)
        config = Config.from_file(folder)
        model = empty_model(config)
        match = match_weights(model, checkpoint)
        if match.problems:
            raise CheckpointError(f"Reading {folder}", match.problems,
                                  "Nothing was converted. Is the download complete?")
        rounded = frozenset(f"{name}.weight" for name, module in model.named_modules()
                            if isinstance(module, Linear) and module.quantize_input)
        config_json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "text_config" not in config_json:  # the publisher's flat names
            config_json = config.to_dict()
        return cls(checkpoint, config_json, match, rounded)

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def plans(self) -> dict[str, WeightPlan]:
        """By parameter name, in the order of the model."""
        return self.match.plans

    def require_native(self, format_name: str) -> None:
        """Raises ValueError for anything but the publisher's layout."""
        if self.match.family.key != "native":
            raise ValueError(f"Converting {self.folder} to {format_name}: it must be a native checkpoint, this one is "
                             f"{self.match.family.title}. Start from the published files.")

    def weights(self) -> list[Weight]:
        """All weights, for planning."""
        return [Weight(plan.name, plan.shape, plan.format or plan.tensors[0].dtype) for plan in self.plans.values()]

    def identity(self, format_name: str, **options: Any) -> dict[str, Any]:
        """What an interrupted conversion is compared by: format, options, header entries, when shards were written."""
        digest = hashlib.sha256()
        for tensor in sorted(self.checkpoint.tensors.values(), key=lambda tensor: tensor.name):
            digest.update(f"{tensor.name} {tensor} {tensor.shard.name} {tensor.offset}\n".encode())
        for shard in sorted({tensor.shard for tensor in self.checkpoint.tensors.values()}):
            digest.update(f"{shard.name} {shard.stat().st_mtime_ns}\n".encode())
        digest.update(json.dumps(self.config_json, sort_keys=True).encode())
        return {"format": format_name, "source": digest.hexdigest(), **options}

    def plain_config(self) -> dict[str, Any]:
        """config.json without any statement about formats."""
        drop = {"quantization", "quantization_config", "omlx_deepseek_v41"}
        return {key: value for key, value in self.config_json.items() if key not in drop}

    def companion_files(self) -> dict[str, bytes]:
        """Tokenizer and other small files that go along unchanged."""
        return {name: (self.folder / name).read_bytes() for name in COMPANION_FILES if (self.folder / name).is_file()}


def read(plan: WeightPlan) -> tuple[Tensor, ...]:
    """The stored tensors of one weight. Raises ValueError for values that no weight may have."""
    return _checked(plan.format, plan.tensors)


def read_pieces(plan: WeightPlan, budget: int = PIECE_BYTES) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(first row, stored tensors of consecutive rows from there); all at once where rows cannot be cut (NVFP4)."""
    if plan.format is not None and plan.format != "fp8_blocks" and not FORMATS[plan.format].rowwise:
        yield 0, read(plan)
        return
    unit = TILE if plan.format == "fp8_blocks" else 1  # rows that must stay together
    units = -(-plan.shape[0] // unit)
    for piece in row_slices(units, sum(tensor.size for tensor in plan.tensors) // max(1, units), budget):
        rows = slice(piece.start * unit, min(piece.stop * unit, plan.shape[0]))
        weight, *companions = plan.tensors
        parts = (_rows(weight, rows), *(_rows(tensor, piece) for tensor in companions))
        yield rows.start, _checked(plan.format, parts, rows)


def copy_pieces(stored: StoredTensor, budget: int = PIECE_BYTES) -> Iterator[tuple[int, Tensor]]:
    """(first index, values of consecutive indices from there) of one stored tensor of a native checkpoint."""
    if not stored.shape:
        yield 0, _checked(None, (stored,))[0]
        return
    for rows in row_slices(stored.shape[0], stored.size // max(1, stored.shape[0]), budget):
        yield rows.start, _checked(None, (_rows(stored, rows),), rows)[0]


def decode(plan: WeightPlan, tensors: tuple[Tensor, ...]) -> Tensor:
    """Values of `read` or of one of `read_pieces`: BF16, or F32 where that is how the weight is stored."""
    return tensors[0] if plan.format is None else FORMATS[plan.format].decode(*tensors)


def _rows(tensor: StoredTensor, piece: slice) -> StoredTensor:
    """Consecutive rows of a stored tensor, as one."""
    step = tensor.size // tensor.shape[0]
    count = piece.stop - piece.start
    return dataclasses.replace(tensor, shape=(count, *tensor.shape[1:]), offset=tensor.offset + piece.start * step,
                               size=count * step)


def _checked(key: str | None, stored: tuple[StoredTensor, ...], piece: slice | None = None) -> tuple[Tensor, ...]:
    tensors = tuple(tensor.read() for tensor in stored)
    rows = None if piece is None else torch.arange(piece.start, piece.stop)
    problems = weight_problems(key, stored, tensors, rows)
    if problems:
        raise ValueError("Reading the source:\n  " + "\n  ".join(problems) + "\nCopy the named shards again.")
    return tensors
