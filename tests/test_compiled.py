"""torch.compile of the small operations: same bits where nothing is summed, same text, few compilations, nothing left behind.

Most tests trace and run what was traced (backend "eager"); generating code takes seconds a function, so only some are built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.utils import counters

import inference
from inference import compiled, decoding, generate, quant
from inference.compiled import compile_whole, compiled_forms
from inference.experts import Stack
from inference.hyper_connections import sinkhorn
from inference.layers import RMSNorm
from inference.numerics import full_precision
from inference.packing import COMPRESSED, INDEX_KEY, WINDOW
from inference.quant import FORMATS, PackedWeight
from inference.rope import rotate
from reference.benchmark_clocks import Machine
from reference.benchmark_layers import SMALL, Bench
from reference.metrics import relative_l2

PROMPTS = ([1, 7, 3, 9, 4], [1, 15, 8, 2, 6, 11, 12])


@pytest.fixture(scope="module")
def builds() -> None:
    """Skips where torch.compile by itself builds nothing (no C++ compiler, no Python headers); ours failing alone is a failure."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(2))
    except Exception as error:
        pytest.skip(f"torch.compile builds no code on this machine: {error}")


def only_traced(monkeypatch, built: tuple[Callable, ...] = ()) -> None:
    """Within the test `compiled_forms` generates code for `built` alone and traces the rest."""
    def some(form: Callable, more=None, backend: str = "inductor") -> Callable:
        return compile_whole(form, more or {}, "inductor" if form in built else "eager")

    monkeypatch.setattr(compiled, "compile_whole", some)


