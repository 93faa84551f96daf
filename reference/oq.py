"""The oQ quantizer: a native checkpoint to the oMLX layout, with bits where the model is sensitive.

Steps
    1. plan        modules, and which of them may be quantized (oq_allocation.py); shapes alone
    2. calibrate   layer sensitivity and importance matrix from a text (oq_calibration.py); kept in TO until the end, so
                   that an interrupted conversion does not repeat it
    3. allocate    bits under target and cap (oq_allocation.py)
    4. write       every module in its format: fitted affine (oq_fit.py), mxfp8 and mxfp4 (source values), BF16, F32
Layout
    config.json without quantization_config, with the section omlx_deepseek_v41: a spec per quantized module, an entry
    per Engram table, and the report. quantization_report.json beside it. Shards: one per Engram table, the last layer's
    first, then shards of at most 5 GB. The index has no total_size; the shard headers have format "mlx".
Shortcuts
    --bits-from DIR   takes the bits of another oMLX checkpoint: no sensitivity is measured
    --fit minmax      MLX's unweighted rule: no importance matrix is collected. Both together need no calibration text.
Mirrors
    oMLX 0.7 (jundot/omlx), as documented and as published reports and headers show.
Tests
    tests/test_oq.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inference.checkpoint import load
from inference.model import Model
from inference.tokenizer import Tokenizer
from reference import oq_calibration
from reference.jobs import affine_job, dense_job, mx_job, table_job
from reference.oq_allocation import ENGRAM_BITS, ENGRAM_GROUP, GROUP, WIDTHS, Allocation, Budget, Module, allocate, \
    allocation_of, modules_of, preserved_format, preserved_reason
from reference.oq_calibration import ImportanceMatrix, collect_importance, measure_sensitivity, samples_of
from reference.oq_fit import DEFAULT_REFITS, is_constant
from reference.shard_writer import Job, Output, TargetFolder, json_bytes, pack_shards, target_folder
from reference.source import Source

REPORT = "quantization_report.json"
_EXPERT_CACHE = 8 * 2**30  # ours: bytes; the packed experts of one released layer are 6.7 GiB


@dataclass(frozen=True)
class Options:
    """What the command line may set. Each changes the result, so only equal ones continue an interrupted conversion."""

    format_name: str
    calibration_text: Path | None = None
    imatrix: Path | None = None
    fit: str = "weighted"
    refits: int = DEFAULT_REFITS
    bits_from: Path | None = None
    target_bpw: float = Budget.target_bpw
    hard_cap_bpw: float = Budget.hard_cap_bpw
    samples: int = oq_calibration.IMPORTANCE_CAP
    sample_length: int = oq_calibration.IMPORTANCE_LENGTH
    batch_size: int = 32

    @classmethod
    def of(cls, format_name: str, given: Mapping[str, Any]) -> Options:
        """Raises ValueError for values that cannot be used."""
        options = cls(format_name, **given)
        if options.fit not in ("weighted", "minmax"):
            raise ValueError(f"Quantizing: --fit must be weighted or minmax, got {options.fit!r}.")
        if options.fit == "minmax" and options.imatrix is not None:
            raise ValueError("Quantizing: --fit minmax uses no importance matrix. Leave --fit or --imatrix out.")
        low = min(options.refits + 1, options.samples, options.sample_length - 1, options.batch_size)
        if low < 1:
            raise ValueError("Quantizing: --refits must be at least 0, --samples and --batch-size at least 1, "
                             "--sample-length at least 2.")
        return options

    @property
    def keeps_table(self) -> bool:
        """Whether the Engram tables stay FP8 (the -ngram- builds)."""
        return "-ngram" in self.format_name

    def identity(self) -> dict[str, Any]:
        """Files by content, everything else by value."""
        files = {"calibration_text": self.calibration_text, "imatrix": self.imatrix,
                 "bits_from": None if self.bits_from is None else self.bits_from / "config.json"}
        values = {name: value for name, value in vars(self).items() if name != "format_name"}
        return values | {name: path and hashlib.sha256(_read(path)).hexdigest() for name, path in files.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the oq formats."""
    group = parser.add_argument_group("oq3e-mtp and oq3e-ngram-mtp")
    group.add_argument("--calibration-text", type=Path, metavar="FILE", help="UTF-8 text to calibrate with")
    group.add_argument("--imatrix", type=Path, metavar="FILE", help="importance matrix (npz) instead of collecting one")
    group.add_argument("--fit", choices=("weighted", "minmax"), help="how scales are fitted (default weighted)")
    group.add_argument("--refits", type=int, metavar="N", help=f"least-squares refits (default {DEFAULT_REFITS})")
    group.add_argument("--bits-from", type=Path, metavar="DIR", help="take the bits of this oMLX checkpoint")
    group.add_argument("--target-bpw", type=float, help=f"bits per parameter to reach (default {Budget.target_bpw})")
    group.add_argument("--hard-cap-bpw", type=float, help=f"bits per parameter at most (default {Budget.hard_cap_bpw})")
    group.add_argument("--samples", type=int, metavar="N", help="importance samples at most (default "
                       f"{oq_calibration.IMPORTANCE_CAP})")
    group.add_argument("--sample-length", type=int, metavar="N", help="tokens of one importance sample (default "
                       f"{oq_calibration.IMPORTANCE_LENGTH})")
    group.add_argument("--batch-size", type=int, metavar="N", help="samples that run together (default 32)")


