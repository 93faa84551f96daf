"""Negative controls: known mistakes, made on purpose from outside, that the comparison must name at the right point.

    python -m reference.mutations [--only NAME] [--list]

A harness that never fails proves nothing. Every mutant below is a mistake that ports of this model have made. Each runs
on a tiny checkpoint (reference/tiny.py) in float32, is recorded at level all, and is compared with the right run like
any other trace. It must be caught, and the first divergent point must be the one where the mistake is made. A mutant
that survives means that the fixture does not cover the mechanism: fix the fixture, not the bound.
Scenarios
    prompt   one call, fake quantization off        rounded  the same with fake quantization on
    images   a prompt with two pictures, one call   decode   22 tokens, six drafted ones of which two are accepted, then
                                                             single tokens, a draft after every call
    weights  one token, with a digest of every weight
Exit codes
    0 every mutant is caught at its place, 1 one is not, 3 bad options.
Nothing is left behind: every mutant is a context manager. Tests: tests/test_mutations.py
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

import inference
from inference.command import Parser, run
from inference.image_processor import ImageInput
from inference.model import Model
from reference.compare import EQUAL, Comparison, compare
from reference.mutants import MUTANTS, Mutant, swapped_nibbles
from reference.tiny import Prompts, make_tiny, tiny_prompts
from reference.trace import Inputs, record
from reference.trace_format import Trace, parse_chunks


class Scenario(NamedTuple):
    fake_quant: bool = False
    tokens: int | None = None  # of the text prompt; None = all 33
    chunks: str | None = None
    draft: bool = False
    weights: bool = False  # digest every weight


SCENARIOS = {"prompt": Scenario(), "rounded": Scenario(fake_quant=True), "images": Scenario(),
             "decode": Scenario(tokens=28, chunks="22,6/2,1*", draft=True), "weights": Scenario(tokens=1, weights=True)}


# --- running -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught: bool
    text: str


class Bench:
    """The tiny checkpoint, its right runs, and the mutants' runs, all in one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = make_tiny(folder / "checkpoint", "nano-like")
        self.prompts: Prompts = tiny_prompts(json.loads((self.checkpoint / "config.json").read_text()))
        self._models: dict[bool, Model] = {}
        self._right: dict[str, Trace] = {}

    def model(self, fake_quant: bool) -> Model:
        if fake_quant not in self._models:
            self._models[fake_quant] = inference.load(self.checkpoint, numerics="float32", fake_quant=fake_quant)
        return self._models[fake_quant]

    def inputs(self, scenario: str) -> Inputs:
        if scenario != "images":
            return Inputs(torch.from_numpy(self.prompts.input_ids[:1, :SCENARIOS[scenario].tokens]))
        ids, types, patches, grids = self.prompts.vision
        images = tuple(ImageInput(torch.from_numpy(values).bfloat16(), *grid[1:].tolist())
                       for values, grid in zip(patches, grids))
        return Inputs(torch.from_numpy(ids), torch.from_numpy(types), images)

    def right(self, scenario: str) -> Trace:
        """The trace of the unchanged model."""
        if scenario not in self._right:
            model = self.model(SCENARIOS[scenario].fake_quant)
            self._right[scenario] = self._record(model, self.checkpoint, scenario, f"right-{scenario}")
        return self._right[scenario]

    def run(self, mutant: Mutant) -> tuple[Comparison, Outcome]:
        """Record one mutant and compare it with the right run."""
        right = self.right(mutant.scenario)
        if mutant.mutate is None:
            folder = swapped_nibbles(self.checkpoint, self.folder / mutant.name)
            model = inference.load(folder, numerics="float32", fake_quant=SCENARIOS[mutant.scenario].fake_quant)
            wrong = self._record(model, folder, mutant.scenario, f"trace-{mutant.name}")
        else:
            model = self.model(SCENARIOS[mutant.scenario].fake_quant)
            with mutant.mutate(model):
                wrong = self._record(model, self.checkpoint, mutant.scenario, f"trace-{mutant.name}")
        # A port that makes the mistake does not say so in its manifest.
        wrong = dataclasses.replace(wrong, manifest={**wrong.manifest, "switches": right.manifest["switches"]})
        comparison = compare(wrong, right)
        shutil.rmtree(self.folder / f"trace-{mutant.name}")
        return comparison, _judge(mutant, comparison)

    def _record(self, model: Model, checkpoint: Path, scenario: str, name: str) -> Trace:
        inputs, plan = self.inputs(scenario), SCENARIOS[scenario]
        schedule = parse_chunks(plan.chunks, inputs.input_ids.shape[1]) if plan.chunks else None
        return record(model, checkpoint, inputs, self.folder / name, "all", schedule=schedule, draft=plan.draft,
                      digest_weights=plan.weights)


def _judge(mutant: Mutant, comparison: Comparison) -> Outcome:
    first = comparison.first
    if comparison.code == EQUAL or first is None:
        return Outcome(mutant, False, f"SURVIVED: {comparison.verdict}")
    where = first.name + ("" if first.position is None else f", position {first.position}")
    if not re.fullmatch(mutant.expected, first.name) or not mutant.positions(first.position):
        return Outcome(mutant, False, f"caught at {where}, wanted {mutant.expected}")
    return Outcome(mutant, True, f"caught at {where}: {first.label()}")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="run only mutants whose name contains this")
    parser.add_argument("--list", action="store_true", help="name the mutants and what is wrong with them")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only is None or options.only in mutant.name]
    if not chosen:
        print(f"BAD INPUT. No mutant has {options.only!r} in its name; --list names them.", file=sys.stderr)
        return 3
    if options.list:
        print("\n".join(f"{mutant.name:<26}{mutant.meaning}" for mutant in chosen))
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for mutant in tqdm(chosen, desc="mutants", disable=None, leave=False):
            _, outcome = bench.run(mutant)
            failed += not outcome.caught
            tqdm.write(f"{'ok  ' if outcome.caught else 'FAIL'} {mutant.name:<26}{outcome.text}")
    print(f"{len(chosen) - failed} of {len(chosen)} mutants caught at the expected point")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(main))
