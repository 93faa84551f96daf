"""Reading a checkpoint folder, strictly, and putting its weights into a model.

What it does
    1. `Checkpoint.open(folder)`: parses `model.safetensors.index.json` and the header of every shard (or one
       `model.safetensors`), and checks files against the index and against their own sizes. Nothing is read but headers.
    2. `plan_weights(model, checkpoint)`: matches stored tensors with the model's parameters, both ways. The format of every weight
       is decided from its header: dtype, last dimension, companion scale and its shape. Never from a name or the config.
    3. `load(folder)`: builds the model on the meta device, reads, checks scales for NaN, assigns.
    All problems of a step are collected and raised as one `ValueError`; a model is returned whole or not at all.
Weights in memory
    "resident": dequantized to BF16 at load (float32 where the product is float32).
    "packed":   kept as stored and decoded when used. Both give the same BF16 values, so outputs are bit-equal.
Mirrors
    official: the conversion and loading scripts of the official inference code (names are the checkpoint's, unchanged).
Tests
    tests/test_checkpoint.py
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from inference.config import Config
from inference.engram import Engram
from inference.layers import Embedding, Linear
from inference.model import Model
from inference.numerics import Numerics
from inference.quant import FORMATS, PackedWeight
from inference.tokenizer import Tokenizer, check_class_count, fold_vocabulary

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool, "U32": torch.uint32,
}
WEIGHT_MODES = ("resident", "packed")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """All problems that one step of loading found. `problems` has every one; the text shows the first hundred."""

    def __init__(self, action: str, problems: list[str], advice: str) -> None:
        self.problems = list(problems)
        shown = "\n  ".join(self.problems[:100])
        more = f"\n  ... and {len(self.problems) - 100} more" if len(self.problems) > 100 else ""
        super().__init__(f"{action}: {len(self.problems)} problem(s).\n  {shown}{more}\n{advice}")


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a shard header."""

    name: str
    dtype: str  # safetensors tag
    shape: tuple[int, ...]
    shard: Path
    offset: int  # bytes from the start of the file
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def read(self) -> Tensor:
        """A copy of the tensor in memory."""
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            data = bytearray(file.read(self.size))
        if len(data) != self.size:
            raise ValueError(f"Reading {self.name}: {self.shard} ended after {len(data)} of {self.size} bytes. The file "
                             "changed since it was opened; copy it again.")
        if not data:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint folder, checked against each other."""

    folder: Path
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read all headers. Raises CheckpointError listing absent or truncated shards, duplicates and index mismatches."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"Opening a checkpoint: {folder} is not a folder. Give the folder that holds config.json and "
                             f"{INDEX}.")
        problems: list[str] = []
        index = _read_index(folder)
        if index is None and not (folder / SINGLE).is_file():
            raise ValueError(f"Opening a checkpoint: {folder} has neither {INDEX} nor {SINGLE}. Is the download complete?")
        shards = sorted(set(index.values())) if index is not None else [SINGLE]
        tensors: dict[str, StoredTensor] = {}
        for shard in shards:
            path = folder / shard
            if not path.is_file():
                listed = sum(1 for value in index.values() if value == shard)
                problems.append(f"{shard}: absent, but the index lists {listed} tensors in it")
                continue
            for tensor in _read_header(path, problems):
                if tensor.name in tensors:
                    problems.append(f"{tensor.name}: in two shards, {tensors[tensor.name].shard.name} and {shard}")
                elif index is not None and tensor.name not in index:
                    problems.append(f"{tensor.name}: in {shard}, but not in the index")
                tensors[tensor.name] = tensor
        if index is not None and not problems:
            for name, shard in index.items():
                if name not in tensors:
                    problems.append(f"{name}: the index says it is in {shard}, but it is not there")
                elif tensors[name].shard.name != shard:
                    problems.append(f"{name}: the index says {shard}, but it is in {tensors[name].shard.name}")
        if problems:
            raise CheckpointError(f"Opening the checkpoint {folder}", problems,
                                  "Compare the files with the published ones and copy the bad ones again.")
        return cls(folder, tensors)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard file name, or None when there is no index file."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_pairs)
        weight_map = pairs["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map is not an object of strings")
        outside = [shard for shard in weight_map.values() if Path(shard).name != shard]
        if outside:
            raise ValueError(f"shard {outside[0]!r} is not a plain file name")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Opening a checkpoint: {path} is not a valid index ({error}). Copy it again.") from None
    return weight_map


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return seen


def _read_header(path: Path, problems: list[str]) -> list[StoredTensor]:
    """Entries of one shard. A file that is not exactly header plus tensors is a problem, found before any tensor is read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, 100_000_000):
            problems.append(f"{path.name}: {size} bytes, too short for a safetensors header or not a safetensors file")
            return []
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique_pairs)
        except ValueError as error:
            problems.append(f"{path.name}: its header is not valid JSON ({error})")
            return []
    tensors, end = [], 0
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            wanted = math.prod(shape) * DTYPES[dtype].itemsize
        except (KeyError, TypeError, ValueError):
            problems.append(f"{name}: {path.name} describes it as {entry}, which this reader does not know")
            continue
        if stop - start != wanted:
            problems.append(f"{name}: {path.name} gives it {stop - start} bytes, but {dtype} {list(shape)} needs {wanted}")
        end = max(end, stop)
        tensors.append(StoredTensor(name, dtype, shape, path, 8 + length + start, stop - start))
    if size != 8 + length + end:
        state = "truncated" if size < 8 + length + end else "too long"
        problems.append(f"{path.name}: {state}, {size} bytes, its header describes {8 + length + end}")
    return tensors


