"""The whole backbone, one prompt at a time, recomputed from position 0.

    streams = C copies of the embedding (image rows replace placeholder rows)
    per layer: [Engram on the streams] -> attention -> MoE, each wrapped in lagged hyper-connections
    logits  = RMSNorm(collapse(streams, pre of the last MoE)) Whead

A layer with compressed KV reads the rows of the nearest KV source at or below it, and the selection of the nearest
index source at or below it. Mirrors: Transformer and Block of the official inference code. Leaves out: caches; a decode
step is checked against this by truncating the prompt. Test: tests/oracles/test_oracle_model.py (golden traces).

Point names are those of the recorded traces: `layers.{i}.{module}.{point}`, `embed`, `head.collapsed`, `logits`,
`mtp.main_hidden`, `vision.out`, `aligner.out`.
"""

from pathlib import Path

import numpy as np

from reference.oracles import attention, compressor, engram, hyper_connections, indexer, moe, vision
from reference.oracles.basics import linear, rms_norm
from reference.oracles.checkpoint import Checkpoint, load_checkpoint
from reference.oracles.quantizers import FP4_GROUP16, FP4_GROUP32, FP8_GROUP32, rounding_margin
from reference.oracles.recorder import Recorder
from reference.oracles.rope import rotary_frequencies

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3  # official: codes of token_types


def nearest_source(layer: int, sources: list[int]) -> int:
    """The largest source id at or below `layer`. official: sharing runs forward from each source."""
    below = [source for source in sources if source <= layer]
    if not below:
        raise ValueError(f"layer {layer} reads compressed rows, but no source at or below it is among {sources}")
    return max(below)


def embed(
    ids: np.ndarray, token_types: np.ndarray, patches: list, grids: list, checkpoint: Checkpoint, recorder: Recorder
) -> np.ndarray:
    """Token rows [S, D]; image span rows replaced by their delimiters and by the aligned image features."""
    weights = checkpoint.weights
    rows = weights["embed.weight"][ids]
    delimiters = {START: "image_start", NEWLINE: "image_newline", END: "image_end"}
    for image_patches, grid in zip(patches, grids):
        start, patch_rows, patch_columns, cell_rows, cell_columns = (int(number) for number in grid)
        vision_config = checkpoint.config["vision_config"]
        features = vision.tower(image_patches, patch_columns, vision_config, weights)
        features = recorder.record("vision.out", features)
        aligned = vision.aligner(features, patch_rows, patch_columns, vision_config["downsample_ratio"], weights)
        aligned = recorder.record("aligner.out", aligned)
        span = [START] + ([IMAGE] * cell_columns + [NEWLINE]) * cell_rows + [END]
        if list(token_types[start : start + len(span)]) != span:
            raise ValueError(f"placing an image at position {start}: token_types there do not spell the span {span}")
        features_left = iter(aligned)
        for offset, kind in enumerate(span):
            rows[start + offset] = next(features_left) if kind == IMAGE else weights[delimiters[kind]]
    return rows


