"""Seeded random checkpoints of tiny models in the publisher's layout.

    python -m reference.tiny OUT_DIR [--preset NAME] [--seed N] [--shards N] [--traces DIR]

What it writes: config.json, tokenizer.json, model.safetensors.index.json and shards, with the published tensor names,
types and packing: dense FP8 E4M3 in 32x32 tiles with E8M0 `.scale`, routed experts as packed FP4 (I8) with one E8M0
scale per 32 inputs, Engram rows as FP8 with one scale per 32 channels, BF16 and F32 as published. Parts a configuration
lacks (vision, draft stages, Engram, compressors, indexers) have no tensors.

What makes them useful for tests: activations stay near 1, no learned number sits at a neutral value (norm weights
scatter around 1; sinks, biases and hyper-connection tables are nonzero and asymmetric), one embedding row has size
1e-11 so that a wrong norm epsilon shows, and some expert channels exceed the clamp on both sides. `check_coverage`
proves on the oracle's numbers that a preset exercises its mechanisms.

Mirrors: the published weight files. Leaves out: realistic weights. Test: tests/oracles/test_oracle_tiny.py.
"""

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from reference.oracles.checkpoint import Checkpoint, load_checkpoint
from reference.oracles.dspark import oracle_draft_with_margins
from reference.oracles.engram import column_primes, fold_vocabulary
from reference.oracles.model import END, IMAGE, NEWLINE, START, TEXT, oracle_forward_with_margins
from reference.oracles.moe import route
from reference.oracles.write import VisionPrompt, write_traces

NANO = Path(__file__).parent / "golden" / "nano" / "checkpoint"  # its tokenizer serves every tiny model
TINY_TOKEN, TINY_AMPLITUDE = 700, 1e-11  # ours: the token whose embedding row exposes a wrong norm epsilon
CLAMP_FACTOR = 12.0  # ours: gain of the expert channels that must exceed swiglu_limit = 10


# --- configurations ----------------------------------------------------------------------------------------------

# Differences from the nano configuration; ours throughout. The seeds were searched: they pass `check_coverage`,
# and noise of float32 size in every activation moves no logit by more than 4e-6 (relative L2), because no value that
# matters sits on a rounding midpoint. Most seeds are not like that; another seed means other, likely narrower, margins.
_NO_DRAFT = {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": []}
_NO_ENGRAM = {"engram_layer_ids": [], "engram_num_embeddings": []}
_NO_CANDIDATES = {"candidate_source_layer_id": None}
_SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32, "q_lora_rank": 32,
          "o_lora_rank": 32, "o_groups": 1, "n_routed_experts": 4}
PRESETS = {
    # every mechanism of the released model: vision, Engram, candidates, drafts
    "nano-like": {"seed": 19, "vision": True, "text": {}},
    # other shapes of the same mechanisms: groups of four tokens, two streams, six heads, Engram on layer 0
    "ratio4": {"seed": 20, "vision": False, "text": {
        **_NO_DRAFT, **_NO_CANDIDATES, "hidden_size": 96, "num_hidden_layers": 6, "compress_ratios": [0, 4, 4, 2, 1, 1],
        "kv_source_layer_ids": [1, 3, 4], "index_source_layer_ids": [1, 3, 4, 5], "hc_mult": 2,
        "num_attention_heads": 6, "o_groups": 3, "sliding_window": 6, "index_topk": 5, "index_n_heads": 10,
        "n_routed_experts": 6, "engram_layer_ids": [0, 3], "engram_max_ngram_size": 3, "engram_n_heads": 3,
        "engram_vocab_size": 67}},
    # compression, index reuse and candidates without anything else
    "compressed": {"seed": 14, "vision": False, "text": {
        **_SMALL, **_NO_DRAFT, **_NO_ENGRAM, "num_hidden_layers": 5, "compress_ratios": [2, 2, 1, 1, 1],
        "kv_source_layer_ids": [0, 2], "index_source_layer_ids": [0, 2, 3], "candidate_source_layer_id": 2}},
    "two-layer": {"seed": 17, "vision": False, "text": {
        **_SMALL, **_NO_DRAFT, **_NO_ENGRAM, **_NO_CANDIDATES, "num_hidden_layers": 2, "compress_ratios": [0, 2],
        "kv_source_layer_ids": [1], "index_source_layer_ids": [1]}},
    "one-layer-window": {"seed": 2, "vision": False, "text": {
        **_SMALL, **_NO_DRAFT, **_NO_ENGRAM, **_NO_CANDIDATES, "num_hidden_layers": 1, "compress_ratios": [0],
        "kv_source_layer_ids": [], "index_source_layer_ids": []}},
}


