"""Which stored tensors make up which parameter of the model.

What it does
    `match_weights(model, checkpoint)` walks the parameters: the family (families.py) gives the stored name, the headers
    give the format, and config.json, where it states a format, must agree. Every tensor must be used by a parameter, or
    be known to belong to none. Nothing is read and nothing is raised for a mismatch: all of them are listed.
Tests
    tests/test_checkpoint.py, tests/test_families.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from inference.families import (COMPANIONS, PACKED_TAGS, SKIPPED, Family, detect_family, detect_format, table_spec,
                                unsupported_table)
from inference.layers import Embedding, Linear
from inference.model import Model
from inference.quant import FORMATS
from inference.shards import StoredTensor

if TYPE_CHECKING:
    from inference.checkpoint import Checkpoint


@dataclass(frozen=True)
class WeightPlan:
    """Where one parameter comes from."""

    name: str  # parameter name
    format: str | None  # key of quant.FORMATS, or None for a plain tensor
    tensors: tuple[StoredTensor, ...]  # the weight and its companions, sliced if experts are stacked
    shape: tuple[int, ...]  # logical


@dataclass(frozen=True)
class Match:
    """What a checkpoint has for a model."""

    family: Family
    plans: dict[str, WeightPlan]  # by parameter name
    skipped: dict[str, StoredTensor]  # stored tensors that are no part of a weight (families.SKIPPED)
    problems: list[str]


def match_weights(model: Model, checkpoint: Checkpoint) -> Match:
    """Match every parameter with stored tensors, both ways. Time is linear in the number of tensors.

    Raises ValueError if config.json or the names belong to no known family.
    """
    tensors = checkpoint.tensors
    family = detect_family(model.config, tensors)
    modules = dict(model.named_modules())
    plans, problems, claimed, stacked_done = {}, [], set(), set()
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        stored_name, expert = family.names.stored(name)
        parts = _parts(stored_name, family, tensors)
        claimed.update(tensor.name for tensor in parts.values())
        shape = tuple(parameter.shape)
        experts = None if expert is None else len(modules[owner.rpartition(".")[0].rpartition(".")[0]])
        plan, problem = _plan(name, modules[owner], attribute, parts, shape, parameter.dtype, family, expert, experts)
        if plan is not None:
            plans[name] = plan
        elif stored_name not in stacked_done:  # experts of one stacked tensor share its problem
            problems.append(f"{name if experts is None else stored_name}: {problem}")
        if problem and experts is not None:
            stacked_done.add(stored_name)
    skipped = {}
    for name, tensor in tensors.items():
        base, _, suffix = name.rpartition(".")
        if name in claimed:
            continue
        if suffix in SKIPPED and f"{base}.weight" in claimed:
            skipped[name] = tensor
        else:
            problems.append(f"{name}: unexpected, {tensor}")
    for module in sorted(family.specified):
        if f"{module}.weight" not in claimed:
            problems.append(f"{module}: config.json states its format, but the files have no such module")
    tables = {family.names.stored(name)[0].removesuffix(".weight") for name in plans if _is_table(name)}
    problems += [f"{module}: config.json states an Engram table, but the model has none there, or it did not fit"
                 for module in sorted(set(family.tables) - tables)]
    return Match(family, plans, skipped, problems)


def _is_table(parameter: str) -> bool:
    return parameter.endswith(".engram.embed.weight")


def _parts(stored_name: str, family: Family, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored weight under "weight" and its companions under their suffixes, as far as they exist."""
    base = stored_name.removesuffix(".weight")
    if base in family.tables:
        entry = family.tables[base]
        keys = {"weight": entry.get("weight_key"), "biases": entry.get("bias_key")}
        keys[str(entry.get("scale_key")).rpartition(".")[2]] = entry.get("scale_key")
        return {suffix: tensors[key] for suffix, key in keys.items() if key in tensors}
    weight = tensors.get(stored_name)
    if weight is None:
        return {}
    parts = {"weight": weight}
    if stored_name.endswith(".weight") and weight.dtype in PACKED_TAGS:
        for suffix in COMPANIONS:
            companion = tensors.get(f"{base}.{suffix}")
            if companion is not None:
                parts[suffix] = companion
    return parts