# --- matching tensors with parameters --------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightPlan:
    """Where one parameter comes from."""

    name: str  # parameter name = tensor name
    format: str | None  # key of quant.FORMATS, or None for a plain tensor
    tensors: tuple[StoredTensor, ...]  # the weight and its companions
    shape: tuple[int, ...]  # logical


def plan_weights(model: Model, checkpoint: Checkpoint) -> dict[str, WeightPlan]:
    """Match every parameter with stored tensors, both ways. Raises CheckpointError with every mismatch."""
    modules = dict(model.named_modules())
    left = dict(checkpoint.tensors)
    plans, problems = {}, []
    for name, parameter in model.named_parameters():
        stored = left.pop(name, None)
        if stored is None:
            problems.append(f"{name}: missing, wanted {list(parameter.shape)}")
            continue
        owner_name, _, attribute = name.rpartition(".")
        allowed = _allowed_formats(modules[owner_name], attribute, name)
        companion_name = f"{name.removesuffix('.weight')}.scale"
        scale = left.pop(companion_name, None) if stored.dtype in ("F8_E4M3", "I8") else None
        found = _detect_format(stored, scale, tuple(parameter.shape), parameter.dtype)
        if found not in allowed:
            wanted = ", ".join(_describe(kind, parameter) for kind in allowed)
            scale_text = f" with scale {scale}" if scale is not None else ""
            problems.append(f"{name}: wanted {wanted}; got {stored}{scale_text}")
            continue
        tensors = (stored,) if scale is None else (stored, scale)
        plans[name] = WeightPlan(name, None if found == "plain" else found, tensors, tuple(parameter.shape))
    problems += [f"{name}: unexpected, {tensor}" for name, tensor in left.items()]
    if problems:
        raise CheckpointError(f"Matching {checkpoint.folder} with its configuration", problems,
                              "Nothing was loaded. Is config.json the one of these weights, and is every shard present?")
    return plans


def _allowed_formats(module: nn.Module, attribute: str, name: str) -> tuple[str, ...]:
    """Formats in which the release, or a lossless conversion of it, stores this parameter."""
    if isinstance(module, Linear) and attribute == "weight":
        if module.quantize_input or name.endswith("attn.wo_a.weight"):
            return ("fp8_blocks", "mxfp4", "plain")
    if isinstance(module, Embedding) and name.endswith("engram.embed.weight"):
        return ("fp8_rows", "plain")
    return ("plain",)


