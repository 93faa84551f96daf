"""Does the draft head know how sure it is? Calibration error, and temperatures that repair it.

    python -m reference.calibration GENERATION_DIR [GENERATION_DIR ...]     folders written by decoding's Generation.save

What it computes
    confidence   c_k = sigmoid(logit_k / T_k), estimated probability that draft k is accepted if drafts < k were
    survival     a_k = c_1 ... c_k, estimated probability that drafts 1 .. k are all accepted
    ECE          over bins of equal width: mean of |accepted share - mean estimate|, weighted by the bin's size
    fit          sequential temperature scaling: T_1, then T_2, ...; each is the one of a grid that makes the ECE of a_k
                 smallest, with the earlier ones fixed. Draft k is judged on the rounds that sent it
Record with confidence_threshold 0: a threshold hides the drafts that the head was unsure of.
Mirrors DSpark paper: sequential temperature scaling. Grid and bins are those of a public serving engine. Tests:
tests/test_calibration.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from inference.command import Parser, run
from inference.decoding import Round

BINS = 15
GRID = tuple(10 ** (exponent / 20) for exponent in range(-20, 21))  # 41 temperatures from 0.1 to 10, log-spaced


def calibration_error(estimates: Tensor, outcomes: Tensor, bins: int = BINS) -> float:
    """ECE of estimates [n] in 0..1 against outcomes [n] bool."""
    estimates, outcomes = estimates.to(torch.float64), outcomes.to(torch.float64)
    which = (estimates * bins).long().clamp_max(bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add(0, which, outcomes - estimates)
    return float(gap.abs().sum() / len(estimates))


def fit_temperatures(rounds: Sequence[Round]) -> tuple[float, ...]:
    """One temperature per draft position, for Settings.confidence_temperatures. Raises ValueError without records."""
    temperatures: list[float] = []
    for position in range(_positions(rounds)):
        logits, accepted = _records(rounds, position)
        before = _survival(logits[:, :position], temperatures)
        # Among equals the temperature closest to 1: nothing is changed without a reason.
        temperatures.append(min(GRID, key=lambda value: (
            round(calibration_error(before * torch.sigmoid(logits[:, position] / value), accepted), 12),
            abs(torch.tensor(value).log().item()))))
    return tuple(temperatures)


def errors(rounds: Sequence[Round], temperatures: Sequence[float] = ()) -> list[float]:
    """ECE of the survival of every draft position; temperatures: 1 by default."""
    result = []
    for position in range(_positions(rounds)):
        logits, accepted = _records(rounds, position)
        scale = temperatures[:position + 1] or [1.0] * (position + 1)
        result.append(calibration_error(_survival(logits, scale), accepted))
    return result


def _survival(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """logits [n, k] -> product over the k positions [n]; 1 for k = 0."""
    return torch.sigmoid(logits / torch.tensor(list(temperatures), dtype=torch.float64)).prod(dim=1)


def _positions(rounds: Sequence[Round]) -> int:
    """Draft positions that any round sent."""
    most = max((entry.sent for entry in rounds), default=0)
    if most == 0:
        raise ValueError("Calibrating: no draft was ever sent. Record a generation with speculate=True and "
                         "confidence_threshold=0.")
    return most


def _records(rounds: Sequence[Round], position: int) -> tuple[Tensor, Tensor]:
    """Of the rounds that sent draft `position` (from 0): logits [n, position + 1] float64, whether all were accepted [n]."""
    judged = [entry for entry in rounds if entry.sent > position]
    logits = torch.tensor([entry.confidence[:position + 1] for entry in judged], dtype=torch.float64)
    return logits, torch.tensor([entry.accepted > position for entry in judged])


def read_rounds(folder: str | Path) -> list[Round]:
    """The rounds of a saved generation. Raises ValueError for anything else."""
    try:
        entries = json.loads((Path(folder) / "state.json").read_text(encoding="utf-8"))["extra"]["rounds"]
        return [Round(row, sent, accepted, tuple(confidence)) for row, sent, accepted, confidence in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Calibrating: {folder} is no saved generation ({error!r}). Use Generation.save.") from None


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.calibration", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", help="folders written by Generation.save, speculation on, threshold 0")
    options = parser.parse_args(arguments)
    try:
        rounds = [entry for folder in options.folders for entry in read_rounds(folder)]
        fitted = fit_temperatures(rounds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(f"{len(rounds)} rounds\n position  sent  temperature  ECE before  after")
    for position, (before, after) in enumerate(zip(errors(rounds), errors(rounds, fitted))):
        sent = sum(entry.sent > position for entry in rounds)
        print(f"{position + 1:9d} {sent:5d} {fitted[position]:12.3f} {before:11.4f} {after:6.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