def convert(source: Source, target: Path, options: Options) -> Output:
    """Quantize. Raises ValueError for input that cannot be used, ConversionStopped when the disk ends the work."""
    source.require_native(options.format_name)
    modules = modules_of(source.weights())
    _check_tables(source, modules, options)
    given_bits = None if options.bits_from is None else bits_of(options.bits_from, modules)
    needs_text = given_bits is None or (options.fit == "weighted" and options.imatrix is None)
    if needs_text and options.calibration_text is None:
        raise ValueError(f"Quantizing to {options.format_name}: layer sensitivity and importance come from a text. "
                         "Give --calibration-text FILE, or both --bits-from DIR and --fit minmax, which need none.")
    budget = Budget(3, options.target_bpw, options.hard_cap_bpw)
    with target_folder(target, source.identity(options.format_name, **options.identity())) as folder:
        calibration = calibrate(source, modules, options, folder, given_bits is None)
        if given_bits is not None:
            allocation = allocation_of(modules, given_bits)
        else:
            allocation = allocate(modules, calibration.sensitivity, budget)
        output = plan(source, modules, allocation, calibration, options)
        folder.write(output)
    return output


def _check_tables(source: Source, modules: Sequence[Module], options: Options) -> None:
    for module in modules:
        if module.is_engram_table and options.keeps_table and module.source != "fp8_rows":
            raise ValueError(f"Converting {source.folder} to {options.format_name}: {module.names[0]} must be FP8 "
                             f"rows, it is {module.source}. Use oq3e-mtp, which quantizes the table.")


def bits_of(folder: Path, modules: Sequence[Module]) -> dict[str, int]:
    """Affine widths by module path, as config.json of an oMLX checkpoint states them; ValueError if they do not fit."""
    path = folder / "config.json"
    try:
        section = json.loads(_read(path))["omlx_deepseek_v41"]
        specs = dict(section["quantized_modules"])
        bits = {name: spec["bits"] for name, spec in specs.items() if spec.get("mode") == "affine"}
        groups = {spec.get("group_size") for spec in specs.values() if spec.get("mode") == "affine"}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"Taking the bits of {folder}: its config.json has no quantized_modules of oMLX. Name an oQ "
                         "checkpoint.") from None
    eligible = {module.path for module in modules if preserved_reason(module) is None and not module.is_engram_table}
    unknown = sorted(set(bits) - eligible)
    widths = set(bits.values())
    if unknown:
        raise ValueError(f"Taking the bits of {folder}: {unknown[0]!r} is no module that may be quantized here. Name "
                         "an oQ checkpoint of this model.")
    if not groups <= {GROUP} or not widths <= set(WIDTHS):
        raise ValueError(f"Taking the bits of {folder}: it has groups {groups} and widths {widths}, wanted group "
                         f"{GROUP} and widths among {WIDTHS}.")
    return bits


# --- calibration -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What is known about the model; empty parts were not needed."""

    sensitivity: Mapping[int, float]
    matrix: ImportanceMatrix | None
    used_samples: int
    reused: bool  # the importance matrix was given


