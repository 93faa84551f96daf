"""Known mistakes of ports, each as a context manager that makes it in our model from outside.

`MUTANTS` is the list: name, what is wrong, the point where a comparison must notice it, and the run that shows it. What
is done with it is in reference/mutations.py.
Tests: tests/test_mutations.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import inference.attention
import inference.cache
import inference.compressor
import inference.dspark
import inference.indexer
import inference.model
import inference.vision
from inference.context import Context
from inference.engram import NgramHash
from inference.model import Layer, Model
from inference.moe import ROUTE_EPS, Expert, Gate
from reference.tiny import preset_config, tiny_prompts

TINY_ROW = 5  # position of the token whose embedding is about 1e-11 (tiny.py)
Mutate = Callable[[Model], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """One mistake. expected: regular expression for the full name of the first divergent point."""

    name: str
    meaning: str
    expected: str
    mutate: Mutate | None  # None: the mistake is in reading the weights (`swapped_nibbles`)
    scenario: str = "prompt"
    positions: Callable[[int | None], bool] = lambda position: True  # where that point must differ first


# --- tools -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` for a while."""
    before, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


@contextlib.contextmanager
def all_of(*managers: AbstractContextManager) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


def replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Mutate:
    """A mutant that replaces a function of a module or class by make(original)."""
    return lambda model: patched(module, name, make(getattr(module, name)))


def rotation(make: Callable[[Any], Any]) -> Mutate:
    """A mutant of `rotate`, wherever it is used."""
    return lambda model: all_of(*(patched(module, "rotate", make(module.rotate))
                                  for module in (inference.attention, inference.indexer)))


# --- rotary ------------------------------------------------------------------------------------------------------


