"""Does drafting change the text? Plain and speculative greedy decoding of the same prompts, token for token.

    python -m reference.speculation [CHECKPOINT_DIR] [--prompts N] [--tokens N] [--numerics MODE] [--no-fake-quant]
                                    [--threshold C] [--save DIR]

In exact arithmetic the two texts are equal. In float32 they are unless a rounding flip of a quantizer falls on a near-tie of
two logits; in native numerics products of one row and of six rows round differently, so near-ties may fall the other way.
Prompts are random ids, one length each. --save keeps the speculative run for `python -m reference.calibration`.
Exit codes: 0 equal, 1 different (naming the first place), 3 bad input.
Tests: tests/test_decoding_speculative.py checks the same on shorter texts
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import torch

import inference
from inference import decoding
from inference.command import Parser, run
from inference.numerics import MODES

NANO = Path(__file__).parent / "golden" / "nano" / "checkpoint"


def random_prompts(vocabulary: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of 1 to 40 random ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    return [torch.randint(8, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.speculation", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default=str(NANO), help="checkpoint folder (default: nano, random weights)")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--numerics", default="float32", choices=sorted(MODES))
    parser.add_argument("--no-fake-quant", action="store_true")
    parser.add_argument("--threshold", type=float, default=0.0, help="confidence below which drafts are not sent")
    parser.add_argument("--save", help="folder for the speculative run")
    options = parser.parse_args(arguments)
    try:
        model = inference.load(options.checkpoint, numerics=options.numerics, fake_quant=not options.no_fake_quant)
        prompts = random_prompts(model.config.text_config.vocab_size, options.prompts)
        plain = decoding.Settings(max_new_tokens=options.tokens, stop_ids=())
        drafted = dataclasses.replace(plain, speculate=True, confidence_threshold=options.threshold)
        runs = []
        for settings in (plain, drafted):
            start = time.perf_counter()
            run = decoding.generate(model, prompts, settings)
            for _ in run:
                pass
            runs.append(run)
            name = "speculative" if settings.speculate else "plain"
            print(f"{name}: {time.perf_counter() - start:.1f} s; {run.stats.line()}")
        if options.save:
            runs[1].save(options.save)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    for row, (wanted, found) in enumerate(zip(runs[0].tokens, runs[1].tokens)):
        place = next((i for i, pair in enumerate(zip(wanted, found)) if pair[0] != pair[1]), None)
        if place is not None:
            print(f"DIFFERENT: prompt {row}, new token {place}: plain {wanted[place]}, speculative {found[place]}")
            return 1
    print(f"equal: {options.prompts} prompts, {options.tokens} new tokens each")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
