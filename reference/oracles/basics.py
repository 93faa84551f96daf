"""The few formulas every concept shares: linear map, RMSNorm, SiLU, sigmoid, softmax.

    linear(x) = x W^T (+ bias)        rms_norm(x) = weight * x / sqrt(mean(x^2) + eps)

All float64, over the last axis. Test: through every other oracle.
"""

import numpy as np


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x [..., I], weight [O, I], bias [O] -> [..., O]."""
    product = x @ weight.T
    return product if bias is None else product + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., D], weight [D] -> [..., D]."""
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), element by element, written so that large |x| neither overflows nor cancels."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(x, np.float64)))


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    """Along the last axis, largest value subtracted first."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
