"""DSpark drafting: one block of tokens guessed from the backbone's late streams.

    main_x     = RMSNorm(main_hidden Wmain)                     main_hidden: mean streams entering the target layers
    context    = per stage: fake_quant(rotate(RMSNorm(main_x Wkv)))       one row per committed position
    block      = [anchor, noise, ..., noise] at the positions after the last committed one; every block row sees the
                 last `window` context rows and ALL block rows (no causal mask)
    stages     = layers like the backbone's, window only, fresh one-hot collapse at the first
    logits_k   = head(norm(h_k)) + Markov(previous token);  next token = argmax
    confidence_k = w . [h_k ; Markov embedding of the previous token]     h un-normed

Mirrors: the draft forward of the official inference code. Leaves out: verification, sampling at a temperature.
Test: tests/oracles/test_oracle_dspark.py (golden traces).
"""

from pathlib import Path

import numpy as np

from reference.oracles import attention, hyper_connections
from reference.oracles.basics import linear, rms_norm
from reference.oracles.checkpoint import Checkpoint
from reference.oracles.model import as_checkpoint, moe_layer, oracle_forward, wrapped
from reference.oracles.quantizers import FP8_GROUP32, rounding_margin
from reference.oracles.recorder import Recorder
from reference.oracles.rope import rotary_frequencies


def stage_attention(
    x: np.ndarray, main_x: np.ndarray, stage: int, checkpoint: Checkpoint, fake_quant: bool, recorder: Recorder
) -> np.ndarray:
    """x [block, D] normed, main_x [committed, D] -> [block, D]."""
    text, weights = checkpoint.config["text_config"], checkpoint.weights
    prefix, eps, frequencies = f"mtp.{stage}.attn.", text["rms_norm_eps"], rotary_frequencies(text, 0)
    committed = len(main_x)

    def cached(source: np.ndarray, positions: range) -> np.ndarray:
        rows = attention.unquantized_rows(source, weights, prefix, positions, frequencies, eps)
        recorder.margin(prefix + "kv_quant", rounding_margin(rows, FP8_GROUP32))
        return attention.maybe_fake_quantize(rows, fake_quant)

    first = max(0, committed - text["sliding_window"])
    context = cached(main_x[first:], range(first, committed))
    positions = range(committed, committed + len(x))
    rows = np.concatenate([context, cached(x, positions)])
    _, q = attention.queries(x, weights, prefix, text["num_attention_heads"], positions, frequencies, eps)
    out = attention.attend_back_rotated(q, [rows] * len(x), weights[prefix + "attn_sink"], positions, frequencies)
    out = recorder.record(prefix + "out_unrotated", out)
    wo_a, wo_b = weights[prefix + "wo_a.weight"], weights[prefix + "wo_b.weight"]
    return attention.output_projection(out, wo_a, wo_b, text["o_groups"])


