"""Reading a checkpoint folder, strictly, and putting its weights into a model.

    python -m inference.checkpoint DIR [--json] [--engram-dir DIR]      what is there, what is missing, memory per mode

What it does
    1. `Checkpoint.open(folder)`: parses `model.safetensors.index.json` and the header of every shard (or one
       `model.safetensors`), and checks files against the index and against their own sizes. Nothing is read but
       headers.
    2. `whole_match(model, checkpoint)`: matches stored tensors with the model's parameters, both ways (matching.py).
       Names follow from the family (families.py), the format of every weight from its header: dtype, shape, companions.
    3. `load(folder)`: builds the model on the meta device, reads, checks values, assigns.
    All problems of a step are collected and raised as one `ValueError`; a model is returned whole or not at all.
Where the weights are
    "resident": dequantized to BF16 at load (float32 where the product is float32).
    "packed":   in memory as stored, decoded when used.
    "stream":   on disk, read and decoded when used (streaming.py); norms, router and biases are in memory.
    All give the same BF16 values, so outputs are bit-equal on a CPU. On CUDA the products of the experts are grouped
    (experts.py), in another way in each mode, so a BF16 rounding may fall to the other side.
Mirrors
    official: the conversion and loading scripts of the official inference code (names are the checkpoint's, unchanged).
Tests
    tests/test_checkpoint.py, tests/test_families.py, tests/test_streaming.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from tqdm import tqdm

from inference.command import BAD_INPUT, Parser, run
from inference.config import Config, unique_pairs
from inference.context import GPU_MEMORY_BUDGET
from inference.families import SKIPPED
from inference.layers import Embedding, Linear
from inference.matching import Match, WeightPlan, match_weights
from inference.model import Model
from inference.moe import stack_experts
from inference.numerics import Numerics
from inference.quant import FORMATS, PackedWeight
from inference.shards import StoredTensor, read_header
from inference.streaming import DEFAULT_EXPERT_CACHE, Stream, StreamedWeight, weight_problems
from inference.tokenizer import Tokenizer, check_class_count, fold_vocabulary

if TYPE_CHECKING:
    from inference.parallel import Ranks

WEIGHT_MODES = ("resident", "packed", "stream")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNFINISHED = "conversion.inprogress.json"  # oMLX, and our converter: the export was interrupted


class CheckpointError(ValueError):
    """All problems that one step of loading found. `problems` has every one; the text shows the first hundred."""

    def __init__(self, action: str, problems: list[str], advice: str) -> None:
        self.problems = list(problems)
        shown = "\n  ".join(self.problems[:100])
        more = f"\n  ... and {len(self.problems) - 100} more" if len(self.problems) > 100 else ""
        super().__init__(f"{action}: {len(self.problems)} problem(s).\n  {shown}{more}\n{advice}")


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint folder, checked against each other."""

    folder: Path
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: str | Path, engram_dir: str | Path | None = None) -> Checkpoint:
        """Read all headers. Raises CheckpointError listing absent or truncated shards, duplicates and index mismatches.

        engram_dir: where the shards with Engram tables are, if not in the folder itself; shards that are not there are
        taken from the folder.
        """
        checkpoint, problems = cls.survey(folder, engram_dir)
        if problems:
            raise CheckpointError(f"Opening the checkpoint {checkpoint.folder}", problems,
                                  "Compare the files with the published ones and copy the bad ones again.")
        return checkpoint

    @classmethod
    def survey(cls, folder: str | Path, engram_dir: str | Path | None = None) -> tuple[Checkpoint, list[str]]:
        """Like `open`, but returns what is there, and the problems. Raises ValueError if there is no checkpoint."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"Opening a checkpoint: {folder} is not a folder. Give the folder that holds config.json "
                             f"and {INDEX}.")
        if (folder / UNFINISHED).exists():
            raise ValueError(f"Opening a checkpoint: {folder} has a file {UNFINISHED}, so its export was interrupted. "
                             "Finish the export, or copy the folder again.")
        problems: list[str] = []
        index = _read_index(folder)
        if index is None and not (folder / SINGLE).is_file():
            raise ValueError(f"Opening a checkpoint: {folder} has neither {INDEX} nor {SINGLE}. Is the download "
                             "complete?")
        if index is not None:
            index = _with_table_files(index, folder, problems)
        elsewhere = _engram_shards(index, folder, engram_dir)
        listed: dict[str, set[str]] = {}
        for name, shard in (index or {}).items():
            listed.setdefault(shard, set()).add(name)
        tensors: dict[str, StoredTensor] = {}
        for shard in sorted(listed) if index is not None else [SINGLE]:
            path = elsewhere.get(shard, folder / shard)
            if not path.is_file():
                problems.append(f"{shard}: absent, but the index lists {len(listed[shard])} tensors in it")
                continue
            found = read_header(path, problems)
            names = {tensor.name for tensor in found}
            other = _shard_of(names, listed) if index is not None and names != listed[shard] else None
            if other is not None:
                problems.append(f"{shard}: holds the tensors that the index lists in {other}; the file was replaced or "
                                "renamed")
                continue
            for tensor in found:
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
        return cls(folder, tensors), problems


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> shard file name, or None when there is no index file."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_pairs)
        weight_map = pairs["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map is not an object of strings")
        outside = [shard for shard in weight_map.values() if Path(shard).name != shard]
        if outside:
            raise ValueError(f"shard {outside[0]!r} is not a plain file name")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"Opening a checkpoint: {path} is not a valid index ({error}). Copy it again.") from None
    return weight_map


def _shard_of(names: set[str], listed: dict[str, set[str]]) -> str | None:
    return next((shard for shard, wanted in listed.items() if wanted == names), None)


def _with_table_files(index: dict[str, str], folder: Path, problems: list[str]) -> dict[str, str]:
    """The index plus the Engram tables that config.json of an oMLX export names with their files."""
    try:
        section = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("omlx_deepseek_v41", {})
        tables = section.get("engram_tables", {}).values()
        named = {entry[f"{part}_key"]: entry.get(f"{part}_file", entry["weight_file"]) for entry in tables
                 for part in ("weight", "scale", "bias") if entry.get(f"{part}_key")}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return index  # config.json is read in full, with proper errors, by Config.from_file
    for name, file in named.items():
        if Path(str(file)).name != file:
            problems.append(f"{name}: engram_tables puts it in {file!r}, which is no plain file name")
        elif index.get(name, file) != file:
            problems.append(f"{name}: the index says {index[name]}, engram_tables in config.json says {file}")
    return {**named, **index}


def _engram_shards(index: dict[str, str] | None, folder: Path, engram_dir: str | Path | None) -> dict[str, Path]:
    """Shard name -> path, for the shards with Engram tables that lie in `engram_dir`."""
    if engram_dir is None:
        return {}
    shards = {shard for name, shard in (index or {}).items() if ".engram.embed." in name}
    found = {shard: Path(engram_dir) / shard for shard in shards if (Path(engram_dir) / shard).is_file()}
    if not found:
        wanted = ", ".join(sorted(shards)) or "a shard with an Engram table, but the index lists none"
        raise ValueError(f"Opening a checkpoint: the Engram folder {engram_dir} holds no table of {folder}. Wanted "
                         f"{wanted}.")
    return found


# --- matching tensors with parameters --------------------------------------------------------------------------


def whole_match(model: Model, checkpoint: Checkpoint) -> Match:
    """Match every parameter with stored tensors, both ways. Raises CheckpointError with every mismatch."""
    match = match_weights(model, checkpoint)
    if match.problems:
        raise CheckpointError(
            f"Matching {checkpoint.folder} with its configuration", match.problems,
            "Nothing was loaded. Is config.json the one of these weights, and is every shard present?")
    return match


# --- loading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: stored tensors and bytes, by format."""

    folder: Path
    tokenizer: str  # where the tokenizer came from
    tensors: int
    bytes: int
    formats: dict[str, int]  # format -> weights
    family: str = "native (DeepSeek)"
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> stored tensors that were not used