def compressed_side(
    x: np.ndarray, q_latent: np.ndarray, layer: int, shared: dict, checkpoint: Checkpoint, fake_quant: bool,
    recorder: Recorder,
) -> tuple[dict, np.ndarray, np.ndarray]:
    """What a layer with ratio > 0 makes or reads besides its window: (shared of later layers, KV rows, selection).

    shared maps ("kv" | "keys" | "selection" | "candidates", source layer id) to arrays; a new dict is returned.
    """
    text, weights = checkpoint.config["text_config"], checkpoint.weights
    ratio, eps = text["compress_ratios"][layer], text["rms_norm_eps"]
    frequencies, prefix = rotary_frequencies(text, ratio), f"layers.{layer}.attn."
    kv_source = nearest_source(layer, text["kv_source_layer_ids"])
    index_source = nearest_source(layer, text["index_source_layer_ids"])
    if text["compress_ratios"][kv_source] != ratio:
        raise ValueError(f"layer {layer} has ratio {ratio}, its KV source {kv_source} has another one")
    shared = dict(shared)

    if layer == kv_source:
        wgate = weights[prefix + "compressor.wgate.weight"] if ratio > 1 else None
        wkv, norm = weights[prefix + "compressor.wkv.weight"], weights[prefix + "compressor.norm.weight"]
        latent = compressor.latents(x, wkv, wgate, norm, ratio, eps)
        latent = recorder.record(prefix + "compressor.latent", latent)
        shared["kv", layer] = compressor.cached_rows(latent, ratio, frequencies, fake_quant)
        rotated = compressor.rotated_rows(latent, ratio, frequencies)
        recorder.margin(prefix + "compressor.kv", rounding_margin(rotated, FP4_GROUP16))
        wk, k_norm = weights[prefix + "indexer.wk.weight"], weights[prefix + "indexer.k_norm.weight"]
        keys = indexer.unquantized_keys(latent, wk, k_norm, ratio, frequencies, eps)
        recorder.margin(prefix + "indexer.k", rounding_margin(keys, FP4_GROUP32))
        shared["keys", layer] = indexer.maybe_fake_quantize(keys, fake_quant)

    if layer == index_source:
        heads, wq_b = text["index_n_heads"], weights[prefix + "indexer.wq_b.weight"]
        queries = indexer.unquantized_queries(q_latent, wq_b, heads, frequencies)
        recorder.margin(prefix + "indexer.q", rounding_margin(queries, FP4_GROUP32))
        queries = indexer.maybe_fake_quantize(queries, fake_quant)
        keys, proj = shared["keys", kv_source], weights[prefix + "indexer.weights_proj.weight"]
        score = recorder.record(prefix + "indexer.scores", indexer.scores(queries, keys, x, proj, ratio))
        candidate_source = text.get("candidate_source_layer_id")
        if layer == candidate_source:
            block, keep = text["candidate_block_size"], text["candidate_topk_blocks"]
            candidates = indexer.candidate_rows(score, ratio, block, keep)
            shared["candidates", layer] = recorder.record(prefix + "indexer.candidates", candidates)
        elif candidate_source is not None and layer > candidate_source:
            score = np.where(shared["candidates", candidate_source], score, -np.inf)
        selection = indexer.select(score, text["index_topk"])
        shared["selection", layer] = recorder.record(prefix + "indexer.topk", selection)
        recorder.margin(prefix + "indexer.topk", indexer.selection_margin(score, text["index_topk"]))

    if layer == kv_source:
        shared["kv", layer] = recorder.record(prefix + "compressor.kv", shared["kv", layer])
    return shared, shared["kv", kv_source], shared["selection", index_source]


def attention_layer(
    x: np.ndarray, layer: int, shared: dict, checkpoint: Checkpoint, fake_quant: bool, recorder: Recorder
) -> tuple[np.ndarray, dict]:
    """x [S, D], already normed -> attention output [S, D], shared of later layers."""
    text, weights = checkpoint.config["text_config"], checkpoint.weights
    ratio, eps, window = text["compress_ratios"][layer], text["rms_norm_eps"], text["sliding_window"]
    frequencies, prefix = rotary_frequencies(text, ratio), f"layers.{layer}.attn."
    positions = range(len(x))
    q_latent, q = attention.queries(x, weights, prefix, text["num_attention_heads"], positions, frequencies, eps)
    q = recorder.record(prefix + "q", q)
    rows = attention.unquantized_rows(x, weights, prefix, positions, frequencies, eps)
    recorder.margin(prefix + "kv_quant", rounding_margin(rows, FP8_GROUP32))
    rows = recorder.record(prefix + "kv_quant", attention.maybe_fake_quantize(rows, fake_quant))
    visible = [rows[max(0, p - window + 1) : p + 1] for p in positions]
    if ratio > 0:
        shared, compressed, selection = compressed_side(x, q_latent, layer, shared, checkpoint, fake_quant, recorder)
        visible = [
            np.concatenate([window_rows, compressed[[j for j in chosen if j >= 0]]])
            for window_rows, chosen in zip(visible, selection)
        ]
    out = attention.attend_back_rotated(q, visible, weights[prefix + "attn_sink"], positions, frequencies)
    out = recorder.record(prefix + "out_unrotated", out)
    wo_a, wo_b = weights[prefix + "wo_a.weight"], weights[prefix + "wo_b.weight"]
    return attention.output_projection(out, wo_a, wo_b, text["o_groups"]), shared