def draft_one(main_hidden: np.ndarray, anchor: int, checkpoint: Checkpoint, fake_quant: bool) -> Recorder:
    """main_hidden [committed, targets * D] of one sequence, the token after it -> every point of one draft."""
    text, weights, recorder = checkpoint.config["text_config"], checkpoint.weights, Recorder()
    eps, stages = text["rms_norm_eps"], text["num_nextn_predict_layers"]
    last, block_size = f"mtp.{stages - 1}.", text["dspark_block_size"]
    recorder.record("anchor", np.int64(anchor))
    recorder.record("mtp.main_hidden", main_hidden[-1:])
    main_x = rms_norm(linear(main_hidden, weights["mtp.0.main_proj.weight"]), weights["mtp.0.main_norm.weight"], eps)
    recorder.record("mtp.main_x", main_x[-1:])

    ids = [anchor] + [text["dspark_noise_token_id"]] * (block_size - 1)
    streams = np.repeat(weights["embed.weight"][ids][:, None, :], text["hc_mult"], axis=1)
    pre = hyper_connections.first_pre(block_size, text["hc_mult"])
    for stage in range(stages):
        prefix = f"mtp.{stage}."
        newest_position = range(len(main_x) - 1, len(main_x))
        newest = attention.unquantized_rows(
            main_x[-1:], weights, prefix + "attn.", newest_position, rotary_frequencies(text, 0), eps
        )
        recorder.record(prefix + "attn.context_kv", attention.maybe_fake_quantize(newest, fake_quant))

        def run_attention(x, stage=stage):
            return stage_attention(x, main_x, stage, checkpoint, fake_quant, recorder), None

        def run_moe(x, prefix=prefix):
            no_images = np.zeros(block_size, bool)  # official: drafts are text, bias_vl of the stages is never used
            active = text["dspark_num_experts_per_tok"]
            return moe_layer(x, no_images, prefix + "ffn.", active, checkpoint, recorder), None

        streams, pre, _ = wrapped(streams, pre, prefix, "attn", checkpoint, recorder, run_attention)
        streams, pre, _ = wrapped(streams, pre, prefix, "ffn", checkpoint, recorder, run_moe)

    hidden = recorder.record("mtp.head.collapsed", hyper_connections.collapse(streams, pre))
    base_logits = linear(rms_norm(hidden, weights[last + "norm.weight"], eps), weights["head.weight"])
    tokens, logits, confidence = [int(anchor)], [], []
    for k in range(block_size):
        markov = weights[last + "markov_head.embed.weight"][tokens[-1]]
        logits.append(base_logits[k] + linear(markov, weights[last + "markov_head.head.weight"]))
        confidence.append(linear(np.concatenate([hidden[k], markov]), weights[last + "confidence_head.proj.weight"])[0])
        tokens.append(int(np.argmax(logits[-1])))
        ordered = np.sort(logits[-1])
        recorder.margin("mtp.draft_ids", float((ordered[-1] - ordered[-2]) / np.abs(ordered).max()))
    recorder.record("mtp.logits", np.array(logits))
    recorder.record("mtp.confidence", np.array(confidence))
    recorder.record("mtp.draft_ids", np.array(tokens, np.int64))
    return recorder


def oracle_draft_with_margins(
    checkpoint: Checkpoint | str | Path,
    input_ids: np.ndarray,
    anchor: np.ndarray,
    fake_quant: bool = True,
    main_hidden: np.ndarray | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """oracle_draft, and the smallest margin per decision point (see model.oracle_forward_with_margins)."""
    checkpoint = as_checkpoint(checkpoint)
    if not checkpoint.config["text_config"].get("num_nextn_predict_layers"):
        raise ValueError("drafting: wanted a checkpoint with draft stages, got num_nextn_predict_layers = 0")
    if main_hidden is None:
        main_hidden = oracle_forward(checkpoint, input_ids, fake_quant)["mtp.main_hidden"]
    recorders = [draft_one(row, int(token), checkpoint, fake_quant) for row, token in zip(main_hidden, anchor)]
    points = {name: np.stack([recorder.points[name] for recorder in recorders]) for name in recorders[0].points}
    margins = {name: min(recorder.margins[name] for recorder in recorders) for name in recorders[0].margins}
    return points, margins


def oracle_draft(
    checkpoint: Checkpoint | str | Path,
    input_ids: np.ndarray,
    anchor: np.ndarray,
    fake_quant: bool = True,
    main_hidden: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """One greedy draft after the committed tokens.

    checkpoint   folder in the publisher's layout, or what load_checkpoint returned
    input_ids    int [B, S], the committed tokens; unused when main_hidden is given
    anchor       int [B], the token after them
    main_hidden  [B, S, targets * D] of the committed tokens from an earlier oracle_forward; None computes it
    returns      point name -> array. Points of committed tokens (mtp.main_hidden, mtp.main_x, context_kv) hold the
                 newest one only; mtp.draft_ids [B, 1 + block] starts with the anchor; mtp.logits hold the Markov bias
    """
    return oracle_draft_with_margins(checkpoint, input_ids, anchor, fake_quant, main_hidden)[0]
