"""Format converters: one checkpoint folder to another.

    python -m reference.convert FROM TO --format FORMAT [options]

Formats
    nvfp4                backbone experts from MXFP4 to NVFP4, without loss; all else as it is. FROM is native.
    nvfp4-mxfp4-engram   the same, and the Engram tables from FP8 to MXFP4 (lossy: half the size)
    oq3e-ngram-mtp       oMLX's oQ3: experts and attention affine, FP8 Engram tables kept (oq.py). FROM is native.
    oq3e-mtp             the same, with the Engram tables affine 3 bits, group 32
    affine               plain min/max affine in the mlx-lm layout, every matrix with the same bits. FROM is any format.
    bf16                 plain BF16 (F32 where the release has F32). FROM is any format.
The lossless cast
    MXFP4 block j = codes * 2^k_j. NVFP4 keeps the codes (-0 becomes 0) with global scale 2^(k_max - 8) and the scale of
    both its halves 2^(k_j - k_max + 8), k_max over the tensor, or over w1 and w3 together, whose products are fused.
    Exact if no block with values lies more than 17 steps below k_max; one that does is an error. Every block is decoded
    again from what will be written and compared.
Safety
    FROM is only read. TO must be new or empty, or hold the interrupted result of the same command, which is then
    finished (shard_writer.py). Memory holds one weight, or one piece of a table, at a time.
Exit codes
    0 complete; 1 the disk or the system ended it, run again to continue; 3 the input or the options cannot be used.
Mirrors
    NVIDIA Model Optimizer: cast of MXFP4 experts to NVFP4. MLX: `mx.quantize`, mode affine.
Tests
    tests/test_convert.py
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from inference.quant import AFFINE_BITS, AFFINE_GROUPS
from reference import oq
from reference.jobs import affine_job, copy_job, dense_job, mxfp4_table_job, nvfp4_job
from reference.oq_allocation import modules_of
from reference.shard_writer import ConversionStopped, Job, Output, Shard, json_bytes, pack_shards, write
from reference.source import Source

FORMATS = ("nvfp4", "nvfp4-mxfp4-engram", "oq3e-ngram-mtp", "oq3e-mtp", "affine", "bf16")
_ROUTED = re.compile(r"layers\.\d+\.ffn\.experts\.\d+\.w([123])\.weight")
_NVFP4_IGNORE = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]  # Model Optimizer
_NVFP4_PRODUCER = {"name": "modelopt", "version": "dsv4-nvfp4-experts"}  # Model Optimizer


# --- plans of whole checkpoints ----------------------------------------------------------------------------------


def plan_nvfp4(source: Source, mxfp4_engram: bool, input_scale: float | None) -> Output:
    """Shards keep their names and order; every job stands in the shard of its `.weight`."""
    source.require_native("NVFP4")
    owners = {tensor.name: plan for plan in source.plans.values() for tensor in plan.tensors}
    shards: dict[str, list[Job]] = {}
    blocks = 0
    for tensor in source.checkpoint.tensors.values():
        plan = owners[tensor.name]
        jobs = shards.setdefault(tensor.shard.name, [])
        match = _ROUTED.fullmatch(plan.name)
        if match and plan.format == "mxfp4":
            if tensor is plan.tensors[0]:
                blocks += math.prod(plan.shape) // 32
                jobs.append(nvfp4_job(plan, source.plans.get(_fused_name(plan.name, match[1])), input_scale))
        elif mxfp4_engram and plan.name.endswith(".engram.embed.weight") and plan.format != "mxfp4":
            if tensor is plan.tensors[0]:
                jobs.append(mxfp4_table_job(plan))
        else:
            jobs.append(copy_job(tensor))
    layers = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}
              for layer in range(source.config_json["text_config"]["num_hidden_layers"])}
    mixed = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "group_size": 16}
    half = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    config = {**source.config_json, "quantization_config": {
        **(source.config_json.get("quantization_config") or {}), **mixed, "moe_quant_algo": "NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": half, "input_activations": half}},
        "quantized_layers": layers, "ignore": _NVFP4_IGNORE, "producer": _NVFP4_PRODUCER}}
    recipe = {"producer": _NVFP4_PRODUCER,
              "quantization": {**mixed, "quantized_layers": layers, "exclude_modules": _NVFP4_IGNORE}}
    return Output(tuple(Shard(name, tuple(jobs)) for name, jobs in sorted(shards.items()) if jobs),
                  {**source.companion_files(), "hf_quant_config.json": json_bytes(recipe),
                   "config.json": json_bytes(config)},
                  source.identity("nvfp4-mxfp4-engram" if mxfp4_engram else "nvfp4", input_scale=input_scale),
                  summary=f"{blocks:,} blocks of 32 weights went from MXFP4 to NVFP4; every value was compared and is "
                          "equal")


def _fused_name(name: str, projection: str) -> str:
    """The other of w1 and w3; empty for w2."""
    other = {"1": "w3", "3": "w1"}.get(projection)
    return re.sub(r"w[13]\.weight$", f"{other}.weight", name) if other else ""


def plan_bf16(source: Source) -> Output:
    """Names are the model's own, every expert by itself."""
    jobs = [dense_job(plan.name, plan.shape, [plan]) for plan in source.plans.values()]
    return Output(pack_shards([], jobs), {**source.companion_files(), "config.json": json_bytes(source.plain_config())},
                  source.identity("bf16"))