def _plan(name: str, module: nn.Module, attribute: str, parts: dict[str, StoredTensor], shape: tuple[int, ...],
          dtype: torch.dtype, family: Family, expert: int | None, experts: int | None) -> tuple[WeightPlan | None, str]:
    """The plan of one parameter, or None and what is wrong with it."""
    stacked = "" if experts is None else f"{experts} times "
    if "weight" not in parts:
        return None, f"missing, wanted {stacked}{list(shape)}"
    text = _describe_parts(parts)
    if experts is not None:
        if any(tensor.shape[:1] != (experts,) for tensor in parts.values()):
            return None, f"wanted {experts} experts stacked on the first axis; got {text}"
        parts = {suffix: tensor.slice(expert) for suffix, tensor in parts.items()}
    allowed = _allowed_formats(module, attribute, name, family)
    found = detect_format(parts, shape, dtype)
    if "weight_scale" in parts and "weight_scale_2" not in parts and not _is_table(name):
        found = None  # that spelling of a lone scale is known for Engram tables only
    if found is None or found[0] not in allowed:
        wanted = ", ".join(_describe_formats(allowed, shape, dtype))
        known = unsupported_table(parts) if _is_table(name) else None
        if known:
            text += f". This is {known}, which is not supported; use a checkpoint with FP8 or MXFP4 Engram rows"
        return None, f"wanted {stacked}{wanted}; got {text}"
    key = None if found[0] == "plain" else found[0]
    problem = _spec_problem(name, module, key, found[1], family)
    return (None, problem) if problem else (WeightPlan(name, key, found[1], shape), "")


def _spec_problem(name: str, module: nn.Module, key: str | None, tensors: tuple[StoredTensor, ...], family: Family,
                  ) -> str:
    """Where config.json and the headers contradict each other; empty if they agree."""
    base = family.names.stored(name)[0].removesuffix(".weight")
    if family.spec is None:
        return ""
    if base in family.tables:
        spec = table_spec(base, family.tables[base])
        if spec is None and key not in ("fp8_rows", None):
            return f"engram_tables in config.json states no bits (FP8 rows); the headers say {_label(key)}"
    else:
        spec = family.spec(base, key is not None)
        if key is not None and spec is None:
            return f"config.json states no format (a dense weight); the headers say {_label(key)}"
        if key is not None and family.one_shard and len({tensor.shard for tensor in tensors}) > 1:
            return f"its tensors are in {len({tensor.shard for tensor in tensors})} shards, wanted one"
    if spec is None:
        return ""
    if spec.format != key:
        return f"config.json states {spec}; the headers say {_label(key)}"
    if isinstance(module, Linear) and spec.quantize_input not in (None, module.quantize_input):
        return (f"config.json states quantize_input {spec.quantize_input}, but for this layer it is "
                f"{module.quantize_input}")
    return ""


def _allowed_formats(module: nn.Module, attribute: str, name: str, family: Family) -> tuple[str, ...]:
    """Formats in which this family may store this parameter."""
    if attribute != "weight" or not isinstance(module, Linear | Embedding):
        return ("plain",)
    if _is_table(name):
        return (*family.table_formats, "plain")
    released = isinstance(module, Linear) and (module.quantize_input or name.endswith("attn.wo_a.weight"))
    return (*(family.released_formats if released else ()), *family.matrix_formats, "plain")


def _label(key: str | None) -> str:
    return "a dense weight" if key is None else FORMATS[key].name


def _describe_parts(parts: Mapping[str, StoredTensor]) -> str:
    companions = [f"{suffix} {tensor}" for suffix, tensor in parts.items() if suffix != "weight"]
    if not companions and parts["weight"].dtype in PACKED_TAGS:
        return f"{parts['weight']} without a scale"
    return str(parts["weight"]) + (f" with {', '.join(companions)}" if companions else "")


def _describe_formats(kinds: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    names = []
    for kind in kinds:
        if kind == "plain":
            text = f"{'F32' if dtype == torch.float32 else 'BF16'} {list(shape)}"
        else:
            text = f"{'affine' if kind.startswith('affine') else FORMATS[kind].name} of {list(shape)}"
        if text not in names:
            names.append(text)
    return names
