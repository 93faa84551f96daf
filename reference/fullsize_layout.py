"""Where every tensor of a full-size checkpoint lies: names, types, shapes, shards and offsets. Needs no weights.

What it computes
    1. `Release.of(config)`: the publisher's own layout, from the parameters of the model.
    2. `plan_output(release, format)`: the same for every other format, planned by the converters themselves. For the
       released configuration, tensors and bytes must be the published ones.
    3. `place(release, output)`: shard headers, and for every parameter its position in the files, found by the
       matching that a loader does.
Formats
    native
    nvfp4               NVIDIA: FP8 Engram, an input_scale per expert weight, draft experts as MXFP4
    nvfp4-mxfp4-engram  LibertAI: MXFP4 Engram, draft experts as NVFP4 too, no input_scale
    oq3e-ngram-mtp      oMLX with FP8 Engram
    oq3e-mtp            oMLX with affine Engram
Tests
    tests/test_fullsize.py
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import inference
from inference.checkpoint import Checkpoint
from inference.config import Config, TextConfig
from inference.families import detect_family
from inference.inventory import empty_model
from inference.layers import Linear
from inference.matching import Match, WeightPlan, match_weights
from inference.model import Model
from inference.shards import StoredTensor
from reference import oq
from reference.convert import plan_nvfp4
from reference.jobs import nvfp4_job
from reference.oq_allocation import allocate, modules_of
from reference.shard_writer import Job, Output, Shard, TensorSpec, json_bytes
from reference.source import Source

FORMATS = ("native", "nvfp4", "nvfp4-mxfp4-engram", "oq3e-ngram-mtp", "oq3e-mtp")
# Tensors and bytes of tensors. native, nvfp4: public audits of the shard headers. LibertAI: public count, and bytes
# that agree with its public 399.9 GiB. oq3e-mtp: published quantization report; oq3e-ngram-mtp: the same with the
# release's FP8 table.
PUBLISHED = {
    "native": (96_085, 510_286_023_000), "nvfp4": (188_245, 527_273_322_840),
    "nvfp4-mxfp4-engram": (143_317, 429_390_891_608), "oq3e-ngram-mtp": (2_282, 459_747_934_040),
    "oq3e-mtp": (2_284, 355_296_826_440),
}
RECORD = "fullsize.json"  # in the folder: what was made
RELEASED = Path(inference.__file__).parent / "configs" / "deepseek-v4.1-flash.json"
EXPERT = re.compile(r"((?:layers|mtp)\.\d+)\.ffn\.experts\.(\d+)\.w[123]\.weight")
VISUAL = ("vision.", "aligner.", "image_")
# oMLX: layers whose output projection has 8 bits in the published oQ3e file, beside the last one, the most sensitive.
_SENSITIVE = (6, 7, 12, 14, 15, 16, 17, 18, 26)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of small objects, none of them garbage, take four times as long with the collector."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def disk_bytes(folder: Path) -> int:
    """Bytes that the files of a folder occupy, holes not counted (as `du` counts)."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def native_kind(name: str, module: nn.Module, parameter: Tensor) -> str:
    """How the release stores a parameter: "mxfp4", "fp8_rows", "fp8_blocks", "BF16" or "F32"."""
    if EXPERT.fullmatch(name):
        return "mxfp4"
    if name.endswith(".engram.embed.weight"):
        return "fp8_rows"
    # official: every product with an FP8 input has an FP8 weight; wo_a has one too, with a BF16 input.
    if isinstance(module, Linear) and (module.quantize_input or name.endswith(".wo_a.weight")):
        return "fp8_blocks"
    return "F32" if parameter.dtype == torch.float32 else "BF16"