def moe_layer(
    x: np.ndarray, image_mask: np.ndarray, prefix: str, active: int, checkpoint: Checkpoint, recorder: Recorder
) -> np.ndarray:
    """x [S, D], already normed -> MoE output [S, D]. Shared with the draft stages. prefix ends in "ffn."."""
    text, weights = checkpoint.config["text_config"], checkpoint.weights
    text_bias, image_bias = weights[prefix + "gate.bias"], weights[prefix + "gate.bias_vl"]
    bias = np.array([image_bias if is_image else text_bias for is_image in image_mask])
    scaling = text["routed_scaling_factor"]
    ids, expert_weights, biased = moe.route(x, weights[prefix + "gate.weight"], bias, active, scaling)
    ids = recorder.record(prefix + "expert_ids", ids)
    expert_weights = recorder.record(prefix + "expert_weights", expert_weights)
    recorder.margin(prefix + "expert_ids", indexer.selection_margin(biased, active))
    return moe.moe(x, ids, expert_weights, weights, prefix, text["swiglu_limit"])


def wrapped(
    streams: np.ndarray, pre_used: np.ndarray, prefix: str, kind: str, checkpoint: Checkpoint, recorder: Recorder, run
) -> tuple[np.ndarray, np.ndarray, object]:
    """One sub-layer inside its hyper-connection. kind: "attn" or "ffn"; run: normed [S, D] -> (output [S, D], extra).

    Returns the new streams [S, C, D], the pre vector of the NEXT sub-layer [S, C], and extra.
    """
    text, weights = checkpoint.config["text_config"], checkpoint.weights
    fn, base, scale = (weights[f"{prefix}hc_{kind}_{part}"] for part in ("fn", "base", "scale"))
    coefficients = zip(("pre_next", "post", "comb"), hyper_connections.mixes(streams, fn, base, scale, text))
    pre_next, post, comb = (recorder.record(f"{prefix}hc_{kind}.{name}", value) for name, value in coefficients)
    collapsed = hyper_connections.collapse(streams, pre_used)
    normed = rms_norm(collapsed, weights[f"{prefix}{kind}_norm.weight"], text["rms_norm_eps"])
    output, extra = run(recorder.record(f"{prefix}{kind}.in", normed))
    output = recorder.record(f"{prefix}{kind}.out", output)
    new_streams = hyper_connections.expand(output, streams, post, comb)
    new_streams = recorder.record(f"{prefix}mid" if kind == "attn" else f"{prefix}out", new_streams)
    return new_streams, pre_next, extra


