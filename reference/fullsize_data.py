"""The few weights of a full-size checkpoint that are no holes: which, and their values.

What is real
    everywhere     norms, sinks, router weights and biases, hyper-connections, compressors: all small dense tensors
    whole layers   attention, shared experts, Engram projection of the first layer of each kind that owns an Engram,
                   compressor or indexer, of the last layer, and of the first and the last draft stage; and of their
                   routed experts the first and the last, which a large router bias gives to every token
    rows           the Engram rows that the ten tokens of the check hash to; of the vocabulary tensors (embedding, head,
                   Markov head) the rows of these tokens and about 1,024 others
    Holes are all else: other experts and attention weights, vision, aligner, input scales. They decode to zero.
Values
    Drawn by name and seed in the formats of the release, at sizes that keep activations near 1; then put into the
    format of the checkpoint by the encoders of inference/quant.py. So native and nvfp4 of one seed have equal values.
Leaves out
    Anything like trained weights: routing, drafts and text mean nothing.
Tests
    tests/test_fullsize.py
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.cache import DEAD
from inference.config import Config, LayerPlan, TextConfig, layer_plan
from inference.engram import NgramHash
from inference.quant import FORMATS, encode_affine, encode_mxfp4, mxfp4_to_nvfp4
from inference.tokenizer import Tokenizer, fold_vocabulary
from reference.fullsize_layout import EXPERT, VISUAL, Layout

PROMPT, STEPS = 8, 2  # tokens of the prompt; decode steps after it
TEXT = "Sparse files read as zeros, and only a few of these rows are real."  # its first tokens, after BOS
_LAYER = re.compile(r"((?:layers|mtp)\.\d+)\.")
WHOLE = slice(None)
_GAINS = {"gate": 1.5, "wgate": 1.5, "wo_b": 0.5, "w2": 0.5, "proj": 2.0}  # ours: outputs stay near 1; others 1.2
_FP8_RMS, _FP4_RMS = 1.16, 2.93  # root mean square of the codes drawn below
FAVORED_BIAS = 8.0  # ours: above every router score, sqrt(softplus(logit)) of a logit that stays below 10


@dataclass(frozen=True)
class RealData:
    """The weights that are no holes. A pure function of configuration, tokenizer and seed."""

    seed: int
    tokens: tuple[int, ...]  # the prompt, then the tokens of the decode steps
    layers: tuple[str, ...]  # "layers.1", "mtp.0": layers with real products
    experts: dict[str, tuple[int, ...]]  # of each of these layers
    rows: dict[str, Tensor]  # parameter -> its real rows, ascending; all other parameters are real whole or not at all

    @classmethod
    def choose(cls, config: Config, tokenizer: Tokenizer, seed: int) -> RealData:
        text, plans = config.text_config, layer_plan(config.text_config)
        ids = (config.bos_token_id, *tokenizer.encode(TEXT, allow_special=False))[:PROMPT + STEPS]
        step = max(2, text.vocab_size // 1024)  # ours: enough rows for varied logits, few enough to stay small
        vocabulary = {*ids, text.vocab_size - 1, *range(0, text.vocab_size, step)}
        tables = ["embed.weight", "head.weight"]
        if text.num_nextn_predict_layers:
            vocabulary.add(text.dspark_noise_token_id)
            last = f"mtp.{text.num_nextn_predict_layers - 1}.markov_head"
            tables += [f"{last}.embed.weight", f"{last}.head.weight"]
        rows = dict.fromkeys(tables, torch.tensor(sorted(vocabulary)))
        layers = _real_layers(plans)
        experts = {plan.name: (0, plan.n_routed_experts - 1) for plan in plans if plan.name in layers}
        return cls(seed, ids, layers, experts, rows | _table_rows(text, tokenizer, ids))

    def selection(self, name: str, kind: str) -> slice | Tensor | None:
        """What of a parameter is real: WHOLE, its real rows, or None for a hole."""
        if name in self.rows:
            return self.rows[name]
        if name.startswith(VISUAL):
            return None
        expert, layer = EXPERT.fullmatch(name), _LAYER.match(name)
        if expert:
            return WHOLE if int(expert[2]) in self.experts.get(expert[1], ()) else None
        if kind in ("BF16", "F32"):
            return WHOLE
        return WHOLE if layer and layer[1] in self.layers else None

    def draw(self, name: str, kind: str, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The tensors of one parameter as the release stores them. shape: logical; its rows are the real ones only."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        if kind in ("BF16", "F32"):
            values = _dense(name, torch.randn(shape, generator=generator))
            layer = name.partition(".ffn.gate.")[0]
            if name.endswith(".gate.bias") and layer in self.experts:
                values[list(self.experts[layer])] += FAVORED_BIAS
            return (values.to(torch.float32 if kind == "F32" else torch.bfloat16),)
        rows, columns = shape
        count = rows * columns // (2 if kind == "mxfp4" else 1)
        octets = torch.empty(-(-count // 8), dtype=torch.int64).random_(-2**63, None, generator=generator)
        octets = octets.view(torch.uint8)[:count].view(rows, -1)
        # FP4: any code. FP8: any sign and fraction, two exponents, so that values are 0.5 to 1.9 in size.
        weight = octets.view(torch.int8) if kind == "mxfp4" else ((octets & 0x8F) | 0x30).view(torch.float8_e4m3fn)
        size = 1.0 if kind == "fp8_rows" else _gain(name) / columns**0.5  # of the values: their root mean square
        exponent = math.floor(math.log2(size / (_FP4_RMS if kind == "mxfp4" else _FP8_RMS)))
        groups = (-(-rows // 32) if kind == "fp8_blocks" else rows, -(-columns // 32))
        scale = 127 + exponent + torch.randint(0, 2, groups, generator=generator, dtype=torch.uint8)
        return weight, scale.view(torch.float8_e8m0fnu)

    def stored(self, layout: Layout, name: str) -> tuple[Tensor, ...] | None:
        """The stored tensors of one parameter in a layout, its real rows only; None for a hole."""
        kind, plan = layout.kinds[name], layout.plans[name]
        selection = self.selection(name, kind)
        if selection is None:
            return None
        shape = plan.shape if selection is WHOLE else (len(selection), *plan.shape[1:])
        return convert(plan.format, kind, self.draw(name, kind, shape))


def _real_layers(plans: Sequence[LayerPlan]) -> tuple[str, ...]:
    """Layers with real products, in the order of the model; the rule is in the module docstring."""
    backbone, draft = ([plan for plan in plans if plan.is_draft == is_draft] for is_draft in (False, True))
    chosen = {backbone[-1].name, *(plan.name for plan in (*draft[:1], *draft[-1:]))}
    seen = set()
    for plan in backbone:
        owned = (plan.owns_compressor, plan.owns_indexer, plan.engram_slot is not None)
        kind = (plan.compress_ratio, plan.candidate_role, owned)
        if any(owned) and kind not in seen:
            chosen.add(plan.name)
        seen.add(kind)
    return tuple(plan.name for plan in plans if plan.name in chosen)


def _table_rows(text: TextConfig, tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Tensor]:
    """Rows that a text of these ids reads, by Engram table."""
    if not text.engram_layer_ids:
        return {}
    ngrams = NgramHash(text, torch.from_numpy(fold_vocabulary(tokenizer, text.vocab_size)))
    folded = ngrams.fold(torch.tensor([ids]), None)
    before = torch.full((1, text.engram_max_ngram_size), DEAD)
    return {f"layers.{layer}.engram.embed.weight": ngrams.hash_ids(folded, before, slot).unique(sorted=True)
            for slot, layer in enumerate(text.engram_layer_ids)}


def _gain(name: str) -> float:
    return _GAINS.get(name.removesuffix(".weight").rpartition(".")[2], 1.2)


def _dense(name: str, noise: Tensor) -> Tensor:
    """Values of a dense tensor from standard normal noise of its shape: sizes that keep activations near 1 (ours)."""
    attribute = name.rpartition(".")[2]
    if attribute in ("q_weight", "k_weight"):
        return 1 + 0.3 * noise
    if "hc_" in attribute:
        part = attribute.rpartition("_")[2]
        return {"fn": 1.2 / noise.shape[-1]**0.5 * noise, "base": 0.5 * noise, "scale": 0.75 + 0.1 * noise}[part]
    if attribute in ("bias", "bias_vl"):
        return 0.1 * noise
    if attribute == "attn_sink" or name.endswith("embed.weight"):
        return noise
    return 1 + 0.2 * noise if noise.dim() == 1 else _gain(name) / noise.shape[-1]**0.5 * noise


def convert(key: str | None, kind: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors of the release's format `kind` as those of the format `key` (of quant.FORMATS; None: dense)."""
    if key == kind or key is None and kind not in FORMATS:
        return tensors
    if key == "mxfp8":
        weight, scale = tensors
        return weight, scale.view(torch.uint8).repeat_interleave(32, 0)[:len(weight)]
    if key == "nvfp4":
        return mxfp4_to_nvfp4(*tensors)
    values = FORMATS[kind].decode(*tensors) if kind in FORMATS else tensors[0]
    if key is None:
        return (values,)
    if key == "mxfp4":
        return encode_mxfp4(values)
    bits, group = re.fullmatch(r"affine(\d)_g(\d+)", key).groups()
    pieces = [encode_affine(piece, int(bits), int(group)) for piece in values.split(64)]  # small pieces stay in cache
    return tuple(torch.cat([tensor.view(torch.uint8) for tensor in parts]).view(parts[0].dtype)
                 for parts in zip(*pieces))
