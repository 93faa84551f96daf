"""oQ calibration: what the weights meet when real text runs through the model.

What it computes
    sensitivity  per backbone layer l: run the layer, run it again on the same inputs with every eligible projection
                 rounded to plain affine 3 bits, group 64, and take
                     score_l = sum |out - out_q|^2 / max(sum |out|^2, 1e-10)
                 over all samples and both outputs of a layer: the streams and the pre vector of the next sub-layer
    importance   per projection and input channel j: mean of x_j^2 over the rows that it saw. Experts count their own
                 rows; an expert that saw none gets ones, that is, uniform importance.
How memory stays bounded
    The model's weights stay on disk (`load(..., weights="stream")`) and are read as they are used, once per batch: a
    large batch reads less often and takes more memory. Sensitivity also keeps the rounded weights of one layer, packed.
Adaptive sampling
    Importance takes samples in steps until every expert was seen and the 5th percentile of the counts reaches 16, or
    the cap or the end of the text comes first.
Mirrors
    oMLX 0.7: sensitivity and calibration, as documented. ours: every sample starts with the begin token; samples are
    consecutive pieces of the given text; importance is taken before the activation is rounded to FP8.
Tests
    tests/test_oq.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from inference.context import Context, Shared
from inference.layers import Linear, dense_weight
from inference.model import Layer, Model
from inference.quant import FORMATS, PackedWeight, encode_affine
from reference.oq_allocation import GROUP, Module

SENSITIVITY_BITS = 3  # oMLX
SENSITIVITY_FLOOR = 1e-10  # oMLX: of the denominator
SENSITIVITY_SAMPLES, SENSITIVITY_LENGTH = 32, 256  # oMLX
IMPORTANCE_SAMPLES, IMPORTANCE_LENGTH = 128, 512  # oMLX: of one step
IMPORTANCE_CAP = 1024  # ours: samples; a published build names 1024 x 512
REQUIRED_COUNT, REQUIRED_PERCENTILE = 16, 5  # oMLX

# --- sensitivity -----------------------------------------------------------------------------------------------


def measure_sensitivity(model: Model, modules: Sequence[Module], samples: Tensor, batch_size: int) -> dict[int, float]:
    """Score of every backbone layer. modules: the eligible ones; samples [N, S] int64."""
    eligible = {name for module in modules for name in module.names}
    sums = {layer.plan.layer_id: [0.0, 0.0] for layer in model.layers}  # of the error, of the outputs

    def run_twice(layer: Layer, run: Callable[..., tuple[Tensor, Tensor]], streams: Tensor, pre: Tensor, attention: Any,
                  context: Context) -> tuple[Tensor, Tensor]:
        # The rounded run comes first, so that the true one overwrites what it staged in the cache. Both attentions get
        # what earlier layers published: with the rounded rows among it, the second would take them for its own.
        published: list[Shared] = []

        def same_input(_: nn.Module, arguments: tuple) -> tuple:
            published.append(arguments[3])
            return *arguments[:3], published[0]

        handle = layer.attn.register_forward_pre_hook(same_input)
        with _rounded_weights([linear for name, linear in _linears(layer) if f"{name}.weight" in eligible]):
            rounded = run(streams, pre, attention, dataclasses.replace(context, observe=None))
        outputs = run(streams, pre, attention, context)
        handle.remove()
        for out, out_q in zip(outputs, rounded):
            sums[layer.plan.layer_id][0] += float((out.double() - out_q.double()).square().sum())
            sums[layer.plan.layer_id][1] += float(out.double().square().sum())
        return outputs

    try:
        for layer in model.layers:
            layer.sublayers = partial(run_twice, layer, layer.sublayers)
        _run(model, samples, batch_size, "sensitivity")
    finally:
        for layer in model.layers:
            vars(layer).pop("sublayers", None)
    return {layer: error / max(total, SENSITIVITY_FLOOR) for layer, (error, total) in sums.items()}


def _run(model: Model, samples: Tensor, batch_size: int, description: str) -> None:
    """A forward of every sample [N, S] int64, `batch_size` at a time."""
    with torch.no_grad():
        for batch in tqdm(samples.split(batch_size), desc=description, unit="batch", disable=None):
            model(batch, model.new_cache(len(batch)), last_only=True)


@contextlib.contextmanager
def _rounded_weights(linears: Sequence[Linear]) -> Iterator[None]:
    """The weights of these linears as plain affine 3 bits while the context lasts; packed, so that a layer fits."""
    originals = [linear.weight for linear in linears]
    try:
        for linear in linears:
            dense = dense_weight(linear.weight, torch.bfloat16)
            packed = encode_affine(dense, SENSITIVITY_BITS, GROUP)
            _put_weight(linear, PackedWeight(FORMATS[f"affine{SENSITIVITY_BITS}_g{GROUP}"], packed, tuple(dense.shape)))
        yield
    finally:
        for linear, original in zip(linears, originals):
            _put_weight(linear, original)


def _put_weight(linear: Linear, value: Any) -> None:
    """Set a weight, a parameter or a packed or streamed one, whichever it was before."""
    linear._parameters.pop("weight", None)
    vars(linear).pop("weight", None)
    setattr(linear, "weight", value)


def _linears(layer: Layer) -> list[tuple[str, Linear]]:
    """(native module path, module) of every linear of a layer."""
    return [(f"{layer.plan.name}.{name}", part) for name, part in layer.named_modules() if isinstance(part, Linear)]


# --- importance matrix -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportanceMatrix:
    """Per oMLX module path: sum of squares of the inputs and rows seen.

    in_sum2 [in] float32, or [E, in] for stacked experts; counts [] or [E] int64.
    """

    in_sum2: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]

    def importance(self, path: str) -> Tensor:
        """[in] or [E, in] float32: mean squares; ones where nothing was seen."""
        counts = self.counts[path].unsqueeze(-1)
        mean = self.in_sum2[path] / counts.clamp_min(1).to(torch.float32)
        return torch.where(counts > 0, mean, torch.ones_like(mean))

    def expert_counts(self) -> Tensor:
        """[all experts of all stacked modules] int64."""
        stacked = [counts for counts in self.counts.values() if counts.dim() == 1]
        return torch.cat(stacked) if stacked else torch.zeros(0, dtype=torch.int64)

    def is_sufficient(self) -> bool:
        counts = self.expert_counts()
        if not len(counts):
            return True
        return bool(counts.min() > 0) and np.percentile(counts.numpy(), REQUIRED_PERCENTILE) >= REQUIRED_COUNT

    def unobserved(self) -> dict[str, list[int]]:
        """Module path -> ids of the experts that saw no row."""
        return {path: (counts == 0).nonzero().flatten().tolist() for path, counts in self.counts.items()
                if counts.dim() == 1 and bool((counts == 0).any())}

    def coverage(self) -> dict[str, Any]:
        """The object `calibration.expert_coverage` of the published report."""
        counts = self.expert_counts()
        values = counts.numpy()
        zero = int((counts == 0).sum())
        summary = {"has_expert_counts": len(counts) > 0,
                   "expert_modules": sum(c.dim() == 1 for c in self.counts.values()), "total_experts": len(counts),
                   "active_experts": len(counts) - zero, "zero_count_experts": zero,
                   "active_ratio": (len(counts) - zero) / max(1, len(counts))}
        percentiles = {"min_count": 0, "p05_count": 5, "p10_count": 10, "median_count": 50, "max_count": 100}
        for name, percentile in percentiles.items():
            summary[name] = float(np.percentile(values, percentile)) if len(values) else 0.0
        return {**summary, "min_required_count": REQUIRED_COUNT, "required_percentile": REQUIRED_PERCENTILE}

    def plus(self, other: ImportanceMatrix) -> ImportanceMatrix:
        return ImportanceMatrix({path: self.in_sum2[path] + other.in_sum2[path] for path in self.in_sum2},
                                {path: self.counts[path] + other.counts[path] for path in self.counts})

    def to_npz(self) -> bytes:
        """oMLX's cache: arrays `<module>.in_sum2` and `<module>.counts`."""
        arrays = {f"{path}.in_sum2": self.in_sum2[path].numpy() for path in self.in_sum2}
        arrays |= {f"{path}.counts": self.counts[path].numpy() for path in self.counts}
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        return stream.getvalue()

    @classmethod
    def from_npz(cls, path: Path, modules: Sequence[Module]) -> ImportanceMatrix:
        """Read a cache and check it against the modules that need it. Raises ValueError."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                sums = {m.path: torch.from_numpy(arrays[f"{m.path}.in_sum2"]).to(torch.float32) for m in modules}
                counts = {m.path: torch.from_numpy(arrays[f"{m.path}.counts"]).to(torch.int64) for m in modules}
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"Reading the importance matrix {path}: {error}. Name one that was made for this "
                             "model.") from None
        for module in modules:
            lead = module.shape[:-2]
            found = list(sums[module.path].shape), list(counts[module.path].shape)
            wanted = [*lead, module.shape[-1]], list(lead)
            if found != wanted:
                raise ValueError(f"Reading the importance matrix {path}: the sums and counts of {module.path} have "
                                 f"shapes {found}, wanted {wanted}. Name one that was made for this model.")
        return cls(sums, counts)


def collect_importance(model: Model, modules: Sequence[Module], samples: Tensor, batch_size: int,
                       step: int = IMPORTANCE_SAMPLES, cap: int = IMPORTANCE_CAP) -> tuple[ImportanceMatrix, int]:
    """The importance matrix of the eligible modules, and how many samples it took. samples [N, S] int64."""
    matrix, used = None, 0
    while used < min(len(samples), cap) and (matrix is None or not matrix.is_sufficient()):
        chosen = samples[used:min(used + step, cap)]
        found = _importance_of(model, modules, chosen, batch_size)
        matrix = found if matrix is None else matrix.plus(found)
        used += len(chosen)
    return matrix, used


def _importance_of(model: Model, modules: Sequence[Module], samples: Tensor, batch_size: int) -> ImportanceMatrix:
    sums = {m.path: torch.zeros(*m.shape[:-2], m.shape[-1]) for m in modules}
    counts = {m.path: torch.zeros(m.shape[:-2], dtype=torch.int64) for m in modules}
    places = {name.removesuffix(".weight"): (m.path, index if len(m.shape) == 3 else ...)
              for m in modules for index, name in enumerate(m.names)}

    def watch(name: str) -> Callable[[nn.Module, tuple], None]:
        path, index = places[name]

        def seen(_: nn.Module, arguments: tuple) -> None:
            rows = arguments[0].flatten(0, -2).to(torch.float32)
            sums[path][index] += rows.square().sum(0)
            counts[path][index] += len(rows)

        return seen

    handles = [linear.register_forward_pre_hook(watch(name))
               for layer in model.layers for name, linear in _linears(layer) if name in places]
    try:
        _run(model, samples, batch_size, "importance")
    finally:
        for handle in handles:
            handle.remove()
    return ImportanceMatrix(sums, counts)


# --- text ------------------------------------------------------------------------------------------------------


def samples_of(ids: Sequence[int], length: int, count: int, begin: int) -> Tensor:
    """Token ids of a text -> [N, S] int64, N <= count samples of S <= length tokens, each led by the begin token.

    A text shorter than one sample gives one shorter sample; an unfinished last piece is left out.
    """
    piece = min(length - 1, len(ids))
    if piece < 1:
        raise ValueError("Calibrating: the calibration text has no tokens. Give a text of some pages.")
    whole = [[begin, *ids[first:first + piece]] for first in range(0, len(ids) - piece + 1, piece)]
    return torch.tensor(whole[:count], dtype=torch.int64)
