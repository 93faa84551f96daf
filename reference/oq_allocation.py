"""oQ bit allocation: which modules are quantized, and to how many bits. Needs shapes and layer scores, no weights.

What it computes
    1. `modules_of(weights)`: the tensors of a native checkpoint as the modules of an oMLX checkpoint: experts stacked,
       names prefixed, one `Module` per stored weight.
    2. `preserved_reason(module)`: why a module keeps its source precision, or None if it may be quantized ("eligible").
    3. `allocate(modules, scores, budget)`: bits per eligible module.
Formulas (bits per eligible weight; P = parameters without Engram tables, fixed = bytes of the preserved tensors)
    target = (target_bpw P - 8 fixed) / eligible        cap = (hard_cap_bpw P - 8 fixed) / eligible
    bytes of n weights at b bits, group 64 = n b / 8 + 4 n / 64     (BF16 scale and bias per group)
Order of steps
    every eligible module at the base width; floors of shared experts and output projections; a greedy rise of the
    sensitive layers; a last rise of what rose already, only if the target is not reached. No step may pass the cap.
Mirrors
    oMLX 0.7: `_build_quant_plan` as documented. The published oQ3e report is reproduced to the byte (tests/test_oq.py).
Leaves out
    Fractional levels, which also raise routed experts.
Tests
    tests/test_oq.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inference.families import NameTable

WIDTHS = (2, 3, 4, 6, 8)  # oMLX: 5 occurs as a floor on the way, but is never stored
GROUP = 64  # oMLX: weights per scale and bias
ENGRAM_GROUP, ENGRAM_BITS = 32, 3  # oMLX: the Engram table of an oQ3 file
TOP = 8  # widest affine width
NAMES = NameTable("language_model.", "ffn", stacked=True)  # oMLX
_VISUAL = ("vision.", "aligner.", "image_")
_LAYER = re.compile(r"^language_model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Weight:
    """One logical tensor of a native checkpoint; scales are not counted as tensors of their own."""

    name: str  # as stored, e.g. "layers.0.attn.wq_a.weight"
    shape: tuple[int, ...]  # logical
    source: str  # "fp8_blocks", "fp8_rows", "mxfp4", "BF16" or "F32"


@dataclass(frozen=True)
class Module:
    """One weight of the oMLX layout, before it is decided how it is stored."""

    path: str  # without ".weight"
    key: str  # of the dense tensor: path + ".weight", or the path itself for parameters such as hc_attn_fn
    shape: tuple[int, ...]  # logical; stacked experts are [E, out, in]
    source: str
    names: tuple[str, ...]  # native tensors; one per expert if stacked

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Backbone layer id, None outside the backbone layers."""
        match = _LAYER.match(self.path)
        return int(match.group(1)) if match else None

    @property
    def is_engram_table(self) -> bool:
        return self.path.endswith(".engram.embed")

    @property
    def is_text_matrix(self) -> bool:
        """A matrix of the text model, drafts and Engram included, that may be rounded; not the router."""
        is_matrix = self.key.endswith(".weight") and len(self.shape) > 1
        return is_matrix and not self.path.startswith(_VISUAL) and not self.path.endswith(".ffn.gate")

    @property
    def is_routed(self) -> bool:
        return ".ffn.experts." in self.path


def modules_of(weights: Iterable[Weight]) -> list[Module]:
    """The modules of a native checkpoint, in the order in which their first tensor comes.

    Raises ValueError if the experts of one projection are not numbered 0 .. E-1 or differ in shape or format.
    """
    found: dict[str, dict[int | None, Weight]] = {}
    for weight in weights:
        key, expert = NAMES.stored(weight.name)
        found.setdefault(key, {})[expert] = weight
    modules = []
    for key, parts in found.items():
        first = next(iter(parts.values()))
        lead: tuple[int, ...] = ()
        if None not in parts:
            lead = (len(parts),)
            alike = {(weight.shape, weight.source) for weight in parts.values()}
            if set(parts) != set(range(len(parts))) or len(alike) != 1:
                raise ValueError(f"Stacking the experts of {key}: wanted experts 0 .. E-1 of one shape and format, got "
                                 f"{len(parts)} experts, {max(parts)} the last, of {len(alike)} kinds. Is the "
                                 "checkpoint complete?")
        names = tuple(parts[expert].name for expert in sorted(parts, key=lambda e: -1 if e is None else e))
        modules.append(Module(key.removesuffix(".weight"), key, (*lead, *first.shape), first.source, names))
    return modules


