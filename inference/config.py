"""Configuration and the per-layer plan.

What it holds
    `Config` mirrors `config.json` key for key: the top level, `text_config`, `vision_config` and
    `quantization_config` are frozen dataclasses whose field names are the JSON keys.
What it computes
    `layer_plan(config)`: one frozen `LayerPlan` per layer (backbone layers, then draft stages). It is the only
    place in the project that asks "is this layer id in that list?"; every other file reads the answer.
Inputs and outputs
    `Config.from_file(path)` reads the Hugging Face form or the publisher's `inference/config.json` (flat names);
    unknown, missing or contradictory keys raise `ValueError` and are named.
Mirrors
    official: `config.json`, class `ModelArgs` of the official inference code (revision dba1be0a).
Leaves out
    How tensors are stored: that is decided per tensor from the file headers (`checkpoint.py`), never from here.
Tests
    tests/test_config.py
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One power-of-two scale per 32 channels (official: activation and weight block size). Every width that is fake
# quantized must be a multiple, or the released arithmetic is not defined for it.
QUANT_GROUP = 32


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: an object whose keys are all different. Raises ValueError naming one that occurs twice."""
    seen = dict(pairs)
    if len(seen) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return seen


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with a compress ratio above 0 (official: `rope_scaling`)."""

    rope_type: str = "yarn"
    factor: float = 16  # context extension; frequencies below the ramp are divided by it
    beta_fast: float = 32  # rotations over the original length above which a frequency is untouched
    beta_slow: float = 1  # rotations below which it is fully divided
    original_max_position_embeddings: int = 64  # tokens


@dataclass(frozen=True)
class TextConfig:
    """The `text_config` section. Defaults describe a tiny runnable text model; released values: configs/."""

    model_type: str = "deepseek_v41_text"
    vocab_size: int = 768
    hidden_size: int = 128  # D, width of one stream
    moe_intermediate_size: int = 64  # F, inner width of every expert
    num_hidden_layers: int = 6  # L, backbone layers; draft stages come after them
    num_attention_heads: int = 4  # H
    num_key_value_heads: int = 1  # one row serves as key and value of all heads
    head_dim: int = 64  # K, width of that row
    qk_rope_head_dim: int = 16  # R, rotated channels, always the last R of a vector
    q_lora_rank: int = 64  # Q, query latent, shared by attention and indexer
    o_lora_rank: int = 32  # O, low rank of one output group
    o_groups: int = 2  # G, output groups of consecutive heads
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0  # gate is clamped from above, up from both sides
    rms_norm_eps: float = 1e-20  # all text norms, and the mean square of mixes and Engram gates
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1024  # tokens, prompt and completion together
    rope_theta: float = 10000.0  # window-only layers, no YaRN
    rope_scaling: RopeScaling = RopeScaling()
    n_routed_experts: int = 8  # E
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2  # A
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    sliding_window: int = 8  # W, positions p-W+1 .. p
    compress_ratios: tuple[int, ...] = (0, 0, 2, 2, 1, 1)  # per layer, draft stages included; 0 = window only
    compress_rope_theta: float = 160000.0  # layers with a ratio above 0, with YaRN
    kv_source_layer_ids: tuple[int, ...] = (2, 4)  # layers that own a compressor
    index_source_layer_ids: tuple[int, ...] = (2, 4, 5)  # layers that own an index query
    index_n_heads: int = 4  # J
    index_head_dim: int = 32  # X
    index_topk: int = 6  # compressed rows that a query selects
    candidate_source_layer_id: int | None = 4  # layer that publishes candidate blocks; null = no filter
    candidate_topk_blocks: int = 3
    candidate_block_size: int = 4  # compressed rows in a block
    hc_mult: int = 4  # C, residual streams
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()  # rows per Engram layer: sum of that layer's primes
    engram_max_ngram_size: int = 4  # orders 2 .. this
    engram_vocab_size: int = 101  # where the search for primes starts
    engram_n_heads: int = 2  # hash heads per order
    engram_head_dim: int = 32  # channels of one row
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 638  # folded token classes
    num_nextn_predict_layers: int = 0  # draft stages
    dspark_block_size: int = 5  # tokens drafted at once
    dspark_noise_token_id: int = 6
    dspark_target_layer_ids: tuple[int, ...] = ()  # draft conditioning is read before these layers
    dspark_markov_rank: int = 32
    dspark_n_routed_experts: int = 4
    dspark_num_experts_per_tok: int = 2


@dataclass(frozen=True)
class VisionConfig:
    """The `vision_config` section."""

    model_type: str = "deepseek_v41_vision"
    num_hidden_layers: int = 2
    hidden_size: int = 64
    num_attention_heads: int = 4
    intermediate_size: int = 96
    patch_size: int = 14  # pixels per side
    rope_theta: float = 10000.0
    downsample_ratio: int = 3  # patches per side that the aligner merges into one token
    max_image_tokens: int = 64  # positions of one image span, delimiters included
    min_pixels: int = 7056  # smaller areas are scaled up to this
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class QuantizationConfig:
    """The `quantization_config` section. Informative: formats are read from the headers, tensor by tensor.

    `extra` keeps the keys that other publishers add (NVFP4 recipes, group sizes, ...), as (key, value) pairs.
    """

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Config:
    """The whole `config.json`."""

    architectures: tuple[str, ...] = ("DeepseekV41ForCausalLM",)
    model_type: str = "deepseek_v41"
    dtype: str = "bfloat16"
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 5
    text_config: TextConfig = TextConfig()
    vision_config: VisionConfig | None = None
    quantization_config: QuantizationConfig | None = QuantizationConfig()
    quantization_extra: tuple[tuple[str, Any], ...] = ()  # sections of MLX exporters, as they are (see families.py)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("The configuration contradicts itself:\n  " + "\n  ".join(problems))

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """Read a `config.json`, or the folder that holds one. Raises ValueError for anything that is not one."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_pairs)
        except FileNotFoundError:
            raise ValueError(f"Reading the configuration: {path} does not exist. Give a checkpoint folder that has a "
                             "config.json.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"Reading the configuration: {path} is not readable JSON ({error}).") from None
        if not isinstance(values, dict):
            raise ValueError(f"Reading the configuration: {path} holds a {type(values).__name__}, wanted an object.")
        return cls.from_dict(values, origin=str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], origin: str = "config.json") -> Config:
        """Build from parsed JSON in either published form. `origin` is named in errors."""
        if "text_config" not in values and "dim" in values:
            values = _from_model_args(values, origin)
        problems: list[str] = []
        top = _section(cls, {k: v for k, v in values.items() if k not in _SECTIONS | _EXTRA_TOP}, "", _IGNORED_TOP,
                       _OPTIONAL_TOP, problems)
        extra = tuple((name, values[name]) for name in sorted(_EXTRA_TOP & set(values)))
        text_values = values.get("text_config")
        text = TextConfig()
        if not isinstance(text_values, dict):
            problems.append(f"text_config: wanted an object, got {text_values!r}")
        else:
            fields = _section(TextConfig, text_values, "text_config.", frozenset(), _optional_text(text_values),
                              problems)
            scaling = fields.get("rope_scaling")
            if isinstance(scaling, dict):
                fields["rope_scaling"] = RopeScaling(**_section(
                    RopeScaling, scaling, "text_config.rope_scaling.", frozenset({"type"}), frozenset(), problems))
            elif "rope_scaling" in text_values:
                problems.append(f"text_config.rope_scaling: wanted an object, got {scaling!r}")
            text = fields
        vision = values.get("vision_config")
        if vision is not None:
            if not isinstance(vision, dict):
                problems.append(f"vision_config: wanted an object or null, got {vision!r}")
            else:
                vision = _section(VisionConfig, vision, "vision_config.", frozenset(), frozenset({"model_type"}),
                                  problems)
        quantization = values.get("quantization_config")
        if quantization is not None and not isinstance(quantization, dict):
            problems.append(f"quantization_config: wanted an object or null, got {quantization!r}")
        if problems:
            raise ValueError(f"Reading {origin}:\n  " + "\n  ".join(problems))
        return cls(**top, text_config=TextConfig(**text), vision_config=None if vision is None else
                   VisionConfig(**vision), quantization_config=_quantization(quantization), quantization_extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The Hugging Face form again, as plain JSON values."""
        values = dataclasses.asdict(self)
        values.update(dict(values.pop("quantization_extra")))
        if self.quantization_config is not None:
            extra = values["quantization_config"].pop("extra")
            values["quantization_config"].update(dict(extra))
        return json.loads(json.dumps(values))


@dataclass(frozen=True)
class LayerPlan:
    """Everything that depends on which layer it is. Produced by `layer_plan` alone."""

    layer_id: int  # 0 .. L-1 backbone, L .. draft stages
    name: str  # prefix in the checkpoint: "layers.3" or "mtp.0"
    compress_ratio: int  # 0 = window only, otherwise tokens per compressed row
    rope_theta: float
    use_yarn: bool
    kv_source: int | None  # layer whose compressed rows are attended to
    owns_compressor: bool
    index_source: int | None  # layer whose selection is used
    owns_indexer: bool
    candidate_role: str  # "publish", "filter" or "none"
    engram_slot: int | None  # index into engram_layer_ids
    n_routed_experts: int
    num_experts_per_tok: int
    is_draft: bool
    is_draft_target: bool  # draft conditioning is read from the streams that enter this layer


def layer_plan(config: TextConfig) -> tuple[LayerPlan, ...]:
    """The plan of all layers, backbone first, then draft stages.

    official: the KV source (selection source) of a layer is the largest entry not above it in
    `kv_source_layer_ids` (`index_source_layer_ids`); layers of ratio 0 have neither. Candidate blocks are published by
    `candidate_source_layer_id` and filter the later selections over the same compressed rows.
    """
    plan = []
    for layer_id in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        is_draft = layer_id >= config.num_hidden_layers
        ratio = config.compress_ratios[layer_id]
        kv_source = index_source = None
        if ratio > 0:
            kv_source = max(i for i in config.kv_source_layer_ids if i <= layer_id)
            index_source = max(i for i in config.index_source_layer_ids if i <= layer_id)
        owns_indexer = index_source == layer_id
        role = "none"
        if owns_indexer and config.candidate_source_layer_id is not None:
            if layer_id == config.candidate_source_layer_id:
                role = "publish"
            elif layer_id > config.candidate_source_layer_id:
                role = "filter"
        plan.append(LayerPlan(
            layer_id=layer_id,
            name=f"mtp.{layer_id - config.num_hidden_layers}" if is_draft else f"layers.{layer_id}",
            compress_ratio=ratio,
            rope_theta=config.compress_rope_theta if ratio > 0 else config.rope_theta,
            use_yarn=ratio > 0,
            kv_source=kv_source,
            owns_compressor=kv_source == layer_id,
            index_source=index_source,
            owns_indexer=owns_indexer,
            candidate_role=role,
            engram_slot=config.engram_layer_ids.index(layer_id) if layer_id in config.engram_layer_ids else None,
            n_routed_experts=config.dspark_n_routed_experts if is_draft else config.n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok if is_draft else config.num_experts_per_tok,
            is_draft=is_draft,
            is_draft_target=not is_draft and layer_id in config.dspark_target_layer_ids,
        ))
    return tuple(plan)


PREFILL_MODES = ("full", "replay", "halo")


def prefill_rows(config: TextConfig, mode: str, tokens: int) -> tuple[int, ...]:
    """How many of the last `tokens` prompt tokens every backbone layer has to run.

    The last KV source is the border between encoder and decoder (report: causal encoder-decoder): all later layers read
    its compressed rows, which come from the stream that enters it. So it makes them for every token, and apart from that
    the decoder, from the border on, serves only its own windows and the last logits:
    "full"    every layer runs every token. The definition.
    "replay"  the decoder runs the last W tokens. Approximate: their windows begin at the first of them. Report: simulated
              in training, so the model is used to it.
    "halo"    the tokens that the last W rows of the deepest window depend on: each layer needs W - 1 more than the next.
    W is sliding_window. Raises ValueError for another mode.
    """
    if mode not in PREFILL_MODES:
        raise ValueError(f"Planning the prefill: mode must be one of {', '.join(PREFILL_MODES)}, got {mode!r}.")
    layers, window = config.num_hidden_layers, config.sliding_window
    border = config.kv_source_layer_ids[-1] if config.kv_source_layer_ids else layers
    if mode == "full":
        return (tokens,) * layers
    halo = window - 1 if mode == "halo" else 0
    return tuple(tokens if layer_id < border else min(tokens, window + (layers - 1 - layer_id) * halo)
                 for layer_id in range(layers))


# --- reading ---------------------------------------------------------------------------------------------------

_SECTIONS = frozenset({"text_config", "vision_config", "quantization_config"})
# How MLX exporters say which modules they quantized; `quantization_extra` keeps these sections.
_EXTRA_TOP = frozenset({"quantization", "omlx_deepseek_v41"})
# Keys that other tools write and that change nothing in the computation.
_IGNORED_TOP = frozenset({"transformers_version", "torch_dtype", "_name_or_path", "auto_map"})
_OPTIONAL_TOP = frozenset({"architectures", "model_type", "dtype", "pad_token_id"})
# Keys with one meaningful value, checked in _problems; a file may leave them out.
_FIXED_TEXT = {
    "num_key_value_heads": 1, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "n_shared_experts": 1,
}
_OPTIONAL_TEXT = frozenset(_FIXED_TEXT) | {"model_type", "initializer_range", "use_cache", "candidate_source_layer_id",
                                           "engram_layer_ids", "num_nextn_predict_layers"}


def _optional_text(values: dict[str, Any]) -> frozenset[str]:
    """Text keys that may be missing: those of a mechanism that this configuration switches off."""
    names = {field.name for field in dataclasses.fields(TextConfig)}
    optional = set(_OPTIONAL_TEXT)
    if not values.get("engram_layer_ids"):
        optional |= {name for name in names if name.startswith("engram_")}
    if not values.get("num_nextn_predict_layers"):
        optional |= {name for name in names if name.startswith("dspark_")}
    if values.get("candidate_source_layer_id") is None:
        optional |= {name for name in names if name.startswith("candidate_")}
    return frozenset(optional)


def _section(cls: type, values: dict[str, Any], prefix: str, ignored: frozenset[str], optional: frozenset[str],
             problems: list[str]) -> dict[str, Any]:
    """Values of one section, checked against the fields of `cls`; lists become tuples. Appends to `problems`."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in _SECTIONS | {"quantization_extra"}}
    for name in values:
        if name not in fields and name not in ignored:
            problems.append(f"{prefix}{name}: unknown key")
    result = {}
    for name, field in fields.items():
        if name not in values:
            if name not in optional:
                problems.append(f"{prefix}{name}: missing")
            elif name == "candidate_source_layer_id":
                result[name] = None
            continue
        value = values[name]
        value = tuple(value) if isinstance(value, list) else value
        wrong = _type_problem(field.type, value)
        if wrong:
            problems.append(f"{prefix}{name}: wanted {wrong}, got {value!r}")
        elif field.type == "float":
            value = float(value)
        result[name] = value
    return result


def _type_problem(annotation: str, value: Any) -> str | None:
    """What was wanted, if `value` does not fit the annotation; None if it fits."""
    def is_int(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**63

    def is_number(x: Any) -> bool:
        return is_int(x) or isinstance(x, float) and math.isfinite(x)  # an integer beyond int64 is no sensible width

    checks = {
        "int": ("an integer", is_int),
        "int | None": ("an integer or null", lambda x: x is None or is_int(x)),
        "float": ("a finite number", is_number),
        "float | None": ("a finite number or null", lambda x: x is None or is_number(x)),
        "bool": ("true or false", lambda x: isinstance(x, bool)),
        "str": ("a string", lambda x: isinstance(x, str)),
        "tuple[int, ...]": ("a list of integers", lambda x: isinstance(x, tuple) and all(map(is_int, x))),
        "tuple[str, ...]": ("a list of strings", lambda x: isinstance(x, tuple) and all(isinstance(s, str) for s in x)),
    }
    if annotation not in checks:
        return None  # RopeScaling and sections are checked by their own pass
    wanted, fits = checks[annotation]
    return None if fits(value) else wanted


def _quantization(values: dict[str, Any] | None) -> QuantizationConfig | None:
    if values is None:
        return None
    names = {field.name for field in dataclasses.fields(QuantizationConfig)} - {"extra"}
    known = {name: tuple(value) if isinstance(value, list) else value
             for name, value in values.items() if name in names}
    extra = tuple((name, value) for name, value in values.items() if name not in names)
    return QuantizationConfig(**known, extra=extra)


# --- the publisher's flat names (official: class ModelArgs) ------------------------------------------------------

_MODEL_ARGS_TEXT = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers", "n_mtp_layers": "num_nextn_predict_layers", "n_heads": "num_attention_heads",
    "head_dim": "head_dim", "rope_head_dim": "qk_rope_head_dim", "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts", "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func", "route_scale": "routed_scaling_factor", "swiglu_limit": "swiglu_limit",
    "norm_topk_prob": "norm_topk_prob", "norm_eps": "rms_norm_eps", "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups", "o_lora_rank": "o_lora_rank", "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids", "index_source_layers": "index_source_layer_ids",
    "compress_ratios": "compress_ratios", "compress_rope_theta": "compress_rope_theta", "rope_theta": "rope_theta",
    "index_n_heads": "index_n_heads", "index_head_dim": "index_head_dim", "index_topk": "index_topk",
    "candidate_source_layer": "candidate_source_layer_id", "candidate_topk_blocks": "candidate_topk_blocks",
    "candidate_block_size": "candidate_block_size", "hc_mult": "hc_mult", "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps", "engram_layer_ids": "engram_layer_ids", "engram_num_embeddings": "engram_num_embeddings",
    "engram_max_ngram_size": "engram_max_ngram_size", "engram_vocab_size": "engram_vocab_size",
    "engram_n_heads": "engram_n_heads", "engram_head_dim": "engram_head_dim", "engram_pad_id": "engram_pad_token_id",
    "engram_compressed_vocab_size": "engram_compressed_vocab_size", "dspark_block_size": "dspark_block_size",
    "dspark_noise_token_id": "dspark_noise_token_id", "dspark_target_layer_ids": "dspark_target_layer_ids",
    "dspark_markov_rank": "dspark_markov_rank", "dspark_n_routed_experts": "dspark_n_routed_experts",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
_MODEL_ARGS_ROPE = {"original_seq_len": "original_max_position_embeddings", "rope_factor": "factor",
                    "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
_MODEL_ARGS_VISION = {
    "vision_n_layers": "num_hidden_layers", "vision_dim": "hidden_size", "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size", "vision_patch_size": "patch_size", "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio", "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels", "vision_max_wh_ratio": "max_wh_ratio",
}
# Run-time settings of the official code that are no property of the model; gate_temp is checked to be 1.
_MODEL_ARGS_IGNORED = frozenset({"max_batch_size", "max_seq_len", "temperature", "gate_temp"})


def _from_model_args(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """The Hugging Face form of a flat `inference/config.json`. Unknown keys raise ValueError."""
    text: dict[str, Any] = {}
    rope: dict[str, Any] = {"rope_type": "yarn"}
    vision: dict[str, Any] = {}
    top: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # official: tokenizer ids
    quantization = {}
    problems = []
    for name, value in values.items():
        if name in _MODEL_ARGS_TEXT:
            text[_MODEL_ARGS_TEXT[name]] = value
        elif name in _MODEL_ARGS_ROPE:
            rope[_MODEL_ARGS_ROPE[name]] = value
        elif name in _MODEL_ARGS_VISION:
            vision[_MODEL_ARGS_VISION[name]] = value
        elif name == "image_token_id":
            top[name] = value
        elif name == "dtype":
            quantization["quant_method"] = value
        elif name == "expert_dtype":
            quantization["expert_dtype"] = value
        elif name not in _MODEL_ARGS_IGNORED:
            problems.append(f"{name}: unknown key")
    if values.get("gate_temp", 1.0) != 1.0:
        problems.append(f"gate_temp: only 1.0 is implemented, got {values['gate_temp']!r}")
    if problems:
        raise ValueError(f"Reading {origin} (official inference form):\n  " + "\n  ".join(problems))
    if all(isinstance(rope.get(key), (int, float)) and math.isfinite(rope[key])
           for key in ("factor", "original_max_position_embeddings")):
        # ours: that form has no context limit; YaRN's extended length is the released one (65,536 * 16).
        text["max_position_embeddings"] = int(rope["factor"] * rope["original_max_position_embeddings"])
    text["rope_scaling"] = rope
    return {**top, "text_config": text, "vision_config": vision or None, "quantization_config": quantization or None}


# --- contradictions --------------------------------------------------------------------------------------------


def _problems(config: Config) -> list[str]:
    """All contradictions of a configuration, one sentence each, naming the keys."""
    text = config.text_config
    problems = []

    def check(holds: bool, message: str) -> None:
        if not holds:
            problems.append(message)

    for name, value in _FIXED_TEXT.items():
        check(getattr(text, name) == value, f"{name}: only {value!r} is implemented, got {getattr(text, name)!r}")
    check(text.rope_scaling.rope_type == "yarn", f"rope_scaling.rope_type: only 'yarn' is implemented, got "
          f"{text.rope_scaling.rope_type!r}")
    check(text.rope_scaling.beta_fast > text.rope_scaling.beta_slow, f"rope_scaling: beta_fast "
          f"{text.rope_scaling.beta_fast} must be above beta_slow {text.rope_scaling.beta_slow}")
    check(config.model_type.startswith("deepseek_v41"), f"model_type: only deepseek_v41 is implemented, got "
          f"{config.model_type!r}")
    for name in ("num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts", "dspark_n_routed_experts",
                 "num_attention_heads", "index_n_heads", "hc_mult", "engram_n_heads", "engram_max_ngram_size"):
        check(getattr(text, name) <= 2**16, f"{name}: {getattr(text, name)} is more than 65,536")
    for name in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "o_lora_rank", "o_groups",
                 "sliding_window", "index_head_dim", "candidate_block_size", "hc_sinkhorn_iters", "engram_head_dim"):
        check(getattr(text, name) <= 2**24, f"{name}: {getattr(text, name)} is more than 2^24")
    may_be_zero = {"num_nextn_predict_layers", "engram_pad_token_id", "dspark_noise_token_id", "attention_dropout",
                   "candidate_source_layer_id"}
    for section in (text, text.rope_scaling, *([config.vision_config] if config.vision_config else [])):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if field.type in ("int", "float") and field.name not in may_be_zero:
                check(value > 0, f"{field.name}: must be above 0, got {value}")
    if problems:
        return problems  # the rules below divide by these values

    layers = text.num_hidden_layers + text.num_nextn_predict_layers
    ratios = text.compress_ratios
    check(len(ratios) == layers, f"compress_ratios has {len(ratios)} entries, wanted num_hidden_layers + "
          f"num_nextn_predict_layers = {layers}")
    check(all(ratio >= 0 for ratio in ratios), f"compress_ratios: entries must be 0 or above, got {list(ratios)}")
    check(not any(ratios[text.num_hidden_layers:]), "compress_ratios: draft stages are window only, their entries "
          "must be 0")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(text, name)
        check(list(ids) == sorted(set(ids)), f"{name}: must be strictly ascending, got {list(ids)}")
        outside = [i for i in ids if not 0 <= i < text.num_hidden_layers]
        check(not outside, f"{name}: {outside} outside the backbone layers 0..{text.num_hidden_layers - 1}")
    if not problems:
        problems += _source_problems(text)

    check(text.num_attention_heads % text.o_groups == 0, f"o_groups {text.o_groups} does not divide "
          f"num_attention_heads {text.num_attention_heads}")
    check(text.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim: must be even, got {text.qk_rope_head_dim}")
    for name in ("head_dim", "index_head_dim"):
        check(getattr(text, name) >= text.qk_rope_head_dim, f"{name} {getattr(text, name)} is smaller than "
              f"qk_rope_head_dim {text.qk_rope_head_dim}")
    group_input = text.num_attention_heads // text.o_groups * text.head_dim
    widths = {"hidden_size": text.hidden_size, "moe_intermediate_size": text.moe_intermediate_size,
              "head_dim": text.head_dim, "q_lora_rank": text.q_lora_rank, "index_head_dim": text.index_head_dim,
              "o_groups * o_lora_rank": text.o_groups * text.o_lora_rank,
              "num_attention_heads / o_groups * head_dim": group_input}
    if text.engram_layer_ids:
        widths["engram_head_dim"] = text.engram_head_dim
    for name, width in widths.items():
        check(width % QUANT_GROUP == 0, f"{name} = {width} is not a multiple of {QUANT_GROUP}, so it cannot be "
              "quantized in groups")
    for name, active, total in (
            ("num_experts_per_tok", text.num_experts_per_tok, text.n_routed_experts),
            ("dspark_num_experts_per_tok", text.dspark_num_experts_per_tok, text.dspark_n_routed_experts)):
        check(active <= total, f"{name} {active} is more than the {total} routed experts")
    check(len(text.engram_num_embeddings) == len(text.engram_layer_ids), f"engram_num_embeddings has "
          f"{len(text.engram_num_embeddings)} entries for {len(text.engram_layer_ids)} engram_layer_ids")
    if text.engram_layer_ids:
        check(text.engram_max_ngram_size >= 2, f"engram_max_ngram_size must be at least 2, got "
              f"{text.engram_max_ngram_size}")
    if text.num_nextn_predict_layers:
        check(len(text.dspark_target_layer_ids) > 0, "dspark_target_layer_ids is empty although there are draft stages")
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id,
           "pad_token_id": config.pad_token_id}
    if config.vision_config is not None:
        ids["image_token_id"] = config.image_token_id
    if text.engram_layer_ids:
        ids["engram_pad_token_id"] = text.engram_pad_token_id
    if text.num_nextn_predict_layers:
        ids["dspark_noise_token_id"] = text.dspark_noise_token_id
    for name, value in ids.items():
        check(0 <= value < text.vocab_size, f"{name} {value} is outside the vocabulary 0..{text.vocab_size - 1}")
    vision = config.vision_config
    if vision is not None:
        check(vision.hidden_size % (4 * vision.num_attention_heads) == 0, "vision hidden_size "
              f"{vision.hidden_size} must be a multiple of 4 * num_attention_heads (two rotated axes of pairs)")
    return problems


def _source_problems(text: TextConfig) -> list[str]:
    """Contradictions between ratios and sources; the id lists are known to be ascending and in range."""
    problems = []
    ratios = text.compress_ratios
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer_id in getattr(text, name):
            if ratios[layer_id] == 0:
                problems.append(f"{name}: layer {layer_id} has compress ratio 0 and cannot be a source")
    for layer_id in text.kv_source_layer_ids:
        if layer_id not in text.index_source_layer_ids:
            problems.append(f"kv_source_layer_ids: layer {layer_id} is no entry of index_source_layer_ids, so its "
                            "compressed rows would be read with another source's selection")
    for layer_id, ratio in enumerate(ratios[:text.num_hidden_layers]):
        if ratio == 0:
            continue
        sources = [i for i in text.kv_source_layer_ids if i <= layer_id]
        if not sources or not any(i <= layer_id for i in text.index_source_layer_ids):
            problems.append(f"layer {layer_id} has compress ratio {ratio} but no source layer at or before it in "
                            "kv_source_layer_ids and index_source_layer_ids")
        elif ratios[sources[-1]] != ratio:
            problems.append(f"compress_ratios: layer {layer_id} has ratio {ratio} but reads layer {sources[-1]}, which "
                            f"has ratio {ratios[sources[-1]]}")
    candidate = text.candidate_source_layer_id
    if candidate is not None:
        if candidate not in text.index_source_layer_ids:
            problems.append(f"candidate_source_layer_id {candidate} is no entry of index_source_layer_ids")
        later = [i for i in text.kv_source_layer_ids if i > candidate]
        if later:
            problems.append(f"candidate_source_layer_id {candidate}: kv_source_layer_ids {later} come after it, but its "
                            "candidate blocks count another source's rows")
    return problems
