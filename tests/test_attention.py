"""Attention (inference/attention.py): window, compressed branch, query, grouped output, and where rounding happens.

One-layer models with random weights are compared with the float64 oracle of the whole model, in one call and in steps.
Without fake quantization float32 stays within 2e-5 of it.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from inference.attention import window_indices
from inference.config import Config, TextConfig
from inference.context import Context
from inference.model import Model
from inference.numerics import Numerics
from inference.quant import fake_quant_fp8
from inference.rope import rotate
from reference.metrics import relative_l2
from reference.oracles import attention as oracle
from reference.oracles.checkpoint import Checkpoint
from reference.oracles.model import oracle_forward
from reference.oracles.quantizers import FP4_GROUP16, FP4_GROUP32, FP8_GROUP32, fake_quantize

BOUND = 2e-5
FLOAT32, NATIVE = Numerics.of("float32", fake_quant=False), Numerics.of("native")


def fill(module: nn.Module) -> None:
    """Random values at sizes that keep activations near 1; norm weights scatter around 1."""
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif parameter.dim() == 2 and not name.startswith("embed"):
            values = 1.5 * values / parameter.shape[-1] ** 0.5
        parameter.copy_(values)


def one_layer(ratio: int, numerics: Numerics = FLOAT32, **text) -> Model:
    """Layer 0 alone: window only (ratio 0), or with its own compressor and indexer."""
    sources = (0,) if ratio else ()
    fields = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "q_lora_rank": 32, "sliding_window": 4,
              "index_topk": 3}
    config = TextConfig(num_hidden_layers=1, compress_ratios=(ratio,), kv_source_layer_ids=sources,
                        index_source_layer_ids=sources, candidate_source_layer_id=None, **fields | text)
    model = Model(Config(text_config=config), numerics)
    fill(model)
    return model


def oracle_logits(model: Model, ids: Tensor, **text) -> Tensor:
    """The float64 oracle on the model's weights; `text` changes the configuration (wrong variants)."""
    config = model.config.to_dict()
    config["text_config"].update(text)
    weights = {name: parameter.double().numpy() for name, parameter in model.named_parameters()}
    points = oracle_forward(Checkpoint(config, weights, None), ids.numpy(), fake_quant=model.numerics.fake_quant)
    return torch.from_numpy(points["logits"])


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 768, shape)


def step_by_step(model: Model, ids: Tensor, split: int) -> Tensor:
    """Logits of one call of `split` tokens and of single-token calls after it."""
    cache = model.new_cache(len(ids))
    logits = [model(ids[:, :split], cache).logits]
    logits += [model(ids[:, p:p + 1], cache).logits for p in range(split, ids.shape[1])]
    return torch.cat(logits, dim=1)


def moved_rows(after: Tensor, before: Tensor) -> list[bool]:
    """Which rows differ by more than rounding: experts see other batches, so unmoved rows are not bit-equal."""
    return [relative_l2(a, b) > 1e-4 for a, b in zip(after[0], before[0])]


# --- window ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_window_only_layer(length: int) -> None:
    """Pitfall 20: lengths window - 1, window, window + 1, 2 window + 1, then three steps; one off either way fails."""
    model, ids = one_layer(0), tokens(2, length + 3)
    wanted = oracle_logits(model, ids)
    assert relative_l2(model(ids, model.new_cache(2)).logits, wanted) < BOUND
    assert relative_l2(step_by_step(model, ids, length), wanted) < BOUND
    if length > 1:
        for window in (3, 5):
            assert relative_l2(oracle_logits(model, ids, sliding_window=window), wanted) > 1e-3


def test_query_7_sees_4_to_7() -> None:
    """Pitfall 20: with window 4, tokens 4 .. 7 move the logits at 7, token 3 does not; nothing moves an earlier row."""
    model, ids = one_layer(0), tokens(1, 8)
    before = model(ids, model.new_cache()).logits
    for position in range(8):
        changed = ids.clone()
        changed[0, position] = (ids[0, position] + 1) % 768
        after = model(changed, model.new_cache()).logits
        assert moved_rows(after, before) == [position <= row < position + 4 for row in range(8)]


def test_window_indices() -> None:
    """Ring slots hold positions before the call, position mod window; rows of the call follow them; -1 at the end."""
    assert window_indices(torch.arange(6)[None], torch.tensor([0]), 4)[0].tolist() == [
        [4, -1, -1, -1], [4, 5, -1, -1], [4, 5, 6, -1], [4, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]]
    assert window_indices(torch.arange(6, 9)[None], torch.tensor([6]), 4)[0].tolist() == [
        [3, 0, 1, 4], [0, 1, 4, 5], [1, 4, 5, 6]]  # position 6 reads 3, 4, 5 from slots 3, 0, 1
    uneven = window_indices(torch.tensor([[2, 3], [9, 10]]), torch.tensor([2, 9]), 4)
    assert uneven.tolist() == [[[0, 1, 4, -1], [0, 1, 4, 5]], [[2, 3, 0, 4], [3, 0, 4, 5]]]


