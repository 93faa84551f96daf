"""The configuration of the toy model: every mechanism of the release, at a size that a laptop runs.

What it makes: the content of `config.json` for a given tokenizer (the Engram hashes depend on how its ids fold).
The plan of the eight layers (ours):
    0 window            1 window, Engram            2 ratio 2, Full            3 ratio 2, Reuse of 2
    4 ratio 2, Full, Engram    5 ratio 1, Full, candidates    6 ratio 1, Reindex inside the candidates    7 ratio 1, Reuse of 6
    and three draft stages conditioned on layers 5, 6, 7.
The window has 32 positions and a query selects 32 compressed rows, out of at most 64 that the candidate blocks leave of a
context of up to 2,048 tokens: what a question asks for is nearly always outside the window, and must be found.
Test: tests/test_train.py
"""

from __future__ import annotations

from typing import Any

from inference.config import TextConfig
from inference.engram import hash_primes
from inference.tokenizer import Tokenizer, fold_vocabulary

LAYERS, STAGES = 8, 3

TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 96,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 128},
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 32,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1] + [0] * STAGES,
    "compress_rope_theta": 160000.0,
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 6],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 32,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 7001,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": STAGES,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 6,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}

VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "patch_size": 14,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 7056,
    "max_wh_ratio": None,
}


def toy_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of config.json. Raises ValueError where the tokenizer does not fit (too few ids for the markers)."""
    text = {"vocab_size": tokenizer.vocab_size, **TEXT}
    sizes = TextConfig(**{key: tuple(text[key]) if isinstance(text[key], list) else text[key] for key in (
        "engram_layer_ids", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads")})
    text["engram_num_embeddings"] = [sum(sum(order) for order in orders) for orders in hash_primes(sizes)]
    text["engram_compressed_vocab_size"] = int(fold_vocabulary(tokenizer, tokenizer.vocab_size).max()) + 1
    return {
        "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 5,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
                                "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        "text_config": text, "vision_config": dict(VISION),
    }
