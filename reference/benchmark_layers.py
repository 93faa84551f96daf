"""How fast one layer of every kind is, at the released shapes: `python -m reference.benchmark layer|decode|prefill|cpu`.

What it measures
    layer     each kind of layer: one token at batch 1 and 32, and a chunk of a prompt
    decode    one token, after 4 thousand to 1 million
    prefill   a chunk of a prompt, by its length
    cpu       the three tables on a small model, on the CPU
Kinds of layers
    window-only   no compressed rows          Full     makes compressed rows and index keys, scores, selects
    Reindex       scores the rows of another layer and selects anew      Reuse     takes rows and selection of others
    A layer runs whole: hyper-connections, attention, experts, staging of its rows. Engram and the head are no part.
How
    Weights and caches are random codes, made on the device: values do not matter to the time, apart from which experts
    are chosen, and those are counted. A time is the median over replays of a CUDA graph (chunks of a prompt: over calls).
    `host` is the same call from Python, launch by launch.
    floor: the larger of bytes / copy bandwidth and operations / rate of a large BF16 product, both of this run. Bytes:
    what must be read at least: the layer's weights as they are stored, of the experts only the chosen ones; windows;
    index keys of all rows that may be scored; selected rows. Operations: products of weights, attention, index scores.
    torch form: the same with KERNEL=torch.
    --compile: every row a second time with the small operations compiled (inference/compiled.py), and how many times faster
    than the row above. Compiling is not part of the time.
    --profile: calls of cudaStreamSynchronize and copies between host and device while the layer runs, by the profiler.
Tests
    tests/test_benchmark.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import inference.config
from inference.cache import Cache, Ring, RowStore
from inference.compiled import compiled_forms
from inference.config import Config, LayerPlan, TextConfig, layer_plan
from inference.context import DEFAULT_MEMORY_BUDGET, GPU_MEMORY_BUDGET, Context, Shared
from inference.hyper_connections import first_pre
from inference.kernel import tilelang_installed
from inference.layers import Linear
from inference.model import Layer
from inference.moe import stack_experts
from inference.numerics import Numerics
from inference.packing import COMPRESSED, INDEX_KEY
from inference.quant import FORMATS, TILE, PackedWeight
from reference.benchmark_clocks import Machine, eager_time, graph_time, median_time, versions

RELEASED = Path(inference.config.__file__).parent / "configs" / "deepseek-v4.1-flash.json"
# A small model with every kind of layer; the CPU table, and trial runs.
SMALL = TextConfig(hidden_size=256, moe_intermediate_size=128, n_routed_experts=16, num_attention_heads=8, index_topk=32,
                   sliding_window=16, candidate_topk_blocks=16, max_position_embeddings=2**20)
KNOWN, DECODE_BATCHES, CHUNK = 65536, (1, 32), 2048  # layer: tokens before the call, batch sizes, tokens of a chunk
LENGTHS, CHUNKS = (4096, 32768, 262144, 1048000), (256, 1024, 4096)  # decode; prefill
SMALL_KNOWN, SMALL_BATCHES, SMALL_CHUNK, SMALL_LENGTHS, SMALL_CHUNKS = 512, (1, 4), 64, (128, 4096), (16, 64)


def layer(arguments: argparse.Namespace) -> None:
    """Print what one layer of each kind takes, for tokens and for a chunk of a prompt."""
    bench = Bench.of(arguments)
    known, batches, chunk = ((SMALL_KNOWN, SMALL_BATCHES, SMALL_CHUNK) if arguments.smoke else
                             (KNOWN, DECODE_BATCHES, CHUNK))
    print(f"one layer, {bench.weights} weights, {known:,} tokens before the call")
    bench.head("kind")
    for kind, plan in bench.kinds().items():
        module = bench.make_layer(plan)
        for batch, tokens in [*((batch, 1) for batch in batches), (1, chunk)]:
            call = bench.call(module, batch, tokens, known)
            bench.row(f"{kind}, {f'batch {batch}' if tokens == 1 else f'chunk of {tokens}'}", call, with_torch=True)
            if arguments.profile:
                print(f"    {host_stops(call)}", flush=True)
                if bench.compile:
                    with compiled_forms(bench.machine.device):
                        print(f"    compiled {host_stops(call)}", flush=True)


def decode(arguments: argparse.Namespace) -> None:
    """Print how one token's time grows with the tokens before it."""
    bench = Bench.of(arguments)
    print(f"one token through one layer, {bench.weights} weights, batch 1, by tokens before it")
    bench.head("kind, tokens before", growth="of the first")
    for kind, plan in bench.kinds().items():
        module, first = bench.make_layer(plan), None
        for known in SMALL_LENGTHS if arguments.smoke else LENGTHS:
            first = bench.row(f"{kind}, {known:,}", bench.call(module, 1, 1, known), first=first)