def preserved_reason(module: Module) -> str | None:
    """Why this module keeps its source precision (the words of the published report), or None if it is eligible."""
    path = module.path
    if path.startswith(_VISUAL) or path.endswith(".ffn.gate"):  # the router decides hard choices
        return "precision_policy"
    if not module.key.endswith(".weight") or len(module.shape) < 2 or module.shape[-1] % GROUP:
        return "ineligible_shape" if ".engram." not in path else "outside_layer_sensitivity"
    if ".engram." in path:
        return "outside_layer_sensitivity"
    if module.layer is None or path.endswith(".attn.wo_a"):  # mtp, embed, head; wo_a is no plain linear
        return "uncalibrated"
    return None


# --- sizes -----------------------------------------------------------------------------------------------------


def affine_bytes(parameters: int, bits: int, group: int = GROUP) -> int:
    """Stored bytes of `parameters` weights: packed codes plus a BF16 scale and a BF16 bias per group."""
    return parameters * bits // 8 + 4 * (parameters // group)


def preserved_format(module: Module) -> str:
    """How a preserved module is stored: "mxfp8", "mxfp4", "BF16", "F32", or "fp8_rows" for an Engram table.

    oMLX: FP8 tiles become mxfp8 by repeating each scale over the 32 rows of its tile; wo_a is stored dense.
    """
    if module.source == "fp8_blocks":
        return "BF16" if module.path.endswith(".attn.wo_a") or module.shape[-1] % 32 else "mxfp8"
    return module.source


def preserved_bytes(module: Module) -> int:
    """Stored bytes of a module in its preserved format."""
    bytes_of_32 = {"mxfp8": 33, "mxfp4": 17, "fp8_rows": 33, "BF16": 64, "F32": 128}[preserved_format(module)]
    return module.parameters * bytes_of_32 // 32


# --- allocation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Bits per parameter over everything but the Engram tables. Defaults: oMLX's oQ3."""

    base_bits: int = 3
    target_bpw: float = 3.5
    hard_cap_bpw: float = 3.7

    def __post_init__(self) -> None:
        if self.base_bits not in WIDTHS or not 0 < self.target_bpw <= self.hard_cap_bpw:
            raise ValueError(f"Planning bits: wanted a base width among {WIDTHS} and 0 < target <= cap, got {self}.")


@dataclass(frozen=True)
class Allocation:
    """The result. Rates are bits per eligible weight, metadata included."""

    bits: Mapping[str, int]  # path -> width, eligible modules only
    preserved: Mapping[str, str]  # path -> reason, all other modules but the Engram tables
    logical_parameters: int  # without Engram tables
    fixed_bytes: int  # of the preserved modules
    eligible_bytes: int
    target_rate: float
    cap_rate: float
    rate: float

    @property
    def tensor_bytes(self) -> int:
        """Everything but the Engram tables."""
        return self.fixed_bytes + self.eligible_bytes

    @property
    def effective_bpw(self) -> float:
        return 8 * self.tensor_bytes / self.logical_parameters