def preset_config(name: str) -> dict:
    """A preset's config.json as a dict. Raises ValueError for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"making a tiny checkpoint: wanted a preset among {', '.join(PRESETS)}, got {name!r}")
    config = json.loads((NANO / "config.json").read_text())
    text = config["text_config"]
    text.update(copy.deepcopy(PRESETS[name]["text"]))
    if not PRESETS[name]["vision"]:
        config["vision_config"] = None
    primes = column_primes(
        len(text["engram_layer_ids"]), text["engram_max_ngram_size"], text["engram_n_heads"], text["engram_vocab_size"]
    )
    text["engram_num_embeddings"] = [sum(layer) for layer in primes]
    tokenizer = json.loads((NANO / "tokenizer.json").read_text())
    text["engram_compressed_vocab_size"] = len(set(fold_vocabulary(tokenizer, text["vocab_size"])))
    return config


# --- packing -----------------------------------------------------------------------------------------------------


def _power_of_two_scale(largest: torch.Tensor, format_max: float) -> torch.Tensor:
    """largest [...] float32 -> E8M0 exponents (int32): smallest power of two with largest / scale <= format_max."""
    fraction, exponent = torch.frexp(largest.clamp_min(1e-30) / format_max)  # fraction * 2^exponent, fraction >= 0.5
    return (exponent - (fraction == 0.5).int()).clamp(-126, 127)


def _e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """int32 exponents -> float8_e8m0fnu, by its bytes (a value-converting copy would round small powers to zero)."""
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def pack_fp8(values: torch.Tensor, row_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """values [R, C] float32 -> E4M3 [R, C], E8M0 scales [ceil(R / row_block), ceil(C / 32)].

    row_block: 32 for dense weights, 1 for Engram rows.
    """
    rows, columns = values.shape
    padded = torch.zeros(-(-rows // row_block) * row_block, -(-columns // 32) * 32)
    padded[:rows, :columns] = values
    tiles = padded.view(padded.shape[0] // row_block, row_block, padded.shape[1] // 32, 32)
    exponents = _power_of_two_scale(tiles.abs().amax(dim=(1, 3)), 448.0)
    codes = torch.ldexp(tiles, -exponents[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), _e8m0(exponents)


def pack_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values [R, C] float32 -> two E2M1 codes per byte, int8 [R, C / 2] (even column low), E8M0 scales [R, C / 32]."""
    groups = values.view(values.shape[0], -1, 32)
    exponents = _power_of_two_scale(groups.abs().amax(dim=-1), 6.0)
    scaled = torch.ldexp(groups, -exponents[..., None]).reshape(values.shape)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(scaled.abs(), midpoints) + 8 * torch.signbit(scaled)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8), _e8m0(exponents)


# --- tensors -----------------------------------------------------------------------------------------------------


class _Draw:
    """Draws named tensors, each kind with its published type and at a size that keeps activations near 1."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def plain(self, name: str, *shape: int, mean: float = 0.0, deviation: float = 1.0, dtype=torch.bfloat16) -> None:
        """Any tensor that is not a projection."""
        self.tensors[name] = (mean + deviation * self.normal(*shape)).to(dtype)

    def norm(self, name: str, width: int) -> None:
        self.plain(name, width, mean=1.0, deviation=0.2)

    def projection(self, name: str, out: int, inputs: int, kind: str, gain: float = 1.2, loud_row: int = -1) -> None:
        """A linear weight [out, inputs]; outputs have about `gain` times the inputs' RMS. kind: bf16, fp8 or fp4."""
        weight = self.normal(out, inputs) * gain / inputs**0.5
        if loud_row >= 0:
            weight[loud_row] *= CLAMP_FACTOR
        if kind == "bf16":
            self.tensors[f"{name}.weight"] = weight.bfloat16()
            return
        packed, scale = pack_fp8(weight, row_block=32) if kind == "fp8" else pack_fp4(weight)
        self.tensors.update({f"{name}.weight": packed, f"{name}.scale": scale})


