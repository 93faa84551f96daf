"""Compressor (inference/compressor.py) against the scalar oracle: group borders, chunks, uneven rows, precision.

Every test runs a one-layer model whose layer 0 owns a compressor, and reads what the compressor got (`attn.in`) and
made (`compressor.latent`), so that the memory between calls takes part.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.config import Config, TextConfig
from inference.context import Context
from inference.model import Model
from inference.numerics import Numerics
from reference.metrics import relative_l2
from reference.oracles.compressor import latents

RATIOS = (1, 2, 4)


def fill(module: nn.Module) -> None:
    """Random values at sizes that keep activations near 1; norm weights scatter around 1."""
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif parameter.dim() == 2 and not name.startswith("embed"):
            values = 1.5 * values / parameter.shape[-1] ** 0.5
        parameter.copy_(values)


def one_layer(ratio: int, numerics: str = "float32") -> Model:
    text = TextConfig(num_hidden_layers=1, compress_ratios=(ratio,), kv_source_layer_ids=(0,),
                      index_source_layer_ids=(0,), candidate_source_layer_id=None, hidden_size=64,
                      moe_intermediate_size=32, head_dim=32, q_lora_rank=32)
    model = Model(Config(text_config=text), Numerics.of(numerics))
    fill(model)
    return model


def run(model: Model, cache, ids: Tensor, **options) -> tuple[Tensor, Tensor]:
    """One call: what the compressor got [B, S, D] and the latents it made [B, G, K]."""
    points: dict[str, Tensor] = {}
    model(ids, cache, observe=points.__setitem__, **options)
    return points["layers.0.attn.in"], points["layers.0.attn.compressor.latent"]


def wanted_latents(model: Model, x: Tensor, wrong_softmax_axis: bool = False) -> Tensor:
    """The oracle's rows for one sequence x [S, D]."""
    compressor = model.layers[0].attn.compressor
    wkv, norm = (part.weight.double().numpy() for part in (compressor.wkv, compressor.norm))
    wgate = None if compressor.wgate is None else compressor.wgate.weight.double().numpy()
    if wrong_softmax_axis:  # one weight per token for all channels
        wgate = wgate.mean(0, keepdims=True).repeat(len(wgate), 0)
    return torch.from_numpy(latents(x.double().numpy(), wkv, wgate, norm, compressor.ratio, 1e-20))


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 768, shape)


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_length_around_the_first_groups(ratio: int) -> None:
    """Pitfall 8: lengths ratio - 1 .. 2 ratio + 1, in one call: floor(length / ratio) rows, each by the oracle."""
    model = one_layer(ratio)
    for length in range(max(1, ratio - 1), 2 * ratio + 2):
        x, made = run(model, model.new_cache(), tokens(1, length))
        assert made.shape[1] == length // ratio
        if made.shape[1]:
            assert relative_l2(made[0], wanted_latents(model, x[0])) < 1e-5


def test_softmax_runs_over_the_tokens_of_each_channel() -> None:
    model = one_layer(2)
    x, made = run(model, model.new_cache(), tokens(1, 8))
    assert relative_l2(made[0], wanted_latents(model, x[0], wrong_softmax_axis=True)) > 1e-2


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("chunks", [[1] * 11, [3, 1, 1, 4, 2], [2, 9], [7, 4], [10, 1]], ids=str)
def test_chunks_equal_one_call(ratio: int, chunks: list[int]) -> None:
    """Pitfalls 8 and 9: a group comes out of the call that brings its last token, and of no other; nothing is lost."""
    model, ids = one_layer(ratio), tokens(1, 11)
    x, whole = run(model, model.new_cache(), ids)
    cache, parts, known = model.new_cache(), [], 0
    for size in chunks:
        _, made = run(model, cache, ids[:, known:known + size])
        assert made.shape[1] == (known + size) // ratio - known // ratio
        parts.append(made)
        known += size
    assert relative_l2(torch.cat(parts, dim=1), whole) < 1e-6
    assert relative_l2(whole[0], wanted_latents(model, x[0])) < 1e-5


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kept", [(3, 1), (2, 4), (5, 3)])
def test_rows_at_different_positions(ratio: int, kept: tuple[int, int]) -> None:
    """Pitfalls 10 and 11: two sequences kept 5 tokens or fewer of a call; the next call finishes each one's own groups.

    What the rejected tokens would have pooled must not appear, and each row equals the sequence run alone.
    """
    model, first, second = one_layer(ratio), tokens(2, 5), tokens(2, 2 * ratio)
    cache = model.new_cache(2)
    out = model(first, cache, commit=False)
    cache.commit(out.pending, kept)
    _, made = run(model, cache, second)
    for row, count in enumerate(kept):
        alone = torch.cat((first[row, :count], second[row]))[None]
        x, _ = run(model, model.new_cache(), alone)
        wanted = wanted_latents(model, x[0])[count // ratio:]
        assert len(wanted) == 2
        assert relative_l2(made[row, :2], wanted) < 1e-5


def test_padding_of_a_short_row_stays_out() -> None:
    """Pitfall 10: NaN behind a row's tokens reaches no finished group of any row."""
    model, x = one_layer(2), torch.randn(2, 5, 64)
    x[1, 3:] = float("nan")
    context = Context(model.numerics, positions=torch.arange(5).expand(2, 5), starts=(0, 0), counts=(5, 3))
    groups = model.layers[0].attn.compressor(x, context, model.new_cache(2).tails[0])
    assert list(groups.counts) == [2, 1]
    for row, count in enumerate((5, 3)):
        assert relative_l2(groups.latent[row, :count // 2], wanted_latents(model, x[row, :count])) < 1e-5


def test_pooling_is_float32_in_native_numerics() -> None:
    """Ratio above 1: both projections and the pooling in float32, one cast, then the norm. BF16 projections differ."""
    model = one_layer(2, "native")
    compressor = model.layers[0].attn.compressor
    x, made = run(model, model.new_cache(), tokens(1, 16))
    assert x.dtype == made.dtype == torch.bfloat16

    def pooled(dtype: torch.dtype, cast: bool = True) -> Tensor:
        v, g = (F.linear(x.to(dtype), part.weight.to(dtype)).float().unflatten(1, (-1, 2))
                for part in (compressor.wkv, compressor.wgate))
        rows = (g.softmax(2) * v).sum(2)
        return compressor.norm(rows.bfloat16() if cast else rows).bfloat16()

    assert torch.equal(made, pooled(torch.float32))
    assert not torch.equal(made, pooled(torch.bfloat16))
    assert not torch.equal(made, pooled(torch.float32, cast=False))  # the cast comes before the norm


def test_ratio_one_is_a_plain_bf16_projection() -> None:
    model = one_layer(1, "native")
    compressor = model.layers[0].attn.compressor
    x, made = run(model, model.new_cache(), tokens(1, 9))
    assert compressor.wgate is None
    assert torch.equal(made, compressor.norm(F.linear(x, compressor.wkv.weight)))
    assert not torch.equal(made, compressor.norm(F.linear(x.float(), compressor.wkv.weight.float())).bfloat16())