def forward_one(
    checkpoint: Checkpoint, ids: np.ndarray, token_types: np.ndarray, patches: list, grids: list, fake_quant: bool,
    grafts: dict,
) -> Recorder:
    """One sequence, ids [S] -> every point (without batch axis) and every margin."""
    text, weights, recorder = checkpoint.config["text_config"], checkpoint.weights, Recorder(grafts)
    image_mask = token_types != TEXT
    table_rows = {}
    if text.get("engram_layer_ids"):
        classes = [engram.DEAD if dead else checkpoint.token_classes[i] for i, dead in zip(ids, image_mask)]
        table_rows = engram.all_hash_ids(classes, text, checkpoint.token_classes)
        for layer, row_ids in list(table_rows.items()):
            table_rows[layer] = recorder.record(f"layers.{layer}.engram.hash_ids", row_ids)

    rows = recorder.record("embed", embed(ids, token_types, patches, grids, checkpoint, recorder))
    streams = recorder.record("layers.0.in", np.repeat(rows[:, None, :], text["hc_mult"], axis=1))
    pre, shared, draft_parts = hyper_connections.first_pre(len(ids), text["hc_mult"]), {}, []
    draft_layers = text.get("dspark_target_layer_ids") or []
    for layer in range(text["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        if layer in draft_layers:
            draft_parts.append(streams.mean(axis=1))
        if layer in table_rows:
            gate, streams = engram.engram(
                streams, table_rows[layer], image_mask, weights, prefix + "engram.", text["rms_norm_eps"]
            )
            recorder.record(prefix + "engram.gate", gate)
            streams = recorder.record(prefix + "engram.out", streams)

        def run_attention(x, layer=layer, shared=shared):
            return attention_layer(x, layer, shared, checkpoint, fake_quant, recorder)

        def run_moe(x, prefix=prefix):
            return moe_layer(x, image_mask, prefix + "ffn.", text["num_experts_per_tok"], checkpoint, recorder), None

        streams, pre, shared = wrapped(streams, pre, prefix, "attn", checkpoint, recorder, run_attention)
        streams, pre, _ = wrapped(streams, pre, prefix, "ffn", checkpoint, recorder, run_moe)

    collapsed = recorder.record("head.collapsed", hyper_connections.collapse(streams, pre))
    logits = linear(rms_norm(collapsed, weights["norm.weight"], text["rms_norm_eps"]), weights["head.weight"])
    recorder.record("logits", logits)
    recorder.margin("argmax", indexer.selection_margin(logits, 1))
    if draft_parts:
        recorder.record("mtp.main_hidden", np.concatenate(draft_parts, axis=-1))
    return recorder


def as_checkpoint(checkpoint: Checkpoint | str | Path) -> Checkpoint:
    """A loaded checkpoint as it is, a path loaded."""
    return checkpoint if isinstance(checkpoint, Checkpoint) else load_checkpoint(checkpoint)


def is_per_image(name: str) -> bool:
    """Points of one image have no batch axis."""
    return name.startswith(("vision.", "aligner."))


def oracle_forward_with_margins(
    checkpoint: Checkpoint | str | Path,
    input_ids: np.ndarray,
    fake_quant: bool = True,
    token_types: np.ndarray | None = None,
    patches: list = (),
    grids: list = (),
    grafts: dict | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """oracle_forward, and per decision point the smallest margin over all rows. ours.

    margins of fake quantizers: see quantizers.rounding_margin. margins of selections (`indexer.topk`, `expert_ids`,
    `argmax`): gap between the last kept and the first dropped value, relative to the largest.
    """
    checkpoint = as_checkpoint(checkpoint)
    vocab_size = checkpoint.config["text_config"]["vocab_size"]
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(f"running the oracle: wanted input_ids [B, S] with S >= 1, got shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"running the oracle: wanted token ids in 0..{vocab_size - 1}, got {ids.min()}..{ids.max()}")
    if len(patches) and len(ids) != 1:
        raise ValueError(f"running the oracle: images are placed in one sequence, got a batch of {len(ids)}; split it")
    types = np.full(ids.shape, TEXT) if token_types is None else np.asarray(token_types)
    recorders = []
    for b in range(len(ids)):
        row_grafts = {name: values if is_per_image(name) else values[b] for name, values in (grafts or {}).items()}
        recorders.append(forward_one(checkpoint, ids[b], types[b], list(patches), list(grids), fake_quant, row_grafts))
    points = {}
    for name, first in recorders[0].points.items():
        rows = [recorder.points[name] for recorder in recorders]
        points[name] = first if is_per_image(name) else np.stack(rows)
    margins = {name: min(recorder.margins[name] for recorder in recorders) for name in recorders[0].margins}
    return points, margins


def oracle_forward(
    checkpoint: Checkpoint | str | Path,
    input_ids: np.ndarray,
    fake_quant: bool = True,
    token_types: np.ndarray | None = None,
    patches: list = (),
    grids: list = (),
    grafts: dict | None = None,
) -> dict[str, np.ndarray]:
    """One prompt through the backbone.

    checkpoint   folder in the publisher's layout, or what load_checkpoint returned
    input_ids    int [B, S]
    fake_quant   whether window KV, compressed KV, index keys and index queries are rounded to their cache formats
    token_types  int [B, S]: -1 text, 0 image start, 1 image, 2 newline, 3 image end; None = all text
    patches      per image [n, 3, P, P], values as the tower sees them; needs B = 1
    grids        per image (start position, patch rows, patch columns, text rows, text columns)
    grafts       point name -> value [B, ...] to go on with in place of the computed one (see recorder.py)
    returns      point name -> float64 [B, S, ...] or integer array, in execution order
    """
    return oracle_forward_with_margins(checkpoint, input_ids, fake_quant, token_types, patches, grids, grafts)[0]
