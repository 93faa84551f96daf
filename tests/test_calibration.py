"""Calibration of the confidence head: the error measure, the fit, and recorded rounds from a saved generation."""

from __future__ import annotations

import pytest
import torch

from inference import decoding
from inference.decoding import Round, Settings
from reference import calibration


def simulated(temperatures: list[float], count: int = 4000) -> list[Round]:
    """Rounds whose drafts are accepted with probability sigmoid(logit / T_k): the head is off by these temperatures."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(count, len(temperatures), generator=generator) + 1
    chances = torch.sigmoid(logits / torch.tensor(temperatures))
    stands = torch.rand(chances.shape, generator=generator) < chances
    accepted = stands.to(torch.int64).cumprod(1).sum(1)
    return [Round(0, len(temperatures), int(n), tuple(row.tolist())) for n, row in zip(accepted, logits)]


def test_error_measure() -> None:
    estimates = torch.tensor([0.25] * 100 + [0.75] * 100)
    right = torch.tensor([True] * 25 + [False] * 75 + [True] * 75 + [False] * 25)
    assert calibration.calibration_error(estimates, right) == pytest.approx(0.0)
    assert calibration.calibration_error(estimates, torch.ones(200, dtype=torch.bool)) == pytest.approx(0.5)
    assert calibration.calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([True, False])) == 0.0


def test_fit_finds_the_temperatures() -> None:
    true = [2.0, 0.5, 3.0]
    rounds = simulated(true)
    fitted = calibration.fit_temperatures(rounds)
    for found, wanted in zip(fitted, true):
        assert wanted / 1.35 < found < wanted * 1.35
    before, after = calibration.errors(rounds), calibration.errors(rounds, fitted)
    assert max(after) < 0.03 and before[0] > 0.05 and all(a <= b for a, b in zip(after, before))


def test_a_calibrated_head_is_left_alone() -> None:
    for found in calibration.fit_temperatures(simulated([1.0, 1.0], 20_000)):
        assert 0.8 < found < 1.25


def test_drafts_that_were_not_sent_do_not_count() -> None:
    """A position is judged on the rounds that sent it; its logits elsewhere may be anything."""
    rounds = simulated([2.0, 0.5])
    unsent = [Round(0, 1, min(1, entry.accepted), (entry.confidence[0], -50.0)) for entry in rounds[:1000]]
    mixed = calibration.fit_temperatures(unsent + rounds[1000:])
    wanted = calibration.fit_temperatures(rounds[1000:])
    assert mixed[1] == pytest.approx(wanted[1], rel=0.3)


def test_recorded_generation(nano, tmp_path, capsys) -> None:
    """The command on a real recording; its temperatures are accepted by the settings."""
    run = decoding.generate(nano, [[100, 101], [200]], Settings(max_new_tokens=8, speculate=True, stop_ids=()))
    for _ in run:
        pass
    run.save(tmp_path / "run")
    assert calibration.read_rounds(tmp_path / "run") == run.rounds
    assert calibration.main([str(tmp_path / "run")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5
    Settings(confidence_temperatures=calibration.fit_temperatures(run.rounds))
    assert calibration.main([str(tmp_path)]) == 3
    with pytest.raises(ValueError, match="no draft was ever sent"):
        calibration.fit_temperatures([Round(0, 0, 0)])