# --- compressed branch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_compressed_layer(ratio: int) -> None:
    """More groups than index_topk; one call, and steps from every border of the first groups (pitfalls 8, 12)."""
    model, ids = one_layer(ratio), tokens(1, 19)
    wanted = oracle_logits(model, ids)
    assert relative_l2(model(ids, model.new_cache()).logits, wanted) < BOUND
    for split in (1, 3, 4, 5, 8, 18):
        assert relative_l2(step_by_step(model, ids, split), wanted) < BOUND
    for wrong in ({"index_topk": 2}, {"compress_rope_theta": 10000.0}):
        assert relative_l2(oracle_logits(model, ids, **wrong), wanted) > 1e-3


def test_compressed_branch_reaches_beyond_the_window() -> None:
    """Pitfall 7: window 8, 20 tokens: token 2 moves the logits at 19; with the branch off (wrong variant) not."""
    on = one_layer(2, sliding_window=8, index_topk=16)
    off = one_layer(0, sliding_window=8, index_topk=16)
    off.load_state_dict(on.state_dict(), strict=False)
    ids = tokens(1, 20)
    changed = ids.clone()
    changed[0, 2] = (ids[0, 2] + 1) % 768
    for model, moves in ((on, True), (off, False)):
        moved = moved_rows(*(model(prompt, model.new_cache()).logits for prompt in (ids, changed)))
        assert moved == [False] * 2 + [True] * 8 + [moves] * 10


# --- query and core ----------------------------------------------------------------------------------------------


def test_no_norm_per_head() -> None:
    """Pitfall 29: doubling wq_b doubles the queries, and with them the logits; a norm per head would undo it."""
    model, points = one_layer(0), {}
    model(tokens(1, 6), model.new_cache(), observe=points.__setitem__)
    attn = model.layers[0].attn
    context = Context(FLOAT32, positions=torch.arange(6)[None], starts=(0,), counts=(6,))
    x, frequencies = points["layers.0.attn.in"], attn.frequencies(torch.device("cpu"))
    latent, q = attn.query(x, frequencies, context)
    assert torch.equal(q, points["layers.0.attn.q"])
    doubled = copy.deepcopy(attn)
    doubled.wq_b.weight.mul_(2)
    assert torch.equal(doubled.query(x, frequencies, context)[1], 2 * q)
    assert torch.equal(doubled.query(x, frequencies, context)[0], latent)  # the query latent does have its norm

    def normed(queries: Tensor) -> Tensor:  # wrong variant
        return queries * torch.rsqrt(queries.square().mean(-1, keepdim=True) + 1e-20)

    torch.testing.assert_close(normed(2 * q), normed(q))


@pytest.mark.parametrize("factor", [1.0, 1.277])
def test_softmax_scale_is_the_head_width_alone(factor: float) -> None:
    """Pitfall 3: several keys at different positions against the oracle; scaled queries (mscale, wrong) differ."""
    attn = one_layer(2).layers[0].attn
    frequencies, positions = attn.frequencies(torch.device("cpu")), torch.arange(40, 43)[None]
    kv, index = torch.randn(1, 9, 32), torch.tensor([[[0, 1, 2, -1], [1, 2, 3, 8], [0, 4, 6, 7]]])
    q = 2 * torch.randn(1, 3, 4, 32)
    context = Context(FLOAT32, positions=positions, starts=(40,), counts=(3,))
    got = attn.attend(factor * q, kv, index, frequencies, context)
    visible = [kv[0, row[row >= 0]].double().numpy() for row in index[0]]
    wanted = oracle.attend_back_rotated(q[0].double().numpy(), visible, attn.attn_sink.double().numpy(), range(40, 43),
                                        frequencies.numpy())
    assert (relative_l2(got[0], torch.from_numpy(wanted)) < 1e-6) == (factor == 1.0)


# --- output ------------------------------------------------------------------------------------------------------


def eight_groups(numerics: Numerics) -> tuple[Model, Context, Tensor]:
    """A layer of 16 heads in 8 groups, and head outputs [1, 5, 16, 32]."""
    model = one_layer(0, numerics, num_attention_heads=16, o_groups=8)
    context = Context(numerics, positions=torch.arange(5)[None], starts=(0,), counts=(5,))
    return model, context, torch.randn(1, 5, 16, 32).to(numerics.dtype)


def test_output_groups_are_eight_products() -> None:
    """Pitfall 24: consecutive heads, one low-rank product per group; interleaved heads (wrong variant) differ."""
    model, context, out = eight_groups(FLOAT32)
    attn = model.layers[0].attn
    wo_a, wo_b = attn.wo_a.weight.float(), attn.wo_b.weight.float()

    def looped(heads_of_group) -> Tensor:
        parts = [out[0][:, heads_of_group(g)].flatten(1) @ wo_a[32 * g:32 * (g + 1)].T for g in range(8)]
        return torch.cat(parts, dim=-1) @ wo_b.T

    got = attn.project(out, context)[0]
    assert relative_l2(got, looped(lambda g: [2 * g, 2 * g + 1])) < 1e-6
    assert relative_l2(got, looped(lambda g: [g, g + 8])) > 0.1
    arrays = (values.double().numpy() for values in (out[0], wo_a, wo_b))
    assert relative_l2(got, torch.from_numpy(oracle.output_projection(*arrays, 8))) < 1e-6