def prefill(arguments: argparse.Namespace) -> None:
    """Print how the time of a chunk of a prompt grows with its length."""
    bench = Bench.of(arguments)
    known = SMALL_KNOWN if arguments.smoke else LENGTHS[1]
    print(f"a chunk of a prompt through one layer, {bench.weights} weights, {known:,} tokens before it")
    bench.head("kind, tokens of the chunk", growth="per token")
    for kind, plan in bench.kinds().items():
        module, first = bench.make_layer(plan), None
        for tokens in SMALL_CHUNKS if arguments.smoke else CHUNKS:
            first = bench.row(f"{kind}, {tokens:,}", bench.call(module, 1, tokens, known), first=first, per=tokens)


def cpu(arguments: argparse.Namespace) -> None:
    """Print all three tables for a small model on the CPU."""
    for command in (layer, decode, prefill):
        command(argparse.Namespace(seed=arguments.seed, smoke=True, weights="packed", profile=False, device="cpu"))
        print()


# --- the tables ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """One run of a subcommand: the machine, the model's shapes, the source of random numbers."""

    machine: Machine
    config: TextConfig
    weights: str
    generator: torch.Generator
    compile: bool = False  # every row also with compiled small operations

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Bench:
        """Prints versions and ceilings. Raises ValueError where the released shapes cannot run."""
        wanted = getattr(arguments, "device", "cuda" if torch.cuda.is_available() else "cpu")
        if wanted == "cpu" and not arguments.smoke:
            raise ValueError("Measuring layers: wanted a CUDA device for the released shapes, and torch sees none. Use --smoke "
                             "or the subcommand cpu for a small model.")
        device = torch.device(wanted)
        machine = Machine.measure(device, arguments.smoke)
        print(f"{versions(device)}\n{machine.line()}\n")
        config = SMALL if arguments.smoke else Config.from_file(RELEASED).text_config
        return cls(machine, config, arguments.weights, torch.Generator(device).manual_seed(arguments.seed),
                   getattr(arguments, "compile", False))

    def kinds(self) -> dict[str, LayerPlan]:
        """The last backbone layer of every kind without Engram, and the last Full one of every other ratio."""
        kinds = {}
        for plan in layer_plan(self.config):
            if plan.is_draft or plan.engram_slot is not None:
                continue
            kind = ("window-only" if plan.kv_source is None else f"Full, ratio {plan.compress_ratio}" if plan.owns_compressor
                    else "Reindex" if plan.owns_indexer else "Reuse")
            kinds[kind] = plan
        return kinds

    def make_layer(self, plan: LayerPlan) -> Layer:
        return random_layer(self.config, plan, self.weights, self.generator)

    def call(self, module: Layer, batch: int, tokens: int, known: int) -> Call:
        return Call(module, batch, tokens, known, self.generator)

    def head(self, first: str, growth: str = "") -> None:
        print(f"{first:<34}{'time':>12}{'floor':>12}{'of floor':>10}{'host':>12}"
              + (f"{growth:>14}" if growth else f"{'torch form':>16}"))

    def row(self, name: str, call: Call, first: float | None = None, per: int = 1, with_torch: bool = False) -> float:
        """Print one row, or one per form. Returns the plain time (per `per`), for the ratios of later rows to the first."""
        micro, line = self._measured(name, call)
        if with_torch and tilelang_installed() and self.machine.device.type == "cuda":
            with torch_form():
                plain = call.time()
            line += f"{plain:>9.0f} us{plain / micro:>4.1f}x"
        elif not with_torch:
            line += f"{micro / per / (first or micro / per):>13.2f}x"
        print(line, flush=True)
        if self.compile:
            with compiled_forms(self.machine.device):
                call.run()
                fast, line = self._measured("    compiled", call)
            print(f"{line}    {micro / fast:.2f} times as fast", flush=True)
        return first or micro / per

    def _measured(self, name: str, call: Call) -> tuple[float, str]:
        """Microseconds, and a row without its last column."""
        micro = call.time()
        host = median_time(call.run, 3, self.machine.device)
        floor = self.machine.floor(call.operations(), call.bytes())
        return micro, f"{name:<34}{micro:>9.0f} us{floor:>9.0f} us{micro / floor:>9.1f}x{host:>9.0f} us"