def load(path: str | Path, device: torch.device | str = "cpu", numerics: str = "native", fake_quant: bool = True, *,
         weights: str = "resident", as_published_index_keys: bool = False, engram_dir: str | Path | None = None,
         expert_cache: int = DEFAULT_EXPERT_CACHE, progress: bool | None = None, ranks: Ranks | None = None) -> Model:
    """The model of a checkpoint folder, ready to run, without gradients.

    numerics: native, dequantized or float32 (numerics.py). fake_quant: quantize-dequantize of KV and index caches.
    weights: resident (dequantized once), packed (as stored, decoded at use) or stream (on disk, read at use); outputs
    are bit-equal on a CPU. as_published_index_keys: reproduce the official decode-time index-key slot (attention.py),
    for parity runs. engram_dir: folder of the shards with Engram tables, if they are on another disk. expert_cache:
    bytes of packed experts that stream keeps. progress: bars on stderr; None shows them on a terminal only. ranks:
    processes that share the model; every one of them makes this call and reads its own part (parallel.py).
    Raises ValueError (CheckpointError for the files) naming everything that is wrong; never returns a partial model.
    """
    if weights not in WEIGHT_MODES:
        raise ValueError(f"Loading {path}: weights must be one of {', '.join(WEIGHT_MODES)}, got {weights!r}.")
    mode = Numerics.of(numerics, fake_quant)
    device = _device(device)
    if ranks is not None:
        from inference import parallel  # only then: it imports torch.distributed
        parallel.check_world_size(Config.from_file(path), ranks.size)
    checkpoint = Checkpoint.open(path, engram_dir)
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
    match = whole_match(model, checkpoint)
    stream = Stream(config.text_config.num_hidden_layers, expert_cache, progress) if weights == "stream" else None
    plans = match.plans if ranks is None else parallel.split(model, match.plans, ranks)
    _assign(model, plans, device, mode, weights == "packed", stream, progress)
    if ranks is not None:
        parallel.connect(model, ranks)
    if device.type == "cuda":
        stack_experts(model)
        model.memory_budget = GPU_MEMORY_BUDGET
    if stream is not None:
        stream.show_progress(model)
    model.as_published_index_keys = as_published_index_keys
    formats: dict[str, int] = {}
    for plan in match.plans.values():
        label = FORMATS[plan.format].name if plan.format else plan.tensors[0].dtype
        formats[label] = formats.get(label, 0) + 1
    skipped: dict[str, int] = {}
    for name in match.skipped:
        suffix = name.rpartition(".")[2]
        reason = f"{suffix}: {SKIPPED[suffix]}"
        skipped[reason] = skipped.get(reason, 0) + 1
    stored = checkpoint.tensors.values()
    size = sum(tensor.size for tensor in stored)
    model.load_report = LoadReport(checkpoint.folder, tokenizer.source, len(stored), size, formats, match.family.title,
                                   skipped)
    return model.eval()


