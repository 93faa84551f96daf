"""Every mutant must be caught, at the point where its mistake is made. A surviving mutant fails here."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

import inference.attention
import inference.model
from reference import mutations
from reference.compare import EQUAL, compare
from reference.mutants import MUTANTS, Mutant
from reference.mutations import SCENARIOS, Bench
from reference.points import POINTS, lookup


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught_at_its_place(bench, mutant) -> None:
    comparison, outcome = bench.run(mutant)
    assert outcome.caught, outcome.text
    assert comparison.first.name in comparison.verdict


def test_the_right_model_is_equal_to_itself(bench) -> None:
    """Without a mistake nothing is caught: the same run again, bit for bit."""
    for scenario in SCENARIOS:
        plan = SCENARIOS[scenario]
        again = bench._record(bench.model(plan.fake_quant), bench.checkpoint, scenario, f"again-{scenario}")
        found = compare(again, bench.right(scenario))
        assert found.code == EQUAL and all(result.verdict in ("equal", "skipped") for result in found.results)


def test_survivors_and_misplaced_findings_fail(bench) -> None:
    harmless = Mutant("harmless", "", ".*", lambda model: contextlib.nullcontext())
    assert not bench.run(harmless)[1].caught
    elsewhere = dataclasses.replace(MUTANTS[0], expected=r"step0\.layers\.0\.attn\.out")
    assert not bench.run(elsewhere)[1].caught
    wrong_row = dataclasses.replace(MUTANTS[0], positions=lambda position: position == 0)
    assert not bench.run(wrong_row)[1].caught


def test_mutants_leave_nothing_behind(bench) -> None:
    watched = [(inference.attention, "rotate"), (inference.attention, "sparse_attn"), (inference.model, "expand"),
               (inference.model.Layer, "sublayers")]
    before = [getattr(module, name) for module, name in watched] + [torch.softmax]
    model = bench.model(False)
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    for mutant in MUTANTS:
        if mutant.mutate is not None:
            with pytest.raises(RuntimeError), mutant.mutate(model):
                raise RuntimeError
    assert [getattr(module, name) for module, name in watched] + [torch.softmax] == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state


def test_mutants_cover_every_concept() -> None:
    named = [mutant.expected.replace("\\", "") for mutant in MUTANTS]
    concepts = {point.concept for point in POINTS} - {"input", "embedding", "head"}
    found = set()
    for text in named:
        path = text.partition("step0.")[2] or text.partition("].*.")[2] or text.partition("step1.")[2] or text
        path = path.replace("step[1-9]d*.", "").replace("(shared|out)", "out").replace("(mid|out)", "out")
        assert lookup(path) is not None, text
        found.add(lookup(path).concept)
    assert found >= concepts


def test_command_line(capsys) -> None:
    assert mutations.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTANTS)
    assert mutations.main(["--only", "no such mutant"]) == 3
    assert mutations.main(["--only", "sink-dropped"]) == 0
    assert "1 of 1 mutants caught" in capsys.readouterr().out
