"""The three modes of arithmetic: what each one switches, and that the weights are the same numbers in all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import inference
from inference.layers import dense_weight
from inference.numerics import MODES, Numerics


def test_modes() -> None:
    assert set(MODES) == {"native", "dequantized", "float32"}
    assert Numerics.of("native") == Numerics("native", torch.bfloat16, True, True)
    assert Numerics.of("dequantized") == Numerics("dequantized", torch.bfloat16, False, True)
    assert Numerics.of("float32", fake_quant=False) == Numerics("float32", torch.float32, False, False)


def test_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'bf16' is not one of native, dequantized, float32"):
        Numerics.of("bf16")


def test_a_mode_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Numerics.of("native").fake_quant = False


@pytest.fixture(scope="module")
def points(nano_dir) -> dict[str, dict[str, torch.Tensor]]:
    """Recorded points of one short prompt by mode; every value that a model hands on is there."""
    ids = torch.arange(20, 31)[None]
    seen = {}
    with torch.no_grad():
        for name, fake_quant in (("native", True), ("dequantized", True), ("float32", True), ("float32", False)):
            model = inference.load(nano_dir, numerics=name, fake_quant=fake_quant)
            recorded = seen[name if fake_quant else f"{name}, no fake quant"] = {}
            recorded["logits"] = model(ids, model.new_cache(), observe=recorded.__setitem__).logits
    return seen


def test_activation_dtype(points) -> None:
    """Streams, rows and module outputs in the activation dtype; mixes, router and logits in float32 in every mode."""
    for name, dtype in (("native", torch.bfloat16), ("dequantized", torch.bfloat16), ("float32", torch.float32)):
        for point in ("embed", "layers.1.engram.out", "layers.3.mid", "layers.3.attn.q", "layers.3.attn.kv_quant",
                      "layers.2.attn.compressor.kv", "layers.2.attn.indexer.scores", "layers.3.ffn.out", "norm"):
            assert points[name][point].dtype == dtype, point
        for point in ("layers.3.hc_attn.comb", "layers.3.ffn.gate_scores", "layers.3.ffn.expert_weights",
                      "layers.1.engram.gate", "head.pre", "logits"):
            assert points[name][point].dtype == torch.float32, point


def test_each_switch_is_live(points) -> None:
    """Input quantization separates native from dequantized, fake quantization the two float32 runs."""
    assert torch.equal(points["native"]["embed"], points["dequantized"]["embed"])
    assert not torch.equal(points["native"]["layers.0.attn.q_latent"], points["dequantized"]["layers.0.attn.q_latent"])
    on, off = points["float32"], points["float32, no fake quant"]
    assert torch.equal(on["layers.0.attn.kv"], off["layers.0.attn.kv"])
    assert torch.equal(off["layers.0.attn.kv"], off["layers.0.attn.kv_quant"])
    for point in ("layers.0.attn.kv_quant", "layers.2.attn.compressor.kv", "layers.2.attn.indexer.k",
                  "layers.2.attn.indexer.q"):
        assert not torch.equal(on[point], off[point]), point


def test_weights_are_the_same_numbers_in_all_modes(nano_dir) -> None:
    """Dequantized once to BF16, then widened: no mode sees a finer weight."""
    models = [inference.load(nano_dir, numerics=name) for name in MODES]
    for name in ("layers.0.attn.wq_a", "layers.0.ffn.experts.1.w2", "layers.1.engram.embed",
                 "layers.2.attn.compressor.wkv"):
        wide = [dense_weight(model.get_submodule(name).weight, torch.float32) for model in models]
        assert torch.equal(wide[0], wide[1]) and torch.equal(wide[0], wide[2])
        assert torch.equal(wide[0], wide[0].bfloat16().float())
