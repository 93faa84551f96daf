"""Single operations against recorded numbers (reference/golden/ops.safetensors).

The numbers were computed with an independent transcription of the published arithmetic: quantizers and
hyper-connections as the kernels round them, attention and rotation frequencies in float64.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inference.config import Config, layer_plan
from inference.hyper_connections import Mixes, split_mixes
from inference.kernel import sparse_attn
from inference.quant import fake_quant_fp4_e4m3, fake_quant_fp4_e8m0, fake_quant_fp8
from inference.rope import rope_frequencies
from reference.metrics import relative_l2


@pytest.fixture(scope="module")
def ops(golden_dir) -> dict[str, Tensor]:
    return load_file(golden_dir / "ops.safetensors")


@pytest.mark.parametrize("inputs", ["edges", "random", "ties"])
@pytest.mark.parametrize(("name", "fake_quant"), [
    ("fp8_b32", fake_quant_fp8), ("fp4_e8m0_b32", fake_quant_fp4_e8m0), ("fp4_e4m3_b16", fake_quant_fp4_e4m3)])
def test_quantizer_bits(ops, name: str, fake_quant, inputs: str) -> None:
    """Bit for bit, the sign of zero included."""
    got, wanted = fake_quant(ops[f"quant.{inputs}.input"]), ops[f"quant.{inputs}.{name}"]
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


def attention(ops, **changed: Tensor) -> Tensor:
    given = {part: ops[f"sparse_attn.{part}"] for part in ("q", "kv", "sink", "idx")} | changed
    return sparse_attn(given["q"], given["kv"], given["sink"], given["idx"].long(), given["q"].shape[-1] ** -0.5)


def test_sparse_attention(ops) -> None:
    """Float32 within 1e-6 of float64. The recorded lists hold -1, an all -1 row and a duplicate."""
    wanted, index = ops["sparse_attn.out_float64"], ops["sparse_attn.idx"]
    empty = (index < 0).all(-1)
    assert bool(empty.any()) and not attention(ops)[empty].any() and not wanted[empty].any()
    assert relative_l2(attention(ops), wanted) < 1e-6
    duplicate = [(b, s) for b in range(2) for s in range(5)
                 if len(index[b, s][index[b, s] >= 0].unique()) < int((index[b, s] >= 0).sum())]
    assert duplicate
    # Wrong variants: no sink, -1 read as row 0, every row once.
    once = index.clone()
    for b, s in duplicate:
        values, counts = index[b, s].unique(return_counts=True)
        for value in values[(counts > 1) & (values >= 0)]:
            once[b, s][(index[b, s] == value).nonzero()[1:]] = -1
    for changed in ({"sink": torch.full_like(ops["sparse_attn.sink"], float("-inf"))}, {"idx": index.clamp_min(0)},
                    {"idx": once}):
        assert relative_l2(attention(ops, **changed), wanted) > 1e-3


def test_hyper_connection_mixes(ops) -> None:
    """pre, post and comb after 20 Sinkhorn rounds; one unit in the last place is the measured difference."""
    def split(rounds: int = 20, eps: float = 1e-6) -> Mixes:
        return split_mixes(ops["hc.mixes"], ops["hc.base"], ops["hc.scale"], 4, rounds, eps)

    mixes = split()
    for got, name in ((mixes.pre_next, "pre"), (mixes.post, "post"), (mixes.comb, "comb")):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, ops[f"hc.{name}"], rtol=1e-6, atol=1e-7)
    for wrong in (split(rounds=1), split(eps=1e-20)):
        assert not torch.allclose(wrong.comb, ops["hc.comb"], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(mixes.comb.mT, ops["hc.comb"], rtol=1e-2)


def test_released_frequencies(ops, golden_dir) -> None:
    """Both tables of the released shape; float32 pow is good to two units in the last place."""
    config = Config.from_file(golden_dir.parents[1] / "inference" / "configs" / "deepseek-v4.1-flash.json").text_config
    plan = layer_plan(config)
    for layer in plan:
        wanted = ops["rope.freq.compressed" if layer.compress_ratio else "rope.freq.window_only"]
        torch.testing.assert_close(rope_frequencies(config, layer).double(), wanted, rtol=3e-7, atol=0)
    assert {layer.compress_ratio for layer in plan} == {0, 1, 2}