def plan_affine(source: Source, bits: int, group: int) -> Output:
    """Every text matrix, drafts and Engram tables included, whose rows are whole groups; not the router, not vision.

    Names, prefix and stacking are those of oMLX files. What is not quantized becomes BF16 (or F32 as stored).
    """
    if bits not in AFFINE_BITS or group not in AFFINE_GROUPS:
        raise ValueError(f"Converting to affine: {bits} bits in groups of {group}; wanted bits among {AFFINE_BITS} and "
                         f"a group among {AFFINE_GROUPS}.")
    jobs = []
    for module in modules_of(source.weights()):
        plans = [source.plans[name] for name in module.names]
        if module.is_text_matrix and module.shape[-1] % group == 0:
            jobs.append(affine_job(module.path, module.shape, plans, bits, group))
        else:
            jobs.append(dense_job(module.key, module.shape, plans))
    section = {"bits": bits, "group_size": group, "mode": "affine"}
    config = {**source.plain_config(), "quantization": section, "quantization_config": section}
    return Output(pack_shards([], jobs), {**source.companion_files(), "config.json": json_bytes(config)},
                  source.identity("affine", bits=bits, group=group), {"format": "mlx"})


# --- command line ----------------------------------------------------------------------------------------------

# Options by the formats they belong to; an option given to another format is an error, not ignored.
_OPTIONS = {
    "input_scale": ("nvfp4", "nvfp4-mxfp4-engram"), "bits": ("affine",), "group_size": ("affine",),
    **dict.fromkeys(("calibration_text", "imatrix", "fit", "refits", "bits_from", "target_bpw", "hard_cap_bpw",
                     "samples", "sample_length", "batch_size"), ("oq3e-ngram-mtp", "oq3e-mtp")),
}


def convert(source_folder: Path, target: Path, format_name: str, **options: Any) -> Output:
    """Convert a checkpoint; see the module docstring. options: as on the command line, with underscores.

    Raises ValueError for input that cannot be used, ConversionStopped when the disk or the system ends the work.
    """
    given = {name: value for name, value in options.items() if value is not None}
    foreign = sorted(name for name in given if format_name not in _OPTIONS[name])
    if foreign:
        option, owners = foreign[0].replace("_", "-"), " and ".join(_OPTIONS[foreign[0]])
        raise ValueError(f"Converting to {format_name}: it has no option --{option}, which belongs to {owners}.")
    _check_folders(source_folder, target)
    source = Source.open(source_folder)
    scale = given.get("input_scale")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"Converting to {format_name}: --input-scale must be a finite number above 0, got {scale}.")
    if format_name in ("nvfp4", "nvfp4-mxfp4-engram"):
        output = plan_nvfp4(source, format_name == "nvfp4-mxfp4-engram", given.get("input_scale"))
    elif format_name == "bf16":
        output = plan_bf16(source)
    elif format_name == "affine":
        output = plan_affine(source, given.get("bits", 4), given.get("group_size", 64))
    else:
        return oq.convert(source, target, oq.Options.of(format_name, given))
    write(output, target)
    return output


def _check_folders(source: Path, target: Path) -> None:
    inside, outside = target.resolve(), source.resolve()
    if inside == outside or outside in inside.parents or inside in outside.parents:
        raise ValueError(f"Converting {source}: the result may not lie in it, nor it in the result ({target}). Name a "
                         "folder elsewhere.")


class _Parser(argparse.ArgumentParser):
    """Exit code 3 for options that cannot be used, as for every other unusable input."""

    def error(self, message: str) -> NoReturn:
        self.exit(3, f"{self.format_usage()}{message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module docstring."""
    parser = _Parser(prog="python -m reference.convert", description="Convert a checkpoint to another format.")
    parser.add_argument("source", metavar="FROM", type=Path)
    parser.add_argument("target", metavar="TO", type=Path)
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--input-scale", type=float, metavar="X", help="nvfp4: also write this activation scale for "
                        "every expert (some engines need one; no weight depends on it)")
    parser.add_argument("--bits", type=int, help="affine: bits per weight (default 4)")
    parser.add_argument("--group-size", type=int, help="affine: weights per scale (default 64)")
    oq.add_arguments(parser)
    options = vars(parser.parse_args(arguments))
    source, target, format_name = (options.pop(name) for name in ("source", "target", "format"))
    try:
        output = convert(source, target, format_name, **options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 3
    except ConversionStopped as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Interrupted. Run the same command again to continue in {target}.", file=sys.stderr)
        return 1
    print(f"{target}: {format_name}, {len(output.shards)} shards, {output.tensor_count:,} tensors, "
          f"{output.tensor_bytes:,} bytes")
    if output.summary:
        print(output.summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
