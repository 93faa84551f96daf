"""Compressor: every `ratio` consecutive tokens become one latent row, the key and value of compressed attention.

    ratio 1:  latent_j = RMSNorm(x_j Wkv)
    ratio m:  latent_j = RMSNorm(sum_t softmax_t(x_t Wgate) * (x_t Wkv)),  t = j*m .. j*m + m - 1

The softmax runs over the tokens of the group, separately for each channel. An unfinished group gives no row. The cached
row is the latent rotated at the group's FIRST position j*m, then fake-quantized (FP4, E4M3 scale, groups of 16).
Mirrors: Compressor of the official inference code. Leaves out: the state of an open group (there is no cache here).
Test: tests/oracles/test_oracle_compressor.py.
"""

import numpy as np

from reference.oracles.basics import linear, rms_norm, softmax
from reference.oracles.quantizers import FP4_GROUP16, fake_quantize
from reference.oracles.rope import rotate


def latents(
    x: np.ndarray, wkv: np.ndarray, wgate: np.ndarray | None, norm: np.ndarray, ratio: int, eps: float
) -> np.ndarray:
    """x [S, D] -> un-rotated latents [S // ratio, K]. wgate is None exactly when ratio is 1."""
    values = linear(x, wkv)
    if ratio == 1:
        return rms_norm(values, norm, eps)
    gates = linear(x, wgate)
    rows = np.zeros((len(x) // ratio, wkv.shape[0]))
    for j in range(len(rows)):
        tokens = range(j * ratio, (j + 1) * ratio)
        for channel in range(wkv.shape[0]):
            weights = softmax(np.array([gates[t, channel] for t in tokens]))
            rows[j, channel] = sum(weight * values[t, channel] for weight, t in zip(weights, tokens))
    return rms_norm(rows, norm, eps)


def rotated_rows(latent: np.ndarray, ratio: int, frequencies: np.ndarray) -> np.ndarray:
    """latent [N, K] -> rotated rows [N, K], row j at position j * ratio."""
    return np.array([rotate(row, j * ratio, frequencies) for j, row in enumerate(latent)]).reshape(latent.shape)


def cached_rows(latent: np.ndarray, ratio: int, frequencies: np.ndarray, fake_quant: bool) -> np.ndarray:
    """latent [N, K] -> compressed KV rows [N, K] as the cache holds them."""
    rows = rotated_rows(latent, ratio, frequencies)
    return fake_quantize(rows, FP4_GROUP16) if fake_quant else rows
