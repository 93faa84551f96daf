"""Measure how much two equally right runs differ, and print it beside the bounds.

    python -m reference.noise [--ckpt DIR] [--input-file FILE ...] [--write]

What is measured, on the packaged tiny model unless told otherwise, as the largest relative L2 over all points:
    one kind of numerics   the run as it is, and once more with every product summed in float64 (another order of
                           summation)
    two kinds              float32, dequantized and native against each other
    each with fake quantization on and off; `module` from recorded inputs (graft.py); end to end, `end` outside
    attention and `attention` inside it, next to the quantizers. Except for float32, points behind a decision
    that fell the other way take part.
    flip                   float32 with fake quantization: every close rounding decision taken the other way, one at a
                           time
Input files are those of reference.trace; by default the packaged prompts, only the text one for a checkpoint without
vision. With --write the result replaces the block FLOORS in reference/tolerances.py; bounds are not touched.
Tests: tests/test_compare.py
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import inference
from inference import command
from inference.config import Config
from inference.model import Model
from inference.numerics import MODES
from reference import tolerances
from reference.compare_points import relative_l2
from reference.flips import Arbiter
from reference.graft import Recorded, prefill_points
from reference.points import lookup
from reference.tolerances import pair_name
from reference.trace import Inputs, read_inputs

GOLDEN = Path(__file__).parent / "golden" / "nano"
PROMPTS = tuple(GOLDEN / "traces" / f"{name}.float32.safetensors" for name in ("text_prefill", "vision_prefill"))
PAIRS = (("float32", "float32"), ("dequantized", "dequantized"), ("native", "native"), ("float32", "dequantized"),
         ("float32", "native"), ("dequantized", "native"))
CLOSE = 3e-6  # ours: how close to a rounding boundary a decision is taken the other way
_BLOCK = re.compile(r"(# floors: begin[^\n]*\n).*?(\n# floors: end)", re.DOTALL)

Points = dict[str, Tensor]


@contextlib.contextmanager
def summed_in_float64() -> Iterator[None]:
    """While active, every linear layer and einsum accumulates in float64 and is rounded once to its dtype.

    It changes the order and precision of sums only, as another BLAS would.
    """
    linear, einsum = F.linear, torch.einsum

    def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)

    def wide_einsum(equation: str, *operands: Tensor) -> Tensor:
        return einsum(equation, *(operand.double() for operand in operands)).to(operands[0].dtype)

    F.linear, torch.einsum = wide_linear, wide_einsum
    try:
        yield
    finally:
        F.linear, torch.einsum = linear, einsum


def run(model: Model, inputs: Inputs, arbiter: Arbiter | None = None) -> Points:
    """Every dump point of one whole-prompt call, by path."""
    seen: Points = {}
    arbiter = arbiter or Arbiter()

    def observe(path: str, value: Tensor) -> None:
        arbiter.observe(path, value)
        seen.setdefault(path, value)

    images = None if inputs.token_types is None else [list(inputs.images)]
    with torch.no_grad(), arbiter.active():
        model(inputs.input_ids, model.new_cache(len(inputs.input_ids)), token_types=inputs.token_types, images=images,
              observe=observe)
    return seen


def errors(actual: Points, expected: Points) -> dict[str, float]:
    """Relative L2 of all float points both have. Scores whose visible columns differ count as 1."""
    found = {}
    for path, value in actual.items():
        point = lookup(path)
        if path in expected and point is not None and point.how == "close":
            error = relative_l2(value.float().numpy(), expected[path].float().numpy())
            found[path] = 1.0 if math.isinf(error) else error
    return found


def module_errors(model: Model, inputs: Inputs, expected: Points) -> dict[str, float]:
    """Relative L2 of every point recomputed from `expected`."""
    images = None if inputs.token_types is None else [list(inputs.images)]
    with torch.no_grad():
        computed = dict(prefill_points(model, Recorded(expected), inputs.input_ids, inputs.token_types, images))
    return errors(computed, expected)


def worst(found: dict[str, float]) -> dict[str, float]:
    """The largest error outside attention, inside it, and at the logits."""
    inside = [error for path, error in found.items() if ".attn." in path]
    outside = [error for path, error in found.items() if ".attn." not in path]
    return {"end": max(outside), "attention": max(inside), "logits": found["logits"]}


def measure(checkpoint: str | Path, files: Sequence[str | Path]) -> dict[str, dict[str, float]]:
    """All floors, by pair of numerics; the largest over the inputs."""
    floors: dict[str, dict[str, float]] = {}

    def keep(pair: str, values: dict[str, float]) -> None:
        known = floors.setdefault(pair, {})
        for name, value in values.items():
            known[name] = max(value, known.get(name, 0.0))

    for fake_quant in (False, True):
        models = {name: inference.load(checkpoint, numerics=name, fake_quant=fake_quant) for name in MODES}
        for file in files:
            inputs = read_inputs(file, models["native"], checkpoint)
            plain = {name: run(model, inputs) for name, model in models.items()}
            with summed_in_float64():
                wide = {name: run(model, inputs) for name, model in models.items()}
                modules = {name: module_errors(model, inputs, plain[name]) for name, model in models.items()}
            for first, second in PAIRS:
                pair = pair_name(first, second, fake_quant)
                if (first, second, fake_quant) == ("float32", "float32", True):
                    # What moves without a flip is what moves without quantizers; flips are measured one by one.
                    plain_floors = floors[pair_name(first, second, False)]
                    end = {name: plain_floors[name] for name in ("end", "attention", "logits")}
                    keep(pair, {"module": max(modules[first].values()), **end})
                elif first == second:
                    keep(pair, {"module": max(modules[first].values()), **worst(errors(wide[first], plain[first]))})
                else:
                    keep(pair, worst(errors(plain[second], plain[first])))
            if fake_quant:
                keep(pair_name("float32", "float32", True), flip_floors(models["float32"], inputs))
    return floors


def flip_floors(model: Model, inputs: Inputs) -> dict[str, float]:
    """How far one rounding decision, taken the other way, moves points outside and inside attention.

    Decisions that change what is selected later are left out: those differences show as near-ties of their own.
    """
    arbiter = Arbiter()
    plain = run(model, inputs, arbiter)
    found = {"flip": 0.0, "flip_attention": 0.0}
    for decision in arbiter.close:
        if abs(decision.nudge) > CLOSE:
            continue
        flipped = run(model, inputs, Arbiter((decision,)))
        if any(not torch.equal(value, flipped[path]) for path, value in plain.items()
               if not value.is_floating_point() and not path.endswith("all_index")):
            continue
        moved = worst(errors(flipped, plain))
        found = {"flip": max(found["flip"], moved["end"]),
                 "flip_attention": max(found["flip_attention"], moved["attention"])}
    return found


def write_floors(floors: dict[str, dict[str, float]], path: Path) -> None:
    """Replace the block FLOORS of tolerances.py."""
    lines = ["FLOORS: dict[str, dict[str, float]] = {"]
    for pair, values in floors.items():
        numbers = ", ".join(f'"{name}": {value:.1e}' for name, value in values.items())
        wrapped = textwrap.wrap(f"{{{numbers}}},", 110)
        lines += [f'    "{pair}":', *(f"        {line}" for line in wrapped)]
    text = path.read_text(encoding="utf-8")
    if not _BLOCK.search(text):
        raise ValueError(f"Writing the floors: {path} has no block between '# floors: begin' and '# floors: end'.")
    block = "\n".join([*lines, "}"])
    try:
        path.write_text(_BLOCK.sub(lambda match: match[1] + block + match[2], text), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Writing the floors: {path} cannot be written ({error}).") from None


def table(floors: dict[str, dict[str, float]]) -> str:
    """Floors beside the bounds they stand below."""
    lines = [f"{'pair':<42}{'module':>9}{'bound':>8}{'end':>10}{'bound':>8}{'attention':>11}{'bound':>8}{'logits':>10}"]
    for pair, values in floors.items():
        names, _, quant = pair.partition(",")
        bound = tolerances.bound_for(*names.split(" / "), quant.endswith("on"))
        module = f"{values['module']:>9.1e}{bound.module:>8.0e}" if "module" in values else " " * 17
        lines.append(f"{pair:<42}{module}{values['end']:>10.1e}{bound.end:>8.0e}{values['attention']:>11.1e}"
                     f"{bound.attention:>8.0e}{values['logits']:>10.1e}")
        if "flip" in values:
            lines.append(f"    behind one flip: {values['flip']:.1e} (bound {bound.flip:.0e}), inside attention "
                         f"{values['flip_attention']:.1e} (bound {bound.flip_attention:.0e})")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser(prog="python -m reference.noise", description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", default=str(GOLDEN / "checkpoint"), metavar="DIR")
    parser.add_argument("--input-file", action="append",
                        help="prompts; by default the packaged text and, if the checkpoint has vision, pictures")
    parser.add_argument("--write", action="store_true", help="also replace the floors in reference/tolerances.py")
    options = parser.parse_args(arguments)
    try:
        prompts = PROMPTS if Config.from_file(options.ckpt).vision_config is not None else PROMPTS[:1]
        floors = measure(options.ckpt, options.input_file or prompts)
        print(table(floors))
        if options.write:
            write_floors(floors, Path(tolerances.__file__))
            print(f"written to {tolerances.__file__}")
    except ValueError as error:
        print(f"BAD INPUT. {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
