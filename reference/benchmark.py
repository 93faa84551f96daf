"""How fast this is, next to what the machine can do: `python -m reference.benchmark kernel|layer|decode|prefill|cpu`.

What it measures
    layer, decode, prefill, cpu    whole layers of the model: benchmark_layers.py
    kernel    sparse attention (`inference.kernel`) at the released sizes (64 heads, rows of 512 channels, 640 indices):
              prefill and decode, next to the torch form, a plain gather-and-multiply form, dense attention over the
              same rows, and the roofline of this machine
How
    Every form is first compared with float64 on some of its queries. A time is the median over replays of a CUDA graph
    that holds several launches over rotating inputs, divided by their number: 64 launches for decode, 4 for prefill.
    Forms that take milliseconds are timed without a graph. The TileLang kernels use programmatic dependent launch: a
    launch prepares itself while the kernel before it ends and waits for it before it reads, so that in a graph of
    dependent launches little of the launch itself remains.
    A sample lasts a few milliseconds. Under longer load the clock follows the power limit; the last line shows that.
    Roofline: the larger of operations / matrix rate and bytes / bandwidth. Operations: 4 H K per query and index.
    Bytes: every row, query, index and output once. Rate and bandwidth are measured in the same run: an 8192-cubed BF16
    product of random numbers and a 4 GiB copy (bytes read plus bytes written).
    --smoke runs the same code on small shapes, on a CPU too: its numbers say nothing.
Leaves out
    The cost of calling: Python, argument checks and launches are hidden by the graph.
Tests
    tests/test_benchmark.py, tests/test_kernel_tilelang.py
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference.command import Parser, run
from inference.kernel import sparse_attn, tilelang_installed
from inference.numerics import full_precision
from reference import benchmark_layers
from reference.benchmark_clocks import Machine, best_time, eager_time, graph_time, median_time, versions

HEADS, WIDTH, COUNT = 64, 512, 640  # official: num_attention_heads, head_dim, sliding window + index_topk
SCALE = WIDTH**-0.5
ERROR_BOUND = 1e-2  # relative L2 against float64; BF16 probabilities and output give 2e-3 to 4e-3
BASELINES = ("torch form", "plain torch", "dense SDPA")


@dataclass(frozen=True)
class Case:
    """B x S queries over N rows per batch row."""

    name: str
    batch: int
    queries: int
    rows: int

    @property
    def operations(self) -> int:
        return 4 * self.batch * self.queries * HEADS * COUNT * WIDTH

    @property
    def bytes(self) -> int:
        total = self.batch * self.queries
        return 2 * WIDTH * min(total * COUNT, self.batch * self.rows) + total * (2 * 2 * HEADS * WIDTH + 4 * COUNT)

    @property
    def is_prefill(self) -> bool:
        return self.queries > 1


CASES = (
    Case("prefill, 4096 queries, 65,536 rows", 1, 4096, 65536),
    Case("prefill, 4096 queries, 16,384 rows", 1, 4096, 16384),
    Case("prefill, 2048 queries, 65,536 rows", 1, 2048, 65536),
    Case("decode, batch 64", 64, 1, 32768),
    Case("decode, batch 32", 32, 1, 32768),
    Case("decode, batch 8", 8, 1, 32768),
    Case("decode, batch 1", 1, 1, 32768),
)
SMALL_CASES = (Case("prefill, 8 queries, 700 rows", 1, 8, 700), Case("decode, batch 2", 2, 1, 700))

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q [B, S, H, K], kv [B, N, K], sink [H], indices [B, S, k]


def kernel(arguments: argparse.Namespace) -> None:
    """Print the table of the sparse attention kernel."""
    if not torch.cuda.is_available() and not arguments.smoke:
        raise ValueError("Measuring the kernel: wanted a CUDA device, and torch sees none. "
                         "Run this on a machine with an NVIDIA GPU, or with --smoke.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    machine = Machine.measure(device, arguments.smoke)
    print(f"{versions(device)}\n{machine.line()}\n")
    kernels = ("tilelang", "tilelang-simple") if tilelang_installed() and device.type == "cuda" else ()
    print(f"{'':<35}" + "".join(f"{name:>19}" for name in kernels) + f"{'of roofline':>13}"
          + "".join(f"{name:>19}" for name in BASELINES) + f"{'error':>10}")
    for case in SMALL_CASES if arguments.smoke else CASES:
        micro, error = measure(case, kernels, device, generator)
        print(table_row(case, kernels, micro, machine.floor(case.operations, case.bytes), error), flush=True)
    if kernels and not arguments.smoke:
        print(sustained(CASES[0], device, generator))


def measure(case: Case, kernels: tuple[str, ...], device: torch.device, generator: torch.Generator,
            ) -> tuple[dict[str, float], float]:
    """Microseconds per form, and the largest error of the kernels and the torch form."""
    inputs = make_inputs(case, device, generator)
    micro, errors = {}, []
    for name in kernels:
        run = functools.partial(sparse_attn, scale=SCALE, backend=name)
        errors.append(checked(name, run, inputs[0]))
        micro[name] = graph_time(run, inputs, launches=4 if case.is_prefill else 64)
    slow_time = eager_time if case.is_prefill else functools.partial(best_time, device=device, launches=8)
    errors.append(checked("torch form", torch_form, inputs[0]))
    micro["torch form"] = slow_time(torch_form, inputs)
    checked("plain torch", plain_torch, inputs[0])
    micro["plain torch"] = slow_time(plain_torch, inputs)
    gathered = [gather(*one) for one in inputs[: 1 if case.is_prefill else None]]
    micro["dense SDPA"] = slow_time(dense_attention, gathered)
    return micro, max(errors)


def table_row(case: Case, kernels: tuple[str, ...], micro: dict[str, float], roofline: float, error: float) -> str:
    """Microseconds and TFLOP/s of the kernels, then the others in microseconds and as a multiple of the first form."""
    first = micro[kernels[0] if kernels else "torch form"]
    cells = [f"{f'{micro[name]:.1f} us {case.operations / micro[name] / 1e6:4.0f} T':>19}" for name in kernels]
    cells.append(f"{roofline / first:>13.0%}")
    cells += [f"{f'{micro[name]:.0f} us {micro[name] / first:6.1f}x':>19}" for name in BASELINES]
    return f"{case.name:<35}" + "".join(cells) + f"{error:>10.1e}"


# --- what is measured -------------------------------------------------------------------------------------------------


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> list[Inputs]:
    """Two or four sets of random inputs. Sets share their rows when these are far larger than any cache."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    inputs, kv = [], None
    for _ in range(2 if case.is_prefill else 4):
        if kv is None or case.batch * case.rows < 2**19:
            kv = normal(case.batch, case.rows, WIDTH)
        q = normal(case.batch, case.queries, HEADS, WIDTH)
        sink = torch.randn(HEADS, generator=generator, device=device)
        indices = torch.randint(case.rows, (case.batch, case.queries, COUNT), generator=generator, device=device,
                                dtype=torch.int32)
        inputs.append((q, kv, sink, indices))
    return inputs


