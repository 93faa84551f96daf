"""The model on a CUDA device against the CPU: every numerics, every weights mode, every command; and no host stop inside a layer.

Without a CUDA device all of this is skipped and says so. Float32 differs by the order of sums only (relative L2 below
2e-5, the bound of the golden data); quantizers, packings and choices are equal bit for bit on equal input.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import inference
from inference import packing, quant
from inference.config import TextConfig, layer_plan
from inference.context import Context
from inference.generate import main as generate
from inference.indexer import candidate_blocks, select_columns
from inference.layers import Linear
from inference.model import Layer, Model
from inference.moe import MoE, stack_experts
from inference.numerics import Numerics, full_precision
from reference.metrics import relative_l2
from reference.trace import main as trace
from reference.trace_format import open_trace
from reference.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FLOAT32_BOUND = 2e-5  # golden data: a right implementation that differs in summation order only
NATIVE_BOUND = 1e-2  # golden data: BF16 rounding and summation order of one module
NATIVE_END_BOUND = 0.35  # golden data: random weights amplify one rounding to a few percent
WEIGHTS = ("resident", "packed", "stream")
IDS = torch.arange(20, 57)[None] * 13 % 700


@pytest.fixture(scope="module")
def on_gpu(nano_dir: Path) -> dict[str, Model]:
    """The native nano model by weights mode."""
    return {weights: inference.load(nano_dir, "cuda", weights=weights) for weights in WEIGHTS}


def decoded(model: Model, ids: Tensor = IDS, prompt: int = 30) -> Tensor:
    """Logits [B, S, V] on the CPU of a prompt and single tokens after it."""
    cache, device = model.new_cache(len(ids)), model.norm.weight.device
    calls = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    return torch.cat([model(call.to(device), cache).logits for call in calls], dim=1).cpu()


# --- equal numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
def test_float32_equals_the_cpu(nano_dir, nano_plain, weights) -> None:
    """Without fake quantization no rounding decision can flip, so prompt and steps agree to the order of sums."""
    model = inference.load(nano_dir, "cuda", "float32", False, weights=weights)
    assert relative_l2(decoded(model), decoded(nano_plain)) < FLOAT32_BOUND


@pytest.mark.parametrize("numerics", ["native", "dequantized"])
def test_bf16_equals_the_cpu_within_rounding(nano_dir, numerics) -> None:
    wanted = decoded(inference.load(nano_dir, numerics=numerics))
    for weights in WEIGHTS:
        model = inference.load(nano_dir, "cuda", numerics, weights=weights)
        out = decoded(model)
        assert relative_l2(out, wanted) < NATIVE_END_BOUND, weights
        assert torch.equal(out, decoded(model)), f"two runs with {weights} weights differ"


def test_tf32_outside_changes_nothing(nano_dir) -> None:
    model = inference.load(nano_dir, "cuda", "float32", False)
    wanted = decoded(model)
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert torch.equal(decoded(model), wanted)
        left, right = (torch.randn(256, 256, device="cuda") for _ in range(2))
        loose = left @ right
        with full_precision():
            assert relative_l2(left @ right, loose) > 1e-5  # TF32 was really on
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_quantizers_and_packings_are_bit_equal() -> None:
    """All four quantizers of the forward on normal, tiny and huge rows, and what a packed cache keeps of them."""
    x = torch.randn(400, 512) * torch.logspace(-6, 4, 400)[:, None]
    x[5] = 0
    for values in (x, x.bfloat16()):
        for rounded, layout in ((quant.fake_quant_fp8, packing.WINDOW), (quant.fake_quant_fp4_e4m3, packing.COMPRESSED),
                                (quant.fake_quant_fp4_e8m0, packing.INDEX_KEY)):
            here, there = rounded(values), rounded(values.cuda())
            assert torch.equal(there.cpu(), here), rounded.__name__
            stored = layout.pack(there)
            assert torch.equal(stored.cpu(), layout.pack(here))
            assert torch.equal(layout.unpack(stored, values.dtype).cpu(), here)


def test_division_by_six_is_a_division() -> None:
    """Torch multiplies CUDA tensors by the reciprocal of a Python divisor; the compressed rows must not notice."""
    amax = torch.rand(2_000_000) + 1
    assert not torch.equal((amax.cuda() / 6.0).cpu(), amax / 6.0)  # why quant.py divides by a tensor
    assert torch.equal(quant._divided(amax.cuda(), 6.0).cpu(), amax / 6.0)


@pytest.mark.parametrize("name", ["fp8_blocks", "fp8_rows", "mxfp4", "nvfp4", "affine4_g32", "affine3_g64"])
def test_weights_decode_to_the_same_bits(name) -> None:
    weight = stored(name, torch.randn(96, 256))
    moved = weight.to("cuda")
    assert torch.equal(moved.dequantize().cpu(), weight.dequantize())
    index = torch.randint(96, (3, 7))
    assert torch.equal(moved.rows(index.cuda()).cpu(), weight.rows(index))


def test_choices_are_equal_with_ties() -> None:
    scores = torch.randn(2, 30, 5000).mul(8).round().bfloat16()
    scores[0, :, 4000:] = float("-inf")
    scores[1, 3, 100] = float("nan")
    positions = torch.arange(4970, 5000).expand(2, -1)
    for count in (1, 512, 5000):
        assert torch.equal(select_columns(scores.cuda(), count).cpu(), select_columns(scores, count))
    arguments = (1, 8, 100)
    assert torch.equal(candidate_blocks(scores.cuda(), positions.cuda(), *arguments).cpu(),
                       candidate_blocks(scores, positions, *arguments))


# --- experts ---------------------------------------------------------------------------------------------------------


def stored(name: str, values: Tensor) -> quant.PackedWeight:
    bits, _, group = name.removeprefix("affine").partition("_g")
    encode = (lambda given: quant.encode_affine(given, int(bits), int(group))) if name.startswith("affine") else {
        "fp8_blocks": quant.encode_fp8_blocks, "fp8_rows": quant.encode_fp8_rows, "mxfp4": quant.encode_mxfp4,
        "nvfp4": quant.encode_nvfp4}[name]
    return quant.PackedWeight(quant.FORMATS[name], encode(values), tuple(values.shape))


def make_moe(name: str, width: int = 512, inner: int = 256, experts: int = 24) -> MoE:
    config = TextConfig(hidden_size=width, moe_intermediate_size=inner, n_routed_experts=experts, num_experts_per_tok=6)
    moe = MoE(config, layer_plan(config)[0]).cuda()
    for parameter in moe.parameters():
        parameter.copy_(torch.randn(parameter.shape, device="cuda") / parameter.shape[-1] ** 0.5)
    for linear in [module for module in moe.experts.modules() if isinstance(module, Linear) and name != "bf16"]:
        values = linear.weight.detach()
        del linear._parameters["weight"]
        linear.weight = stored(name, values.cpu()).to("cuda")
    return moe


def call_of(tokens: int, numerics: str = "native") -> Context:
    return Context(Numerics.of(numerics), torch.arange(tokens, device="cuda")[None], (0,), (tokens,))


@pytest.mark.parametrize("tokens", [1, 3, 5, 200])
@pytest.mark.parametrize("name", ["bf16", "mxfp4", "nvfp4", "fp8_blocks", "affine4_g32"])
def test_grouped_experts_equal_the_loop(name, tokens) -> None:
    moe, x = make_moe(name), torch.randn(1, tokens, 512, device="cuda").bfloat16()
    loop = moe(x, call_of(tokens))
    stack_experts(moe)
    assert moe.experts.usable_stacks(x) is not None
    grouped = moe(x, call_of(tokens))
    assert relative_l2(grouped, loop) < 5e-3
    assert torch.equal(grouped, moe(x, call_of(tokens)))


def test_grouped_experts_at_the_released_widths() -> None:
    """16 experts of the released size, one of them without a token."""
    moe, x = make_moe("bf16", 5120, 2304, 16), torch.randn(1, 70, 5120, device="cuda").bfloat16()
    moe.gate.bias[3] = -1e9
    loop = moe(x, call_of(70))
    stack_experts(moe)
    assert relative_l2(moe(x, call_of(70)), loop) < 5e-3


# --- the host does not wait ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_stop_in_layers(monkeypatch):
    """While active, an operation inside a layer for which the host waits raises RuntimeError."""
    def strict(function):
        def run(*arguments, **named):
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments, **named)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return run

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "sublayers", strict(Layer.sublayers))
        patch.setattr(inference.engram.Engram, "forward", strict(inference.engram.Engram.forward))
        yield


def test_stops_are_noticed(on_gpu, monkeypatch) -> None:
    """The check itself: a layer that asks the device for a number is refused."""
    model = on_gpu["resident"]
    norm = model.layers[0].attn_norm.forward
    monkeypatch.setattr(model.layers[0].attn_norm, "forward", lambda x: norm(x) * float(x.sum() == x.sum()))
    with pytest.raises(RuntimeError, match="synchroniz"), no_stop_in_layers(monkeypatch):
        model(IDS.cuda(), model.new_cache())


@pytest.mark.parametrize("weights", ["resident", "packed"])
def test_no_host_stop_inside_a_layer(on_gpu, monkeypatch, weights) -> None:
    """Prompt, steps, ragged steps of a batch, a rejected tail, a draft; constants were copied by the calls before."""
    model, ids = on_gpu[weights], torch.cat((IDS, IDS + 1)).cuda()
    decoded(model, IDS, 20)
    cache = model.new_cache(2)
    model.draft(ids[:, 0], cache)
    with no_stop_in_layers(monkeypatch):
        model(ids[:, :20], cache)
        model(ids[:, 20:21], cache)
        model(ids[:, 21:22], cache)
        out = model(ids[:, 22:24], cache, commit=False)
        cache.commit(out.pending, (1, 2))
        model(ids[:, 24:26], cache, lengths=(2, 1))
        model.draft(ids[:, 26], cache)


def test_stops_per_call(on_gpu) -> None:
    """Outside the layers: what a whole decode call asks of the device. Few, and no more with more layers."""
    model, cache = on_gpu["resident"], on_gpu["resident"].new_cache()
    model(IDS[:, :20].cuda(), cache)
    model(IDS[:, 20:21].cuda(), cache)
    ids = IDS[:, 21:22].cuda()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(ids, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    count = sum("synchroniz" in str(warning.message) for warning in seen)
    print(f"host stops per decode call: {count}")
    assert count <= 12


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "only", "count"), [("resident", None, 7), ("packed", "native", 2)])
def test_verify(nano_dir, traces_dir, weights, only, count) -> None:
    """The golden traces. Those without fake quantization leave nothing to a rounding decision."""
    verdicts = verify(nano_dir, traces_dir, only, device="cuda", weights=weights)
    for verdict in verdicts:
        print(verdict.line(), *verdict.notes, sep="\n    ")
    assert len(verdicts) == count and all(verdict.code == 0 for verdict in verdicts)
    assert all(verdict.error < FLOAT32_BOUND for verdict in verdicts if "no_fake_quant" in verdict.trace)


def test_trace(nano_dir, traces_dir, tmp_path) -> None:
    """The same points, shapes and choices as on the CPU; floats to the order of sums."""
    for device in ("cpu", "cuda"):
        assert trace(["--ckpt", str(nano_dir), "--input-file", str(traces_dir / "text_prefill.float32.safetensors"),
                      "--out", str(tmp_path / device), "--level", "all", "--numerics", "float32", "--no-fake-quant",
                      "--draft", "--chunks", "23,1*", "--device", device]) == 0
    here, there = (open_trace(tmp_path / device) for device in ("cpu", "cuda"))
    assert here.manifest["run"]["device"] == "cpu" and there.manifest["run"]["device"].startswith("cuda")
    assert list(here.entries) == list(there.entries)
    for name, entry in here.entries.items():
        if ".cache." in name or name.startswith(("cache.", "weights.")) or ".margin" in name:
            continue  # digests differ with the last bit
        wanted, got = here.read(entry), there.read(there.entries[name])
        if wanted.dtype.kind == "f":
            assert relative_l2(torch.from_numpy(got), torch.from_numpy(wanted)) < FLOAT32_BOUND, name
        else:
            assert np.array_equal(got, wanted), name


def test_generate(capsys) -> None:
    """Greedy float32 text, drafts included, and an image prompt."""
    def texts(*arguments: str) -> list[list[int]]:
        assert generate([*arguments, "--temperature", "0", "--numerics", "float32", "--json", "--max-new-tokens", "6"]) == 0
        return [json.loads(line)["completion_ids"] for line in capsys.readouterr().out.splitlines()]

    for name in ("example.txt", "image.json"):
        arguments = ("--input-file", name, "--batch-size", "2")
        assert texts(*arguments, "--device", "cuda") == texts(*arguments)
    assert generate(["--prompt", "hello", "--device", "cuda", "--max-new-tokens", "3", "--weights", "packed", "--seed", "1"]) == 0
    assert "peak memory" in capsys.readouterr().out
