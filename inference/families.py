"""Families of published checkpoints: how each names its tensors, and what its config.json says about formats.

Families
    native   the publisher's files: FP8 dense weights, MXFP4 experts, FP8 Engram rows, BF16 and F32; names are the
             model's own
    nvfp4    native names; routed experts as NVFP4 with `.weight_scale` and `.weight_scale_2`; Engram rows FP8 or MXFP4
    oq       oMLX: `language_model.` before every name of the text model, `vision.*.ffn.` for its `vision.*.mlp.`, the
             experts of a layer stacked in one tensor per projection; one spec per module in the section
             `omlx_deepseek_v41`
    mlx      the mlx-lm layout of the same modules: a section `quantization` with defaults and per-module overrides,
             with or without the prefix and the stacking
    The family is read from config.json and the tensor names, never from the name of a folder or repository. It decides
    names and which formats may occur; the format of each tensor is decided from its header (`detect_format`).
Leaves out
    The naming of mlx-lm's and mlx-vlm's own model classes (`switch_mlp`, `self_attn`): mlx-lm's conversion has no
    Engram, no draft stages, no images and no `bias_vl`, so it is not this model. It is recognized and refused.
Tests
    tests/test_families.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference.config import Config
from inference.quant import AFFINE_BITS, AFFINE_GROUPS
from inference.shards import DTYPES, StoredTensor

# --- names -----------------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123]\..+)")
_STACKED = re.compile(r"(.*\.experts)\.(w[123]\..+)")
_OUTSIDE_TEXT = ("vision.", "aligner.", "image_")


@dataclass(frozen=True)
class NameTable:
    """Names of parameters (the model's) and of stored tensors, both ways.

    prefix: before the names of the text model. vision_mlp: what the file calls `vision.blocks.B.mlp`. stacked: the
    experts of a layer are one tensor, expert axis first.
    """

    prefix: str = ""
    vision_mlp: str = "mlp"
    stacked: bool = False

    def stored(self, parameter: str) -> tuple[str, int | None]:
        """Parameter name -> stored name, and the expert's index in it if it is stacked."""
        if parameter.startswith(_OUTSIDE_TEXT):
            is_vision = parameter.startswith("vision.")
            return parameter.replace(".mlp.", f".{self.vision_mlp}.") if is_vision else parameter, None
        expert = _EXPERT.fullmatch(parameter) if self.stacked else None
        if expert is None:
            return self.prefix + parameter, None
        return f"{self.prefix}{expert[1]}.{expert[3]}", int(expert[2])

    def parameter(self, stored: str, expert: int | None = None) -> str:
        """The inverse of `stored`."""
        if stored.startswith(_OUTSIDE_TEXT):
            return stored.replace(f".{self.vision_mlp}.", ".mlp.") if stored.startswith("vision.") else stored
        name = stored.removeprefix(self.prefix)
        stacked = _STACKED.fullmatch(name) if expert is not None else None
        return name if stacked is None else f"{stacked[1]}.{expert}.{stacked[2]}"


# --- what config.json says --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleSpec:
    """Format of one module as config.json states it; None where it says nothing."""

    mode: str  # affine, mxfp4 or mxfp8
    bits: int
    group: int
    quantize_input: bool | None = None  # the product's input is rounded to FP8; no property of the stored weight

    @property
    def format(self) -> str:
        """Key of quant.FORMATS."""
        return f"affine{self.bits}_g{self.group}" if self.mode == "affine" else self.mode

    def __str__(self) -> str:
        return f"{self.mode} with {self.bits} bits in groups of {self.group}"


AFFINE = tuple(f"affine{bits}_g{group}" for bits in AFFINE_BITS for group in AFFINE_GROUPS)


@dataclass(frozen=True)
class Family:
    """One family, with everything that config.json of this checkpoint adds to it."""

    key: str
    title: str
    names: NameTable
    matrix_formats: tuple[str, ...]  # formats of linear and embedding weights, beside plain
    released_formats: tuple[str, ...]  # only for the weights that the release stores in FP8 or FP4
    table_formats: tuple[str, ...]  # Engram tables
    # Spec of a stored module, given its name and whether it is packed; None where config.json states no formats.
    spec: Callable[[str, bool], ModuleSpec | None] | None = None
    specified: frozenset[str] = frozenset()  # module names that config.json mentions; each must exist
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # oq: Engram module -> its entry
    one_shard: bool = False  # all tensors of a quantized module are in one shard


def detect_family(config: Config, names: Collection[str]) -> Family:
    """The family of a checkpoint with these tensor names.

    Raises ValueError for sections or names that are not understood.
    """
    sections = dict(config.quantization_extra)
    foreign = next((name for name in names if ".switch_mlp." in name or ".embed_tokens." in name
                    or name.startswith("model.")), None)
    if foreign is not None:
        raise ValueError(f"Reading the checkpoint: {foreign!r} is a name of an MLX model class (mlx-lm, mlx-vlm). Their "
                         "conversion drops parts of this model (draft stages and router biases for images; mlx-lm also "
                         "Engram and vision). Use an oMLX export, or quantize the published checkpoint.")
    if "omlx_deepseek_v41" in sections:
        return _oq_family(sections["omlx_deepseek_v41"])
    if "quantization" in sections:
        return _mlx_family(sections["quantization"], names)
    if any(name.endswith(".weight_scale_2") for name in names):
        return Family("nvfp4", "NVFP4 (NVIDIA Model Optimizer)", NameTable(), (), ("fp8_blocks", "mxfp4", "nvfp4"),
                      ("fp8_rows", "mxfp4"))
    return Family("native", "native (DeepSeek)", NameTable(), (), ("fp8_blocks", "mxfp4"), ("fp8_rows", "mxfp4"))


_MLX_FORMATS = (*AFFINE, "mxfp4", "mxfp8")


def _oq_family(section: Any) -> Family:
    action = "Reading config.json: omlx_deepseek_v41"
    if not isinstance(section, dict) or section.get("version") != 1:
        version = section.get("version") if isinstance(section, dict) else section
        raise ValueError(f"{action} has version {version!r}; only version 1 is known. Was it written by a newer oMLX?")
    modules, tables = section.get("quantized_modules"), section.get("engram_tables", {})
    if not isinstance(modules, dict) or not isinstance(tables, dict):
        raise ValueError(f"{action} wants the objects quantized_modules and engram_tables. Copy config.json again.")
    if section.get("excluded_draft_tensors") or section.get("preserve_mtp") is False:
        raise ValueError(f"{action} says that draft tensors were left out of this export. Use an export with -mtp.")
    # oMLX: a module that keeps the bytes of the release has no group_size (32) and no quantize_input (true).
    specs = {name: _spec(name, entry, mx_input=True) for name, entry in modules.items()}
    return Family("oq", "oQ (oMLX)", NameTable("language_model.", "ffn", stacked=True), _MLX_FORMATS, (),
                  (*_MLX_FORMATS, "fp8_rows"), lambda module, packed: specs.get(module), frozenset(specs), tables,
                  one_shard=True)


def _mlx_family(section: Any, names: Collection[str]) -> Family:
    if not isinstance(section, dict):
        raise ValueError(f"Reading config.json: quantization wants an object, got {section!r}. Copy config.json again.")
    defaults = {name: value for name, value in section.items() if not isinstance(value, dict | bool)}
    default = _spec("quantization", defaults)
    specs = {name: default if value is True else None if value is False else _spec(name, value, default.group)
             for name, value in section.items() if isinstance(value, dict | bool)}

    def spec(module: str, packed: bool) -> ModuleSpec | None:
        # mlx-lm: the defaults hold for every module that has scales.
        return specs[module] if module in specs else default if packed else None

    prefix = "language_model." if any(name.startswith("language_model.") for name in names) else ""
    vision_mlp = "ffn" if any(name.startswith("vision.") and ".ffn." in name for name in names) else "mlp"
    stacked = any(_STACKED.fullmatch(name) for name in names)
    return Family("mlx", "MLX (mlx-lm layout)", NameTable(prefix, vision_mlp, stacked), _MLX_FORMATS, (),
                  (*_MLX_FORMATS, "fp8_rows"), spec, frozenset(specs))


def _spec(name: str, entry: Any, default_group: int | None = None, mx_input: bool | None = None) -> ModuleSpec:
    """One entry of config.json. Raises ValueError for keys and combinations that are not known."""
    entry = entry if isinstance(entry, dict) else {"entry": entry}
    mode, bits = entry.get("mode", "affine"), entry.get("bits")
    group = entry.get("group_size", default_group if mode == "affine" else 32)
    known = (mode == "affine" and bits in AFFINE_BITS and group in AFFINE_GROUPS
             or (mode, bits, group) in (("mxfp4", 4, 32), ("mxfp8", 8, 32)))
    if not known or set(entry) - {"mode", "bits", "group_size", "quantize_input"}:
        raise ValueError(f"Reading config.json: {name} has the format {entry!r}, which is not known. Known are affine "
                         f"with bits {AFFINE_BITS} and groups {AFFINE_GROUPS}, mxfp4 and mxfp8 with groups of 32.")
    return ModuleSpec(mode, bits, group, entry.get("quantize_input", None if mode == "affine" else mx_input))


def table_spec(module: str, entry: Mapping[str, Any]) -> ModuleSpec | None:
    """Format of an oQ Engram table; None when its entry has no bits: then the FP8 rows of the release were kept."""
    if entry.get("bits") is None:
        return None
    return _spec(module, {key: entry[key] for key in ("mode", "bits", "group_size") if key in entry})


# --- what a header says ----------------------------------------------------------------------------------------

COMPANIONS = ("scale", "weight_scale", "weight_scale_2", "scales", "biases")
PACKED_TAGS = ("F8_E4M3", "I8", "U8", "U32")  # a weight with one of these tags comes with companions
# Stored, but no part of a weight. Values are shown in reports.
SKIPPED = {"input_scale": "scale for the activations of engines that multiply FP4 by FP4"}

Found = tuple[str, tuple[StoredTensor, ...]]  # format key ("plain" or a key of quant.FORMATS), tensors in decoder order


def detect_format(parts: Mapping[str, StoredTensor], shape: tuple[int, ...], dtype: Any) -> Found | None:
    """The format that the headers of `parts` describe for a parameter of logical shape [R, C]; None if they fit none.

    parts: "weight" and its companions by suffix. Only tags and shapes are used. Packed FP4 is half as wide as its
    values: int8 [R, C/2] over a scale [R, C/32] looks like 16 elements per scale and is 32.
    """
    weight = parts["weight"]
    tensors = {suffix: parts[suffix] for suffix in COMPANIONS if suffix in parts}
    suffixes = tuple(tensors)
    if not suffixes:
        return ("plain", (weight,)) if weight.shape == shape and DTYPES[weight.dtype] == dtype else None
    if len(shape) != 2:
        return None
    if suffixes in (("scale",), ("weight_scale",)):
        kind = _e8m0_format(weight, tensors[suffixes[0]], *shape)
    elif suffixes == ("weight_scale", "weight_scale_2"):
        kind = _nvfp4_format(weight, *tensors.values(), *shape)
    elif suffixes == ("scales",):
        kind = _mx_format(weight, tensors["scales"], *shape)
    elif suffixes == ("scales", "biases"):
        kind = _affine_format(weight, *tensors.values(), *shape)
    else:
        kind = None
    return None if kind is None else (kind, (weight, *tensors.values()))


def _e8m0_format(weight: StoredTensor, scale: StoredTensor, rows: int, columns: int) -> str | None:
    if scale.dtype != "F8_E8M0":
        return None
    blocks = -(-columns // 32)
    if weight.dtype == "F8_E4M3" and weight.shape == (rows, columns):
        if scale.shape == (-(-rows // 32), blocks):
            return "fp8_blocks"
        if scale.shape == (rows, blocks) and columns % 32 == 0:
            return "fp8_rows"
    if weight.dtype in ("I8", "U8") and weight.shape == (rows, columns // 2) and scale.shape == (rows, blocks):
        return "mxfp4" if columns % 32 == 0 else None
    return None


def _nvfp4_format(weight: StoredTensor, scale: StoredTensor, global_scale: StoredTensor, rows: int, columns: int,
                  ) -> str | None:
    fits = (weight.dtype == "U8" and weight.shape == (rows, columns // 2) and columns % 16 == 0
            and scale.dtype == "F8_E4M3" and scale.shape == (rows, columns // 16)
            and global_scale.dtype == "F32" and global_scale.shape in ((), (1,)))
    return "nvfp4" if fits else None


def _mx_format(weight: StoredTensor, scales: StoredTensor, rows: int, columns: int) -> str | None:
    if scales.dtype != "U8" or columns % 32 or scales.shape != (rows, columns // 32):
        return None
    layouts = {("U32", (rows, columns // 8)): "mxfp4", ("U32", (rows, columns // 4)): "mxfp8",
               ("U8", (rows, columns)): "mxfp8"}
    return layouts.get((weight.dtype, weight.shape))


def _affine_format(weight: StoredTensor, scales: StoredTensor, biases: StoredTensor, rows: int, columns: int,
                   ) -> str | None:
    """The width follows from words per row, the group from scales per row; neither is taken from config.json."""
    if weight.dtype != "U32" or (scales.dtype, scales.shape) != (biases.dtype, biases.shape):
        return None
    if scales.dtype not in ("BF16", "F16", "F32") or len(weight.shape) != 2 or len(scales.shape) != 2:
        return None
    bits, rest = divmod(32 * weight.shape[1], columns)
    group, remainder = divmod(columns, scales.shape[1]) if scales.shape[1] else (0, 1)
    if rest or remainder or (weight.shape[0], scales.shape[0]) != (rows, rows):
        return None
    key = f"affine{bits}_g{group}"
    return key if key in AFFINE else None


def unsupported_table(parts: Mapping[str, StoredTensor]) -> str | None:
    """Name of an Engram table layout that exists in public but is not read here; None if `parts` is none of them."""
    weight, suffixes = parts["weight"], set(parts)
    scale = next((parts[suffix] for suffix in ("weight_scale", "scale", "scales") if suffix in parts), None)
    if "weight_scale_2" in suffixes or weight.dtype in ("U8", "I8") and scale is not None and scale.dtype == "F8_E4M3":
        return "an NVFP4 table"
    if weight.dtype in ("I8", "U8") and (scale is None or scale.dtype in ("F32", "F16", "BF16")):
        return "an INT8 table"
    if weight.dtype == "F8_E4M3" and scale is not None and scale.dtype == "F32":
        return "an FP8 table with float32 scales"
    return None