def calibrate(source: Source, modules: Sequence[Module], options: Options, folder: TargetFolder, sensitivity: bool,
              ) -> Calibration:
    """Measure what is needed, or take what an interrupted run kept in the folder."""
    eligible = [m for m in modules if preserved_reason(m) is None and not m.is_engram_table]
    model = ids = None

    def ready() -> tuple[Model, list[int]]:
        nonlocal model, ids
        if model is None:
            model = load(source.folder, weights="stream", expert_cache=_EXPERT_CACHE, progress=False)
            text = _read(options.calibration_text).decode("utf-8", errors="strict")
            ids = Tokenizer.load(source.folder).encode(text, allow_special=False)
        return model, ids

    def samples(length: int, count: int) -> torch.Tensor:
        limit = source.config_json["text_config"]["max_position_embeddings"]
        return samples_of(ready()[1], min(length, limit), count, source.config_json["bos_token_id"])

    scores: dict[int, float] = {}
    if sensitivity:
        kept = folder.kept("sensitivity.json")
        if not kept.is_file():
            chosen = samples(oq_calibration.SENSITIVITY_LENGTH, oq_calibration.SENSITIVITY_SAMPLES)
            found = measure_sensitivity(ready()[0], eligible, chosen, options.batch_size)
            folder.keep("sensitivity.json", json_bytes({str(layer): score for layer, score in found.items()}))
        scores = {int(layer): score for layer, score in json.loads(kept.read_text()).items()}
    if options.fit == "minmax":
        return Calibration(scores, None, 0, False)
    if options.imatrix is not None:
        return Calibration(scores, ImportanceMatrix.from_npz(options.imatrix, eligible), 0, True)
    kept = folder.kept("imatrix.npz")
    if not kept.is_file():
        chosen = samples(options.sample_length, options.samples)
        matrix, used = collect_importance(ready()[0], eligible, chosen, options.batch_size, cap=options.samples)
        folder.fact("used_samples", used)
        folder.keep("imatrix.npz", matrix.to_npz())
    return Calibration(scores, ImportanceMatrix.from_npz(kept, eligible), folder.fact("used_samples", 0), False)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"Quantizing: {path} cannot be read ({error.strerror}).") from None


# --- the output ------------------------------------------------------------------------------------------------


def plan(source: Source, modules: Sequence[Module], allocation: Allocation, calibration: Calibration,
         options: Options) -> Output:
    """All shards and files of the oMLX checkpoint."""
    specs: dict[str, dict[str, Any]] = {}
    weighted: list[str] = []
    jobs = []
    for module in modules:
        if not module.is_engram_table:
            job, spec = _module_job(source, module, allocation, calibration, options, weighted)
            jobs.append(job)
            if spec is not None:
                specs[module.path] = spec
    # oMLX: the tables come first, the last layer's in the first shard.
    tables = [module for module in reversed(modules) if module.is_engram_table]
    table_jobs = [_table_job(source, module, options) for module in tables]
    shards = pack_shards(table_jobs, jobs)
    entries = {module.path: _table_entry(module, shard.file, options) for module, shard in zip(tables, shards)}
    report = make_report(source, allocation, calibration, options, tables, table_jobs, weighted, len(shards))
    config = {**source.plain_config(), "omlx_deepseek_v41": {
        "version": 1, "quantized_modules": dict(sorted(specs.items())), "engram_tables": entries,
        "engram_in_index": True, "preserve_mtp": True, "excluded_draft_tensors": 0, "quantization_report": report}}
    files = {**source.companion_files(), REPORT: json_bytes(report), "config.json": json_bytes(config)}
    summary = (f"{allocation.effective_bpw:.4f} bits per parameter without Engram tables, "
               f"{report['engram']['effective_bpw']:g} in them")
    if options.bits_from is None and allocation.rate > allocation.cap_rate:
        summary += (f"\nThe cap of {options.hard_cap_bpw} bits per parameter cannot be met: the base width and the "
                    "tensors that stay as they are need more. Nothing was raised above the base width.")
    return Output(shards, files, shard_metadata={"format": "mlx"}, total_size=False, summary=summary)


