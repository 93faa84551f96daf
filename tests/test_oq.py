"""The oQ quantizer: published sizes and bits at the released shapes, the fit, calibration, the golden files."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import inference
from inference.checkpoint import INDEX, Checkpoint
from inference.families import Family, NameTable
from inference.matching import Match, WeightPlan
from inference.quant import affine_codes, affine_minmax, decode_affine, encode_affine, unpack_bits
from inference.shards import StoredTensor
from inference.tokenizer import Tokenizer
from reference import oq, oq_calibration, shard_writer
from reference.convert import convert, main, plan_nvfp4
from reference.oq_allocation import Budget, Module, Weight, allocate, modules_of, preserved_format, preserved_reason
from reference.oq_calibration import ImportanceMatrix, collect_importance, measure_sensitivity, samples_of
from reference.oq_fit import _refit, _search, fit_affine, quantize, weighted_error
from reference.source import Source

GOLDEN = Path(__file__).parent.parent / "reference" / "golden"

# --- the released shapes ---------------------------------------------------------------------------------------

# Layers whose wo_b has 8 bits in the published oQ3e file: the top quarter of the published sensitivities, of which the
# extremes are public too: 0.0066 in layer 30, 0.0732 in layer 39.
TOP_QUARTER = (6, 7, 12, 14, 15, 16, 17, 18, 26, 39)
SOURCES, INDEXERS = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36)


def released_weights() -> list[Weight]:
    """Every weight of the published checkpoint: names, logical shapes, stored formats."""
    width, inner, vocabulary, found = 5120, 2304, 129280, []

    def add(prefix: str, source: str, **shapes: tuple[int, ...]) -> None:
        found.extend(Weight(prefix + name.replace("__", "."), shape, source) for name, shape in shapes.items())

    def layer(prefix: str, experts: int, number: int | None = None) -> None:
        add(prefix, "BF16", attn_norm__weight=(width,), ffn_norm__weight=(width,), attn__q_norm__weight=(1280,),
            attn__kv_norm__weight=(512,), ffn__gate__weight=(experts, width))
        add(prefix, "F32", attn__attn_sink=(64,), ffn__gate__bias=(experts,), ffn__gate__bias_vl=(experts,))
        add(prefix + "attn.", "fp8_blocks", wq_a__weight=(1280, width), wq_b__weight=(32768, 1280),
            wkv__weight=(512, width), wo_a__weight=(8192, 4096), wo_b__weight=(width, 8192))
        if number in SOURCES:
            add(prefix + "attn.", "BF16", compressor__wkv__weight=(512, width), compressor__norm__weight=(512,),
                indexer__wk__weight=(128, 512), indexer__k_norm__weight=(128,))
            if number != 20:  # ratio 1 pools nothing
                add(prefix + "attn.", "BF16", compressor__wgate__weight=(512, width))
        if number in INDEXERS:
            add(prefix + "attn.indexer.", "fp8_blocks", wq_b__weight=(4096, 1280))
            add(prefix + "attn.indexer.", "BF16", weights_proj__weight=(32, width))
        for expert in ["shared_experts", *(f"experts.{e}" for e in range(experts))]:
            add(f"{prefix}ffn.{expert}.", "fp8_blocks" if expert == "shared_experts" else "mxfp4",
                w1__weight=(inner, width), w2__weight=(width, inner), w3__weight=(inner, width))
        for kind in ("attn", "ffn"):
            add(f"{prefix}hc_{kind}_", "F32", fn=(24, 20480), base=(24,), scale=(3,))

    add("", "BF16", embed__weight=(vocabulary, width), head__weight=(vocabulary, width), norm__weight=(width,))
    for number in range(40):
        layer(f"layers.{number}.", 384, number)
        if number in (1, 14):
            prefix = f"layers.{number}.engram."
            add(prefix, "fp8_rows", embed__weight=({1: 384006168, 14: 384016682}[number], 256))
            add(prefix, "fp8_blocks", wkv__weight=(25600, 6144))
            add(prefix, "BF16", q_weight=(4, width), k_weight=(4, width))
    for stage in range(3):
        layer(f"mtp.{stage}.", 128)
    add("mtp.0.", "fp8_blocks", main_proj__weight=(width, 15360))
    add("mtp.", "BF16", **{"0__main_norm__weight": (width,), "2__norm__weight": (width,)})
    add("mtp.2.", "BF16", markov_head__embed__weight=(vocabulary, 256), markov_head__head__weight=(vocabulary, 256),
        confidence_head__proj__weight=(1, 5376))
    add("vision.", "BF16", patch_embed__proj__weight=(1024, 588), patch_embed__proj__bias=(1024,), norm__weight=(1024,))
    for block in range(32):
        add(f"vision.blocks.{block}.", "BF16", norm1__weight=(1024,), norm2__weight=(1024,),
            attn__wqkv__weight=(3072, 1024), attn__wqkv__bias=(3072,), attn__wo__weight=(1024, 1024),
            attn__wo__bias=(1024,), mlp__w1__weight=(5632, 1024), mlp__w2__weight=(1024, 2816))
    add("", "BF16", aligner__w1__weight=(width, 9216), aligner__w1__bias=(width,), aligner__w2__weight=(width, width),
        aligner__w2__bias=(width,), image_start=(width,), image_end=(width,), image_newline=(width,))
    return found


def released_source(weights: list[Weight]) -> Source:
    """A `Source` with these headers and no files: enough to plan with."""
    plans, tensors = {}, {}

    def stored(name: str, tag: str, shape: tuple[int, ...], shard: str) -> StoredTensor:
        size = math.prod(shape) * {"BF16": 2, "F32": 4}.get(tag, 1)
        tensors[name] = StoredTensor(name, tag, shape, Path(shard), 0, size)
        return tensors[name]

    for weight in weights:
        rows, columns = weight.shape if len(weight.shape) == 2 else (1, weight.shape[0])
        scale = {"fp8_blocks": (-(-rows // 32), -(-columns // 32)), "fp8_rows": (rows, columns // 32),
                 "mxfp4": (rows, columns // 32)}.get(weight.source)
        tag = {"mxfp4": "I8", "fp8_rows": "F8_E4M3", "fp8_blocks": "F8_E4M3"}.get(weight.source, weight.source)
        shape = (rows, columns // 2) if tag == "I8" else weight.shape
        shard = weight.name.split(".")[1 if weight.name[0] in "lm" else 0]
        parts = [stored(weight.name, tag, shape, shard)]
        if scale:
            parts.append(stored(weight.name.replace(".weight", ".scale"), "F8_E8M0", scale, shard))
        plans[weight.name] = WeightPlan(weight.name, weight.source if scale else None, tuple(parts), weight.shape)
    family = Family("native", "native", NameTable(), (), (), ())
    rounded = frozenset(weight.name for weight in weights if weight.source in ("fp8_blocks", "mxfp4"))
    config = {"text_config": {"num_hidden_layers": 40}, "quantization_config": {}}
    return Source(Checkpoint(Path("released"), tensors), config, Match(family, plans, {}, []), rounded)


def published_scores(seed: int) -> dict[int, float]:
    """Layer scores with everything that is public about the real ones; the rest is drawn."""
    draw = random.Random(seed)
    # The 4-bit and 8-bit tensors show that layer 39 alone has half of the maximum and that the top quarter has a fifth.
    scores = {layer: draw.uniform(0.016, 0.036) if layer in TOP_QUARTER else draw.uniform(0.007, 0.0155)
              for layer in range(40)}
    return scores | {30: 0.0066, 39: 0.0732}


@pytest.fixture(scope="module")
def released() -> tuple[list[Weight], list[Module]]:
    weights = released_weights()
    return weights, modules_of(weights)


def published_bits(module: Module) -> int:
    """Bits of an eligible module in the published oQ3e-mtp file."""
    if module.is_routed:
        return 3
    if ".shared_experts." in module.path:
        return 8
    if module.path.endswith(".wo_b"):
        return 8 if module.layer in TOP_QUARTER else 6
    return 8 if module.layer == 39 else 4


@pytest.mark.parametrize("seed", range(5))
def test_published_allocation(seed: int, released: tuple) -> None:
    _, modules = released
    found = allocate(modules, published_scores(seed))
    eligible = [m for m in modules if preserved_reason(m) is None and not m.is_engram_table]
    assert found.bits == {m.path: published_bits(m) for m in eligible}
    assert (found.logical_parameters, found.fixed_bytes) == (566_591_466_194, 14_990_291_784)
    assert sum(m.parameters for m in eligible) == 548_781_686_784
    assert found.tensor_bytes == 256_989_901_640
    rates = (found.target_rate, found.cap_rate, found.effective_bpw)
    assert [round(rate, 5) for rate in rates] == [3.39506, 3.60155, 3.62857]


def test_published_parameters_by_format(released: tuple) -> None:
    _, modules = released
    found, counts = allocate(modules, published_scores(0)), Counter()
    for module in modules:
        if module.path in found.bits:
            counts[f"affine {found.bits[module.path]}"] += module.parameters
        elif not module.is_engram_table:
            counts[preserved_format(module)] += module.parameters
    assert counts == {"affine 3": 543_581_798_400, "affine 4": 2_055_471_104, "affine 6": 1_258_291_200,
                      "affine 8": 1_886_126_080, "mxfp4": 13_589_544_960, "mxfp8": 778_567_680, "BF16": 3_399_359_488,
                      "F32": 42_307_282}


@pytest.mark.parametrize("format_name, tensors, size", [("oq3e-mtp", 2284, 355_296_826_440),
                                                        ("oq3e-ngram-mtp", 2282, 459_747_934_040)])
def test_published_layout(format_name: str, tensors: int, size: int, released: tuple) -> None:
    weights, modules = released
    source = released_source(weights)
    allocation = allocate(modules, published_scores(0))
    counts = {m.path: torch.ones(m.shape[:-2], dtype=torch.int64) for m in modules if m.path in allocation.bits}
    for layer, expert in ((24, 350), (18, 197), (21, 207)):  # the experts that the published calibration never reached
        for key in ("w1", "w2", "w3"):
            counts[f"language_model.layers.{layer}.ffn.experts.{key}"][expert] = 0
    sums = {path: torch.rand(*count.shape, 4) for path, count in counts.items()}
    calibration = oq.Calibration(published_scores(0), ImportanceMatrix(sums, counts), 1024, False)
    output = oq.plan(source, modules, allocation, calibration, oq.Options(format_name))
    assert (output.tensor_count, output.tensor_bytes, len(output.shards)) == (tensors, size, 65)
    assert max(sum(job.size for job in shard.jobs) for shard in output.shards[2:]) <= 5_000_000_000
    assert [shard.specs[0].name.split(".")[2] for shard in output.shards[:2]] == ["14", "1"]  # the tables

    section = json.loads(output.files["config.json"])["omlx_deepseek_v41"]
    assert len(section["quantized_modules"]) == 460
    specs = {spec.name: spec for shard in output.shards for job in shard.jobs for spec in job.specs}
    shapes = {name: (specs[name].dtype, list(specs[name].shape)) for name in specs}
    prefix = "language_model.layers.3."
    assert shapes[prefix + "ffn.experts.w1.weight"] == ("U32", [384, 2304, 480])
    assert shapes[prefix + "ffn.experts.w2.scales"] == ("BF16", [384, 5120, 36])
    assert shapes[prefix + "attn.wo_b.weight"] == ("U32", [5120, 1536])
    assert shapes[prefix + "attn.wo_a.weight"] == ("BF16", [8192, 4096])
    assert shapes["language_model.mtp.1.ffn.experts.w2.scales"] == ("U8", [128, 5120, 72])
    assert shapes["language_model.layers.1.engram.wkv.scales"] == ("U8", [25600, 192])
    assert ("vision.blocks.0.ffn.w1.weight" in shapes) and ("image_start" in shapes)
    inputs = Counter(spec.get("quantize_input") for spec in section["quantized_modules"].values())
    # 19: compressor, indexer wk and weights_proj are BF16 in the source
    assert inputs == {True: 427 - 19, False: 19, None: 33}

    report = section["quantization_report"]
    assert report["remaining_weights"]["tensor_bytes"] == 256_989_901_640
    assert report["preserved_source_draft_tensors"] == 2401
    assert report["engram"]["tensor_bytes"] == (98_306_924_800 if tensors == 2284 else 202_758_032_400)
    coverage = report["calibration"]["expert_coverage"]
    assert [coverage[key] for key in ("total_experts", "active_experts", "zero_count_experts")] == [46080, 46071, 9]
    assert report["calibration"]["unobserved_experts"]["language_model.layers.24.ffn.experts.w2"] == [350]
    assert len(report["imatrix_applied_modules"]) == 427
    reasons = report["calibration"]["preserved_modules"]
    assert reasons["language_model.layers.0.attn.wo_a"] == reasons["language_model.mtp.2.attn.wq_a"] == "uncalibrated"
    assert reasons["language_model.layers.1.engram.wkv"] == "outside_layer_sensitivity"
    assert reasons["language_model.norm"] == "ineligible_shape"
    assert reasons["language_model.layers.0.ffn.gate"] == reasons["aligner.w1"] == "precision_policy"


def test_published_nvfp4_sizes(released: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    source = released_source(released[0])
    sources = source.checkpoint.tensors
    assert (len(sources), sum(tensor.size for tensor in sources.values())) == (96_085, 510_286_023_000)
    monkeypatch.setattr(Source, "identity", lambda *_, **__: {})  # it would ask for the age of the shards
    gc.disable()  # hundreds of thousands of small objects and no garbage
    try:
        fp8, fp4 = plan_nvfp4(source, False, 1.0), plan_nvfp4(source, True, 1.0)
    finally:
        gc.enable()
    assert (fp8.tensor_count, fp8.tensor_bytes) == (188_245, 527_273_322_840)
    assert (fp4.tensor_count, fp4.tensor_bytes) == (188_245, 428_966_398_040)
    assert fp8.summary.startswith("16,986,931,200 blocks")


def test_no_step_passes_the_cap(released: tuple) -> None:
    _, modules = released
    for cap in (3.5, 3.605, 3.61, 3.62, 3.63):
        found = allocate(modules, published_scores(1), Budget(3, 3.4, cap))
        assert found.rate <= max(found.cap_rate, 3.5), cap
        assert set(found.bits.values()) <= {2, 3, 4, 6, 8}
    assert set(allocate(modules, published_scores(1), Budget(3, 3.4, 3.5)).bits.values()) == {3}
    # Below target after the greedy step: what rose already rises on, in the same order, and no further than needed.
    rich, plain = (allocate(modules, published_scores(1), budget) for budget in (Budget(3, 3.64, 4.0), Budget()))
    assert plain.rate < rich.target_rate <= rich.rate < rich.target_rate + 1e-3
    risen = [path for path in rich.bits if rich.bits[path] > plain.bits[path]]
    assert {rich.bits[path] for path in risen} == {8} and not any(".experts." in path for path in risen)
    fully = allocate(modules, published_scores(1), Budget(3, 3.9, 4.0))
    assert {bits for path, bits in fully.bits.items() if ".ffn.experts." not in path} == {8}


def test_what_planning_refuses() -> None:
    experts = [Weight(f"layers.0.ffn.experts.{e}.w1.weight", (64, 64), "mxfp4") for e in (0, 1, 3)]
    with pytest.raises(ValueError, match="3 experts, 3 the last"):
        modules_of(experts)
    with pytest.raises(ValueError, match="no sensitivity for layers"):
        allocate(modules_of([Weight("layers.4.attn.wkv.weight", (64, 64), "fp8_blocks")]), {0: 1.0})
    with pytest.raises(ValueError, match="target <= cap"):
        Budget(3, 3.8, 3.7)


# --- the fit ---------------------------------------------------------------------------------------------------


def error_of(values: torch.Tensor, importance: torch.Tensor, bits: int, stored: tuple[torch.Tensor, ...]) -> float:
    words, scales, biases = stored
    codes = unpack_bits(words, bits).double().unflatten(-1, (scales.shape[-1], -1))
    decoded = (codes * scales.double().unsqueeze(-1) + biases.double().unsqueeze(-1)).flatten(-2)
    return float((importance.double() * (values.double() - decoded).square()).sum())


# Weighted error relative to min/max for t-distributed weights and log-normal importance: search, then 1, 2, 5 refits.
MEASURED = {2: (0.584, 0.494, 0.479, 0.471), 3: (0.593, 0.517, 0.502, 0.495), 4: (0.716, 0.630, 0.611, 0.602)}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_fit_gains_what_was_measured_elsewhere(bits: int) -> None:
    # ours: 4 degrees of freedom and a spread of 1.5, which are not published
    values = torch.distributions.StudentT(4.0).sample((16, 16384)).to(torch.bfloat16)
    importance = torch.exp(1.5 * torch.randn(16384))
    base = error_of(values, importance, bits, encode_affine(values, bits, 64))
    found = [error_of(values, importance, bits, fit_affine(values, importance, bits, 64, refits)) / base
             for refits in (0, 1, 2, 5)]
    assert found == pytest.approx(MEASURED[bits], rel=0.08)
    assert found[0] > found[1] + 0.04 and found[1] > found[2] + 0.01 > found[3] + 0.01


def naive_search(group: list[float], importance: list[float], bits: int) -> float:
    """Smallest weighted error of the fourteen candidates, one weight at a time, in float64."""
    low, high, best = min(group), max(group), math.inf
    step = max((high - low) / (2**bits - 1), 1e-7)
    for edge, signed in ((low, step), (high, -step)):
        levels = round(edge / signed)
        base, bias = (edge / levels, edge) if levels else (signed, 0.0)
        for factor in (0.5, 0.625, 0.75, 0.875, 1, 1.125, 1.25):
            scale = base * factor
            error = 0.0
            for value, weight in zip(group, importance):
                code = min(max(round((value - bias) / scale), 0), 2**bits - 1)
                error += max(weight, 1e-8) * (value - scale * code - bias) ** 2
            best = min(best, error)
    return best


def test_the_search_finds_the_best_candidate() -> None:
    values = torch.randn(3, 128).to(torch.bfloat16)
    importance = torch.rand(128) ** 4
    importance[::5] = 0
    grouped, weights = values.float().unflatten(-1, (2, 64)), importance.clamp_min(1e-8).view(2, 64)
    for bits in (2, 3, 6):
        found = weighted_error(grouped, weights, *_search(grouped, weights, bits), bits)
        for row in range(3):
            for group in range(2):
                wanted = naive_search(grouped[row, group].tolist(), importance.view(2, 64)[group].tolist(), bits)
                assert float(found[row, group]) == pytest.approx(wanted, rel=1e-4)


def test_one_refit_is_the_weighted_least_squares_solution() -> None:
    grouped, weights = torch.randn(4, 1, 64), torch.rand(1, 64) + 0.01
    scale, bias = torch.full((4, 1), 0.9), torch.full((4, 1), -3.0)
    codes = affine_codes(grouped, scale, bias, 3).double()
    new_scale, new_bias = _refit(grouped, weights, scale, bias, 3)
    for row in range(4):
        root = weights[0].double().sqrt().numpy()
        design = np.stack((codes[row, 0].numpy(), np.ones(64)), 1) * root[:, None]
        wanted = np.linalg.lstsq(design, grouped[row, 0].double().numpy() * root, rcond=None)[0]
        assert [float(new_scale[row, 0]), float(new_bias[row, 0])] == pytest.approx(wanted.tolist(), rel=1e-5)


def test_the_fit_never_loses_to_the_plain_rule() -> None:
    """Before rounding, group by group; a group of equal values, of zeros, and of one outlier among them."""
    values = torch.randn(64, 64)
    values[0], values[1], values[2] = 0.0, -0.25, 1e-3
    values[2, 5] = 40.0
    grouped, weights = values.unflatten(-1, (1, 64)), torch.exp(torch.randn(1, 64))
    for bits in (2, 3, 4, 6, 8):
        plain = weighted_error(grouped, weights, *affine_minmax(grouped, bits), bits)
        scale, bias = _search(grouped, weights, bits)
        searched = weighted_error(grouped, weights, scale, bias, bits)
        refitted = weighted_error(grouped, weights, *_refit(grouped, weights, scale, bias, bits), bits)
        assert bool((searched <= plain).all()) and bool((refitted <= searched).all())
        stored = fit_affine(values.to(torch.bfloat16), weights[0], bits, 64)
        assert bool(torch.isfinite(decode_affine(*stored, bits)).all())
        assert not bool(decode_affine(*stored, bits)[0].any())  # zeros stay zeros


def test_codes_belong_to_the_stored_scales() -> None:
    """After a refit. Without one they belong to the float32 scales, as in oMLX, which some of them show."""
    values, importance = torch.randn(64, 256).to(torch.bfloat16), torch.rand(256)
    grouped = values.float().unflatten(-1, (4, 64))
    for refits in (0, 2):
        words, scales, biases = fit_affine(values, importance, 8, 64, refits)
        nearest = affine_codes(grouped, scales.float(), biases.float(), 8).flatten(-2)
        assert torch.equal(unpack_bits(words, 8), nearest) == (refits > 0)


def test_chunks_of_rows_do_not_change_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    values, importance = torch.randn(10, 128).to(torch.bfloat16), torch.rand(128)
    whole = fit_affine(values, importance, 3, 64)
    monkeypatch.setattr("reference.oq_fit._CHUNK", 384)
    for one, other in zip(whole, fit_affine(values, importance, 3, 64)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    for one, other in zip(encode_affine(values, 3, 64), quantize(values, None, 3, 64)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("importance", [torch.ones(64), torch.full((128,), float("nan")), -torch.ones(128)])
def test_an_importance_that_cannot_be_used(importance: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="wanted 128 finite importances"):
        fit_affine(torch.randn(2, 128), importance, 3, 64)


# --- calibration -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pico() -> Path:
    return GOLDEN / "pico" / "checkpoint"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text: the source of this test."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(Path(__file__).read_text()[:4000])
    return path


@pytest.fixture(scope="module")
def model(pico: Path) -> inference.model.Model:
    return inference.load(pico, weights="stream", progress=False)


@pytest.fixture(scope="module")
def samples(pico: Path, text: Path) -> torch.Tensor:
    return samples_of(Tokenizer.load(pico).encode(text.read_text(), allow_special=False), 48, 4, 0)


def eligible_modules(folder: Path) -> list[Module]:
    modules = modules_of(Source.open(folder).weights())
    return [m for m in modules if preserved_reason(m) is None and not m.is_engram_table]


def test_sensitivity_is_the_relative_error_of_a_layer(pico: Path, model: inference.model.Model, samples: torch.Tensor,
                                                      ) -> None:
    modules = eligible_modules(pico)
    scores = measure_sensitivity(model, modules, samples, 4)
    assert scores == pytest.approx(measure_sensitivity(model, modules, samples, 1), rel=1e-3)
    assert sorted(scores) == [0, 1, 2, 3, 4] and all(0 < score < 1 for score in scores.values())

    assert not any("sublayers" in vars(layer) for layer in model.layers)  # the model is as it was

    # Again, by two whole forwards: all layers but one are the true ones. Layer 1 owns a compressor and an indexer.
    def outputs(network: inference.model.Model, layer: int) -> list[torch.Tensor]:
        points = {}
        with torch.no_grad():
            network(samples, network.new_cache(len(samples)), observe=lambda n, v: points.setdefault(n, v.double()))
        return [points[f"layers.{layer}.out"], points[f"layers.{layer}.hc_ffn.pre_next"]]

    for layer in (0, 1, 3):
        other = inference.load(pico)
        for name, parameter in other.named_parameters():
            if name in {native for m in modules if m.layer == layer for native in m.names}:
                rounded = decode_affine(*encode_affine(parameter.data, 3, 64), 3)
                parameter.data = rounded.to(parameter.dtype)
        true, found = outputs(model, layer), outputs(other, layer)
        difference = sum(float((one - two).square().sum()) for one, two in zip(true, found))
        assert scores[layer] == pytest.approx(difference / sum(float(one.square().sum()) for one in true), rel=1e-6)


def test_importance_is_the_mean_square_of_the_inputs(pico: Path, model: inference.model.Model, samples: torch.Tensor,
                                                     ) -> None:
    matrix, used = collect_importance(model, eligible_modules(pico), samples, 2, step=3, cap=4)
    points = {}
    with torch.no_grad():
        model(samples, model.new_cache(len(samples)), observe=lambda n, v: points.setdefault(n, v))
    assert used == (3 if matrix.is_sufficient() else 4)
    points = {name: value[:used] for name, value in points.items()}
    prefix = "language_model.layers.2."
    wanted = points["layers.2.attn.in"].float().square().mean((0, 1))
    assert torch.allclose(matrix.importance(prefix + "attn.wq_a"), wanted, rtol=1e-4)
    assert int(matrix.counts[prefix + "attn.wq_a"]) == used * samples.shape[1]
    chosen = points["layers.2.ffn.expert_ids"]
    rows = points["layers.2.ffn.in"].float()
    for expert in range(4):
        hit = (chosen == expert).any(-1)
        assert int(matrix.counts[prefix + "ffn.experts.w3"][expert]) == int(hit.sum())
        if hit.any():
            wanted = rows[hit].square().mean(0)
            assert torch.allclose(matrix.importance(prefix + "ffn.experts.w3")[expert], wanted, rtol=1e-4)
    assert len(matrix.in_sum2) == len(eligible_modules(pico))


def test_sampling_goes_on_until_experts_are_covered(pico: Path, model: inference.model.Model, samples: torch.Tensor,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    modules = eligible_modules(pico)
    one, used = collect_importance(model, modules, samples, 4, step=1, cap=1)
    assert used == 1
    monkeypatch.setattr(oq_calibration, "REQUIRED_COUNT", 10**6)
    both, used = collect_importance(model, modules, samples, 4, step=1, cap=2)
    assert used == 2 and int(both.expert_counts().sum()) == 2 * int(one.expert_counts().sum())


def test_experts_that_were_never_seen(tmp_path: Path) -> None:
    stack = Module("language_model.layers.0.ffn.experts.w1", "w1", (3, 8, 4), "mxfp4", ("a", "b", "c"))
    plain = Module("language_model.layers.0.attn.wkv", "wkv", (8, 4), "fp8_blocks", ("d",))
    sums = torch.tensor([[2.0, 4, 6, 8], [0, 0, 0, 0], [1, 1, 1, 1]])
    matrix = ImportanceMatrix({stack.path: sums, plain.path: torch.ones(4)},
                              {stack.path: torch.tensor([2, 0, 1]), plain.path: torch.tensor(5)})
    assert matrix.importance(stack.path).tolist() == [[1, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert matrix.unobserved() == {stack.path: [1]} and not matrix.is_sufficient()
    assert {key: matrix.coverage()[key] for key in ("total_experts", "active_experts", "min_count", "max_count")} == {
        "total_experts": 3, "active_experts": 2, "min_count": 0.0, "max_count": 2.0}
    path = tmp_path / "imatrix.npz"
    path.write_bytes(matrix.to_npz())
    again = ImportanceMatrix.from_npz(path, [stack, plain])
    assert torch.equal(again.importance(stack.path), matrix.importance(stack.path))
    with pytest.raises(ValueError, match="the sums and counts of .*wkv have shapes"):
        ImportanceMatrix.from_npz(path, [dataclasses.replace(plain, shape=(8, 16))])
    with pytest.raises(ValueError, match="Name one that was made for this model"):
        ImportanceMatrix.from_npz(path, [dataclasses.replace(plain, path="other")])


# --- whole checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", ["oq3e-mtp", "oq3e-ngram-mtp"])
def test_given_bits_and_the_plain_rule_reproduce_the_golden_checkpoint(format_name: str, pico: Path, tmp_path: Path,
                                                                       ) -> None:
    """Every tensor byte for byte, codes, scales and biases that MLX computed among them."""
    golden = GOLDEN / f"pico-{format_name}"
    output = convert(pico, tmp_path / "out", format_name, bits_from=golden, fit="minmax")
    made, wanted = Checkpoint.open(tmp_path / "out").tensors, Checkpoint.open(golden).tensors
    assert set(made) == set(wanted)
    for name, stored in wanted.items():
        assert (made[name].dtype, made[name].shape) == (stored.dtype, stored.shape), name
        data = (tensor.read().reshape(-1).view(torch.uint8) for tensor in (made[name], stored))
        assert torch.equal(*data), name
    config, golden_config = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", golden))
    section, golden_section = (values.pop("omlx_deepseek_v41") for values in (config, golden_config))
    assert config == golden_config
    assert section["quantized_modules"] == golden_section["quantized_modules"]
    report = json.loads((tmp_path / "out" / oq.REPORT).read_text())
    assert report == section["quantization_report"]
    assert set(json.loads((tmp_path / "out" / INDEX).read_text())) == {"weight_map"}
    assert report["tensor_bytes"] == output.tensor_bytes == golden_section["quantization_report"]["tensor_bytes"]
    for path, entry in golden_section["engram_tables"].items():
        same = {key: value for key, value in section["engram_tables"][path].items() if not key.endswith("_file")}
        assert same == {key: value for key, value in entry.items() if not key.endswith("_file")}


def test_kept_tiles_keep_their_own_scales(pico: Path, tmp_path: Path) -> None:
    """mxfp8 and mxfp4 modules have the values of the source; golden tiles have equal scales, so here they differ."""
    source = Path(shutil.copytree(pico, tmp_path / "source"))
    names = ("mtp.0.attn.wq_b", "mtp.0.main_proj", "layers.1.engram.wkv", "mtp.0.ffn.experts.2.w1")
    for name in names:
        stored = Checkpoint.open(source).tensors[f"{name}.scale"]
        with stored.shard.open("r+b") as file:
            file.seek(stored.offset)
            file.write(bytes(115 + i % 11 for i in range(stored.size)))
    convert(source, tmp_path / "out", "oq3e-mtp", bits_from=GOLDEN / "pico-oq3e-mtp", fit="minmax")
    wanted, made = (inference.load(folder).state_dict() for folder in (source, tmp_path / "out"))
    for name in names:
        assert torch.equal(wanted[f"{name}.weight"], made[f"{name}.weight"]), name


REPORT_FIELDS = {"remaining_weights", "engram", "tensor_bytes", "preserved_source_draft_tensors", "oq_level",
                 "enhanced_requested", "target_bpw", "hard_cap_bpw", "budget_scope", "shard_count", "allocation",
                 "calibration", "imatrix_applied_modules", "storage_layout"}
CALIBRATION_FIELDS = {"tensor_bytes", "effective_bpw", "fixed_source_bytes", "preserved_modules", "unobserved_experts",
                      "unobserved_expert_policy", "uncalibrated_policy", "imatrix_cache_path", "imatrix_cache_reused",
                      "calibration_model", "expert_coverage", "sensitivity"}


def test_calibrated_conversion_stopped_and_continued(pico: Path, text: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oq_calibration, "SENSITIVITY_SAMPLES", 4)
    options = {"calibration_text": text, "samples": 4, "sample_length": 64, "target_bpw": 9.6, "hard_cap_bpw": 9.9}
    convert(pico, tmp_path / "whole", "oq3e-ngram-mtp", **options)
    report = json.loads((tmp_path / "whole" / oq.REPORT).read_text())
    assert set(report) == REPORT_FIELDS and set(report["calibration"]) == CALIBRATION_FIELDS
    assert report["enhanced_requested"] and report["allocation"] == "measured_layer_sensitivity_affine"
    assert report["remaining_weights"]["effective_bpw"] <= 9.9
    specs = json.loads((tmp_path / "whole" / "config.json").read_text())["omlx_deepseek_v41"]["quantized_modules"]
    assert {spec["bits"] for spec in specs.values() if spec["mode"] == "affine"} >= {3, 4, 8}
    assert not [path for path in (tmp_path / "whole").iterdir() if path.name.startswith(shard_writer.KEPT)]
    loaded = inference.load(tmp_path / "whole")
    assert loaded.load_report.family.startswith("oQ")

    class Killed(BaseException):
        pass

    def killed(*_) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "_write_shard", killed)
        with pytest.raises(Killed):
            convert(pico, tmp_path / "out", "oq3e-ngram-mtp", **options)
    with monkeypatch.context() as patch:  # what was measured is not measured again
        patch.setattr(oq, "measure_sensitivity", killed)
        patch.setattr(oq, "collect_importance", killed)
        convert(pico, tmp_path / "out", "oq3e-ngram-mtp", **options)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    with pytest.raises(ValueError, match="already holds"):
        convert(pico, tmp_path / "out", "oq3e-ngram-mtp", **options)


def test_importance_helps_on_the_text_it_was_taken_from(pico: Path, model: inference.model.Model, samples: torch.Tensor,
                                                        tmp_path: Path) -> None:
    """Output error of the first layer at equal bits: plain rule, search alone, search and refits."""
    matrix, _ = collect_importance(model, eligible_modules(pico), samples, 4)
    (tmp_path / "imatrix.npz").write_bytes(matrix.to_npz())
    bits = GOLDEN / "pico-oq3e-mtp"
    errors = []
    for name, options in (("minmax", {"fit": "minmax"}), ("search", {"refits": 0, "imatrix": tmp_path / "imatrix.npz"}),
                          ("refit", {"imatrix": tmp_path / "imatrix.npz"})):
        convert(pico, tmp_path / name, "oq3e-ngram-mtp", bits_from=bits, **options)
        found = []
        for folder in (pico, tmp_path / name):
            points = {}
            network = inference.load(folder, numerics="float32")
            with torch.no_grad():
                network(samples, network.new_cache(len(samples)), observe=lambda n, v: points.setdefault(n, v))
            found.append(points["layers.0.ffn.out"])
        errors.append(float((found[0] - found[1]).norm() / found[0].norm()))
    assert errors[0] > 1.05 * errors[1] > 1.05 * errors[2], errors


def test_an_importance_that_says_nothing_means_the_plain_rule(pico: Path, tmp_path: Path) -> None:
    modules = eligible_modules(pico)
    flat = ImportanceMatrix({m.path: torch.full((*m.shape[:-2], m.shape[-1]), 6.0) for m in modules},
                            {m.path: torch.full(m.shape[:-2], 3) for m in modules})
    (tmp_path / "flat.npz").write_bytes(flat.to_npz())
    bits = GOLDEN / "pico-oq3e-mtp"
    convert(pico, tmp_path / "out", "oq3e-mtp", bits_from=bits, imatrix=tmp_path / "flat.npz")
    wanted = Checkpoint.open(bits).tensors
    for name, stored in Checkpoint.open(tmp_path / "out").tensors.items():
        assert torch.equal(stored.read().view(torch.uint8), wanted[name].read().view(torch.uint8)), name
    report = json.loads((tmp_path / "out" / oq.REPORT).read_text())
    assert report["imatrix_applied_modules"] == [] and report["calibration"]["imatrix_cache_reused"]


def test_options_that_cannot_be_used(pico: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    golden = str(GOLDEN / "pico-oq3e-mtp")
    for arguments, words in (
            (["--calibration-text", str(tmp_path / "none")], "cannot be read"),
            (["--bits-from", golden], "--calibration-text"),
            (["--bits-from", str(pico), "--fit", "minmax"], "no quantized_modules"),
            (["--bits-from", golden, "--imatrix", str(text)], "Name one that was made for this model"),
            (["--fit", "minmax", "--imatrix", str(text)], "uses no importance matrix"),
            (["--calibration-text", str(text), "--target-bpw", "5"], "target <= cap"),
            (["--calibration-text", str(text), "--samples", "0"], "--samples")):
        assert main([str(pico), str(tmp_path / "out"), "--format", "oq3e-mtp", *arguments]) == 3
        assert words in capsys.readouterr().err
    # A start that came to nothing does not bind the next one to its options.
    right = ["--bits-from", golden, "--fit", "minmax"]
    assert main([str(pico), str(tmp_path / "out"), "--format", "oq3e-mtp", *right]) == 0