def test_two_halves_of_the_groups_sum_to_the_whole() -> None:
    """Pitfall 24: what two ranks of 4 groups would compute, added up."""
    model, context, out = eight_groups(FLOAT32)
    attn, total = model.layers[0].attn, 0
    for half in range(2):
        part = one_layer(0, num_attention_heads=8, o_groups=4).layers[0].attn
        part.wo_a.weight.copy_(attn.wo_a.weight[128 * half:128 * (half + 1)])
        part.wo_b.weight.copy_(attn.wo_b.weight[:, 128 * half:128 * (half + 1)])
        total = total + part.project(out[:, :, 8 * half:8 * (half + 1)], context)
    assert relative_l2(total, attn.project(out, context)) < 1e-6


def test_only_the_second_output_product_quantizes_its_input() -> None:
    """wo_a runs as a grouped BF16 product, so its input is left alone; wo_b gets FP8 per 32."""
    model, context, out = eight_groups(NATIVE)
    points: dict[str, Tensor] = {}
    context, attn = dataclasses.replace(context, observe=points.__setitem__), model.layers[0].attn
    result = attn.project(out, context)
    wo_a = attn.wo_a.weight.bfloat16().unflatten(0, (8, 32))

    def grouped(heads: Tensor) -> Tensor:
        return torch.einsum("bsgi,goi->bsgo", heads.unflatten(2, (8, 2)).flatten(-2), wo_a)

    assert torch.equal(points["layers.0.attn.o_groups"], grouped(out))
    assert not torch.equal(points["layers.0.attn.o_groups"], grouped(fake_quant_fp8(out)))
    rows, wo_b = points["layers.0.attn.o_groups"].flatten(-2), attn.wo_b.weight.bfloat16()
    assert torch.equal(result, torch.nn.functional.linear(fake_quant_fp8(rows), wo_b))
    assert not torch.equal(result, torch.nn.functional.linear(rows, wo_b))


# --- cache formats -----------------------------------------------------------------------------------------------


def test_cached_rows_are_quantized_over_all_channels(nano) -> None:
    """Window rows FP8 per 32, compressed rows FP4 per 16, index keys FP4 per 32; the rotated channels included."""
    points: dict[str, Tensor] = {}
    nano(torch.arange(100, 121)[None], nano.new_cache(), observe=points.__setitem__)

    def quantized(values: Tensor, quantizer) -> Tensor:
        return torch.from_numpy(fake_quantize(values.double().numpy(), quantizer)).float()

    for layer in nano.layers:
        name, turned = f"{layer.plan.name}.attn", nano.config.text_config.qk_rope_head_dim
        rows = points[f"{name}.kv"]
        assert torch.equal(points[f"{name}.kv_quant"], quantized(rows, FP8_GROUP32))
        # Wrong variant: the rotated channels left as they are.
        assert not torch.equal(points[f"{name}.kv_quant"][..., -turned:], rows[..., -turned:])
        if not layer.plan.owns_compressor:
            continue
        latent, frequencies = points[f"{name}.compressor.latent"], layer.attn.frequencies(torch.device("cpu"))
        positions = layer.plan.compress_ratio * torch.arange(latent.shape[1])[None]
        cached, indexer = points[f"{name}.compressor.kv"], layer.attn.indexer
        assert torch.equal(cached, quantized(rotate(latent, positions, frequencies), FP4_GROUP16))
        # The key comes from the latent before rotation and rounding; from the cached row (wrong variant) it differs.
        for origin, right in ((latent, True), (cached, False)):
            keys = rotate(indexer.k_norm(indexer.wk(origin, nano.numerics)), positions, frequencies)
            assert torch.equal(points[f"{name}.indexer.k"], quantized(keys, FP4_GROUP32)) == right


def test_selection_goes_with_its_source(nano) -> None:
    """Layers that own no indexer attend to what the source selected: as many rows, and the source's rows."""
    points: dict[str, Tensor] = {}
    nano(torch.arange(100, 121)[None], nano.new_cache(), observe=points.__setitem__)
    for layer in nano.layers:
        index = points[f"{layer.plan.name}.attn.all_index"][0]
        p = torch.arange(21)
        window = torch.minimum(p + 1, torch.tensor(nano.config.text_config.sliding_window))
        chosen = 0
        if layer.plan.index_source is not None:
            selection = points[f"layers.{layer.plan.index_source}.attn.indexer.topk"][0]
            assert np.all(np.diff(selection.masked_fill(selection < 0, 10**6).numpy(), axis=-1) >= 0)
            chosen = (selection >= 0).sum(-1)
        assert torch.equal((index >= 0).sum(-1), window + chosen)
