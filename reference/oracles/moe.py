"""Mixture of experts: every token runs through its best routed experts and one shared expert.

    score  = sqrt(softplus(x Wgate))
    chosen = the A experts with the largest score + bias       (bias_vl instead of bias inside image spans)
    weight = score / (sum of the chosen scores + 1e-20) * routed_scaling_factor       unbiased scores
    expert = (silu(min(x W1, limit)) * clamp(x W3, -limit, limit) * weight) W2
    output = sum over chosen experts + shared expert (weight 1)

Mirrors: Gate, Expert and MoE of the official inference code. Leaves out: nothing (there is no capacity and no group
limit). Test: tests/oracles/test_oracle_moe.py.
"""

import math

import numpy as np

from reference.oracles.basics import linear, silu
from reference.oracles.indexer import best

ROUTE_EPS = 1e-20  # official: a literal in the divisor of the router weights, not the norm's eps


def softplus(logit: float) -> float:
    """log(1 + exp(logit)) without overflow or cancellation."""
    return max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))


def route(
    x: np.ndarray, gate_weight: np.ndarray, bias: np.ndarray, active: int, scaling: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [S, D], bias [S, E] (already chosen per token) -> ids int32 [S, A] ascending, weights [S, A], biased [S, E]."""
    logits = linear(x, gate_weight)
    ids, weights, biased_scores = [], [], []
    for s in range(len(x)):
        score = np.array([math.sqrt(softplus(logit)) for logit in logits[s]])
        biased = score + bias[s]
        chosen = sorted(best(biased, active))
        total = sum(score[e] for e in chosen) + ROUTE_EPS
        ids.append(chosen)
        weights.append([score[e] / total * scaling for e in chosen])
        biased_scores.append(biased)
    return np.array(ids, np.int32), np.array(weights), np.array(biased_scores)


def expert(x: np.ndarray, w1: np.ndarray, w2: np.ndarray, w3: np.ndarray, limit: float, weight: float) -> np.ndarray:
    """One token [D] through one expert -> [D]. official: the gate is clamped from above only."""
    gate = np.minimum(linear(x, w1), limit)
    up = np.clip(linear(x, w3), -limit, limit)
    return linear(silu(gate) * up * weight, w2)


def moe(
    x: np.ndarray, ids: np.ndarray, expert_weights: np.ndarray, weights: dict, prefix: str, limit: float
) -> np.ndarray:
    """x [S, D] with its routing -> [S, D]."""

    def run(token: np.ndarray, name: str, weight: float) -> np.ndarray:
        w1, w2, w3 = (weights[f"{prefix}{name}.{w}.weight"] for w in ("w1", "w2", "w3"))
        return expert(token, w1, w2, w3, limit, weight)

    result = np.zeros_like(x)
    for s, token in enumerate(x):
        for e, weight in zip(ids[s], expert_weights[s]):
            result[s] += run(token, f"experts.{e}", weight)
        result[s] += run(token, "shared_experts", 1.0)
    return result
