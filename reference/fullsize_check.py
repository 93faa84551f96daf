"""Load a full-size checkpoint that has no real weights, run it, and measure: `python -m reference.fullsize check DIR`.

What it does
    Loads DIR strictly in stream mode; runs a prompt of 8 tokens, two decode steps with given tokens, and one draft.
What must hold
    Tensors and bytes are the published ones. Embedding and Engram rows are those that were drawn, logits are finite and
    zero exactly where the head is a hole, and the experts with the large bias are chosen.
What it measures
    Seconds and bytes by part of the model, from a wrapper around each streamed weight and hooks around each Linear; the
    peak of resident memory of the whole process.
Tests
    tests/test_fullsize.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inference.checkpoint import load
from inference.config import Config
from inference.layers import Linear
from inference.model import Model
from inference.quant import FORMATS as WEIGHT_FORMATS
from inference.quant import PackedWeight
from inference.streaming import DEFAULT_EXPERT_CACHE, StreamedWeight
from inference.tokenizer import Tokenizer
from reference.fullsize_data import PROMPT, STEPS, RealData, convert
from reference.fullsize_layout import PUBLISHED, RECORD, RELEASED, disk_bytes, no_garbage_collection


# --- measuring ---------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Seconds and bytes of one part of the model."""

    reads: int = 0  # weights, or gathers of rows
    bytes: int = 0  # from disk
    read: float = 0.0  # seconds
    decode: float = 0.0
    product: float = 0.0


class _TimedWeight(StreamedWeight):
    """A streamed weight that notes what reading and decoding it costs."""

    def __init__(self, weight: StreamedWeight, part: Part) -> None:
        super().__init__(weight.name, weight.key, weight.stored, weight.shape, weight.stream, weight.device)
        self.plain, self.part = weight, part

    def dequantize(self) -> Tensor:
        return self._timed(super().dequantize)

    def rows(self, index: Tensor) -> Tensor:
        reader = super().rows
        return self._timed(lambda: reader(index))

    def _timed(self, reader: Callable[[], Tensor]) -> Tensor:
        part, start, decoded, size = self.part, time.perf_counter(), self.part.decode, self.stream.read_bytes
        values = reader()
        part.read += time.perf_counter() - start - (part.decode - decoded)
        part.reads += 1
        part.bytes += self.stream.read_bytes - size
        return values

    def _values(self, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        start = time.perf_counter()
        values = super()._values(tensors, shape)
        self.part.decode += time.perf_counter() - start
        return values


def part_of(name: str) -> str:
    """Which row of the table a weight belongs to."""
    rules = ((r".*\.engram\.embed\.", "Engram rows"), (r".*\.engram\.", "Engram projections"),
             (r"(embed|.*markov_head\.embed)\.", "embedding rows"),
             (r"(head|.*markov_head\.head)\.", "vocabulary heads"),
             (r"mtp\..*\.experts\.", "routed experts, draft"), (r"mtp\.", "other weights, draft"),
             (r".*\.ffn\.experts\.", "routed experts"), (r".*\.shared_experts\.", "shared experts"),
             (r".*\.attn\.", "attention weights"))
    return next((part for pattern, part in rules if re.match(pattern, name)), "other weights")


@contextlib.contextmanager
def _measured(model: Model) -> Iterator[dict[str, Part]]:
    """Parts by name, filled while the model runs inside the block."""
    parts: dict[str, Part] = {}
    owners: dict[nn.Module, Part] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, StreamedWeight):
            owners[module] = parts.setdefault(part_of(weight.name), Part())
            module.weight = _TimedWeight(weight, owners[module])
    began: list[float] = []

    def spent(module: nn.Module) -> float:
        return time.perf_counter() - owners[module].read - owners[module].decode

    def before(module: nn.Module, _: Any) -> None:
        if isinstance(module, Linear) and module in owners:
            began.append(spent(module))

    def after(module: nn.Module, _: Any, __: Any) -> None:
        if isinstance(module, Linear) and module in owners:
            owners[module].product += spent(module) - began.pop()

    hooks = (nn.modules.module.register_module_forward_pre_hook(before),
             nn.modules.module.register_module_forward_hook(after))
    try:
        yield parts
    finally:
        for hook in hooks:
            hook.remove()
        for module in owners:
            module.weight = module.weight.plain