def weights() -> dict[str, PackedWeight]:
    """Random codes of every family of formats, with scales down to their smallest."""
    def octets(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    e8m0, e4m3, affine = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.bfloat16
    scale = torch.randint(0, 200, (64, 4), dtype=torch.uint8).view(e8m0)
    words = octets(64, 64).view(torch.uint32)
    return {
        "mxfp4": PackedWeight(FORMATS["mxfp4"], (octets(64, 64).view(torch.int8), scale), (64, 128)),
        "fp8_blocks": PackedWeight(FORMATS["fp8_blocks"], (octets(64, 128).view(e4m3), scale[:2]), (64, 128)),
        "mxfp8": PackedWeight(FORMATS["mxfp8"], (octets(64, 128).view(torch.uint32), scale.view(torch.uint8)), (64, 128)),
        "nvfp4": PackedWeight(FORMATS["nvfp4"], (octets(64, 64), octets(64, 8).view(e4m3), torch.tensor(0.3)), (64, 128)),
        "affine4_g64": PackedWeight(FORMATS["affine4_g64"], (words, *torch.randn(2, 64, 2).to(affine)), (64, 128))}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Shape and bits, apart from those of NaN."""
    if left.shape != right.shape:
        return False
    nan = left.isnan() & right.isnan()
    number = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return left.dtype == right.dtype and bool(((left.view(number) == right.view(number)) | nan).all())


def test_forms_for_the_compiler_decode_all_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert same(compiled.e2m1_values(codes), quant.e2m1_decode(codes))
    octets = torch.arange(256, dtype=torch.uint8)
    assert same(compiled.nibble_values(octets).to(torch.bfloat16), quant._nibble_values(octets))
    assert same(compiled.e4m3_values(octets), quant._e4m3_values(octets))


def test_all_sinkhorn_rounds_in_scalars() -> None:
    logits = 4 * torch.randn(50, 4, 4)
    wanted = sinkhorn(logits.double(), 20, 1e-6)
    got, plain = compiled.sinkhorn_in_scalars(logits, 20, 1e-6), sinkhorn(logits, 20, 1e-6)
    assert torch.allclose(got.double(), wanted, rtol=0, atol=1e-6) and torch.allclose(plain.double(), wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(got.double(), sinkhorn(logits.double(), 19, 1e-6), rtol=0, atol=1e-6)  # a round less shows


@pytest.mark.parametrize("name, read, backend", [
    ("mxfp4", "experts", "inductor"), ("fp8_blocks", "all", "inductor"), ("nvfp4", "experts", "eager"),
    ("mxfp8", "rows", "eager"), ("affine4_g64", "all", "eager")])
def test_decoders_give_the_same_bits(name, read, backend, builds) -> None:
    weight = weights()[name]

    def two(part: torch.Tensor) -> torch.Tensor:
        octets = part.view(torch.uint8) if part.dim() else part
        return torch.stack([octets, octets.flip(0)]).view(part.dtype) if part.dim() else part.expand(2, 1, 1)

    stack = Stack(weight.format, tuple(two(part) for part in weight.tensors), weight.shape)
    call = {"experts": lambda: stack.decode(torch.tensor([1, 0, 1])), "all": weight.dequantize,
            "rows": lambda: weight.rows(torch.tensor([[5, 63], [0, 5]]))}[read]
    wanted = call()
    with compiled_forms("cpu", backend):
        assert same(call(), wanted)


@pytest.mark.parametrize("name", ["fake_quant_fp8", "fake_quant_fp4_e8m0", "fake_quant_fp4_e4m3"])
def test_rounding_to_codes_gives_the_same_bits(name, builds) -> None:
    """Every BF16 number of moderate size: all ties, both zeros, all-zero groups, scales that are no powers of two."""
    values = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    values = values[(values.isfinite() & (values.abs() < 1e30)).all(-1)]
    mixed = torch.cat((values, values.flatten()[torch.randperm(values.numel())].view_as(values), torch.zeros_like(values[:2])))
    assert len(mixed) > 1500
    wanted = getattr(quant, name)(mixed)
    with compiled_forms("cpu", "eager" if name == "fake_quant_fp4_e8m0" else "inductor"):
        got = getattr(quant, name)(mixed)
    assert same(got, wanted)


def test_norm_and_rotation_stay_within_one_rounding(builds) -> None:
    norm = RMSNorm(64, 1e-20)
    norm.weight.data = torch.randn(64).to(torch.bfloat16)
    x = torch.randn(3, 5, 64).to(torch.bfloat16)
    wanted = norm(x)
    with compiled_forms("cpu"):
        got = norm(x)
    assert got.shape == wanted.shape and bool(((got - wanted).abs().float() <= 2.0**-7 * wanted.abs().float()).all())
    q, frequencies = torch.randn(2, 3, 4, 32).to(torch.bfloat16), torch.rand(8)
    positions = torch.tensor([[0, 1, 2], [100000, 100001, 1000000]])
    with compiled_forms("cpu", "eager"):
        got = [inference.attention.rotate(q, positions, frequencies, inverse) for inverse in (False, True)]
    assert all(torch.equal(turned, rotate(q, positions, frequencies, inverse)) for turned, inverse in zip(got, (False, True)))


def test_index_scores_keep_their_roundings(builds) -> None:
    """(1 + 2^-7)^2 is 1 + 2^-6 in BF16, which the second head takes away; without that rounding 2^-14 is left."""
    queries = torch.zeros(1, 3, 2, 32, dtype=torch.bfloat16)
    queries[..., 0] = torch.tensor([1 + 2.0**-7, 1 + 2.0**-6])
    keys, weights = torch.zeros(1, 5, 32, dtype=torch.bfloat16), torch.tensor([1 + 2.0**-7, -1]).to(torch.bfloat16)
    keys[..., 0] = 1
    with compiled_forms("cpu"):
        scores = inference.indexer._weighted_scores(queries, weights.expand(1, 3, 2), keys)
    assert scores.dtype == torch.bfloat16 and not scores.any()


@pytest.mark.parametrize("packing, round_to", [(WINDOW, quant.fake_quant_fp8), (COMPRESSED, quant.fake_quant_fp4_e4m3),
                                               (INDEX_KEY, quant.fake_quant_fp4_e8m0)])
def test_unpacking_of_cache_rows(packing, round_to) -> None:
    rows = round_to(torch.randn(2, 5, 64))
    stored = packing.pack(rows)
    with compiled_forms("cpu", "eager"):
        assert torch.equal(packing.unpack(stored[:, 1:4], torch.bfloat16), rows[:, 1:4].to(torch.bfloat16))


def test_the_text_is_the_same_and_shapes_compile_once(nano_dir, builds, monkeypatch) -> None:
    """FP8 rounding built, the rest traced. Batches and lengths that come later compile nothing new."""
    only_traced(monkeypatch, (quant._round_fp8,))
    model = inference.load(nano_dir, weights="packed")

    def text(prompts, chunk: int) -> list[list[int]]:
        generation = decoding.generate(model, prompts, decoding.Settings(max_new_tokens=6, chunk_size=chunk, stop_ids=()))
        for _ in generation:
            pass
        return generation.tokens

    ids = torch.tensor([PROMPTS[0]])
    wanted, logits = text(PROMPTS, 3), model(ids, model.new_cache(1)).logits
    with compiled_forms("cpu"):
        assert text(PROMPTS, 3) == wanted
        close = model(ids, model.new_cache(1)).logits
        known = counters["stats"]["unique_graphs"]
        text((*PROMPTS, *PROMPTS), 4)
        text((PROMPTS[0], PROMPTS[0], PROMPTS[1]), 6)
        assert counters["stats"]["unique_graphs"] - known <= 2 and not counters["graph_break"]
    assert float((close - logits).norm() / logits.norm()) < 1e-2
    before = counters["stats"]["calls_captured"]
    assert text(PROMPTS, 3) == wanted and counters["stats"]["calls_captured"] == before  # plain again


def test_the_flag_of_the_command_line(capsys, monkeypatch) -> None:
    devices = []

    def recorded(device: str):
        devices.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(generate, "compiled_forms", recorded)
    for options in ([], ["--compile"]):
        assert generate.main(["--prompt", "hello", "--max-new-tokens", "1", *options]) == 0
    assert devices == ["cpu"]


def test_a_missing_compiler_is_one_sentence(capsys) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True}):
        torch._dynamo.reset()
        assert generate.main(["--prompt", "hello", "--max-new-tokens", "1", "--compile"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: Compiling the small operations for cpu: wanted a working C++ compiler (g++)")
    assert error.count("\n") == 1 and "run without --compile" in error


# --- on a CUDA device ---------------------------------------------------------------------------------------------


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_same_bits_on_cuda() -> None:
    """Decoders, roundings, unpacking and packing: everything without a sum, each with rows for all codes."""
    values = torch.randn(300, 512, device="cuda").to(torch.bfloat16) * torch.logspace(-6, 6, 300, device="cuda").unsqueeze(1)
    values = torch.cat((values.to(torch.bfloat16), torch.zeros(2, 512, device="cuda", dtype=torch.bfloat16)))
    stored = {packing.name: (packing, getattr(quant, name)(values).unsqueeze(0)) for packing, name in (
        (WINDOW, "fake_quant_fp8"), (COMPRESSED, "fake_quant_fp4_e4m3"), (INDEX_KEY, "fake_quant_fp4_e8m0"))}
    moved = {name: weight.to("cuda") for name, weight in weights().items()}

    def all_of_them() -> dict[str, torch.Tensor]:
        results = {name: weight.dequantize() for name, weight in moved.items()}
        for name in ("fake_quant_fp8", "fake_quant_fp4_e8m0", "fake_quant_fp4_e4m3"):
            results[name] = getattr(quant, name)(values)
        for name, (packing, rows) in stored.items():
            packed, fits = packing.try_pack(rows)
            assert bool(fits), name
            results[f"packed {name}"] = packed.to(torch.float32)
            results[name] = packing.unpack(packed, torch.bfloat16)
        return results

    wanted = all_of_them()
    with compiled_forms("cuda"):
        got = all_of_them()
    assert [name for name in wanted if not same(got[name], wanted[name])] == []


@pytest.mark.gpu
@needs_cuda
def test_layers_on_cuda() -> None:
    """Every kind of layer: its mixes (all Sinkhorn rounds in one kernel) in float32, rotation at far positions, its output."""
    bench = Bench(Machine(torch.device("cuda"), 1.0, 1.0), SMALL, "packed", torch.Generator("cuda").manual_seed(0))
    positions, frequencies = torch.tensor([[0, 1, 77777, 1048000]], device="cuda"), 0.5 ** torch.arange(32, device="cuda")
    q = torch.randn(1, 4, 3, 128, device="cuda").to(torch.bfloat16)
    with full_precision():
        for plan in bench.kinds().values():
            module = bench.make_layer(plan)
            for batch, tokens in ((1, 1), (2, 1), (1, 20)):
                call = bench.call(module, batch, tokens, 511)
                wanted, mixes, turned = call.run(), module.mixes("attn", call.streams), rotate(q, positions, frequencies)
                with compiled_forms("cuda"):
                    got, mixes_got = call.run(), module.mixes("attn", call.streams)
                    turned_got = inference.attention.rotate(q, positions, frequencies)
                for name in ("pre_next", "post", "comb"):
                    assert torch.allclose(getattr(mixes_got, name), getattr(mixes, name), rtol=0, atol=1e-5), name
                assert bool(((turned_got - turned).abs().float() <= 2.0**-7 * turned.abs().float() + 1e-6).all())
                assert relative_l2(got, wanted) < 1e-2
    assert not counters["graph_break"]