def _module_job(source: Source, module: Module, allocation: Allocation, calibration: Calibration, options: Options,
                weighted: list[str]) -> tuple[Job, dict[str, Any] | None]:
    """The job of a module and its entry in quantized_modules; None if it is dense. Appends to `weighted` if fitted."""
    plans = [source.plans[name] for name in module.names]
    if module.path in allocation.bits:
        bits, importance = allocation.bits[module.path], None
        if calibration.matrix is not None:
            importance = calibration.matrix.importance(module.path)
            importance = None if is_constant(importance) else importance
        if importance is not None:
            weighted.append(module.path)
        spec = {"bits": bits, "group_size": GROUP, "mode": "affine",
                "quantize_input": module.names[0] in source.quantized_inputs}
        return affine_job(module.path, module.shape, plans, bits, GROUP, importance, options.refits), spec
    kind = preserved_format(module)
    if kind in ("mxfp8", "mxfp4"):
        return mx_job(module.path, module.shape, plans), {"bits": 8 if kind == "mxfp8" else 4, "mode": kind}
    return dense_job(module.key, module.shape, plans), None


def _table_job(source: Source, module: Module, options: Options) -> Job:
    table = source.plans[module.names[0]]
    if options.keeps_table:
        return table_job(module.path, table)
    return affine_job(module.path, module.shape, [table], ENGRAM_BITS, ENGRAM_GROUP)


def _table_entry(module: Module, file: str, options: Options) -> dict[str, Any]:
    path, kept = module.path, options.keeps_table
    form = {"bits": None} if kept else {"bits": ENGRAM_BITS, "group_size": ENGRAM_GROUP, "mode": "affine"}
    return {"weight_file": file, "weight_key": f"{path}.weight", "scale_file": file,
            "scale_key": f"{path}.scale" if kept else f"{path}.scales",
            "bias_key": None if kept else f"{path}.biases", **form}


def make_report(source: Source, allocation: Allocation, calibration: Calibration, options: Options,
                tables: Sequence[Module], table_jobs: Sequence[Job], weighted: Sequence[str], shard_count: int,
                ) -> dict[str, Any]:
    """quantization_report.json, with the fields of the published one. Rates are bits per logical parameter."""
    table_bytes, table_parameters = sum(job.size for job in table_jobs), sum(module.parameters for module in tables)
    form = {"bits": None, "group_size": None, "mode": None} if options.keeps_table else \
        {"bits": ENGRAM_BITS, "group_size": ENGRAM_GROUP, "mode": "affine"}
    sizes = {"tensor_bytes": allocation.tensor_bytes, "effective_bpw": allocation.effective_bpw}
    measured = options.bits_from is None
    return {
        "remaining_weights": {"logical_parameters": allocation.logical_parameters, **sizes},
        "engram": {"logical_parameters": table_parameters, "tensor_bytes": table_bytes,
                   "effective_bpw": 8 * table_bytes / table_parameters if table_parameters else 0.0, **form},
        "tensor_bytes": allocation.tensor_bytes + table_bytes,
        "preserved_source_draft_tensors": sum(name.startswith("mtp.") for name in source.checkpoint.tensors),
        "oq_level": "oQ3",
        "enhanced_requested": options.fit == "weighted",
        "target_bpw": options.target_bpw,
        "hard_cap_bpw": options.hard_cap_bpw,
        "budget_scope": "all tensors but the Engram tables",
        # The second value is ours: oMLX knows no given bits.
        "allocation": "measured_layer_sensitivity_affine" if measured else "given_bits",
        "calibration": {
            **sizes, "fixed_source_bytes": allocation.fixed_bytes, "preserved_modules": dict(allocation.preserved),
            "unobserved_experts": calibration.matrix.unobserved() if calibration.matrix else {},
            "unobserved_expert_policy": "uniform importance at the allocated bits",
            "uncalibrated_policy": "source precision",
            "imatrix_cache_path": options.imatrix.name if options.imatrix else None,
            "imatrix_cache_reused": calibration.reused,
            "calibration_model": source.folder.name,
            "expert_coverage": calibration.matrix.coverage() if calibration.matrix else None,
            "sensitivity": {str(layer): score for layer, score in sorted(calibration.sensitivity.items())},
        },
        "imatrix_applied_modules": list(weighted),
        "shard_count": shard_count,
        "storage_layout": "unified_safetensors_index",
    }
