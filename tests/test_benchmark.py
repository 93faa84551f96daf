"""The benchmarks: every subcommand on small shapes, and that floors, ratios and inputs mean what they say."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

from reference import benchmark, benchmark_layers
from reference.benchmark_clocks import Machine
from reference.benchmark_layers import SMALL, Bench, Call


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """One length, one batch: the code paths, not the tables."""
    monkeypatch.setattr(benchmark_layers, "SMALL_BATCHES", (2,))
    monkeypatch.setattr(benchmark_layers, "SMALL_CHUNKS", (16, 64))
    monkeypatch.setattr(benchmark_layers, "SMALL_LENGTHS", (128, 512))


@pytest.fixture
def bench() -> Bench:
    machine = Machine(torch.device("cpu"), rate=1e12, bandwidth=1e11)
    return Bench(machine, SMALL, "packed", torch.Generator().manual_seed(0))


KINDS = ("window-only", "Full, ratio 2", "Full, ratio 1", "Reindex", "Reuse")


def test_every_subcommand_runs_on_small_shapes(capsys) -> None:
    assert benchmark.main(["cpu"]) == 0
    out = capsys.readouterr().out
    for kind in KINDS:
        assert out.count(f"\n{kind}, ") == 6, kind
    ratios = [float(value) for value in re.findall(r"([\d.]+)x", out)]
    assert len(ratios) == 50 and min(ratios) > 0  # 30 rows, of 20 also the growth
    for arguments in (["kernel"], ["layer", "--weights", "resident", "--profile"]):
        assert benchmark.main([*arguments, "--smoke"]) == 0
        assert "ceilings: " in capsys.readouterr().out


@pytest.mark.parametrize("command, rows", [("layer", 10), ("decode", 10), ("prefill", 10)])
def test_rows_of_both_forms(command, rows, capsys, monkeypatch) -> None:
    """With --compile a second row per row, timed while the compiled forms are in place; here they are marks only."""
    active, seen, timed = [], [], Call.time

    @contextlib.contextmanager
    def marked(device: torch.device):
        active.append(device)
        yield
        active.pop()

    monkeypatch.setattr(benchmark_layers, "compiled_forms", marked)
    monkeypatch.setattr(Call, "time", lambda call: seen.append(bool(active)) or timed(call))
    assert benchmark.main([command, "--smoke", "--compile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert seen == [False, True] * rows
    for first, second in zip(*([line for line in lines if condition(line)] for condition in (
            lambda line: line.startswith(KINDS), lambda line: line.startswith("    compiled ")))):
        micro, fast, ratio = (float(re.search(pattern, line)[1]) for pattern, line in (
            (r" ([\d.]+) us", first), (r" ([\d.]+) us", second), (r"([\d.]+) times as fast", second)))
        assert ratio == pytest.approx(micro / fast, rel=0.02)


@pytest.mark.parametrize("command", ["layer", "decode", "prefill"])
def test_released_shapes_want_a_gpu(command, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert benchmark.main([command]) == 1
    assert "wanted a CUDA device for the released shapes" in capsys.readouterr().err


def test_kinds_of_the_released_model() -> None:
    config = benchmark_layers.Config.from_file(benchmark_layers.RELEASED).text_config
    bench = Bench(Machine(torch.device("cpu"), 1.0, 1.0), config, "packed", torch.Generator())
    layers = {kind: plan.layer_id for kind, plan in bench.kinds().items()}
    assert layers == {"window-only": 0, "Full, ratio 2": 8, "Full, ratio 1": 20, "Reindex": 36, "Reuse": 39}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_call(bench, kind) -> None:
    """Counted again, part by part: weights without the experts that no token chose, window, keys, selected rows."""
    plan = bench.kinds()[kind]
    module = bench.make_layer(plan)
    call = Call(module, 2, 1, 511, bench.generator)
    weights = 0
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            weights += parameter.numel() * parameter.element_size()
        stored = benchmark_layers.stored_tensors(part) if hasattr(part, "weight") else ()
        weights += 0 if ".experts." in name else sum(tensor.numel() * tensor.element_size() for tensor in stored)
    one_expert = 3 * 256 * 128 * (1 / 2 + 1 / 32)
    wanted = weights + call.chosen * one_expert + 2 * 16 * (64 + 2) + 2 * 2 * 2 * 4 * 256
    rows = 0 if plan.compress_ratio == 0 else 512 // plan.compress_ratio
    wanted += 2 * min(rows, 32) * (32 + 4) if rows else 0
    if plan.owns_indexer:
        wanted += 2 * (min(rows, 16 * 4) if plan.candidate_role == "filter" else rows) * (16 + 1)
    assert call.bytes() == wanted and 2 <= call.chosen <= 4


def test_operations_grow_with_the_tokens(bench) -> None:
    """A layer's products are those of its shapes: here the window-only one, counted by hand."""
    module = bench.make_layer(bench.kinds()["window-only"])
    one, many = (Call(module, 1, tokens, 512, bench.generator) for tokens in (1, 8))
    linears = 256 * 64 + 64 * 8 * 64 + 256 * 64 + 256 * 64 + 64 * 256  # wq_a, wq_b, wkv, wo_a, wo_b
    experts = 3 * 256 * 128 * (1 + 2)  # the shared one and two chosen
    assert one.operations() == 2 * (linears + experts + 2 * 8 * 64 * 16)
    assert many.operations() == 8 * one.operations()


def test_floor_is_the_slower_of_the_two() -> None:
    machine = Machine(torch.device("cpu"), rate=1e12, bandwidth=1e11)
    assert machine.floor(2e6, 1e4) == pytest.approx(2.0) and machine.floor(1e3, 1e6) == pytest.approx(10.0)


@pytest.mark.parametrize("weights", ["packed", "resident"])
def test_layers_are_finite_and_packed_or_not(weights) -> None:
    machine = Machine(torch.device("cpu"), rate=1e12, bandwidth=1e11)
    for plan in Bench(machine, SMALL, weights, torch.Generator().manual_seed(0)).kinds().values():
        generator = torch.Generator().manual_seed(1)
        module = benchmark_layers.random_layer(SMALL, plan, weights, generator)
        call = Call(module, 2, 3, 300, generator)
        out = call.run()
        assert bool(out.isfinite().all()) and 0.1 < float(out.float().std()) < 100
        assert bool(benchmark_layers.stored_tensors(module.attn.wq_b)) == (weights == "packed")
        assert module.ffn.experts.stacks is not None
        assert torch.equal(out, call.run())  # staging the same rows again changes nothing


def test_torch_form_is_set_and_taken_back(monkeypatch) -> None:
    monkeypatch.setenv("KERNEL", "auto")
    with benchmark_layers.torch_form():
        assert benchmark_layers.os.environ["KERNEL"] == "torch"
    assert benchmark_layers.os.environ["KERNEL"] == "auto"


