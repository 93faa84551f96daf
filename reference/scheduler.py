"""How many drafts of every request to verify, when one batch serves many requests.

    survival a_j = c_1 ... c_j       estimated probability that the first j drafts of a request are all accepted
    tau(l)   = sum over requests of (1 + a_1 + ... + a_l)     expected tokens of a step, the bonus included
    B(l)     = sum over requests of (1 + l)                   tokens in the step's call
    Theta    = tau * SPS(B)                                   expected tokens per second; SPS: measured steps per second
Greedy plan: admit (request, position) pairs by falling survival and stop at the first one that does not raise Theta.
Why stop there
    c_{k+1} is computed from the drawn token x_k. A plan that looks past a fall may admit x_k because of what x_k is; tokens
    that are verified only when they are likely to lead to good drafts are no longer distributed like the model's.
    `lengths(..., stop=False)` is that wrong plan, kept as the counterexample of tests/test_scheduler.py.
In production (DSpark paper) the number of pairs comes from confidences of two steps earlier, which cannot know this step's
tokens, so it needs no early stop: `capacity` and `admit`.
Mirrors DSpark paper: hardware-aware prefix scheduler, appendix A. Tests: tests/test_scheduler.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def survival(confidence: Sequence[float], temperatures: Sequence[float] = ()) -> list[float]:
    """Confidence logits of one request's drafts -> survival of every prefix. temperatures: see calibration.py."""
    scale = [*temperatures, *[1.0] * len(confidence)]
    chances = [1 / (1 + math.exp(-logit / temperature)) for logit, temperature in zip(confidence, scale)]
    return [math.prod(chances[:count]) for count in range(1, len(chances) + 1)]


def lengths(survivals: Sequence[Sequence[float]], steps_per_second: Sequence[float], stop: bool = True) -> list[int]:
    """Drafts to verify for every request.

    survivals: per request, falling. steps_per_second[n]: steps per second when the call has n tokens more than requests.
    stop=False: the best number of admissions overall; NOT lossless when survivals are of this step's drafts.
    """
    pairs = _ordered(survivals)
    _check(len(pairs), steps_per_second)
    rates, best = _throughputs(survivals, pairs, steps_per_second), 0
    for admitted in range(1, len(rates)):
        if rates[admitted] > rates[best]:
            best = admitted
        elif stop:
            break
    return _counts(pairs[:best], len(survivals))


def capacity(survivals: Sequence[Sequence[float]], steps_per_second: Sequence[float]) -> int:
    """How many pairs maximize Theta. Lossless for a later step, whose tokens these survivals do not depend on."""
    return sum(lengths(survivals, steps_per_second, stop=False))


def admit(survivals: Sequence[Sequence[float]], pairs: int) -> list[int]:
    """Drafts to verify for every request when `pairs` of all requests together are to be verified."""
    return _counts(_ordered(survivals)[:pairs], len(survivals))


def _ordered(survivals: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """All (request, position) by falling survival; among equals the earlier position, so that prefixes stay prefixes."""
    for request, values in enumerate(survivals):
        if any(not 0 <= value <= 1 for value in values) or list(values) != sorted(values, reverse=True):
            raise ValueError(f"Scheduling: survivals must fall from at most 1 to at least 0, request {request} has "
                             f"{list(values)}. Use scheduler.survival.")
    return sorted(((request, position) for request, values in enumerate(survivals) for position in range(len(values))),
                  key=lambda pair: (-survivals[pair[0]][pair[1]], pair[1], pair[0]))


def _check(pairs: int, steps_per_second: Sequence[float]) -> None:
    if len(steps_per_second) <= pairs or any(not rate > 0 for rate in steps_per_second):
        raise ValueError(f"Scheduling: wanted {pairs + 1} positive entries of steps_per_second (0 to {pairs} drafts), got "
                         f"{list(steps_per_second)}.")


def _throughputs(survivals: Sequence[Sequence[float]], pairs: Sequence[tuple[int, int]],
                 steps_per_second: Sequence[float]) -> list[float]:
    """Theta after 0, 1, 2, ... admissions."""
    expected, rates = float(len(survivals)), [len(survivals) * steps_per_second[0]]
    for admitted, (request, position) in enumerate(pairs, 1):
        expected += survivals[request][position]
        rates.append(expected * steps_per_second[admitted])
    return rates


def _counts(pairs: Sequence[tuple[int, int]], requests: int) -> list[int]:
    chosen = [request for request, _ in pairs]
    return [chosen.count(request) for request in range(requests)]
