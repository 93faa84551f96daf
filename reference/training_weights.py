"""Weights in training: float32 masters beside a model that holds what the file would hold.

What it does
    `Masters` keeps a float32 value for every parameter. `publish` rounds them to their published formats (FP8 tiles, packed
    FP4, FP8 rows, BF16) and puts the rounded values into the model; the gradient with respect to the rounded weight is
    taken for the master (straight-through), so the model that is trained is bit for bit the model that is exported.
    `initial_values` gives the start, `read_masters` the values of a checkpoint, `export` a checkpoint folder.
Formats
    Which tensor has which comes from the layout of `reference/tiny.py`, which is the publisher's.
Mirrors
    report: quantization-aware training to FP4 experts and FP8 linears. The initial values are ours.
Test
    tests/test_train.py
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from inference import quant
from inference.checkpoint import INDEX
from inference.model import Model
from reference.shard_writer import json_bytes
from reference.tiny import random_tensors

SHARD_BYTES = 4_500_000  # ours: small files, so that a repository can hold them
_GROUP = 32


def stored_formats(config: Mapping[str, Any]) -> dict[str, str]:
    """Parameter name -> "bf16", "f32", "fp8_blocks", "fp8_rows" or "mxfp4", for the content of a config.json."""
    formats = {}
    for name, tensor in random_tensors(dict(config), 0).items():
        if name.endswith(".scale"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            formats[name] = "fp8_rows" if name.endswith("engram.embed.weight") else "fp8_blocks"
        else:
            formats[name] = {torch.int8: "mxfp4", torch.bfloat16: "bf16", torch.float32: "f32"}[tensor.dtype]
    return formats


def initial_values(model: Model, seed: int) -> dict[str, Tensor]:
    """Float32 start of every parameter of an empty model, on the CPU. ours throughout.

    Projections have variance 1 / inputs; what writes into the streams starts small. Streams start apart from each other: a
    sub-layer reads mostly one of them, in turn, and every stream carries mostly itself.
    """
    generator = torch.Generator().manual_seed(seed)
    copies = model.config.text_config.hc_mult
    values = {}
    for name, parameter in model.named_parameters():
        shape, last = tuple(parameter.shape), name.rsplit(".", 1)[-1]

        def normal(deviation: float) -> Tensor:
            return torch.randn(shape, generator=generator) * deviation

        if last.startswith("hc_"):
            values[name] = _hyper_connection_start(name, shape, copies, generator)
        elif "norm" in name or last in ("q_weight", "k_weight"):
            values[name] = torch.ones(shape)
        elif last in ("bias", "bias_vl", "attn_sink"):
            values[name] = torch.zeros(shape)
        elif name == "embed.weight" or last.startswith("image_"):
            values[name] = normal(0.25)
        elif name.endswith(("engram.embed.weight", "markov_head.embed.weight")):
            values[name] = normal(0.1)
        elif name.endswith(("markov_head.head.weight", "confidence_head.proj.weight")):
            values[name] = normal(0.02)
        elif name.endswith(("wo_b.weight", "ffn.shared_experts.w2.weight")) or ".experts." in name and ".w2." in name:
            values[name] = normal(0.3 * shape[-1]**-0.5)
        else:
            values[name] = normal(shape[-1]**-0.5)
    return values


def _hyper_connection_start(name: str, shape: tuple[int, ...], copies: int, generator: torch.Generator) -> Tensor:
    if name.endswith("_fn"):
        return torch.randn(shape, generator=generator) * shape[-1]**-0.5
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    where = name.split(".")
    sublayer = 2 * int(where[1]) + ("hc_ffn" in name)
    base = torch.zeros(shape)
    base[:copies] = -2.0
    base[(sublayer + 1) % copies] = 2.0  # the pre vector is used by the next sub-layer
    base[2 * copies:] = (4.0 * torch.eye(copies)).flatten()
    return base + 0.1 * torch.randn(shape, generator=generator)


class Masters:
    """Float32 masters of all parameters of `model`, on its device, and the rounding of them into the model."""

    def __init__(self, model: Model, values: Mapping[str, Tensor], formats: Mapping[str, str]) -> None:
        self.parameters = dict(model.named_parameters())
        if set(self.parameters) != set(values) or set(values) != set(formats):
            odd = sorted(set(self.parameters) ^ set(values) | set(values) ^ set(formats))
            raise ValueError(f"Preparing to train: names of model, values and formats differ: {', '.join(odd[:5])} ...")
        self.formats = dict(formats)
        self.values = {name: values[name].to(p.device, torch.float32).clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def publish(self) -> None:
        """Round every master to its format and write the value into the model's parameter."""
        plain = [name for name, kind in self.formats.items() if kind in ("bf16", "f32")]
        # Float32 products widen a BF16 weight, so the model may hold it in float32; it is rounded to BF16 all the same.
        rounded = [self.values[name].to(torch.bfloat16) if self.formats[name] == "bf16" else self.values[name]
                   for name in plain]
        torch._foreach_copy_([self.parameters[name].data for name in plain], rounded)
        for kind in ("fp8_blocks", "fp8_rows", "mxfp4"):
            names = [name for name, own in self.formats.items() if own == kind]
            if names:
                values = _rounded([self.values[name] for name in names], kind)
                torch._foreach_copy_([self.parameters[name].data for name in names], values)