def allocate(modules: Sequence[Module], scores: Mapping[int, float], budget: Budget = Budget()) -> Allocation:
    """Bits for every eligible module.

    scores: backbone layer id -> sensitivity, all positive or zero; every layer with eligible modules needs one.
    A base width that already passes the cap is not an error: nothing is raised, and `rate > cap_rate` says so.
    """
    eligible = {m.path: m for m in modules if not m.is_engram_table and preserved_reason(m) is None}
    missing = sorted({m.layer for m in eligible.values()} - set(scores))
    if missing:
        raise ValueError(f"Planning bits: no sensitivity for layers {missing}. Measure every backbone layer.")
    spent = _Spending(eligible, modules, budget)
    order = sorted(scores, key=lambda layer: (-scores[layer], layer))
    # oMLX: a quarter of the layers; ours: at least one, so that small models have a top layer too.
    top_quarter = set(order[:max(1, len(order) // 4)])
    for path, module in eligible.items():
        spent.set(path, _floor(module, module.layer in top_quarter))
    highest = max(scores.values(), default=0.0)
    raised = []
    for layer in order:
        ratio = scores[layer] / highest if highest > 0 else 0.0
        for path, module in eligible.items():
            if module.layer == layer and not module.is_routed:
                wanted = TOP if ratio >= 0.5 else spent.bits[path] + (2 if ratio >= 0.2 else 1)
                if spent.raise_to(path, wanted):
                    raised.append(path)
    for path in raised:
        if spent.rate >= spent.target_rate:
            break
        spent.raise_to(path, TOP)
    for path, width in spent.bits.items():
        if width not in WIDTHS:  # ours: a floor of 5 that the cap kept from rising to 6
            spent.set(path, max(w for w in WIDTHS if w < width), lower=True)
    reasons = {m.path: preserved_reason(m) for m in modules if not m.is_engram_table and m.path not in eligible}
    return spent.result(reasons)


def allocation_of(modules: Sequence[Module], bits: Mapping[str, int]) -> Allocation:
    """The allocation that another checkpoint states; modules without an entry keep their source precision."""
    chosen = {m.path: m for m in modules if m.path in bits}
    spent = _Spending(chosen, modules, Budget())
    for path in chosen:
        spent.set(path, bits[path], lower=True)
    kept = [m for m in modules if not m.is_engram_table and m.path not in chosen]
    return spent.result({m.path: preserved_reason(m) or "precision_policy" for m in kept})


def _floor(module: Module, sensitive: bool) -> int:
    """Smallest width that the policy wants for this module; 0 for none."""
    if module.is_routed:
        return 0
    if ".shared_experts." in module.path:
        return TOP
    last = module.path.rpartition(".")[2]
    if last.startswith("wo") or last in ("down", "w2"):
        return 6 if sensitive else 5
    return 0


class _Spending:
    """Widths chosen so far and their rate; local to one `allocate` call."""

    def __init__(self, eligible: Mapping[str, Module], modules: Sequence[Module], budget: Budget) -> None:
        self.eligible = eligible
        self.bits = dict.fromkeys(eligible, budget.base_bits)
        kept = [m for m in modules if not m.is_engram_table and m.path not in eligible]
        self.fixed = sum(preserved_bytes(m) for m in kept)
        self.weights = sum(m.parameters for m in eligible.values())
        self.logical = self.weights + sum(m.parameters for m in kept)
        self.bytes = sum(affine_bytes(m.parameters, budget.base_bits) for m in eligible.values())
        self.target_rate, self.cap_rate = (
            (bpw * self.logical - 8 * self.fixed) / max(1, self.weights)
            for bpw in (budget.target_bpw, budget.hard_cap_bpw))

    @property
    def rate(self) -> float:
        return 8 * self.bytes / max(1, self.weights)

    def raise_to(self, path: str, wanted: int) -> bool:
        """The largest width <= wanted that raises this module and stays under the cap. True if it rose."""
        return any(self.set(path, width) for width in reversed(WIDTHS) if width <= wanted)

    def set(self, path: str, width: int, lower: bool = False) -> bool:
        """This width, if it is a rise (or `lower`) and stays under the cap. True if it was set."""
        parameters, current = self.eligible[path].parameters, self.bits[path]
        size = self.bytes + affine_bytes(parameters, width) - affine_bytes(parameters, current)
        if not lower and (width <= current or 8 * size > self.cap_rate * self.weights):
            return False
        self.bits[path], self.bytes = width, size
        return True

    def result(self, reasons: Mapping[str, str]) -> Allocation:
        return Allocation(dict(self.bits), dict(reasons), self.logical, self.fixed, self.bytes, self.target_rate,
                          self.cap_rate, self.rate)