def peak_memory() -> int:
    """Peak of resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# --- running -----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a check found. Seconds by phase and by part."""

    format: str
    tensors: int
    bytes: int
    on_disk: int
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    experts_per_layer: float = 0.0  # distinct routed experts that a layer used for the prompt, mean
    digest: str = ""  # of all logits
    peak: int = 0  # bytes of resident memory, of the whole process
    processor: float = 0.0  # processor seconds of the whole process, all threads


class _Seen:
    """Observer: keeps what the check compares."""

    def __init__(self) -> None:
        self.embedded: list[Tensor] = []
        self.rows: dict[str, list[Tensor]] = {}
        self.hashes: dict[str, list[Tensor]] = {}
        self.experts: dict[str, list[Tensor]] = {}

    def __call__(self, point: str, value: Tensor) -> None:
        layer, _, last = point.rpartition(".")
        if point == "embed":
            self.embedded.append(value[0])
        elif point.endswith(".engram.rows"):
            self.rows.setdefault(layer, []).append(value[0])
        elif point.endswith(".engram.hash_ids"):
            self.hashes.setdefault(layer, []).append(value[0])
        elif last == "expert_ids":
            self.experts.setdefault(layer.removesuffix(".ffn"), []).append(value[0])


def check(folder: Path, expert_cache: int = DEFAULT_EXPERT_CACHE, progress: bool | None = False) -> Result:
    """Load and run a folder that `fullsize.make` wrote; see the module docstring.

    expert_cache: bytes of packed experts that are kept. Raises ValueError for any other folder, and whatever loading
    raises.
    """
    record = _read_record(folder)
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    with phase("load"), no_garbage_collection():
        model = load(folder, weights="stream", expert_cache=expert_cache, progress=progress)
    real = RealData.choose(model.config, Tokenizer.load(folder), record["seed"])
    tokens, seen, logits = torch.tensor([real.tokens]), _Seen(), []
    with torch.inference_mode(), _measured(model) as parts:
        cache = model.new_cache(1)
        with phase(f"prompt, {PROMPT} tokens"):
            logits.append(model(tokens[:, :PROMPT], cache, observe=seen).logits)
        experts = [len(ids[0].unique()) for ids in seen.experts.values()]
        for step in range(STEPS):
            with phase(f"decode step {step + 1}"):
                at = PROMPT + step
                logits.append(model(tokens[:, at:at + 1], cache, observe=seen).logits)
        if model.mtp:
            with phase("draft"):
                draft = model.draft(logits[-1][:, -1].argmax(-1), cache, observe=seen)
            logits.append(draft.logits)
    report = model.load_report
    found = torch.cat(logits, dim=1)[0]
    result = Result(record["format"], report.tensors, report.bytes, disk_bytes(folder), [], seconds, parts,
                    sum(experts) / max(1, len(experts)), hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16])
    result.problems = [*_total_problems(record, result, model.config), *_value_problems(model, real, seen, found)]
    result.peak, result.processor = peak_memory(), time.process_time()
    return result


