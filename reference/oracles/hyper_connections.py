"""Lagged hyper-connections: C residual streams, mixed before and after every sub-layer.

    u = (W flatten(X)) / sqrt(mean(flatten(X)^2) + eps_norm)              one statistic over all streams of a token
    pre[c]  = sigmoid(u_pre[c] * scale[0] + base_pre[c]) + eps            weights of the NEXT collapse (the lag)
    post[c] = 2 sigmoid(u_post[c] * scale[1] + base_post[c])
    comb    = Sinkhorn(softmax over targets of (u_comb * scale[2] + base_comb))
    collapse:  z = sum_c a[c] X[c]
    expand:    X'[j] = post[j] y + sum_i comb[i, j] X[i]                  comb carries source i to target j

u, base = [C pre | C post | C*C comb, row-major]: C * (2 + C) numbers. Mirrors: hc_pre, hc_post and hc_split_sinkhorn
of the official inference code, V4.1 form. Leaves out: nothing. Test: tests/oracles/test_oracle_hyper_connections.py.
"""

import math

import numpy as np

from reference.oracles.basics import sigmoid


def split_mixes(
    u: np.ndarray, base: np.ndarray, scale: np.ndarray, copies: int, rounds: int, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """u [C*(2+C)] float64 of one token -> pre [C], post [C], comb [C, C] (source, target)."""
    pre = np.array([sigmoid(u[c] * scale[0] + base[c]) + eps for c in range(copies)])
    post = np.array([2 * sigmoid(u[copies + c] * scale[1] + base[copies + c]) for c in range(copies)])
    comb = np.empty((copies, copies))
    for i in range(copies):
        row = [u[2 * copies + copies * i + j] * scale[2] + base[2 * copies + copies * i + j] for j in range(copies)]
        exponentials = [math.exp(value - max(row)) for value in row]
        comb[i] = [value / sum(exponentials) + eps for value in exponentials]
    # official: the first round has no row step (the softmax was one); the last step is a column step.
    for round_number in range(rounds):
        if round_number > 0:
            comb = comb / (comb.sum(axis=1, keepdims=True) + eps)  # rows: over the targets of each source
        comb = comb / (comb.sum(axis=0, keepdims=True) + eps)  # columns: over the sources of each target
    return pre, post, comb


def mixes(
    streams: np.ndarray, fn: np.ndarray, base: np.ndarray, scale: np.ndarray, text_config: dict
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """streams [S, C, D], fn [C*(2+C), C*D] -> pre [S, C], post [S, C], comb [S, C, C]."""
    copies, rounds, eps = text_config["hc_mult"], text_config["hc_sinkhorn_iters"], text_config["hc_eps"]
    results = []
    for token in streams:
        flat = token.reshape(-1)  # stream index slowest
        u = (fn @ flat) / math.sqrt((flat * flat).mean() + text_config["rms_norm_eps"])
        results.append(split_mixes(u, base, scale, copies, rounds, eps))
    pre, post, comb = zip(*results)
    return np.array(pre), np.array(post), np.array(comb)


def first_pre(tokens: int, copies: int) -> np.ndarray:
    """The collapse weights of the first sub-layer: stream 0 alone, [S, C]. official: one-hot, not a mean."""
    pre = np.zeros((tokens, copies))
    pre[:, 0] = 1
    return pre


def collapse(streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
    """streams [S, C, D], pre [S, C] -> [S, D]."""
    return np.array([sum(pre[s, c] * streams[s, c] for c in range(streams.shape[1])) for s in range(len(streams))])


def expand(output: np.ndarray, streams: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
    """Sub-layer output [S, D] written back into streams [S, C, D] -> [S, C, D]."""
    result = np.empty_like(streams)
    for s in range(streams.shape[0]):
        for j in range(streams.shape[1]):
            result[s, j] = post[s, j] * output[s]
            for i in range(streams.shape[1]):
                result[s, j] += comb[s, i, j] * streams[s, i]
    return result