def native_specs(name: str, kind: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """The stored tensors of a parameter: the weight and, if packed, its scale."""
    if kind in ("BF16", "F32"):
        return (TensorSpec(name, kind, shape),)
    rows, columns = shape
    scale_rows = -(-rows // 32) if kind == "fp8_blocks" else rows
    weight = TensorSpec(name, "I8", (rows, columns // 2)) if kind == "mxfp4" else TensorSpec(name, "F8_E4M3", shape)
    scale = TensorSpec(f"{name.removesuffix('.weight')}.scale", "F8_E8M0", (scale_rows, -(-columns // 32)))
    return weight, scale


def release_shard(name: str, text: TextConfig) -> int:
    """Number of the shard, from 1, of one parameter.

    official: 1-2 vision, aligner and vocabulary; then one per layer; 43-46 draft stages; the last two the Engram parts
    of their layers. ours: what is in 1 and what in 2, and that the heads of the draft stages have the last of theirs.
    """
    layers, stages = text.num_hidden_layers, text.num_nextn_predict_layers
    if name.startswith(VISUAL):
        return 1
    area, number, rest = (*name.split(".", 2), "", "")[:3]
    if area not in ("layers", "mtp"):
        return 2
    if area == "layers":
        engrams = list(text.engram_layer_ids)
        if rest.startswith("engram."):
            return 3 + layers + (stages + 1 if stages else 0) + engrams.index(int(number))
        return 3 + int(number)
    return 3 + layers + (stages if rest.startswith(("markov_head.", "confidence_head.")) else int(number))


@dataclass(frozen=True)
class Release:
    """The release's own layout for a configuration."""

    model: Model  # without weights
    kinds: dict[str, str]  # parameter -> how the release stores it
    output: Output  # its jobs have no values
    source: Source  # the same for converters to plan with; it has no values to read

    @classmethod
    def of(cls, config_json: dict[str, Any], folder: Path = Path()) -> Release:
        """folder: where the checkpoint is to be."""
        with no_garbage_collection():
            model = empty_model(Config.from_dict(config_json))
            modules, text = dict(model.named_modules()), model.config.text_config
            kinds, shards, shapes = {}, {}, {}
            for name, parameter in model.named_parameters():
                kinds[name] = native_kind(name, modules[name.rpartition(".")[0]], parameter)
                shapes[name] = tuple(parameter.shape)
                specs = native_specs(name, kinds[name], shapes[name])
                shards.setdefault(release_shard(name, text), []).append(Job(specs, lambda: iter(())))
            jobs = [shards[number] for number in sorted(shards)]
            output = Output(tuple(Shard(f"model-{number:05d}-of-{len(jobs):05d}.safetensors", tuple(group))
                                  for number, group in enumerate(jobs, 1)), {"config.json": json_bytes(config_json)})
            plans = dict.fromkeys(kinds)  # in the order of the model
            for shard in output.shards:
                path = folder / shard.file
                for job in shard.jobs:
                    tensors = tuple(StoredTensor(spec.name, spec.dtype, spec.shape, path, 0, spec.size)
                                    for spec in job.specs)
                    name = tensors[0].name
                    plans[name] = WeightPlan(name, kinds[name] if len(tensors) > 1 else None, tensors, shapes[name])
            tensors = {tensor.name: tensor for plan in plans.values() for tensor in plan.tensors}
            rounded = frozenset(f"{name}.weight" for name, module in modules.items()
                                if isinstance(module, Linear) and module.quantize_input)
        match = Match(detect_family(model.config, tensors), plans, {}, [])
        return cls(model, kinds, output, _Headers(Checkpoint(folder, tensors), config_json, match, rounded))


class _Headers(Source):
    """A source that is planned with and never read."""

    def identity(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def libertai_output(source: Source) -> Output:
    """NVFP4 with MXFP4 Engram rows, as LibertAI stores it: draft experts are NVFP4 too, nothing has an input_scale."""
    output = plan_nvfp4(source, mxfp4_engram=True, input_scale=None)
    shards = []
    for shard in output.shards:
        jobs: list[Job] = []
        for job in shard.jobs:
            name = job.specs[0].name
            if not re.match(r"mtp\.\d+\.ffn\.experts\.", name):
                jobs.append(job)
            elif name.endswith(".weight"):  # with its scale, which has a job of its own here
                jobs.append(nvfp4_job(source.plans[name], None, None))
        shards.append(Shard(shard.file, tuple(jobs)))
    stated = {**(source.config_json.get("quantization_config") or {}),
              # LibertAI
              "expert_dtype": "nvfp4", "expert_block_size": 16, "expert_scale_fmt": "e4m3", "expert_global_scale": True,
              "engram_dtype": "fp4", "engram_block_size": 32, "engram_scale_fmt": "ue8m0"}
    return Output(tuple(shards), {"config.json": json_bytes({**source.config_json, "quantization_config": stated})})


def oq_output(source: Source, format_name: str) -> Output:
    """oMLX's layout, with bits from layer scores that agree with everything that was published about the real ones."""
    modules = modules_of(source.weights())
    layers = source.config_json["text_config"]["num_hidden_layers"]
    scores = {layer: 0.02 if layer in _SENSITIVE else 0.01 for layer in range(layers)} | {layers - 1: 0.0732}
    return oq.plan(source, modules, allocate(modules, scores), oq.Calibration(scores, None, 0, False),
                   oq.Options.of(format_name, {"fit": "minmax"}))


def plan_output(release: Release, format_name: str) -> Output:
    """All shards and small files of a checkpoint. Nothing is read or written.

    format_name: one of FORMATS. Raises ValueError where the released configuration does not give the published totals.
    """
    with no_garbage_collection():
        if format_name == "native":
            output = release.output
        elif format_name == "nvfp4":
            output = plan_nvfp4(release.source, mxfp4_engram=False, input_scale=1.0)
        elif format_name == "nvfp4-mxfp4-engram":
            output = libertai_output(release.source)
        else:
            output = oq_output(release.source, format_name)
        found, wanted = (output.tensor_count, output.tensor_bytes), PUBLISHED[format_name]
    if release.source.config_json == json.loads(RELEASED.read_text(encoding="utf-8")) and found != wanted:
        raise ValueError(f"Making a full-size checkpoint: {format_name} comes to {found} tensors and bytes, published "
                         f"are {wanted}.")
    return output


@dataclass(frozen=True)
class Layout:
    """A whole checkpoint, planned, and where in its files the weight of every parameter lies."""

    config: Config
    kinds: dict[str, str]  # parameter -> how the release stores it
    output: Output
    headers: dict[str, bytes]  # shard file -> length, JSON
    plans: dict[str, WeightPlan]  # by parameter, as a loader finds them


def place(release: Release, output: Output) -> Layout:
    """Headers and positions of an output, matched with the model as a loader does."""
    folder, headers, tensors = release.source.folder, {}, {}
    for shard in output.shards:
        entries: dict[str, Any] = {"__metadata__": dict(output.shard_metadata)} if output.shard_metadata else {}
        end = 0
        for spec in shard.specs:
            offsets = [end, end + spec.size]
            entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
            end += spec.size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # safetensors: tensor data starts at a multiple of 8
        headers[shard.file], path = struct.pack("<Q", len(text)) + text, folder / shard.file
        for spec in shard.specs:
            start = len(headers[shard.file]) + entries[spec.name]["data_offsets"][0]
            tensors[spec.name] = StoredTensor(spec.name, spec.dtype, spec.shape, path, start, spec.size)
    config = Config.from_dict(json.loads(output.files["config.json"]))
    model = copy.copy(release.model)
    model.config = config
    with no_garbage_collection():
        match = match_weights(model, Checkpoint(folder, tensors))
    assert not match.problems, f"the planned checkpoint would not load: {match.problems[:5]}"
    return Layout(config, release.kinds, output, headers, match.plans)
