"""Latent attention: one row per token is key and value for all heads; window rows plus selected compressed rows.

    q_latent = RMSNorm(x Wq_a);  q = rotate(q_latent Wq_b)                 (no norm per head)
    window row = fake_quant(rotate(RMSNorm(x Wkv)))                        visible at positions p - window + 1 .. p
    out_h = sum_t exp(q_h . row_t / sqrt(K)) row_t / (sum_t exp(q_h . row_t / sqrt(K)) + exp(sink_h))
    o_h   = rotate out_h back (the rows are values too, so they arrive rotated)
    result = (grouped o Wo_a) Wo_b                                         G groups of H / G consecutive heads

One softmax over both kinds of rows; a token may appear as window row and as compressed row and then counts twice. The
sink has no value and is not scaled. Mirrors: MLA and sparse_attn of the official inference code. Leaves out: the online
block form of the softmax (same value, different rounding). Test: tests/oracles/test_oracle_attention.py.
"""

import math

import numpy as np

from reference.oracles.basics import linear, rms_norm
from reference.oracles.quantizers import FP8_GROUP32, fake_quantize
from reference.oracles.rope import rotate


def queries(
    x: np.ndarray, weights: dict, prefix: str, heads: int, positions: range, frequencies: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """x [S, D] -> q_latent [S, Q] (shared with the indexer) and rotated queries [S, H, K]."""
    q_latent = rms_norm(linear(x, weights[prefix + "wq_a.weight"]), weights[prefix + "q_norm.weight"], eps)
    q = linear(q_latent, weights[prefix + "wq_b.weight"]).reshape(len(x), heads, -1)
    return q_latent, np.array([[rotate(head, p, frequencies) for head in row] for p, row in zip(positions, q)])


def unquantized_rows(
    x: np.ndarray, weights: dict, prefix: str, positions: range, frequencies: np.ndarray, eps: float
) -> np.ndarray:
    """x [S, D] -> rotated window rows [S, K]."""
    kv = rms_norm(linear(x, weights[prefix + "wkv.weight"]), weights[prefix + "kv_norm.weight"], eps)
    return np.array([rotate(row, p, frequencies) for p, row in zip(positions, kv)])


def maybe_fake_quantize(rows: np.ndarray, fake_quant: bool) -> np.ndarray:
    """Window rows: FP8 with power-of-two scale, groups of 32, over the whole row, rotated channels included."""
    return fake_quantize(rows, FP8_GROUP32) if fake_quant else rows


def attend(query: np.ndarray, rows: np.ndarray, sink: float) -> np.ndarray:
    """One head of one query [K] over its visible rows [T, K] -> [K]; no rows give zeros."""
    if len(rows) == 0:
        return np.zeros_like(query)
    logits = [query @ row / math.sqrt(len(query)) for row in rows]
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    return sum(weight * row for weight, row in zip(weights, rows)) / (sum(weights) + math.exp(sink - largest))


def attend_back_rotated(
    q: np.ndarray, visible: list[np.ndarray], sink: np.ndarray, positions: range, frequencies: np.ndarray
) -> np.ndarray:
    """q [S, H, K], visible: per query the rows it sees [T, K] -> head outputs rotated back, [S, H, K]."""
    result = np.empty_like(q)
    for s, position in enumerate(positions):
        for h in range(q.shape[1]):
            result[s, h] = rotate(attend(q[s, h], visible[s], sink[h]), position, frequencies, inverse=True)
    return result


def output_projection(out: np.ndarray, wo_a: np.ndarray, wo_b: np.ndarray, groups: int) -> np.ndarray:
    """out [S, H, K] -> [S, D]. wo_a [G*O, H*K/G]: each group of heads has its own low-rank projection."""
    rank = wo_a.shape[0] // groups
    grouped = out.reshape(len(out), groups, -1)
    parts = [linear(grouped[:, g], wo_a[g * rank : (g + 1) * rank]) for g in range(groups)]
    return linear(np.concatenate(parts, axis=-1), wo_b)