def _device(device: torch.device | str) -> torch.device:
    try:
        chosen = torch.device(device)
        if chosen.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"Choosing the device: {device!r} is not usable here ({str(error).splitlines()[0]}). Try "
                         "cpu.") from None
    return chosen


def _assign(model: Model, plans: dict[str, WeightPlan], device: torch.device, numerics: Numerics, packed: bool,
            stream: Stream | None, progress: bool | None) -> None:
    """Put every planned weight in place. What is read now is checked before any of it is kept."""
    problems: list[str] = []
    values: dict[str, Tensor | PackedWeight | StreamedWeight] = {}
    modules = dict(model.named_modules())
    disable = None if progress is None else not progress
    for plan in tqdm(plans.values(), desc="reading weights", unit="tensor", disable=disable, leave=False):
        owner, _, attribute = plan.name.rpartition(".")
        if stream is not None and attribute == "weight" and isinstance(modules[owner], Linear | Embedding):
            values[plan.name] = StreamedWeight(plan.name, plan.format, plan.tensors, plan.shape, stream)
            continue
        tensors = tuple(tensor.read() for tensor in plan.tensors)
        problems += weight_problems(plan.format, plan.tensors, tensors)
        if plan.format is None:
            values[plan.name] = tensors[0]
        else:
            weight = PackedWeight(FORMATS[plan.format], tensors, plan.shape)
            values[plan.name] = weight if packed else weight.dequantize()
    if problems:
        raise CheckpointError("Reading the weights", problems, "Nothing was loaded. Copy the named shards again.")
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        module = modules[owner]
        del module._parameters[attribute]
        if not isinstance(value, Tensor):
            setattr(module, attribute, value.to(device))
        else:
            if isinstance(module, Linear) and (module.float32 or numerics.dtype == torch.float32):
                value = value.to(torch.float32)  # widen once instead of at every use; the values stay the same
            module.register_parameter(attribute, nn.Parameter(value.to(device), requires_grad=False))
    left = [name for name, _ in model.named_parameters() if name not in values]
    assert not left, f"parameters without a value: {left[:5]}"


# --- command line ----------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Print what a folder holds, from headers and config.json. Returns 0 if they are complete and fit, 3 if not.

    Values are read by `load` only: it also refuses NaN in weights and scales, and a tokenizer that does not fit.
    """
    from inference.inventory import describe, take_inventory  # it imports this module

    parser = Parser(prog="python -m inference.checkpoint", description="What a checkpoint folder holds.")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--engram-dir", metavar="DIR", help="where the shards with the Engram tables are")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args(arguments)
    try:
        inventory = take_inventory(options.folder, options.engram_dir)
    except ValueError as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(error, file=sys.stderr)
        return 3
    def show() -> int:
        print(json.dumps(inventory.to_dict(), indent=1) if options.json else describe(inventory))
        return BAD_INPUT if inventory.problems else 0

    return run(show)


if __name__ == "__main__":
    sys.exit(main())
