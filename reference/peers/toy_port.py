"""A port of the text model in the style of Hugging Face, with three planted bugs: the patient of reference/PORTING.md.

    python -m reference.peers.torch_hooks --factory reference.peers.toy_port:build --ckpt DIR --input-file FILE
                                          --out DIR [--numerics dequantized] [--option fixed=1]

It computes what inference/ computes, on a whole prompt, in another way: dense masks instead of gathered rows, complex
numbers for rotary, all experts on all tokens. Text only: no Engram, no pictures, no drafts, no cache.
The bugs are three mistakes of real ports. `fixed` says how many of them, in the order in which a comparison finds them,
are repaired: 0 by default. Read PORTING.md before the code below; the point is to find them without it.
Leaves out: the rounding of product inputs (native numerics), and its own loader. Weights and number formats come from
inference/, so that only the forward is under test.
Tests: tests/test_peers.py
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inference
from inference.config import TextConfig
from inference.quant import fake_quant_fp4_e4m3, fake_quant_fp4_e8m0, fake_quant_fp8
from reference.peers.torch_hooks import Engine, Tap
from reference.trace_format import TraceError


class ToyNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class ToyLinear(nn.Linear):
    """A product in float32, rounded once to the dtype of its input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight).to(x.dtype)


class ToyRotary(nn.Module):
    """Turns adjacent channel pairs, as complex numbers."""

    def __init__(self, config: TextConfig, ratio: int) -> None:
        super().__init__()
        width = config.qk_rope_head_dim
        base = config.compress_rope_theta if ratio else config.rope_theta
        speeds = base ** -(torch.arange(0, width, 2) / width)
        if ratio:
            scaling = config.rope_scaling
            low, high = (width * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns))
                         / (2 * math.log(base)) for turns in (scaling.beta_fast, scaling.beta_slow))
            low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
            share = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
            speeds = speeds / scaling.factor * share + speeds * (1 - share)
        self.speeds = speeds

    def turn(self, x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """x [B, S, ..., K] by the angles of positions [S]."""
        width = 2 * len(self.speeds)
        angle = (positions.float()[:, None] * self.speeds * sign).view(1, -1, *(1,) * (x.dim() - 3), width // 2)
        pairs = torch.view_as_complex(x[..., -width:].float().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


class ToyQueries(nn.Module):
    def __init__(self, config: TextConfig, rotary: ToyRotary) -> None:
        super().__init__()
        self.config, self.rotary = config, rotary
        self.a_proj = ToyLinear(config.hidden_size, config.q_lora_rank)
        self.norm = ToyNorm(config.q_lora_rank, config.rms_norm_eps)
        self.b_proj = ToyLinear(config.q_lora_rank, config.num_attention_heads * config.head_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.norm(self.a_proj(x))
        heads = self.b_proj(latent).unflatten(-1, (self.config.num_attention_heads, -1))
        return latent, self.rotary.turn(heads, torch.arange(x.shape[1]))


class ToyWindowRows(nn.Module):
    def __init__(self, config: TextConfig, rotary: ToyRotary, fake_quant: bool) -> None:
        super().__init__()
        self.rotary, self.fake_quant = rotary, fake_quant
        self.proj = ToyLinear(config.hidden_size, config.head_dim)
        self.norm = ToyNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rotary.turn(self.norm(self.proj(x)), torch.arange(x.shape[1]))
        return rows, fake_quant_fp8(rows) if self.fake_quant else rows


class ToyCompressor(nn.Module):
    """Groups of `ratio` tokens -> latents, compressed rows and index keys."""

    def __init__(self, config: TextConfig, ratio: int, rotary: ToyRotary, fake_quant: bool, fixed: int) -> None:
        super().__init__()
        self.ratio, self.rotary, self.fake_quant, self.fixed = ratio, rotary, fake_quant, fixed
        self.kv_proj = ToyLinear(config.hidden_size, config.head_dim)
        self.gate_proj = ToyLinear(config.hidden_size, config.head_dim) if ratio > 1 else None
        self.norm = ToyNorm(config.head_dim, config.rms_norm_eps)
        self.k_proj = ToyLinear(config.head_dim, config.index_head_dim)
        self.k_norm = ToyNorm(config.index_head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = x.shape[1] // self.ratio
        x = x[:, :groups * self.ratio]
        if self.gate_proj is None:
            latent = self.norm(self.kv_proj(x))
        else:
            values, gates = (proj(x.float()).unflatten(1, (groups, self.ratio))
                             for proj in (self.kv_proj, self.gate_proj))
            latent = self.norm((values * gates.softmax(2)).sum(2).to(x.dtype))
        first = torch.arange(groups) * self.ratio
        rows = self.rotary.turn(latent, first if self.fixed >= 2 else torch.arange(groups))
        keys = self.rotary.turn(self.k_norm(self.k_proj(latent)), first)
        if self.fake_quant:
            rows, keys = fake_quant_fp4_e4m3(rows), fake_quant_fp4_e8m0(keys)
        return latent, rows, keys


class ToyIndexer(nn.Module):
    """Which groups every query reads: scores, candidate mask (None if it makes none), mask of the chosen, topk."""

    def __init__(self, config: TextConfig, layer: int, rotary: ToyRotary, fake_quant: bool, fixed: int) -> None:
        super().__init__()
        self.config, self.layer, self.rotary, self.fake_quant, self.fixed = config, layer, rotary, fake_quant, fixed
        self.ratio = config.compress_ratios[layer]
        self.q_proj = ToyLinear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.weights_proj = ToyLinear(config.hidden_size, config.index_n_heads)

    def forward(self, x: Tensor, latent: Tensor, keys: Tensor, candidates: Tensor | None,
                ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        config, positions, groups = self.config, torch.arange(x.shape[1]), keys.shape[1]
        queries = self.rotary.turn(self.q_proj(latent).unflatten(-1, (config.index_n_heads, -1)), positions)
        queries = fake_quant_fp4_e8m0(queries) if self.fake_quant else queries
        weights = self.weights_proj(x) / math.sqrt(config.index_n_heads * config.index_head_dim)
        products = torch.einsum("bshd,bgd->bshg", queries, keys).relu()
        scores = torch.einsum("bshg,bsh->bsg", products, weights)
        visible = (positions + 1) // self.ratio
        scores = scores.masked_fill(torch.arange(groups) >= visible[:, None], -torch.inf)
        allowed = scores
        made = self._candidates(scores, visible) if self.layer == config.candidate_source_layer_id else None
        if made is None and candidates is not None and self.layer > config.candidate_source_layer_id:
            allowed = scores.masked_fill(~candidates, -torch.inf)
        best = allowed.topk(min(config.index_topk, groups))
        topk = best.indices.masked_fill(best.values == -torch.inf, -1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
        return scores, made, chosen, topk

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        size, keep, groups = self.config.candidate_block_size, self.config.candidate_topk_blocks, scores.shape[-1]
        blocks = F.pad(scores, (0, -groups % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        if self.fixed >= 3:
            newest = (visible - 1) // size
            pinned = (torch.arange(blocks.shape[-1]) == newest[:, None]) & (visible > 0)[:, None]
            blocks = blocks.masked_fill(pinned, torch.inf)
        best = blocks.topk(min(keep, blocks.shape[-1]))
        mask = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
        return mask.repeat_interleave(size, -1)[..., :groups]


class ToyCore(nn.Module):
    """Dense masked attention with a sink; the output is turned back."""

    def __init__(self, config: TextConfig, rotary: ToyRotary) -> None:
        super().__init__()
        self.scale, self.rotary = config.head_dim**-0.5, rotary
        self.sink = nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, q: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """q [B, S, H, K], rows [B, T, K], mask [B, S, T] -> [B, S, H, K]."""
        logits = torch.einsum("bshk,btk->bhst", q.float(), rows.float()) * self.scale
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
        sink = self.sink.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        shares = torch.cat((logits, sink), dim=-1).softmax(-1)[..., :-1]
        out = torch.einsum("bhst,btk->bshk", shares, rows.float()).to(q.dtype)
        return self.rotary.turn(out, torch.arange(q.shape[1]), sign=-1)


class ToyAttention(nn.Module):
    def __init__(self, config: TextConfig, layer: int, fake_quant: bool, fixed: int) -> None:
        super().__init__()
        self.config, self.layer, self.ratio = config, layer, config.compress_ratios[layer]
        rotary = ToyRotary(config, self.ratio)
        self.q_proj, self.kv_proj = ToyQueries(config, rotary), ToyWindowRows(config, rotary, fake_quant)
        self.compressor = (ToyCompressor(config, self.ratio, rotary, fake_quant, fixed)
                           if layer in config.kv_source_layer_ids else None)
        self.indexer = (ToyIndexer(config, layer, rotary, fake_quant, fixed)
                        if layer in config.index_source_layer_ids else None)
        self.core = ToyCore(config, rotary)
        group_width = config.num_attention_heads // config.o_groups * config.head_dim
        self.o_a_proj = nn.Parameter(torch.empty(config.o_groups, config.o_lora_rank, group_width))
        self.o_b_proj = ToyLinear(config.o_groups * config.o_lora_rank, config.hidden_size)

    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        """shared: what earlier layers of this forward made for later ones; this layer adds its own."""
        positions = torch.arange(x.shape[1])
        latent, q = self.q_proj(x)
        _, rows = self.kv_proj(x)
        distance = positions[:, None] - positions
        mask = ((distance >= 0) & (distance < self.config.sliding_window)).expand(len(x), -1, -1)
        if self.compressor is not None:
            _, shared["rows"], shared["keys"] = self.compressor(x)
        if self.indexer is not None:
            _, made, shared["chosen"], _ = self.indexer(x, latent, shared["keys"], shared.get("candidates"))
            if made is not None:
                shared["candidates"] = made
        if self.ratio:
            rows, mask = torch.cat((rows, shared["rows"]), dim=1), torch.cat((mask, shared["chosen"]), dim=-1)
        out = self.core(q, rows, mask).unflatten(2, (self.config.o_groups, -1)).flatten(-2)
        return self.o_b_proj(torch.einsum("bsgi,goi->bsgo", out, self.o_a_proj.to(x.dtype)).flatten(-2))


class ToyRouter(nn.Module):
    def __init__(self, config: TextConfig, fixed: int) -> None:
        super().__init__()
        self.config, self.fixed = config, fixed
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.n_routed_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.softplus(F.linear(x.float(), self.weight)).sqrt()
        biased = scores + self.bias
        ids = biased.topk(self.config.num_experts_per_tok).indices
        weights = (scores if self.fixed >= 1 else biased).gather(-1, ids)
        return scores, ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor


class ToyExpert(nn.Module):
    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate_proj = ToyLinear(config.hidden_size, config.moe_intermediate_size)
        self.up_proj = ToyLinear(config.hidden_size, config.moe_intermediate_size)
        self.down_proj = ToyLinear(config.moe_intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x).float().clamp(-self.limit, self.limit)
        return self.down_proj((F.silu(self.gate_proj(x).float().clamp(max=self.limit)) * up).to(x.dtype))


class ToyExperts(nn.Module):
    def __init__(self, config: TextConfig, fixed: int) -> None:
        super().__init__()
        self.router = ToyRouter(config, fixed)
        self.experts = nn.ModuleList(ToyExpert(config) for _ in range(config.n_routed_experts))
        self.shared = ToyExpert(config)

    def forward(self, x: Tensor) -> Tensor:
        _, ids, weights = self.router(x)
        dense = torch.zeros(*x.shape[:2], len(self.experts)).scatter(-1, ids, weights)
        routed = sum(dense[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
        return (routed + self.shared(x)).to(x.dtype)


class ToyMixer(nn.Module):
    """Coefficients of one hyper-connection."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        outputs = config.hc_mult * (2 + config.hc_mult)
        self.fn = nn.Parameter(torch.empty(outputs, config.hc_mult * config.hidden_size))
        self.base, self.scale = nn.Parameter(torch.empty(outputs)), nn.Parameter(torch.empty(3))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copies, eps = self.config.hc_mult, self.config.hc_eps
        flat = streams.float().flatten(2)
        flat = F.rms_norm(flat, flat.shape[-1:], eps=self.config.rms_norm_eps)
        scale = self.scale.repeat_interleave(torch.tensor([copies, copies, copies**2]))
        pre, post, comb = (F.linear(flat, self.fn) * scale + self.base).split([copies, copies, copies**2], -1)
        comb = comb.unflatten(-1, (copies, copies)).softmax(-1) + eps
        for number in range(2 * self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-2 if number % 2 == 0 else -1, keepdim=True) + eps)
        return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def collapsed(streams: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bsc,bscd->bsd", mix, streams.float()).to(streams.dtype)


class ToyLayer(nn.Module):
    def __init__(self, config: TextConfig, layer: int, fake_quant: bool, fixed: int) -> None:
        super().__init__()
        self.attn_hc, self.ffn_hc = ToyMixer(config), ToyMixer(config)
        self.input_layernorm = ToyNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ToyNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ToyAttention(config, layer, fake_quant, fixed)
        self.mlp = ToyExperts(config, fixed)

    def forward(self, streams: Tensor, pre: Tensor, shared: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        for mixer, norm, run in ((self.attn_hc, self.input_layernorm, lambda x: self.self_attn(x, shared)),
                                 (self.ffn_hc, self.post_attention_layernorm, self.mlp)):
            following, post, comb = mixer(streams)
            y = run(norm(collapsed(streams, pre)))
            carried = torch.einsum("bsij,bsid->bsjd", comb, streams.float())
            streams = (post[..., None] * y[:, :, None] + carried).to(streams.dtype)
            pre = following
        return streams, pre


class ToyModel(nn.Module):
    def __init__(self, config: TextConfig, fake_quant: bool, fixed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ToyLayer(config, i, fake_quant, fixed) for i in range(config.num_hidden_layers))
        self.norm = ToyNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = ToyLinear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [B, S] -> logits [B, S, V]."""
        streams = self.embed_tokens(input_ids).to(self.dtype)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        pre = F.one_hot(torch.zeros(input_ids.shape, dtype=torch.int64), self.config.hc_mult).float()
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            streams, pre = layer(streams, pre, shared)
        return self.lm_head(self.norm(collapsed(streams, pre)).float())


# Parts of our parameter names -> its own, tried in this order.
_RENAMES = (("head.weight", "lm_head.weight"), ("embed.", "embed_tokens."), (".attn_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."), (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."),
            (".attn.attn_sink", ".self_attn.core.sink"), (".attn.compressor.wkv", ".self_attn.compressor.kv_proj"),
            (".attn.compressor.wgate", ".self_attn.compressor.gate_proj"),
            (".attn.indexer.wk.", ".self_attn.compressor.k_proj."),
            (".attn.indexer.k_norm", ".self_attn.compressor.k_norm"),
            (".attn.indexer.wq_b", ".self_attn.indexer.q_proj"),
            (".attn.wq_a", ".self_attn.q_proj.a_proj"), (".attn.wq_b", ".self_attn.q_proj.b_proj"),
            (".attn.q_norm", ".self_attn.q_proj.norm"), (".attn.wkv", ".self_attn.kv_proj.proj"),
            (".attn.kv_norm", ".self_attn.kv_proj.norm"), (".attn.wo_a.weight", ".self_attn.o_a_proj"),
            (".attn.wo_b", ".self_attn.o_b_proj"), (".attn.", ".self_attn."), (".ffn.gate.", ".mlp.router."),
            (".ffn.shared_experts.", ".mlp.shared."), (".ffn.", ".mlp."), (".w1.", ".gate_proj."),
            (".w2.", ".down_proj."), (".w3.", ".up_proj."))

TAPS = {
    "embed_tokens": Tap(output="embed"),  # float32 here: the table holds BF16 values, so nothing is lost
    "layers.{i}": Tap("layers.{i}.in", "layers.{i}.out"),
    "layers.{i}.attn_hc": Tap(output=("layers.{i}.hc_attn.pre_next", "layers.{i}.hc_attn.post",
                                      "layers.{i}.hc_attn.comb")),
    "layers.{i}.ffn_hc": Tap(output=("layers.{i}.hc_ffn.pre_next", "layers.{i}.hc_ffn.post", "layers.{i}.hc_ffn.comb")),
    "layers.{i}.self_attn": Tap("layers.{i}.attn.in", "layers.{i}.attn.out"),
    "layers.{i}.self_attn.q_proj": Tap(output=("layers.{i}.attn.q_latent", "layers.{i}.attn.q")),
    "layers.{i}.self_attn.kv_proj": Tap(output=("layers.{i}.attn.kv", "layers.{i}.attn.kv_quant")),
    "layers.{i}.self_attn.compressor": Tap(output=("layers.{i}.attn.compressor.latent", "layers.{i}.attn.compressor.kv",
                                                   "layers.{i}.attn.indexer.k")),
    "layers.{i}.self_attn.indexer": Tap(output=("layers.{i}.attn.indexer.scores", "layers.{i}.attn.indexer.candidates",
                                                None, "layers.{i}.attn.indexer.topk")),
    "layers.{i}.self_attn.core": Tap(output="layers.{i}.attn.out_unrotated"),
    "layers.{i}.mlp": Tap("layers.{i}.ffn.in", "layers.{i}.ffn.out"),
    "layers.{i}.mlp.router": Tap(output=("layers.{i}.ffn.gate_scores", "layers.{i}.ffn.expert_ids",
                                         "layers.{i}.ffn.expert_weights")),
    "norm": Tap("head.collapsed", "norm"),
}


def build(checkpoint: str | Path, fake_quant: bool, fixed: str = "0", numerics: str = "float32") -> Engine:
    """The toy with the weights of a text checkpoint. fixed: how many of the planted bugs are repaired.

    numerics: float32, or dequantized (BF16 between modules). Raises TraceError for anything it cannot run.
    """
    if fixed not in ("0", "1", "2", "3") or numerics not in ("float32", "dequantized"):
        raise TraceError("Building the toy port: fixed must be 0, 1, 2 or 3 and numerics float32 or dequantized, got "
                         f"{fixed!r} and {numerics!r}.")
    try:
        source = inference.load(checkpoint, numerics="float32")
    except ValueError as error:
        raise TraceError(str(error)) from None
    config = source.config.text_config
    if config.engram_layer_ids or config.num_nextn_predict_layers or source.config.vision_config is not None:
        raise TraceError(f"Building the toy port: {checkpoint} has Engram, drafts or pictures, the toy has none. Make "
                         "one with: python -m reference.peers.text_checkpoint OUT_DIR")
    weights = {}
    for name, value in source.state_dict().items():
        if name.endswith("bias_vl"):
            continue
        for old, new in _RENAMES:
            name = name.replace(old, new) if name != new else name
        value = value.float()
        weights[name] = value.unflatten(0, (config.o_groups, -1)) if name.endswith("o_a_proj") else value
    model = ToyModel(config, fake_quant, int(fixed), torch.bfloat16 if numerics == "dequantized" else torch.float32)
    model.load_state_dict(weights)
    return Engine("toy port", f"fixed {fixed}", model.eval(), TAPS, lambda model, ids: model(ids), numerics)
