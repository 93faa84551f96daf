"""The quality table: lossless formats show zero, more bits show less error, and the command prints it."""

from __future__ import annotations

import pytest

from reference.quality import NANO, main, measure


def test_lossless_is_zero_and_more_bits_are_better() -> None:
    rows = {row.format: row for row in measure(NANO, ["bf16", "nvfp4", "affine8-g64", "affine4-g64", "affine2-g64"])}
    for label in ("native", "bf16", "nvfp4"):
        assert rows[label].weight_error == rows[label].kl == 0 and rows[label].top1 == 1
    assert rows["native"].bytes == 4884388 and rows["nvfp4"].bytes > rows["native"].bytes
    errors = [rows[f"affine{bits}-g64"] for bits in (8, 4, 2)]
    for more, fewer in zip(errors, errors[1:]):
        assert 0 < more.weight_error < fewer.weight_error
        assert 0 < more.kl < fewer.kl
        assert more.bits_per_weight > fewer.bits_per_weight


def test_command(capsys) -> None:
    assert main(["--formats", "nvfp4"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("| format |") and len(out) == 4
    assert main(["--formats", "int8"]) == 3
    assert main(["--ckpt", "/nowhere"]) == 3


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match="'gguf' is no known format"):
        measure(NANO, ["gguf"])