def _detect_format(stored: StoredTensor, scale: StoredTensor | None, shape: tuple[int, ...],
                   dtype: torch.dtype) -> str | None:
    """The format that dtype, shape and scale describe for a parameter of this logical shape; None if they fit none.

    Packed FP4 is tagged I8 and half as wide: [R, C/2] over a scale [R, C/32] is 32 elements per scale, not 16.
    """
    if scale is None:
        return "plain" if stored.shape == shape and DTYPES[stored.dtype] == dtype else None
    if len(shape) != 2 or scale.dtype != "F8_E8M0":
        return None
    rows, columns = shape
    blocks = -(-columns // 32)
    if stored.dtype == "F8_E4M3" and stored.shape == shape:
        if scale.shape == (-(-rows // 32), blocks):
            return "fp8_blocks"
        if scale.shape == (rows, blocks) and columns % 32 == 0:
            return "fp8_rows"
    if stored.dtype == "I8" and stored.shape == (rows, columns // 2) and scale.shape == (rows, blocks):
        return "mxfp4" if columns % 32 == 0 else None
    return None


def _describe(kind: str, parameter: Tensor) -> str:
    rows_columns = list(parameter.shape)
    if kind == "plain":
        return f"{'F32' if parameter.dtype == torch.float32 else 'BF16'} {rows_columns}"
    return f"{FORMATS[kind].name} of {rows_columns}"


# --- loading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: stored tensors and bytes, by format."""

    folder: Path
    tokenizer: str  # where the tokenizer came from
    tensors: int
    bytes: int
    formats: dict[str, int]  # format -> weights


def load(path: str | Path, device: torch.device | str = "cpu", numerics: str = "native", fake_quant: bool = True, *,
         weights: str = "resident", as_published_index_keys: bool = False) -> Model:
    """The model of a checkpoint folder, ready to run, without gradients.

    numerics: native, dequantized or float32 (numerics.py). fake_quant: quantize-dequantize of KV and index caches.
    weights: resident (dequantized once) or packed (as stored, decoded at use); outputs are bit-equal.
    as_published_index_keys: reproduce the official decode-time index-key slot (attention.py), for parity runs only.
    Raises ValueError (CheckpointError for the files) naming everything that is wrong; never returns a partial model.
    """
    if weights not in WEIGHT_MODES:
        raise ValueError(f"Loading {path}: weights must be one of {', '.join(WEIGHT_MODES)}, got {weights!r}.")
    mode = Numerics.of(numerics, fake_quant)
    device = _device(device)
    checkpoint = Checkpoint.open(path)
    config = Config.from_file(checkpoint.folder)
    tokenizer = Tokenizer.load(checkpoint.folder)
    tokenizer.check_vocab_size(config.text_config.vocab_size)
    folded = None
    if config.text_config.engram_layer_ids:
        classes = fold_vocabulary(tokenizer, config.text_config.vocab_size)
        check_class_count(classes, config.text_config.engram_compressed_vocab_size, tokenizer)
        folded = torch.from_numpy(classes)
    with torch.device("meta"):
        model = Model(config, mode, folded)
    plans = plan_weights(model, checkpoint)
    _assign(model, plans, device, mode, weights)
    model.as_published_index_keys = as_published_index_keys
    formats: dict[str, int] = {}
    for plan in plans.values():
        label = FORMATS[plan.format].name if plan.format else plan.tensors[0].dtype
        formats[label] = formats.get(label, 0) + 1
    stored = checkpoint.tensors.values()
    model.load_report = LoadReport(checkpoint.folder, tokenizer.source, len(stored), sum(t.size for t in stored), formats)
    return model.eval()


def _device(device: torch.device | str) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Choosing the device: {device!r} is not usable here ({str(error).splitlines()[0]}). Try cpu.") \
            from None
    return chosen


def _assign(model: Model, plans: dict[str, WeightPlan], device: torch.device, numerics: Numerics, weights: str) -> None:
    """Read every planned tensor and put it in place. All values are checked before any is kept."""
    problems: list[str] = []
    values = {}
    for plan in tqdm(plans.values(), desc="reading weights", unit="tensor", disable=None, leave=False):
        tensors = tuple(tensor.read() for tensor in plan.tensors)
        problems += _value_problems(plan, tensors)
        if plan.format is None:
            values[plan.name] = tensors[0]
        else:
            packed = PackedWeight(FORMATS[plan.format], tensors, plan.shape)
            values[plan.name] = packed if weights == "packed" else packed.dequantize()
    if problems:
        raise CheckpointError("Reading the weights", problems, "Nothing was loaded. Copy the named shards again.")
    for name, value in values.items():
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        del module._parameters[attribute]
        if isinstance(value, PackedWeight):
            setattr(module, attribute, value.to(device))
        else:
            if isinstance(module, Linear) and (module.float32 or numerics.dtype == torch.float32):
                value = value.to(torch.float32)  # widen once instead of at every use; the values stay the same
            module.register_parameter(attribute, nn.Parameter(value.to(device), requires_grad=False))
    for module in model.modules():
        if isinstance(module, Engram) and not isinstance(module.embed.weight, (PackedWeight, nn.Parameter)):
            raise AssertionError("an Engram table was not assigned")


def _value_problems(plan: WeightPlan, tensors: tuple[Tensor, ...]) -> list[str]:
    """Values that no weight may have: NaN codes in E8M0 scales and E4M3 weights, NaN or infinity in plain tensors."""
    problems = []
    for stored, tensor in zip(plan.tensors, tensors):
        if stored.dtype == "F8_E8M0":
            bad, what = tensor.view(torch.uint8) == 255, "scale byte 255 (NaN)"
        elif stored.dtype == "F8_E4M3":
            bad, what = (tensor.view(torch.uint8) & 0x7F) == 0x7F, "code 0x7F (NaN)"
        elif tensor.dtype.is_floating_point:
            bad, what = ~torch.isfinite(tensor), "NaN or infinity"
        else:
            continue
        if bool(bad.any()):
            where = [int(i) for i in bad.nonzero()[0]]
            problems.append(f"{stored.name}: {what} at {where} in {stored.shard.name}")
    return problems
