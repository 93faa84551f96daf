"""What each weight format costs: bits per weight, weight error, and how far the logits move.

    python -m reference.quality [--ckpt DIR] [--formats nvfp4 oq3e-mtp ...] [--json]

What it does
    Converts a native checkpoint to every format (reference/convert.py) in a temporary folder, loads each result, and compares it
    with the original on texts of the small world (for another checkpoint: on recorded random prompts).
Columns
    bits/weight   8 * bytes on disk / logical weights, scales and biases included (inference/inventory.py)
    weight error  relative L2 over all weights that the format stores differently, both sides dequantized to BF16
    KL            mean over positions of KL(original || converted) of the next-token distribution, nats, native numerics
    top-1         share of positions with the same most probable token
    loss          next-token cross-entropy on these texts, nats
Mirrors
    The tables of the publishers' cards. With random weights KL measures amplified noise and loss nothing.
Tests
    tests/test_quality.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

import inference
from inference.command import Parser, run
from inference.generate import BUNDLED
from inference.inventory import take_inventory
from inference.layers import dense_weight
from inference.model import Model
from inference.quant import PackedWeight
from reference.convert import convert
from reference.toyworld import corpus

NANO = Path(__file__).parent / "golden" / "nano" / "checkpoint"
# ours: the oQ formats weigh errors by a text; any will do, this one does not change with the project.
CALIBRATION = Path(__file__).parent.parent / "LICENSE"

# Label, format of reference/convert.py, its options.
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bf16", "bf16", {}),
    ("nvfp4", "nvfp4", {}),
    ("nvfp4-mxfp4-engram", "nvfp4-mxfp4-engram", {}),
    ("oq3e-ngram-mtp", "oq3e-ngram-mtp", {"calibration_text": CALIBRATION, "samples": 8, "sample_length": 64}),
    ("oq3e-mtp", "oq3e-mtp", {"calibration_text": CALIBRATION, "samples": 8, "sample_length": 64}),
    ("affine8-g64", "affine", {"bits": 8, "group_size": 64}),
    ("affine4-g64", "affine", {"bits": 4, "group_size": 64}),
    ("affine3-g64", "affine", {"bits": 3, "group_size": 64}),
    ("affine2-g64", "affine", {"bits": 2, "group_size": 64}),
)


@dataclass(frozen=True)
class Row:
    """One format. Fractions and nats as in the module's docstring."""

    format: str
    bytes: int
    bits_per_weight: float
    weight_error: float
    kl: float
    top1: float
    loss: float  # mean next-token cross-entropy on the prompts, nats


def measure(checkpoint: Path, labels: Sequence[str] | None = None, prompts: Tensor | None = None) -> list[Row]:
    """One row per variant, the original first.

    prompts [B, S] int64; by default texts of the small world's test split for the bundled checkpoint, else those of the
    recorded decode trace. Raises ValueError for unknown labels.
    """
    known = [label for label, _, _ in VARIANTS]
    unknown = sorted(set(labels or ()) - set(known))
    if unknown:
        raise ValueError(f"Measuring quality: {unknown[0]!r} is no known format; known are {', '.join(known)}.")
    if prompts is None:
        prompts = _default_prompts(checkpoint)
    original = inference.load(checkpoint, weights="packed")
    expected = _log_probabilities(original, prompts)
    rows = [_row("native", checkpoint, original, original, expected, expected, prompts)]
    chosen = [variant for variant in VARIANTS if labels is None or variant[0] in labels]
    with tempfile.TemporaryDirectory() as scratch:
        for label, format_name, options in tqdm(chosen, desc="converting", unit="format", disable=None, leave=False):
            folder = Path(scratch) / label
            convert(checkpoint, folder, format_name, **options)
            model = inference.load(folder, weights="packed")
            rows.append(_row(label, folder, original, model, expected, _log_probabilities(model, prompts), prompts))
    return rows


def _log_probabilities(model: Model, prompts: Tensor) -> Tensor:
    with torch.no_grad():
        return F.log_softmax(model(prompts, model.new_cache(len(prompts))).logits, dim=-1)


def _default_prompts(checkpoint: Path) -> Tensor:
    if Path(checkpoint).resolve() == BUNDLED.resolve():
        tokenizer = corpus.load_tokenizer()
        return torch.tensor([corpus.episode(seed, 384, "test", tokenizer, kind="text").ids for seed in range(6)])
    return load_file(NANO.parent / "traces" / "decode.float32.safetensors")["input_ids"]


def _row(label: str, folder: Path, original: Model, model: Model, expected: Tensor, actual: Tensor, prompts: Tensor) -> Row:
    found = take_inventory(folder).formats
    size, logical = sum(row.bytes for row in found), sum(row.logical for row in found)
    divergence = (expected.exp() * (expected - actual)).sum(-1).mean()
    agreement = (expected.argmax(-1) == actual.argmax(-1)).to(torch.float32).mean()
    loss = F.nll_loss(actual[:, :-1].flatten(0, 1), prompts[:, 1:].flatten())
    return Row(label, size, 8 * size / logical, _weight_error(original, model), float(divergence), float(agreement), float(loss))


def _weight_error(original: Model, model: Model) -> float:
    """Relative L2 over the weights whose values differ; 0 if none does."""
    wrong = size = 0.0
    for (name, before), (_, after) in zip(_weights(original), _weights(model), strict=True):
        a, b = dense_weight(before, torch.float32), dense_weight(after, torch.float32)
        difference = float((a - b).square().sum(dtype=torch.float64))
        if difference > 0:
            wrong, size = wrong + difference, size + float(a.square().sum(dtype=torch.float64))
    return (wrong / size) ** 0.5 if size else 0.0


def _weights(model: Model) -> list[tuple[str, Tensor | PackedWeight]]:
    """All weights by name, packed or not, in one order."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        weight = module.__dict__.get("weight")
        if isinstance(weight, PackedWeight):
            found[f"{name}.weight"] = weight
    return sorted(found.items())


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| format | bytes | bits/weight | weight error | KL to native (nats) | top-1 | loss (nats) |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {row.format} | {row.bytes:,} | {row.bits_per_weight:.3f} | {row.weight_error:.4f} | {row.kl:.4f} | "
              f"{row.top1:.0%} | {row.loss:.3f} |" for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", type=Path, default=BUNDLED, help="native checkpoint (default: the bundled one)")
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="only these")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        rows = measure(options.ckpt, options.formats)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
