"""Indexer: scores every visible compressed row for every query and keeps the best few.

    key_j      = fake_quant(rotate(RMSNorm(latent_j Wk), j * ratio))                     latent before its own rotation
    query_p,h  = fake_quant(rotate(q_latent_p Wq[h], p))
    score_p,j  = sum_h relu(query_p,h . key_j) * w_p,h,     w = (x Wproj) / sqrt(X * J)  (X = width, J = heads)
    visible:     j < floor((p + 1) / ratio); unseen rows score -inf

Selection: the index_topk best visible rows, lowest index first among equals, listed in ascending order, padded with -1.
Candidate blocks (made by one layer, obeyed by later index layers): blocks of consecutive rows rank by their best row;
the block holding the newest visible row is always kept; later layers may select inside kept blocks only.

Mirrors: Indexer of the official inference code. Leaves out: the BF16 roundings of the score, which belong to the native
numerics. Test: tests/oracles/test_oracle_indexer.py.
"""

import math

import numpy as np

from reference.oracles.basics import linear, rms_norm
from reference.oracles.compressor import rotated_rows
from reference.oracles.quantizers import FP4_GROUP32, fake_quantize
from reference.oracles.rope import rotate


def visible_rows(position: int, ratio: int) -> int:
    """Number of compressed rows a query at `position` may see: groups finished at or before it."""
    return (position + 1) // ratio


def unquantized_keys(
    latent: np.ndarray, wk: np.ndarray, k_norm: np.ndarray, ratio: int, frequencies: np.ndarray, eps: float
) -> np.ndarray:
    """latent [N, K] -> rotated index keys [N, X], one per group, shared by all index heads."""
    return rotated_rows(rms_norm(linear(latent, wk), k_norm, eps), ratio, frequencies)


def unquantized_queries(q_latent: np.ndarray, wq_b: np.ndarray, heads: int, frequencies: np.ndarray) -> np.ndarray:
    """q_latent [S, Q] -> rotated index queries [S, J, X]."""
    queries = linear(q_latent, wq_b).reshape(len(q_latent), heads, -1)
    return np.array([[rotate(head, p, frequencies) for head in row] for p, row in enumerate(queries)])


def maybe_fake_quantize(values: np.ndarray, fake_quant: bool) -> np.ndarray:
    """Index queries and keys share one quantizer: FP4 with power-of-two scale, groups of 32."""
    return fake_quantize(values, FP4_GROUP32) if fake_quant else values


def scores(
    queries: np.ndarray, keys: np.ndarray, x: np.ndarray, weights_proj: np.ndarray, ratio: int
) -> np.ndarray:
    """queries [S, J, X], keys [N, X], x [S, D] -> scores [S, N], -inf where unseen."""
    heads, width = queries.shape[1:]
    head_weights = linear(x, weights_proj) / math.sqrt(heads * width)
    result = np.full((len(queries), len(keys)), -np.inf)
    for p in range(len(queries)):
        for j in range(min(visible_rows(p, ratio), len(keys))):
            result[p, j] = sum(max(queries[p, h] @ keys[j], 0.0) * head_weights[p, h] for h in range(heads))
    return result


def best(values: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` largest finite-or-infinite values above -inf; the lowest index wins a tie."""
    order = sorted(range(len(values)), key=lambda j: (-values[j], j))
    return [j for j in order if values[j] > -np.inf][:count]


def candidate_rows(score: np.ndarray, ratio: int, block_size: int, keep_blocks: int) -> np.ndarray:
    """score [S, N] of the candidate layer -> boolean [S, N]: rows inside the kept blocks of each query."""
    result = np.zeros(score.shape, bool)
    block_count = math.ceil(score.shape[1] / block_size)
    for p, row in enumerate(score):
        blocks = [range(b * block_size, min((b + 1) * block_size, len(row))) for b in range(block_count)]
        block_score = np.array([max(row[j] for j in block) for block in blocks])
        if visible_rows(p, ratio) > 0:
            block_score[(visible_rows(p, ratio) - 1) // block_size] = np.inf  # official: the newest block is pinned
        for b in best(block_score, keep_blocks):
            result[p, blocks[b]] = True
    return result


def select(score: np.ndarray, top: int) -> np.ndarray:
    """score [S, N] with -inf for forbidden rows -> selected rows int32 [S, min(top, N)], ascending, -1 padded."""
    width = min(top, score.shape[1])
    result = np.full((len(score), width), -1, np.int32)
    for p, row in enumerate(score):
        chosen = sorted(best(row, width))
        result[p, : len(chosen)] = chosen
    return result


def selection_margin(score: np.ndarray, count: int) -> float:
    """Smallest gap between the last kept and the first dropped value of a row, relative to the row's largest. ours.

    0 means a tie; inf means that no row had to drop anything.
    """
    smallest = np.inf
    for row in score:
        finite = np.sort(row[np.isfinite(row)])[::-1]
        if len(finite) > count > 0:
            smallest = min(smallest, (finite[count - 1] - finite[count]) / max(np.abs(finite).max(), 1e-300))
    return float(smallest)
