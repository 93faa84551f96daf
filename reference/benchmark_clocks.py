"""Clocks and ceilings of the benchmarks: how long a call takes, what the machine can do at most.

What it measures
    graph_time   microseconds per launch, from replays of a CUDA graph; the host costs nothing
    eager_time   microseconds per call as Python makes it; on a CPU the only form
    `Machine`    operations per second of a large BF16 product, bytes per second of a large copy (read plus written)
Tests
    tests/test_benchmark.py
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.kernel import tilelang_installed

MATRIX, COPY = 8192, 2**32  # rows of the square product, bytes of the copy
SMALL_MATRIX, SMALL_COPY = 256, 2**24  # for a trial run


@dataclass(frozen=True)
class Machine:
    """What one device can do at most, measured in this run."""

    device: torch.device
    rate: float  # operations per second
    bandwidth: float  # bytes per second, read plus written

    @classmethod
    def measure(cls, device: torch.device, smoke: bool = False) -> Machine:
        """smoke: small sizes, which say nothing about the machine."""
        size, copied = (SMALL_MATRIX, SMALL_COPY) if smoke else (MATRIX, COPY)
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        source = torch.ones(copied, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        rate = 2 * size**3 / best_time(torch.matmul, [(left, right)], device, launches=4) * 1e6
        return cls(device, rate, 2 * copied / median_time(lambda: target.copy_(source), 9, device) * 1e6)

    def floor(self, operations: float, size: float) -> float:
        """Microseconds that nothing can go below: `operations` at the matrix rate or `size` bytes at the copy bandwidth."""
        return max(operations / self.rate, size / self.bandwidth) * 1e6

    def line(self) -> str:
        return (f"ceilings: {self.rate / 1e12:.3g} TFLOP/s (BF16 product), {self.bandwidth / 1e12:.3g} TB/s (copy, read + "
                "written)")


def best_time(run: Callable[..., object], inputs: Sequence[tuple[Tensor, ...]], device: torch.device, launches: int) -> float:
    """`graph_time` where there are graphs, else `eager_time`."""
    return graph_time(run, inputs, launches) if device.type == "cuda" else eager_time(run, inputs, device)


def graph_time(run: Callable[..., object], inputs: Sequence[tuple[Tensor, ...]], launches: int, samples: int = 21) -> float:
    """Microseconds per launch, from a CUDA graph of `launches` launches that takes the inputs in turn."""
    for one in inputs:
        run(*one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(launches):
            run(*inputs[launch % len(inputs)])
    graph.replay()
    return median_time(graph.replay, samples, torch.device("cuda")) / launches


def eager_time(run: Callable[..., object], inputs: Sequence[tuple[Tensor, ...]], device: torch.device | None = None) -> float:
    """Microseconds per call without a graph."""
    run(*inputs[0])
    return median_time(lambda: run(*inputs[0]), 3, device or inputs[0][0].device)


def median_time(run: Callable[[], object], samples: int, device: torch.device) -> float:
    """Microseconds of `run`, median: between two events on CUDA, else by the clock of the host."""
    times = []
    for _ in range(samples):
        if device.type != "cuda":
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def versions(device: torch.device) -> str:
    """Date, device and versions, one line."""
    tilelang = importlib.metadata.version("tilelang") if tilelang_installed() else "not installed"
    name = f"CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = f"{found.name}, {found.multi_processor_count} multiprocessors"
    return (f"{datetime.date.today()}, {name}; torch {torch.__version__}, CUDA {torch.version.cuda}, tilelang {tilelang}, "
            f"Python {platform.python_version()}")