def _read_record(folder: Path) -> dict[str, Any]:
    """What `make` noted about the folder."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        numbers = (record["seed"], record["tensors"], record["bytes"])
        if record["format"] not in PUBLISHED or not all(type(number) is int for number in numbers):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"Checking {folder}: it has no {RECORD} of a finished checkpoint. Make one with python -m "
                         "reference.fullsize make.") from None
    return record


def _total_problems(record: dict[str, Any], result: Result, config: Config) -> list[str]:
    wanted = (record["tensors"], record["bytes"])
    released = Config.from_dict(json.loads(RELEASED.read_text(encoding="utf-8")))
    if config.text_config == released.text_config and config.vision_config == released.vision_config:
        wanted = PUBLISHED[record["format"]]
    found = (result.tensors, result.bytes)
    return [] if found == wanted else [f"loaded {found} tensors and bytes, wanted {wanted}"]


def _value_problems(model: Model, real: RealData, seen: _Seen, logits: Tensor) -> list[str]:
    """Whether the run used the weights that were drawn. logits [n, V]: of all steps."""
    problems = []
    if not bool(torch.isfinite(logits).all()):
        problems.append(f"{int((~torch.isfinite(logits)).sum())} of {logits.numel()} logits are not finite")
    is_real = torch.zeros(logits.shape[1], dtype=torch.bool)
    is_real[real.rows["head.weight"]] = True
    if bool((logits[:, ~is_real] != 0).any()) or bool((logits[:, is_real] == 0).any()):
        problems.append("logits are zero in other places than the holes of the head")
    shape = (len(real.rows["embed.weight"]), model.config.text_config.hidden_size)
    table = real.draw("embed.weight", "BF16", shape)[0]
    at = torch.searchsorted(real.rows["embed.weight"], torch.tensor(real.tokens))
    if not torch.equal(torch.cat(seen.embedded), table[at]):
        problems.append("embedding rows differ from the ones that were written")
    for layer in model.layers:
        if layer.engram is not None:
            weight, name = layer.engram.embed.weight, f"{layer.engram.name}.embed.weight"
            shape = (len(real.rows[name]), weight.shape[1])
            stored = convert(weight.key, "fp8_rows", real.draw(name, "fp8_rows", shape))
            values = PackedWeight(WEIGHT_FORMATS[weight.key], stored, shape).dequantize()
            at = torch.searchsorted(real.rows[name], torch.cat(seen.hashes[layer.engram.name]))
            if not torch.equal(torch.cat(seen.rows[layer.engram.name]), values[at]):
                problems.append(f"{name}: rows differ from the ones that were written")
    for layer, ids in real.experts.items():
        chosen = torch.cat(seen.experts[layer])
        missed = [expert for expert in ids if not bool((chosen == expert).any(-1).all())]
        problems += [f"{layer}: expert {expert} was not chosen for every token" for expert in missed]
    return problems


def describe(folder: Path, result: Result) -> str:
    """The result as text."""
    published = " (as published)" if (result.tensors, result.bytes) == PUBLISHED[result.format] else ""
    parts = sorted(result.parts.items(), key=lambda item: -(item[1].read + item[1].decode + item[1].product))
    running = sum(value for name, value in result.seconds.items() if name != "load")
    lines = [f"{folder}: {result.format}, {result.tensors:,} tensors, {result.bytes:,} bytes{published}, "
             f"{result.on_disk / 1e9:.2f} GB on disk", ""]
    lines += [f"{name:<24}{value:>9.1f} s" for name, value in result.seconds.items()]
    lines += ["", f"{'part':<24}{'weights':>9}{'bytes read':>18}{'read s':>9}{'decode s':>10}{'product s':>11}"]
    total = Part()
    for name, part in parts:
        lines.append(_row(name, part))
        for key in vars(total):
            setattr(total, key, getattr(total, key) + getattr(part, key))
    lines.append(_row("all weights", total))
    rest = running - total.read - total.decode - total.product
    lines += [f"{'everything else':<24}{rest:>38.1f}", "",
              f"routed experts per layer, prompt  {result.experts_per_layer:.1f}",
              f"processor time, all threads       {result.processor:.1f} s",
              f"peak resident memory              {result.peak / 2**30:.2f} GiB",
              f"digest of all logits              {result.digest}"]
    lines += ["", *(result.problems or ["Everything that was read is what was written; all logits are finite."])]
    return "\n".join(lines)


def _row(name: str, part: Part) -> str:
    return f"{name:<24}{part.reads:>9,}{part.bytes:>18,}{part.read:>9.1f}{part.decode:>10.1f}{part.product:>11.1f}"