def _experts(draw: _Draw, prefix: str, text: dict, experts: int) -> None:
    width, inner = text["hidden_size"], text["moe_intermediate_size"]
    draw.projection(prefix + "gate", experts, width, "bf16", gain=1.5)
    draw.plain(prefix + "gate.bias", experts, deviation=0.1, dtype=torch.float32)
    draw.plain(prefix + "gate.bias_vl", experts, deviation=0.35, dtype=torch.float32)
    for name, kind in [(f"experts.{e}", "fp4") for e in range(experts)] + [("shared_experts", "fp8")]:
        draw.projection(f"{prefix}{name}.w1", inner, width, kind, loud_row=0)
        draw.projection(f"{prefix}{name}.w2", width, inner, kind, gain=0.5)
        draw.projection(f"{prefix}{name}.w3", inner, width, kind, loud_row=1)


def _layer(draw: _Draw, prefix: str, text: dict, experts: int) -> None:
    """What backbone layers and draft stages have in common."""
    width, copies = text["hidden_size"], text["hc_mult"]
    heads, head, latent = text["num_attention_heads"], text["head_dim"], text["q_lora_rank"]
    groups, rank = text["o_groups"], text["o_lora_rank"]
    draw.norm(prefix + "attn_norm.weight", width)
    draw.norm(prefix + "ffn_norm.weight", width)
    draw.projection(prefix + "attn.wq_a", latent, width, "fp8")
    draw.norm(prefix + "attn.q_norm.weight", latent)
    draw.projection(prefix + "attn.wq_b", heads * head, latent, "fp8")
    draw.projection(prefix + "attn.wkv", head, width, "fp8")
    draw.norm(prefix + "attn.kv_norm.weight", head)
    draw.projection(prefix + "attn.wo_a", groups * rank, heads // groups * head, "fp8")
    draw.projection(prefix + "attn.wo_b", width, groups * rank, "fp8", gain=0.5)
    draw.plain(prefix + "attn.attn_sink", heads, dtype=torch.float32)
    _experts(draw, prefix + "ffn.", text, experts)
    mixes = copies * (2 + copies)
    for kind in ("attn", "ffn"):
        deviation = 1.2 / (copies * width) ** 0.5
        draw.plain(f"{prefix}hc_{kind}_fn", mixes, copies * width, deviation=deviation, dtype=torch.float32)
        draw.plain(f"{prefix}hc_{kind}_base", mixes, deviation=0.5, dtype=torch.float32)
        draw.plain(f"{prefix}hc_{kind}_scale", 3, mean=0.75, deviation=0.1, dtype=torch.float32)


def _compressed_attention(draw: _Draw, layer: int, text: dict) -> None:
    """Compressor and indexer tensors of a layer, as far as it owns them."""
    prefix, ratio = f"layers.{layer}.attn.", text["compress_ratios"][layer]
    width, head, index_width = text["hidden_size"], text["head_dim"], text["index_head_dim"]
    if layer in text["kv_source_layer_ids"]:
        draw.projection(prefix + "compressor.wkv", head, width, "bf16")
        if ratio > 1:
            draw.projection(prefix + "compressor.wgate", head, width, "bf16", gain=1.5)
        draw.norm(prefix + "compressor.norm.weight", head)
        draw.projection(prefix + "indexer.wk", index_width, head, "bf16")
        draw.norm(prefix + "indexer.k_norm.weight", index_width)
    if layer in text["index_source_layer_ids"]:
        draw.projection(prefix + "indexer.wq_b", text["index_n_heads"] * index_width, text["q_lora_rank"], "fp8")
        draw.projection(prefix + "indexer.weights_proj", text["index_n_heads"], width, "bf16")


def _engram(draw: _Draw, layer: int, rows: int, text: dict) -> None:
    prefix, width, copies = f"layers.{layer}.engram.", text["hidden_size"], text["hc_mult"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    table, scale = pack_fp8(draw.normal(rows, text["engram_head_dim"]), row_block=1)
    draw.tensors.update({prefix + "embed.weight": table, prefix + "embed.scale": scale})
    draw.projection(prefix + "wkv", (copies + 1) * width, columns * text["engram_head_dim"], "fp8")
    draw.plain(prefix + "q_weight", copies, width, mean=1.0, deviation=0.3)
    draw.plain(prefix + "k_weight", copies, width, mean=1.0, deviation=0.3)


def _draft_ends(draw: _Draw, text: dict) -> None:
    """What the first and the last draft stage have besides a layer."""
    width, rank, vocab_size = text["hidden_size"], text["dspark_markov_rank"], text["vocab_size"]
    last = f"mtp.{text['num_nextn_predict_layers'] - 1}."
    draw.projection("mtp.0.main_proj", width, len(text["dspark_target_layer_ids"]) * width, "fp8")
    draw.norm("mtp.0.main_norm.weight", width)
    draw.norm(last + "norm.weight", width)
    draw.plain(last + "markov_head.embed.weight", vocab_size, rank)
    draw.projection(last + "markov_head.head", vocab_size, rank, "bf16")
    draw.projection(last + "confidence_head.proj", 1, width + rank, "bf16", gain=2.0)


def _vision(draw: _Draw, vision: dict, text_width: int) -> None:
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]

    def biased(name: str, out: int, inputs: int) -> None:
        draw.projection(name, out, inputs, "bf16")
        draw.plain(name + ".bias", out, deviation=0.1)

    biased("vision.patch_embed.proj", width, 3 * patch * patch)
    for block in range(vision["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}."
        draw.norm(prefix + "norm1.weight", width)
        draw.norm(prefix + "norm2.weight", width)
        biased(prefix + "attn.wqkv", 3 * width, width)
        biased(prefix + "attn.wo", width, width)
        draw.projection(prefix + "mlp.w1", 2 * inner, width, "bf16")
        draw.projection(prefix + "mlp.w2", width, inner, "bf16")
    draw.norm("vision.norm.weight", width)
    biased("aligner.w1", text_width, width * vision["downsample_ratio"] ** 2)
    biased("aligner.w2", text_width, text_width)
    for name in ("image_start", "image_end", "image_newline"):
        draw.plain(name, text_width)


def random_tensors(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint with this configuration, stored form, in reading order."""
    text, draw = config["text_config"], _Draw(seed)
    width, vocab_size = text["hidden_size"], text["vocab_size"]
    if config.get("vision_config"):
        _vision(draw, config["vision_config"], width)
    embedding = draw.normal(vocab_size, width)
    embedding[TINY_TOKEN % vocab_size] *= TINY_AMPLITUDE
    draw.tensors["embed.weight"] = embedding.bfloat16()
    for layer in range(text["num_hidden_layers"]):
        _layer(draw, f"layers.{layer}.", text, text["n_routed_experts"])
        _compressed_attention(draw, layer, text)
    draw.norm("norm.weight", width)
    draw.projection("head", vocab_size, width, "bf16")
    for stage in range(text["num_nextn_predict_layers"]):
        _layer(draw, f"mtp.{stage}.", text, text["dspark_n_routed_experts"])
    if text["num_nextn_predict_layers"]:
        _draft_ends(draw, text)
    for layer, rows in zip(text["engram_layer_ids"], text["engram_num_embeddings"]):
        _engram(draw, layer, rows, text)
    return draw.tensors


def make_tiny(out_dir: str | Path, config: dict | str = "nano-like", seed: int | None = None, shards: int = 3) -> Path:
    """Write a tiny checkpoint into a new or empty folder and return the folder.

    config   a preset's name, or the content of a config.json whose tokenizer facts fit the 768-token tiny tokenizer
    seed     of the weights; None: the preset's own, 0 for a given configuration
    shards   number of safetensors files; tensors are dealt out in reading order
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(f"making a tiny checkpoint: wanted a new or empty folder, {out_dir} is not; choose another")
    if shards < 1:
        raise ValueError(f"making a tiny checkpoint: wanted at least one shard, got {shards}")
    if isinstance(config, str):
        seed = PRESETS.get(config, {}).get("seed", 0) if seed is None else seed
        config = preset_config(config)
    tensors = random_tensors(config, seed or 0)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shutil.copyfile(NANO / "tokenizer.json", out_dir / "tokenizer.json")
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name].contiguous() for name in part}, out_dir / file_name)
        weight_map.update({name: file_name for name in part})
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (out_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")
    return out_dir


# --- prompts and coverage ----------------------------------------------------------------------------------------


class Prompts(NamedTuple):
    """Inputs that go with a tiny checkpoint."""

    input_ids: np.ndarray  # int64 [2, 33]
    split: int  # tokens in the first call of a decode run
    vision: VisionPrompt | None  # two non-square images with text between them


def tiny_prompts(config: dict, seed: int = 0) -> Prompts:
    """Seeded random prompts: begin-of-sequence, ordinary tokens, the tiny-amplitude token at position 5."""
    text, random = config["text_config"], np.random.default_rng(seed)
    ordinary = 12  # ours: the ids below are special tokens of the tiny tokenizer

    def words(*shape: int) -> np.ndarray:
        return random.integers(ordinary, text["vocab_size"], size=shape, dtype=np.int64)

    input_ids = words(2, 33)  # ours: over two windows; longer prompts meet more rounding midpoints
    input_ids[:, 0], input_ids[:, 5] = config["bos_token_id"], TINY_TOKEN
    if not config.get("vision_config"):
        return Prompts(input_ids, 23, None)

    vision = config["vision_config"]
    ids, types, patches, grids = [words(5)], [np.full(5, TEXT)], [], []
    for patch_rows, patch_columns, text_after in ((4, 7, 6), (8, 5, 8)):
        cell_rows, cell_columns = (-(-side // vision["downsample_ratio"]) for side in (patch_rows, patch_columns))
        span = [START] + ([IMAGE] * cell_columns + [NEWLINE]) * cell_rows + [END]
        grids.append(np.array([sum(map(len, ids)), patch_rows, patch_columns, cell_rows, cell_columns], np.int64))
        pixels = random.uniform(-1, 1, (patch_rows * patch_columns, 3, vision["patch_size"], vision["patch_size"]))
        patches.append(torch.from_numpy(pixels).bfloat16().float().numpy())
        ids += [np.full(len(span), config["image_token_id"]), words(text_after)]
        types += [np.array(span), np.full(text_after, TEXT)]
    return Prompts(
        input_ids, 23, VisionPrompt(np.concatenate(ids)[None], np.concatenate(types)[None], patches, grids)
    )


def check_coverage(checkpoint: Checkpoint, prompts: Prompts) -> dict[str, float]:
    """Prove that running `prompts` exercises every mechanism the configuration has. ours.

    Returns the smallest margin per decision point (see reference.oracles.model). Raises ValueError naming every rule
    that does not hold: then the seed or the prompt must change, not the rule.
    """
    text, weights = checkpoint.config["text_config"], checkpoint.weights
    points, margins = oracle_forward_with_margins(checkpoint, prompts.input_ids)
    length, failed = prompts.input_ids.shape[1], []

    def rule(holds: bool, meaning: str) -> None:
        if not holds:
            failed.append(meaning)

    rule(length > 2 * text["sliding_window"], "the prompt is longer than two windows")
    rule(bool((prompts.input_ids == TINY_TOKEN).any()), "the tiny-amplitude row is in the prompt")
    rule(margins["argmax"] > 1e-4, "no argmax is close to a tie")
    gates, ups = [], []
    for layer in range(text["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        hit = set(points[prefix + "ffn.expert_ids"].flatten())
        rule(len(hit) == text["n_routed_experts"], f"layer {layer}: every expert is hit")
        rule(margins[prefix + "ffn.expert_ids"] > 1e-5, f"layer {layer}: no expert choice is close to a tie")
        x = points[prefix + "ffn.in"]
        for e in hit:
            chosen = x[(points[prefix + "ffn.expert_ids"] == e).any(axis=-1)]
            gates.append(chosen @ weights[f"{prefix}ffn.experts.{e}.w1.weight"].T)
            ups.append(chosen @ weights[f"{prefix}ffn.experts.{e}.w3.weight"].T)
    limit = text["swiglu_limit"]
    for name, values in (("gate", np.concatenate(gates)), ("up", np.concatenate(ups))):
        rule(values.max() > limit and values.min() < -limit, f"expert {name} values pass the clamp on both sides")
    index_layers = [i for i in text["index_source_layer_ids"] if f"layers.{i}.attn.indexer.topk" in points]
    for layer in index_layers:
        _check_selection(layer, text, points, margins, rule)
    for layer in text["engram_layer_ids"]:
        gate = points[f"layers.{layer}.engram.gate"]
        rule(gate.min() < 0.45 and gate.max() > 0.55, f"layer {layer}: Engram gates open and close")
    if prompts.vision is not None:
        more = _check_vision(checkpoint, prompts.vision, rule)
        margins = {name: min(value, more[name]) for name, value in margins.items()}
    if text["num_nextn_predict_layers"]:
        anchor, hidden = points["logits"][:, -1].argmax(axis=-1), points["mtp.main_hidden"]
        margins.update(oracle_draft_with_margins(checkpoint, prompts.input_ids, anchor, main_hidden=hidden)[1])
    if failed:
        raise ValueError("checking the coverage of a tiny checkpoint, these do not hold: " + "; ".join(failed))
    return margins


def _check_selection(layer: int, text: dict, points: dict, margins: dict, rule) -> None:
    """Rules about one index layer."""
    prefix = f"layers.{layer}.attn.indexer."
    score, chosen, top = points[prefix + "scores"], points[prefix + "topk"], text["index_topk"]
    rule(score.shape[-1] > top, f"layer {layer}: more compressed rows than index_topk")
    rule((chosen < 0).any() and (chosen >= 0).any(), f"layer {layer}: selections start empty and fill up")
    rule(margins[prefix + "topk"] > 1e-6, f"layer {layer}: no selection is close to a tie")
    candidate_source = text["candidate_source_layer_id"]
    if candidate_source is None or layer < candidate_source:
        return
    block_size, keep = text["candidate_block_size"], text["candidate_topk_blocks"]
    candidates, ratio = points[f"layers.{candidate_source}.attn.indexer.candidates"], text["compress_ratios"][layer]
    if layer > candidate_source:
        removed = [
            not allowed[np.argsort(-row)[:top]].all() for row, allowed in zip(score[:, -1], candidates[:, -1])
        ]
        rule(any(removed), f"layer {layer}: the candidate filter removes rows that would have won")
        return
    rule(-(-score.shape[-1] // block_size) > keep, f"layer {layer}: more candidate blocks than candidate_topk_blocks")
    rule(score.shape[-1] % block_size != 0, f"layer {layer}: the last candidate block is partial")
    pinned = 0
    for row_scores in score:
        for p, row in enumerate(row_scores):
            newest = ((p + 1) // ratio - 1) // block_size
            blocks = [row[start : start + block_size].max() for start in range(0, len(row), block_size)]
            pinned += newest >= 0 and sum(value > blocks[newest] for value in blocks) >= keep
    rule(pinned > 0, f"layer {layer}: the newest block scores too low to be kept unless it is pinned")


def _check_vision(checkpoint: Checkpoint, prompt: VisionPrompt, rule) -> dict[str, float]:
    """Rules about the prompt with images; returns its margins."""
    rule(len(prompt.grids) >= 2 and all(grid[1] != grid[2] for grid in prompt.grids), "two non-square images")
    points, margins = oracle_forward_with_margins(
        checkpoint, prompt.input_ids, True, prompt.token_types, prompt.patches, prompt.grids
    )
    text, weights = checkpoint.config["text_config"], checkpoint.weights
    rows = points["layers.0.ffn.in"][prompt.token_types != TEXT]
    chosen = [
        route(rows, weights["layers.0.ffn.gate.weight"], np.tile(weights[f"layers.0.ffn.gate.{bias}"], (len(rows), 1)),
              text["num_experts_per_tok"], text["routed_scaling_factor"])[0]
        for bias in ("bias", "bias_vl")
    ]
    rule((chosen[0] != chosen[1]).any(), "bias_vl chooses other experts than bias on image rows")
    return margins


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m reference.tiny", description="Write a tiny random checkpoint.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--preset", default="nano-like", choices=list(PRESETS))
    parser.add_argument("--seed", type=int, help="of the weights; default: the preset's own")
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--traces", type=Path, help="also run the oracle and write a trace folder here")
    arguments = parser.parse_args()
    try:
        make_tiny(arguments.out_dir, arguments.preset, arguments.seed, arguments.shards)
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    checkpoint = load_checkpoint(arguments.out_dir)
    prompts = tiny_prompts(checkpoint.config)
    try:
        name, smallest = min(check_coverage(checkpoint, prompts).items(), key=lambda item: item[1])
        coverage = f"coverage complete, smallest margin {smallest:.1e} at {name}"
    except ValueError as error:  # another seed than the preset's own may be less lucky; the checkpoint is still valid
        coverage = str(error)
    size = sum(path.stat().st_size for path in arguments.out_dir.iterdir())
    print(f"{arguments.out_dir}: {size / 1e6:.1f} MB, {coverage}")
    if arguments.traces:
        write_traces(checkpoint, arguments.traces, prompts.input_ids, prompts.split, prompts.vision)
        print(f"{arguments.traces}: traces written")


if __name__ == "__main__":
    main()