def half_split(rotate: Callable) -> Callable:
    def wrong(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
        width = 2 * len(frequencies)
        order = torch.arange(width).view(2, -1).T.flatten()  # 0, half, 1, half + 1, ...
        tail = x[..., -width:][..., order]
        turned = rotate(tail, positions, frequencies, inverse)
        return torch.cat((x[..., :-width], turned[..., order.argsort()]), dim=-1)
    return wrong


def no_inverse(rotate: Callable) -> Callable:
    def wrong(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
        return x if inverse else rotate(x, positions, frequencies)
    return wrong


def one_table(frequencies: Callable) -> Callable:
    def wrong(config: Any, plan: Any, device: Any = "cpu") -> Tensor:
        return frequencies(config, dataclasses.replace(plan, rope_theta=config.rope_theta, use_yarn=False), device)
    return wrong


# --- attention ---------------------------------------------------------------------------------------------------


def sink_dropped(sparse: Callable) -> Callable:
    return lambda q, kv, sink, *rest: sparse(q, kv, torch.full_like(sink, float("-inf")), *rest)


def sink_with_value(sparse: Callable) -> Callable:
    """The sink's share of the softmax goes to the newest row instead of to nothing."""
    def wrong(q: Tensor, kv: Tensor, sink: Tensor, *rest: Any) -> Tensor:
        with_sink = sparse(q, kv, sink, *rest)
        without = sparse(q, kv, torch.full_like(sink, float("-inf")), *rest)
        share = 1 - (with_sink * without).sum(-1, keepdim=True) / without.square().sum(-1, keepdim=True)
        return with_sink + share * kv[:, -1:, None]
    return wrong


def magnitude_scale(sparse: Callable) -> Callable:
    return lambda q, kv, sink, indices, scale, *rest: sparse(q, kv, sink, indices, scale * 1.2773, *rest)


def per_head_norm(query: Callable) -> Callable:
    def wrong(self: Any, x: Tensor, frequencies: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        observe = context.observe
        quiet = dataclasses.replace(context, observe=None)
        q_latent, q = query(self, x, frequencies, quiet)
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-20)
        if observe is not None:
            observe(f"{self.name}.q_latent", q_latent)
            observe(f"{self.name}.q", q)
        return q_latent, q
    return wrong


def short_window(indices: Callable) -> Callable:
    def wrong(positions: Tensor, starts: Any, window: int, *rest: Any) -> Tensor:
        right = indices(positions, starts, window, *rest)
        full = (right >= 0).sum(-1, keepdim=True) == window
        return torch.where(full & (torch.arange(window) == 0), -1, right)
    return wrong


# --- compression -------------------------------------------------------------------------------------------------


def unspaced_positions(positions: Callable) -> Callable:
    return lambda groups, ratio: positions(groups, 1)


def newest_not_pinned(candidates: Callable) -> Callable:
    return lambda scores, positions, *rest: candidates(scores, torch.full_like(positions, -1), *rest)


@contextlib.contextmanager
def unfiltered(model: Model) -> Iterator[None]:
    """Later indexers select among all columns, not inside the candidate blocks."""
    layers = [layer for layer in model.layers if layer.plan.candidate_role == "filter"]
    plans = [dataclasses.replace(layer.plan, candidate_role="none") for layer in layers]
    with all_of(*(patched(layer.attn, "plan", plan) for layer, plan in zip(layers, plans))):
        yield


@contextlib.contextmanager
def wrong_owner(model: Model) -> Iterator[None]:
    """Index keys of whichever source published last, as the published code takes them while decoding."""
    with patched(model, "as_published_index_keys", True):
        yield


# --- hyper-connections and norms ---------------------------------------------------------------------------------


def not_lagged(_sublayers: Callable) -> Callable:
    """V4's rule: the FFN is collapsed with the mix of its own sub-layer."""
    def wrong(self: Layer, streams: Tensor, pre: Tensor, attention: Callable, context: Context,
              ) -> tuple[Tensor, Tensor]:
        collapse, expand = inference.model.collapse, inference.model.expand
        mixes = self._recorded_mixes("attn", streams, pre, context)
        streams = expand(streams, attention(self.attn_norm(collapse(streams, pre))), mixes)
        context.record(f"{self.plan.name}.mid", streams)
        own = self.mixes("ffn", streams).pre_next
        mixes = self._recorded_mixes("ffn", streams, own, context)
        streams = expand(streams, self.ffn(self.ffn_norm(collapse(streams, own)), context), mixes)
        context.record(f"{self.plan.name}.out", streams)
        return streams, mixes.pre_next
    return wrong


def transposed_comb(expand: Callable) -> Callable:
    return lambda streams, y, mixes: expand(streams, y, dataclasses.replace(mixes, comb=mixes.comb.transpose(-1, -2)))


@contextlib.contextmanager
def norm_eps(model: Model) -> Iterator[None]:
    norms = [module for name, module in model.named_modules()
             if hasattr(module, "eps") and not name.startswith("vision")]
    with all_of(*(patched(norm, "eps", 1e-6) for norm in norms)):
        yield


# --- experts -----------------------------------------------------------------------------------------------------


def clamped_both_sides(_forward: Callable) -> Callable:
    def wrong(self: Expert, x: Tensor, weight: Tensor | None, numerics: Any) -> Tensor:
        gate = self.w1(x, numerics).float().clamp(-self.limit, self.limit)
        up = self.w3(x, numerics).float().clamp(-self.limit, self.limit)
        hidden = F.silu(gate) * up if weight is None else weight * (F.silu(gate) * up)
        return self.w2(hidden.to(x.dtype), numerics)
    return wrong


def biased_weights(forward: Callable) -> Callable:
    def wrong(self: Gate, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        scores, ids, _ = forward(self, x, image_mask)
        bias = self.bias if image_mask is None else torch.where(image_mask.unsqueeze(-1), self.bias_vl, self.bias)
        weights = (scores + bias).gather(1, ids)
        return scores, ids, weights / (weights.sum(-1, keepdim=True) + ROUTE_EPS) * self.scale
    return wrong


def unbiased_choice(forward: Callable) -> Callable:
    def wrong(self: Gate, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        scores, _, _ = forward(self, x, image_mask)
        ids = scores.topk(self.active).indices.sort(-1).values
        weights = scores.gather(1, ids)
        return scores, ids, weights / (weights.sum(-1, keepdim=True) + ROUTE_EPS) * self.scale
    return wrong


def text_bias_everywhere(forward: Callable) -> Callable:
    return lambda self, x, image_mask: forward(self, x, None)


@contextlib.contextmanager
def unscaled_routing(model: Model) -> Iterator[None]:
    with all_of(*(patched(layer.ffn.gate, "scale", 1.0) for layer in model.layers)):
        yield


@contextlib.contextmanager
def shared_unclamped(model: Model) -> Iterator[None]:
    with all_of(*(patched(layer.ffn.shared_experts, "limit", float("inf")) for layer in model.layers)):
        yield


# --- Engram, vision, drafts, cache, formats ----------------------------------------------------------------------


def skips_images(_hash_ids: Callable) -> Callable:
    """Look-back reads the last tokens that are no image, instead of stopping at an image."""
    def wrong(self: NgramHash, folded: Tensor, history: Tensor, slot: int) -> Tensor:
        joined, tokens = torch.cat((history, folded), dim=1), folded.shape[1]
        columns: list[list[list[int]]] = []
        for row in joined.tolist():
            columns.append([])
            for end in range(len(row) - tokens, len(row)):
                text = [value for value in row[:end + 1] if value >= 0] if row[end] >= 0 else []
                accumulated, offset, ids = 0, 0, []
                for look_back, multiplier in enumerate(self.multipliers[slot]):
                    seen = text[-1 - look_back] if look_back < len(text) else self.pad
                    accumulated ^= seen * multiplier
                    for prime in self.primes[slot][look_back - 1] if look_back else ():
                        ids.append(accumulated % prime + offset)
                        offset += prime
                columns[-1].append(ids)
        return torch.tensor(columns)
    return wrong


def gate_open_on_images(forward: Callable) -> Callable:
    return lambda self, streams, hash_ids, context: forward(self, streams, hash_ids,
                                                            dataclasses.replace(context, image_mask=None))


def transposed_grid(angles: Callable) -> Callable:
    def wrong(grid_rows: int, grid_cols: int, head_width: int, *rest: Any) -> Tensor:
        right = angles(grid_rows, grid_cols, head_width, *rest)
        return torch.cat(right.chunk(2, dim=-1)[::-1], dim=-1)
    return wrong


def patch_major(merge: Callable) -> Callable:
    def wrong(features: Tensor, grid_rows: int, grid_cols: int, factor: int) -> Tensor:
        cells = merge(features, grid_rows, grid_cols, factor)
        return cells.unflatten(-1, (features.shape[1], factor**2)).transpose(-1, -2).flatten(-2)
    return wrong


def causal_block(indices: Callable) -> Callable:
    def wrong(starts: tuple[int, ...], window: int, block: int, *rest: Any) -> Tensor:
        right = indices(starts, window, block, *rest)
        later = torch.arange(block) > torch.arange(block)[:, None]
        hidden = torch.cat((torch.zeros(block, right.shape[-1] - block, dtype=torch.bool), later), dim=-1)
        return right.masked_fill(hidden, -1)
    return wrong


def written_before_acceptance(commit: Callable) -> Callable:
    def wrong(self: inference.cache.Cache, pending: Any, counts: Any = None) -> None:
        rings = {layer: self.windows[layer].write(rows, pending.starts, pending.counts)
                 for layer, rows in pending.windows.items()}
        commit(self, pending, counts)
        self.state = dataclasses.replace(self.state, windows={**self.windows, **rings})
    return wrong


def quantizer(make: Callable[[Any], Any]) -> Mutate:
    """A mutant of the window quantizer. Its rows have no codes, so the cache must hold plain values."""
    def mutate(model: Model) -> AbstractContextManager[None]:
        plain = functools.partial(model.new_cache, kind="bf16")
        return all_of(patched(inference.attention, "fake_quant_fp8", make(inference.attention.fake_quant_fp8)),
                      patched(model, "new_cache", plain))
    return mutate


def not_rounded(_quantize: Callable) -> Callable:
    return lambda x: x


def any_scale(_quantize: Callable) -> Callable:
    """Scales that are not rounded up to a power of two."""
    def wrong(x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (-1, 32))
        scale = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        codes = (grouped / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        return (codes * scale).flatten(-2).to(x.dtype)
    return wrong


def swapped_nibbles(folder: Path, out: Path) -> Path:
    """A copy of a checkpoint as a reader with exchanged nibbles sees it."""
    shutil.copytree(folder, out)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for name, value in tensors.items():
            if value.dtype == torch.int8:
                octets = value.view(torch.uint8)
                tensors[name] = ((octets << 4) | (octets >> 4)).view(torch.int8)
        save_file(tensors, path)
    return out


_FFN = r"step0\.layers\.0\.ffn\."
MUTANTS = (
    Mutant("half-split-rotary", "channel c is paired with c + half instead of its neighbor",
           r"step0\.layers\.0\.attn\.q", rotation(half_split)),
    Mutant("latent-position", "a compressed row is rotated at its number j instead of at j * ratio",
           r"step0\.layers\.2\.attn\.compressor\.kv",
           replaced(inference.compressor.Groups, "positions", unspaced_positions)),
    Mutant("one-rope-table", "layers with compression use the base and the table of those without",
           r"step0\.layers\.2\.attn\.q", replaced(inference.attention, "rope_frequencies", one_table)),
    Mutant("no-inverse-rotary", "the output of attention is not rotated back",
           r"step0\.layers\.0\.attn\.out_unrotated", rotation(no_inverse)),
    Mutant("sink-dropped", "no sink in the softmax", r"step0\.layers\.0\.attn\.out_rotated",
           replaced(inference.attention, "sparse_attn", sink_dropped)),
    Mutant("sink-with-value", "the sink's share goes to a row", r"step0\.layers\.0\.attn\.out_rotated",
           replaced(inference.attention, "sparse_attn", sink_with_value)),
    Mutant("magnitude-scale", "YaRN's magnitude scale on the softmax", r"step0\.layers\.0\.attn\.out_rotated",
           replaced(inference.attention, "sparse_attn", magnitude_scale)),
    Mutant("per-head-query-norm", "V4's norm of every query head is left in", r"step0\.layers\.0\.attn\.q",
           replaced(inference.attention.Attention, "query", per_head_norm)),
    Mutant("short-window", "the window misses its oldest position", r"step0\.layers\.0\.attn\.window_index",
           replaced(inference.attention, "window_indices", short_window)),
    Mutant("pooled-over-channels", "the compressor's softmax runs over channels instead of over the group",
           r"step0\.layers\.2\.attn\.compressor\.latent",
           lambda model: patched(inference.compressor.torch, "softmax", _only_pooling(torch.softmax))),
    Mutant("newest-not-pinned", "the newest candidate block must win like any other",
           r"step0\.layers\.6\.attn\.indexer\.candidates",
           replaced(inference.attention, "candidate_blocks", newest_not_pinned)),
    Mutant("candidates-ignored", "later indexers select outside the candidate blocks",
           r"step0\.layers\.8\.attn\.indexer\.topk", unfiltered),
    Mutant("wrong-key-owner", "while decoding, index keys come from the source that published last",
           r"step[1-9]\d*\.layers\.2\.attn\.indexer\.scores", wrong_owner, "decode",
           lambda position: position is not None and position % 2 == 0),
    Mutant("mix-not-lagged", "a sub-layer is collapsed with its own mix", r"step0\.layers\.0\.hc_ffn\.pre_used",
           replaced(Layer, "sublayers", not_lagged)),
    # The streams of layer 0 are copies until its attention is written back, and then comb cannot show.
    Mutant("comb-transposed", "streams are carried the wrong way", r"step0\.layers\.0\.(mid|out)",
           replaced(inference.model, "expand", transposed_comb)),
    Mutant("norm-eps", "the epsilon of the mixes, 1e-6, in the norms", r"step0\.layers\.0\.attn\.in", norm_eps,
           positions=lambda position: position == TINY_ROW),
    Mutant("gate-clamped-below", "the gate of an expert is clamped on both sides", _FFN + "(shared|out)",
           replaced(Expert, "forward", clamped_both_sides)),
    Mutant("shared-unclamped", "the shared expert has no clamp", _FFN + "shared", shared_unclamped),
    Mutant("biased-weights", "expert weights come from the biased score", _FFN + "expert_weights",
           replaced(Gate, "forward", biased_weights)),
    Mutant("unbiased-choice", "experts are chosen without the bias", _FFN + "expert_ids",
           replaced(Gate, "forward", unbiased_choice)),
    Mutant("routing-scale", "the routed scaling factor is missing", _FFN + "expert_weights", unscaled_routing),
    Mutant("text-bias-on-images", "image tokens are routed with the text bias", _FFN + "expert_ids",
           replaced(Gate, "forward", text_bias_everywhere), "images", lambda position: position in _image_rows()),
    Mutant("look-back-skips-images", "n-grams reach across an image", r"step0\.layers\.1\.engram\.hash_ids",
           replaced(NgramHash, "hash_ids", skips_images), "images"),
    Mutant("engram-on-images", "the Engram gate is open on image rows", r"step0\.layers\.1\.engram\.gate",
           replaced(inference.model.Engram, "forward", gate_open_on_images), "images",
           lambda position: position in _image_rows()),
    Mutant("vision-grid-transposed", "rows and columns of the patch grid are exchanged",
           r"step0\.vision\.blocks\.0\.out", replaced(inference.vision, "rotation_angles", transposed_grid), "images"),
    Mutant("aligner-patch-major", "the patches of a cell are not laid out channel by channel",
           r"step0\.aligner\.merged", replaced(inference.vision, "merge_cells", patch_major), "images"),
    Mutant("causal-draft-block", "drafts do not see the drafts after them", r"step0\.mtp\.0\.attn\.out_rotated",
           replaced(inference.dspark, "block_indices", causal_block), "decode"),
    Mutant("ring-before-acceptance", "rejected drafts stay in the window ring", r"step1\.cache\.layers\.0\.window",
           replaced(inference.cache.Cache, "commit", written_before_acceptance), "decode"),
    Mutant("window-not-rounded", "window rows are not fake quantized", r"step0\.layers\.0\.attn\.kv_quant",
           quantizer(not_rounded), "rounded"),
    Mutant("scale-not-power-of-two", "FP8 scales are not powers of two", r"step0\.layers\.0\.attn\.kv_quant",
           quantizer(any_scale), "rounded"),
    Mutant("swapped-nibbles", "the two codes of an FP4 byte are exchanged",
           r"weights\.layers\.0\.ffn\.experts\.0\.w1\.weight", None, "weights"),
)


def _only_pooling(softmax: Callable) -> Callable:
    """torch.softmax that is wrong for the compressor's pooling alone: four dimensions, and axis 2."""
    return lambda scores, dim: softmax(scores, -1 if scores.dim() == 4 and dim == 2 else dim)


def _image_rows() -> set[int]:
    types = tiny_prompts(preset_config("nano-like")).vision.token_types[0]
    return {position for position, kind in enumerate(types.tolist()) if kind >= 0}