def _rounded(weights: list[Tensor], kind: str) -> list[Tensor]:
    """Every weight rounded to one format, all in one go: float32 in, BF16 out, shapes as given."""
    if kind == "fp8_blocks":
        tiles = [w.unflatten(1, (-1, _GROUP)).unflatten(0, (-1, _GROUP)).transpose(1, 2) for w in weights]
        flat = torch.cat([t.reshape(-1, _GROUP) for t in tiles])  # one tile is 32 rows of 32
        parts = quant.decode_fp8_blocks(*quant.encode_fp8_blocks(flat)).split([w.numel() // _GROUP for w in weights])
        return [part.view(tile.shape).transpose(1, 2).reshape(w.shape) for part, tile, w in zip(parts, tiles, weights)]
    encode, decode = {"fp8_rows": (quant.encode_fp8_rows, quant.decode_fp8_rows),
                      "mxfp4": (quant.encode_mxfp4, quant.decode_mxfp4)}[kind]
    flat = torch.cat([w.reshape(-1, _GROUP) for w in weights])
    parts = decode(*encode(flat)).split([w.numel() // _GROUP for w in weights])
    return [part.view(w.shape) for part, w in zip(parts, weights)]


def stored_tensors(values: Mapping[str, Tensor], formats: Mapping[str, str]) -> dict[str, Tensor]:
    """Masters in the layout of the native checkpoint: every weight with its `.scale` where it has one."""
    encoders = {"fp8_blocks": quant.encode_fp8_blocks, "fp8_rows": quant.encode_fp8_rows, "mxfp4": quant.encode_mxfp4}
    tensors = {}
    for name, value in values.items():
        value, kind = value.detach().to("cpu", torch.float32), formats[name]
        if kind in encoders:
            codes, scale = encoders[kind](value)
            tensors[name] = codes.view(torch.int8) if kind == "mxfp4" else codes
            tensors[name.removesuffix("weight") + "scale"] = scale
        else:
            tensors[name] = value.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    return tensors


def export(values: Mapping[str, Tensor], formats: Mapping[str, str], config: Mapping[str, Any], tokenizer: Path,
           folder: Path) -> None:
    """Write a native checkpoint: config.json, tokenizer.json, shards of at most SHARD_BYTES, the index last.

    A checkpoint that lies in the folder is replaced when the new one is whole; before, whatever fails leaves it as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as new:
        names = _write(stored_tensors(values, formats), config, tokenizer, Path(new))
        for old in (folder / INDEX, *folder.glob("model*.safetensors")):  # without its index, no file is a checkpoint
            old.unlink(missing_ok=True)
        for name in names:
            os.replace(Path(new) / name, folder / name)


def _write(tensors: Mapping[str, Tensor], config: Mapping[str, Any], tokenizer: Path, folder: Path) -> list[str]:
    """Write the files of a checkpoint into an empty folder; their names, the index last."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        more = tensor.numel() * tensor.element_size()
        if shards[-1] and size + more > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += more
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (folder / INDEX).write_bytes(json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return ["config.json", "tokenizer.json", *dict.fromkeys(weight_map.values()), INDEX]


def read_masters(model: nn.Module) -> dict[str, Tensor]:
    """Masters of a loaded (resident) model: the values that its file holds."""
    return {name: parameter.detach().to(torch.float32) for name, parameter in model.named_parameters()}


def parameter_count(model: nn.Module) -> int:
    """Numbers that the model is made of, whatever their format."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