def torch_form(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor) -> Tensor:
    """The readable form, in float32 with the official roundings."""
    return sparse_attn(q, kv, sink, indices.long(), SCALE, backend="torch")


def plain_torch(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor) -> Tensor:
    """What one would write first: gather, multiply, softmax with a sink column, multiply, in BF16."""
    query, rows = gather(q, kv, sink, indices)
    logits = (query @ rows.transpose(-1, -2)).float() * SCALE  # [B S, 1, H, k]
    column = sink.view(1, 1, -1, 1).expand(logits.shape[0], -1, -1, -1)
    probabilities = torch.cat((logits, column), dim=-1).softmax(-1)[..., :-1].to(q.dtype)
    return (probabilities @ rows).view(q.shape)


def gather(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Selected rows copied together: queries [B S, 1, H, K], rows [B S, 1, k, K]. Heads play the part of positions."""
    first = torch.arange(kv.shape[0], device=kv.device).view(-1, 1, 1) * kv.shape[1]
    rows = kv.flatten(0, 1)[(indices + first).flatten(0, 1)]
    return q.flatten(0, 1).unsqueeze(1), rows.unsqueeze(1)


def dense_attention(query: Tensor, rows: Tensor) -> Tensor:
    """Torch's own attention over rows that are gathered already; it has no sink."""
    return F.scaled_dot_product_attention(query, rows, rows, scale=SCALE)


def checked(name: str, run: Callable[..., Tensor], inputs: Inputs) -> float:
    """Relative L2 distance from float64 on about 64 of the queries. Raises ValueError when it is not small."""
    q, kv, sink, indices = inputs
    out = run(*inputs).flatten(0, 1)
    picked = torch.arange(0, out.shape[0], max(1, out.shape[0] // 64), device=q.device)
    batch = picked // q.shape[1]
    rows = kv[batch.unsqueeze(-1), indices.flatten(0, 1)[picked].long()].double()  # [picked, k, K]
    logits = q.flatten(0, 1)[picked].double() @ rows.transpose(-1, -2) * SCALE
    column = sink.double().view(1, -1, 1).expand(logits.shape[0], -1, -1)
    wanted = torch.cat((logits, column), dim=-1).softmax(-1)[..., :-1] @ rows
    error = float((out[picked].double() - wanted).norm() / wanted.norm())
    if not error < ERROR_BOUND:
        raise ValueError(f"Checking {name} before timing it: wanted a relative L2 error below {ERROR_BOUND}, got "
                         f"{error}. Run pytest tests/test_kernel_tilelang.py.")
    return error


# --- the command -----------------------------------------------------------------------------------------------------


def sustained(case: Case, device: torch.device, generator: torch.Generator) -> str:
    """One case for about a second without a pause."""
    inputs = make_inputs(case, device, generator)
    launches = 1500

    def run() -> None:
        for launch in range(launches):
            sparse_attn(*inputs[launch % len(inputs)], SCALE, backend="tilelang")

    micro = median_time(run, 1, device) / launches
    return (f"\n{case.name}, {launches} launches without a pause: {micro:.1f} us, "
            f"{case.operations / micro / 1e6:.0f} TFLOP/s (the clock follows the power limit)")


SUBCOMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "kernel": kernel, "layer": benchmark_layers.layer, "decode": benchmark_layers.decode,
    "prefill": benchmark_layers.prefill, "cpu": benchmark_layers.cpu}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status; a user mistake is one line on standard error."""
    parser = Parser(prog="python -m reference.benchmark", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__)
        command.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
        command.add_argument("--smoke", action="store_true", help="small shapes, to see that everything runs")
        if name in ("layer", "decode", "prefill"):
            command.add_argument("--weights", default="packed", choices=("packed", "resident"),
                                 help="codes as stored, decoded at use, or BF16")
            command.add_argument("--compile", action="store_true",
                                 help="torch.compile the small operations; a minute or more, the first time; rows for both forms")
        if name == "layer":
            command.add_argument("--profile", action="store_true", help="count what the host waits for inside a layer")
    parsed = parser.parse_args(arguments)
    try:
        with torch.no_grad(), full_precision():
            SUBCOMMANDS[parsed.command](parsed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