@contextlib.contextmanager
def torch_form() -> Iterator[None]:
    """KERNEL=torch while active."""
    before = os.environ.get("KERNEL")
    os.environ["KERNEL"] = "torch"
    try:
        yield
    finally:
        os.environ.pop("KERNEL")
        if before is not None:
            os.environ["KERNEL"] = before


def host_stops(call: Call) -> str:
    """What the host waits for during one call, by the profiler."""
    if not torch.cuda.is_available():
        return "profile: no CUDA device, nothing to count"
    call.run()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call.run()
    names = [event.name for event in profile.events()]
    counts = {"cudaStreamSynchronize": sum(name == "cudaStreamSynchronize" for name in names),
              "host-to-device copies": sum("HtoD" in name for name in names),
              "device-to-host copies": sum("DtoH" in name for name in names),
              "kernel launches": sum(name.startswith("cudaLaunchKernel") or name.startswith("cuLaunchKernel") for name in names)}
    return "profile: " + ", ".join(f"{count} {name}" for name, count in counts.items())


# --- one layer and its surroundings ----------------------------------------------------------------------------------


class Call:
    """One call of one layer: B rows, S tokens after `known` ones, and what earlier layers would have published."""

    def __init__(self, module: Layer, batch: int, tokens: int, known: int, generator: torch.Generator) -> None:
        self.module, self.plan, self.config = module, module.plan, module.config
        self.batch, self.tokens, self.known, self.device = batch, tokens, known, generator.device
        config, numerics = self.config, Numerics.of("native")
        positions = known + torch.arange(tokens, device=self.device).expand(batch, -1)
        budget = GPU_MEMORY_BUDGET if self.device.type == "cuda" else DEFAULT_MEMORY_BUDGET
        self.context = Context(numerics, positions, (known,) * batch, (tokens,) * batch, memory_budget=budget)
        self.streams = torch.randn(batch, tokens, config.hc_mult, config.hidden_size, generator=generator, device=self.device,
                                   dtype=torch.bfloat16)
        self.pre = first_pre(self.streams)
        self.cache = random_cache(config, self.plan, batch, known, tokens, generator)
        self.shared = self._shared(generator)
        self.chosen = 0
        handle = module.ffn.gate.register_forward_hook(self._count_experts)
        self.run()
        handle.remove()

    def run(self) -> Tensor:
        """The layer, streams in, streams out."""
        def attention(x: Tensor) -> Tensor:
            return self.module.attn(x, self.context, self.cache, self.shared)[0]

        return self.module.sublayers(self.streams, self.pre, attention, self.context)[0]

    def time(self) -> float:
        """Microseconds."""
        if self.device.type == "cuda" and self.tokens == 1:
            return graph_time(self.run, [()], launches=1, samples=9)
        return eager_time(self.run, [()], self.device)

    @property
    def rows(self) -> int:
        """Compressed rows that exist after the call."""
        return (self.known + self.tokens) // self.plan.compress_ratio if self.plan.compress_ratio else 0

    def bytes(self) -> int:
        """What must be read at least."""
        config, plan = self.config, self.plan
        experts = list(self.module.ffn.experts.parameters()) + [
            tensor for linear in self.module.ffn.experts.modules() if isinstance(linear, Linear)
            for tensor in stored_tensors(linear)]
        everything = [*self.module.parameters(), *(tensor for linear in self.module.modules() if isinstance(linear, Linear)
                                                   for tensor in stored_tensors(linear))]
        of_experts, total = size_of(experts), size_of(everything)
        total += of_experts // plan.n_routed_experts * self.chosen - of_experts
        total += size_of([self.cache.windows[plan.layer_id].stored])
        if plan.kv_source is not None:
            selected = min(self.rows, config.index_topk * self.tokens)
            total += self.batch * selected * COMPRESSED.width(config.head_dim)
        if plan.owns_indexer:
            total += self.batch * self.scored * INDEX_KEY.width(config.index_head_dim)
        return total + 2 * size_of([self.streams])

    @property
    def scored(self) -> int:
        """Rows that a query must be compared with: all, or those of the candidate blocks."""
        candidates = self.config.candidate_topk_blocks * self.config.candidate_block_size
        return min(self.rows, candidates) if self.plan.candidate_role == "filter" else self.rows

    def operations(self) -> int:
        """Multiplications and additions of the products."""
        config, plan, each = self.config, self.plan, 0
        for name, linear in self.module.named_modules():
            if isinstance(linear, Linear) and ".experts." not in name:
                each += linear.in_features * linear.out_features
        each += 3 * plan.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
        attended = config.sliding_window + (min(config.index_topk, self.rows) if plan.kv_source is not None else 0)
        each += 2 * config.num_attention_heads * config.head_dim * attended
        if plan.owns_indexer:
            each += config.index_n_heads * config.index_head_dim * self.scored
        return 2 * each * self.batch * self.tokens

    def _count_experts(self, _gate: nn.Module, _inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self.chosen = output[1].unique().numel()

    def _shared(self, generator: torch.Generator) -> Shared:
        config, plan, shared = self.config, self.plan, Shared()
        if plan.kv_source is None or plan.owns_compressor:
            return shared
        shared = shared.publish("compressed", plan.kv_source, self.cache.compressed[plan.kv_source].view(self.rows))

        def ascending(count: int, below: int) -> Tensor:
            shape = (self.batch, self.tokens, min(count, below))
            return torch.randint(below, shape, generator=generator, device=self.device).sort(-1).values

        if not plan.owns_indexer:
            return shared.publish("selections", plan.index_source, ascending(config.index_topk, self.rows))
        shared = shared.publish("index_keys", plan.kv_source, self.cache.index_keys[plan.kv_source].view(self.rows))
        if plan.candidate_role == "filter":
            blocks = ascending(config.candidate_topk_blocks, -(-self.rows // config.candidate_block_size))
            shared = shared.publish("candidates", config.candidate_source_layer_id, blocks)
        return shared


def random_layer(config: TextConfig, plan: LayerPlan, weights: str, generator: torch.Generator) -> Layer:
    """A layer with random weights in the formats of the release: FP4 experts, FP8 tiles, BF16, float32."""
    device = generator.device
    with torch.device("meta"):
        module = Layer(config, plan)
    for name, part in module.named_modules():
        for attribute, parameter in list(part.named_parameters(recurse=False)):
            shape = tuple(parameter.shape)
            stored = None
            if isinstance(part, Linear) and ".experts." in name:
                stored = random_mxfp4(shape, generator)
            elif isinstance(part, Linear) and (part.quantize_input or name.endswith("wo_a")):
                stored = random_fp8_tiles(shape, generator)
            del part._parameters[attribute]
            if stored is not None and weights == "packed":
                setattr(part, attribute, stored)
                continue
            dtype = torch.float32 if getattr(part, "float32", False) else parameter.dtype
            value = stored.dequantize() if stored is not None else random_values(shape, dtype, generator)
            part.register_parameter(attribute, nn.Parameter(value, requires_grad=False))
    assert all(parameter.device.type == torch.device(device).type for parameter in module.parameters())
    return stack_experts(module.eval())


def random_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Ones for vectors, else normal numbers that keep the size of what they multiply."""
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=generator.device)
    values = torch.randn(shape, generator=generator, device=generator.device) / math.sqrt(shape[-1])
    return values.to(dtype)


def random_fp8_tiles(shape: tuple[int, int], generator: torch.Generator) -> PackedWeight:
    rows, columns = shape
    codes = torch.randn(shape, generator=generator, device=generator.device).to(torch.float8_e4m3fn)
    return PackedWeight(FORMATS["fp8_blocks"], (codes, scales((-(-rows // TILE), -(-columns // TILE)), columns, 1, generator)),
                        shape)


def random_mxfp4(shape: tuple[int, int], generator: torch.Generator) -> PackedWeight:
    rows, columns = shape
    codes = random_bytes((rows, columns // 2), 0, 256, generator)
    return PackedWeight(FORMATS["mxfp4"], (codes, scales((rows, columns // 32), columns, 3, generator)), shape)


def scales(shape: tuple[int, int], inputs: int, size: int, generator: torch.Generator) -> Tensor:
    """E8M0: what makes codes of RMS `size` into weights of RMS about 1 / sqrt(inputs)."""
    byte = 127 - round(math.log2(size * math.sqrt(inputs)))
    return torch.full(shape, byte, dtype=torch.uint8, device=generator.device).view(torch.float8_e8m0fnu)


def random_bytes(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device, dtype=torch.uint8)


def random_cache(config: TextConfig, plan: LayerPlan, batch: int, known: int, tokens: int, generator: torch.Generator) -> Cache:
    """A packed cache of `known` tokens; only what this layer reads is filled."""
    cache = Cache(Config(text_config=config), layer_plan(config), batch, torch.bfloat16, generator.device, "packed")
    width, window = config.head_dim, cache.windows[plan.layer_id]
    rows = random_rows(window.stored.shape, width, (0, 0x50), 120, generator)
    windows: dict[int, Ring] = {**cache.windows, plan.layer_id: dataclasses.replace(window, stored=rows)}
    cache.state = dataclasses.replace(cache.state, lengths=(known,) * batch, windows=windows)
    if plan.kv_source is not None:
        count = (known + tokens) // plan.compress_ratio + 1
        # E4M3 scales about 2^-3 and E8M0 scales 2^-3, on codes of two to a byte.
        fill(cache.compressed[plan.kv_source], (batch, count), width // 2, 0x20, generator)
        fill(cache.index_keys[plan.kv_source], (batch, count), config.index_head_dim // 2, 124, generator)
    return cache


def fill(store: RowStore, shape: tuple[int, int], code_bytes: int, scale: int, generator: torch.Generator) -> None:
    store.stored = random_rows((*shape, store.stored.shape[2]), code_bytes, (0, 256), scale, generator)


def random_rows(shape: Sequence[int], code_bytes: int, codes: tuple[int, int], scale: int, generator: torch.Generator) -> Tensor:
    """Packed rows [B, N, bytes]: random codes, then one scale everywhere."""
    rows = torch.full(tuple(shape), scale, dtype=torch.uint8, device=generator.device)
    rows[..., :code_bytes] = random_bytes((*shape[:2], code_bytes), *codes, generator)
    return rows


def stored_tensors(linear: Linear) -> tuple[Tensor, ...]:
    """Of a packed weight; () for a parameter."""
    return linear.weight.tensors if isinstance(linear.weight, PackedWeight) else ()


def size_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
