"""Router and experts (inference/moe.py) against float64; what other ports got wrong is kept as wrong variants."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference import experts as experts_module
from inference import moe as moe_module
from inference import quant
from inference.config import TextConfig, layer_plan
from inference.context import Context
from inference.experts import grouped_experts
from inference.moe import Expert, Experts, Gate, MoE, stack_experts
from inference.numerics import Numerics
from reference.metrics import relative_l2
from reference.oracles import moe as oracle

FLOAT32, NATIVE = Numerics.of("float32"), Numerics.of("native")


def fill(module: nn.Module) -> None:
    """Random weights; experts are loud enough to reach the clamps."""
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape)
        if parameter.dim() == 2:
            values = values / parameter.shape[-1] ** 0.5 * (6 if name.endswith(("w1.weight", "w3.weight")) else 1)
        else:
            values = 0.1 * values
        parameter.copy_(values)


def make_moe(**text) -> MoE:
    config = TextConfig(hidden_size=64, moe_intermediate_size=32, **text)
    moe = MoE(config, layer_plan(config)[0])
    fill(moe)
    return moe


def context(numerics: Numerics, tokens: int, **fields) -> Context:
    return Context(numerics, positions=torch.arange(tokens)[None], starts=(0,), counts=(tokens,), **fields)


def gate_for(logits: list[float], bias: list[float] | None = None, bias_vl: list[float] | None = None,
             active: int = 2) -> tuple[Gate, Tensor]:
    """A gate and one token whose router logits are exactly these numbers."""
    config = TextConfig(hidden_size=32, n_routed_experts=len(logits), num_experts_per_tok=active)
    gate = Gate(config, layer_plan(config)[0])
    gate.weight.zero_()
    gate.weight[:, 0] = torch.tensor(logits)
    for parameter, values in ((gate.bias, bias), (gate.bias_vl, bias_vl)):
        parameter.copy_(torch.zeros(len(logits)) if values is None else torch.tensor(values))
    return gate, torch.eye(32)[:1]


# --- router ------------------------------------------------------------------------------------------------------


def test_scores_of_extreme_logits() -> None:
    """Pitfall 31: sqrt(log(1 + exp(x))) at -20, -200, 90 against float64; the naive float32 form is 0 at -20.

    At -200 the softplus (1e-87) underflows float32, so the tolerance there is absolute.
    """
    logits = [-200.0, -20.0, -3.0, 0.0, 15.0, 20.5, 90.0]
    gate, x = gate_for(logits)
    scores = gate(x, None)[0][0]
    wanted = [math.sqrt(math.log1p(math.exp(value)) if value < 30 else value) for value in logits]
    assert bool(torch.isfinite(scores).all()) and bool((scores.diff() > 0).all())
    assert scores[0].item() == pytest.approx(wanted[0], abs=1e-20)
    assert scores[1:].tolist() == pytest.approx(wanted[1:], rel=1e-6)
    assert scores.dtype == torch.float32
    naive = torch.log(1 + torch.tensor(logits).exp()).sqrt()
    assert naive[1] == 0 and not torch.isfinite(naive[-1])


def test_weights_of_tiny_scores() -> None:
    """Pitfall 31: a row of -20 everywhere normalizes to the routed scale; all -200 stays finite, by the 1e-20."""
    gate, x = gate_for([-20.0] * 4)
    assert gate(x, None)[2].tolist()[0] == pytest.approx([0.75, 0.75], rel=1e-6)
    gate, x = gate_for([-200.0] * 4)
    weights = gate(x, None)[2]
    assert bool(torch.isfinite(weights).all()) and not weights.any()


def test_bias_chooses_and_never_weighs() -> None:
    """Pitfall 31: a large bias on experts 3 and 1 makes them the choice; their weights are of the plain scores."""
    logits = [2.0, 0.5, 1.0, -1.0]
    gate, x = gate_for(logits, bias=[0.0, 50.0, 0.0, 60.0])
    _, ids, weights = gate(x, None)
    scores = torch.tensor(logits, dtype=torch.float64).exp().log1p().sqrt()
    assert ids.tolist() == [[1, 3]]
    wanted = 1.5 * scores[[1, 3]] / scores[[1, 3]].sum()
    assert weights[0].tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    biased = scores[[1, 3]] + torch.tensor([50.0, 60.0])
    assert abs(1.5 * (biased / biased.sum())[0] - wanted[0]) > 0.1  # wrong variant
    float32 = (scores.float() + 60.0) - 60.0  # another: taking the bias off again cancels
    assert not torch.allclose(float32, scores.float(), rtol=1e-6)


def test_choice_is_made_in_float32() -> None:
    """Pitfall 32: biases 8.0 and 8.0001 at equal scores; BF16 merges them, and the lower id would win."""
    biases = [8.0, 8.0001, 7.0, 7.0]
    gate, x = gate_for([1.0] * 4, bias=biases, active=1)
    assert gate(x, None)[1].tolist() == [[1]]
    merged = torch.tensor(biases).bfloat16()
    assert merged[0] == merged[1]


def test_router_logits_are_a_float32_product() -> None:
    """Pitfall 32: BF16 input and weight, float32 product. A BF16 product (wrong variant) makes other choices."""
    moe = make_moe(n_routed_experts=64, num_experts_per_tok=6)
    x = torch.randn(1000, 64).bfloat16()
    _, ids, weights = moe.gate(x, None)
    matrix, bias = moe.gate.weight.double(), moe.gate.bias.double()
    arrays = (values.numpy() for values in (x.double(), matrix, bias.expand(1000, -1)))
    wanted_ids, wanted_weights, biased = oracle.route(*arrays, 6, 1.5)
    best = torch.from_numpy(biased).topk(7).values
    clear = best[:, 5] - best[:, 6] > 1e-6  # float32 may decide closer ones the other way
    assert clear.sum() > 950
    assert torch.equal(ids[clear], torch.from_numpy(wanted_ids)[clear].long())
    assert relative_l2(weights[clear], torch.from_numpy(wanted_weights)[clear]) < 1e-6
    narrow = F.softplus((x.double() @ matrix.T).bfloat16().double()).sqrt() + bias
    assert not torch.equal(narrow.topk(6).indices.sort(-1).values[clear], ids[clear])


def test_image_bias_replaces_the_text_bias() -> None:
    """Pitfall 33: in an image span `bias_vl` decides instead of `bias`, not on top of it; the weights know neither."""
    gate, x = gate_for([1.0, 1.0, 1.0, 1.0], bias=[5.0, 5.0, 0.0, 0.0], bias_vl=[0.0, 0.0, 4.0, 4.0])
    x = x.expand(3, -1)
    _, ids, weights = gate(x, torch.tensor([False, True, False]))
    assert ids.tolist() == [[0, 1], [2, 3], [0, 1]]  # the sum of both would choose 0, 1 everywhere
    assert gate(x, None)[1].tolist() == [[0, 1]] * 3
    assert weights.flatten().tolist() == pytest.approx([0.75] * 6)


def test_ties_go_to_the_lower_expert_and_ids_ascend() -> None:
    gate, x = gate_for([1.0, 3.0, 1.0, 1.0, 2.0], active=3)
    assert gate(x, None)[1].tolist() == [[0, 1, 4]]


# --- experts -----------------------------------------------------------------------------------------------------


def echo_expert(gate: float, up: float, width: int = 64) -> Expert:
    """An expert with w1 = gate I, w3 = up I, w2 = I: an input of ones gives silu(gate) * up after the clamps."""
    expert = Expert(TextConfig(hidden_size=width, moe_intermediate_size=width))
    for layer, factor in ((expert.w1, gate), (expert.w3, up), (expert.w2, 1.0)):
        layer.weight.copy_(factor * torch.eye(width))
    return expert


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


@pytest.mark.parametrize(("gate", "up", "wanted"), [
    (-20.0, 1.0, silu(-20.0)), (20.0, 1.0, silu(10.0)), (-10.5, 1.0, silu(-10.5)), (1.0, 20.0, silu(1.0) * 10),
    (1.0, -20.0, silu(1.0) * -10), (9.0, 9.0, silu(9.0) * 9)])
def test_clamps(gate: float, up: float, wanted: float) -> None:
    """Pitfall 30: gate -20 stays -20 and 20 becomes 10, up is cut on both sides."""
    out = echo_expert(gate, up)(torch.ones(1, 64), None, FLOAT32)
    assert out[0].tolist() == pytest.approx([wanted] * 64, rel=1e-5)
    assert abs(silu(-20.0) - silu(-10.0)) > 1e-4  # a gate clamped on both sides would show


def test_shared_expert_is_clamped_like_the_routed_ones() -> None:
    """Pitfall 30: with silent routed experts the output is the shared expert's: silu(10) * 10."""
    moe = make_moe()
    moe.shared_experts = echo_expert(20.0, 20.0)
    for expert in moe.experts:
        expert.w2.weight.zero_()
    out = moe(torch.ones(1, 2, 64), context(FLOAT32, 2))
    assert out.flatten().tolist() == pytest.approx([silu(10.0) * 10] * 128, rel=1e-5)


def test_moe_equals_the_oracle() -> None:
    """Every expert is chosen by some token, both clamps act, and tokens inside an image span use the other bias."""
    moe, x = make_moe(), torch.randn(1, 60, 64)
    mask = torch.arange(60)[None] % 3 == 0
    points: dict[str, Tensor] = {}
    out = moe(x, context(FLOAT32, 60, image_mask=mask, observe=points.__setitem__))
    weights = {name: parameter.double().numpy() for name, parameter in moe.named_parameters()}
    bias = torch.where(mask[0].unsqueeze(-1), moe.gate.bias_vl, moe.gate.bias).double().numpy()
    rows = x[0].double().numpy()
    ids, expert_weights, _ = oracle.route(rows, weights["gate.weight"], bias, 2, 1.5)
    assert points["layers.0.ffn.expert_ids"][0].tolist() == ids.tolist()
    assert len(set(ids.flatten().tolist())) == 8
    wanted = torch.from_numpy(oracle.moe(rows, ids, expert_weights, weights, "", 10.0))
    assert relative_l2(out[0], wanted) < 1e-5
    for limit in (5.0, 1e9):  # wrong variants
        assert relative_l2(torch.from_numpy(oracle.moe(rows, ids, expert_weights, weights, "", limit)), wanted) > 1e-2


def native_output(moe: MoE, x: Tensor, weight_first: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """The MoE in plain steps, token by token: x [n, D] BF16. The arguments make wrong variants."""
    def run(expert: Expert, token: Tensor, weight: float | Tensor) -> Tensor:
        gate = expert.w1(token, NATIVE).float().clamp_max(10)
        up = expert.w3(token, NATIVE).float().clamp(-10, 10)
        if weight_first:
            return expert.w2((weight * (F.silu(gate) * up)).bfloat16(), NATIVE)
        return (weight * expert.w2((F.silu(gate) * up).bfloat16(), NATIVE).float()).bfloat16()

    _, ids, weights = moe.gate(x, None)
    rows = []
    for token in range(len(x)):
        row, total = x[token:token + 1], torch.zeros(1, 64, dtype=dtype)
        for expert_id, weight in zip(ids[token].tolist(), weights[token]):
            total = total + run(moe.experts[expert_id], row, weight).to(dtype)
        rows.append((total + run(moe.shared_experts, row, 1.0).to(dtype)).bfloat16())
    return torch.cat(rows)


def test_native_output_step_by_step() -> None:
    """The weight goes in before w2, where it takes part in the quantization; experts are added up in float32.

    BF16 products of one row and of several may round differently, hence a few differing values; each wrong variant
    (weight after w2, BF16 sum) moves many.
    """
    moe, x = make_moe(num_experts_per_tok=4), torch.randn(40, 64).bfloat16()
    out = moe(x[None], context(NATIVE, 40))[0]
    assert out.dtype == torch.bfloat16

    def share_that_differs(**variant) -> float:
        wanted = native_output(moe, x, **variant)
        assert relative_l2(out, wanted) < 0.05
        return float((out != wanted).double().mean())

    assert share_that_differs() < 0.01
    assert share_that_differs(weight_first=False) > 0.3
    assert share_that_differs(dtype=torch.bfloat16) > 0.1


def constant_expert(value: float) -> Expert:
    """An expert that gives about `value` in every channel, and exactly the negative for -value."""
    expert = Expert(TextConfig(hidden_size=64, moe_intermediate_size=32))
    for layer in (expert.w1, expert.w3, expert.w2):
        layer.weight.zero_()
    expert.w1.weight[0, 0], expert.w3.weight[0, 0] = 4.0, 2.0
    expert.w2.weight[:, 0] = value / (silu(4.0) * 2)
    return expert


def test_experts_are_added_in_ascending_order() -> None:
    """Three experts whose float32 sum depends on the order: 2^27, then 1, which drowns, then -2^27."""
    moe = make_moe(n_routed_experts=3, num_experts_per_tok=3)
    moe.gate.weight.zero_()
    for parameter in moe.shared_experts.parameters():
        parameter.zero_()
    large, small, negative = (constant_expert(2 * value) for value in (2.0**27, 1.0, -(2.0**27)))  # all weights are 0.5
    orders = {0.0: (large, small, negative), 1.0: (large, negative, small)}
    for wanted, experts in orders.items():
        moe.experts = nn.ModuleList(experts)
        out = moe(torch.ones(1, 1, 64), context(FLOAT32, 1)).flatten()
        assert out.tolist() == pytest.approx([wanted] * 64, rel=1e-2)


# --- the grouped form --------------------------------------------------------------------------------------------


def packed(moe: MoE, format_name: str) -> MoE:
    """Routed experts as stored in a file: encoded, then kept as codes and scales."""
    encode = {"mxfp4": quant.encode_mxfp4, "nvfp4": quant.encode_nvfp4, "fp8_blocks": quant.encode_fp8_blocks,
              "fp8_rows": quant.encode_fp8_rows, "affine4_g32": lambda values: quant.encode_affine(values, 4, 32)}[format_name]
    for expert in moe.experts:
        for linear in (expert.w1, expert.w2, expert.w3):
            values = linear.weight.detach()
            del linear._parameters["weight"]
            linear.weight = quant.PackedWeight(quant.FORMATS[format_name], encode(values), tuple(values.shape))
    return moe


def both_forms(moe: MoE, x: Tensor, call: Context) -> tuple[Tensor, Tensor]:
    """Outputs of the loop and of the grouped form, which must really have run."""
    loop = moe(x, call)
    assert stack_experts(moe) is moe and moe.experts.usable_stacks(x) is not None
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_module, "grouped_experts", lambda *given: runs.append(1) or grouped_experts(*given))
        grouped = moe(x, call)
    assert runs
    return loop, grouped


@pytest.mark.parametrize("tokens", [1, 2, 60])
@pytest.mark.parametrize("format_name", ["bf16", "mxfp4", "nvfp4", "fp8_blocks", "fp8_rows", "affine4_g32"])
@pytest.mark.parametrize("numerics", [NATIVE, Numerics.of("dequantized")], ids=lambda numerics: numerics.name)
def test_grouped_form_equals_the_loop(tokens, format_name, numerics) -> None:
    """Within one BF16 rounding, for fewer pairs than experts and more, and any memory budget.

    On a CPU the grouped product of torch makes the same products as the loop, so nearly all bits agree.
    """
    moe = make_moe(n_routed_experts=12, num_experts_per_tok=3)
    moe = moe if format_name == "bf16" else packed(moe, format_name)
    x = torch.randn(1, tokens, 64).bfloat16()
    mask = torch.arange(tokens)[None] % 3 == 0
    loop, grouped = both_forms(moe, x, context(numerics, tokens, image_mask=mask))
    assert relative_l2(grouped, loop) < 1e-3
    small = moe(x, context(numerics, tokens, image_mask=mask, memory_budget=1))
    assert relative_l2(small, loop) < 1e-3
    moe.experts.stacks = moe.experts.stacks[1:] + moe.experts.stacks[:1]  # wrong variant: w3, w2, w1
    assert moe.experts.usable_stacks(x) is None


def test_grouped_form_sees_wrong_runs() -> None:
    """A run that ends one row early or late, and results added to the wrong token, move the output."""
    moe, x = make_moe(n_routed_experts=12, num_experts_per_tok=3), torch.randn(1, 40, 64).bfloat16()
    loop, grouped = both_forms(moe, x, context(NATIVE, 40))
    assert relative_l2(grouped, loop) < 1e-3
    product = experts_module._product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_module, "_product", lambda rows, matrices, ends: product(
            rows, matrices, torch.cat((ends[:-1] - 1, ends[-1:])).clamp_min(0)))
        assert relative_l2(moe(x, context(NATIVE, 40)), loop) > 1e-2


def test_experts_stay_where_they_were() -> None:
    """Stacking keeps names, values and the count of bytes; what is written into a weight afterwards counts."""
    moe, x = make_moe(), torch.randn(1, 5, 64).bfloat16()
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    stack_experts(moe)
    after = moe.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    stack = moe.experts.stacks[2]
    assert moe.experts[3].w2.weight.data_ptr() == stack.tensors[0][3].data_ptr()
    for expert in moe.experts:
        expert.w2.weight.zero_()
    moe.shared_experts.w2.weight.zero_()
    assert not moe(x, context(NATIVE, 5)).any()


def test_stale_blocks_are_not_used() -> None:
    """Other weights, another dtype of x, gradients, or other experts: the loop runs."""
    moe, x = make_moe(), torch.randn(1, 5, 64).bfloat16()
    stack_experts(moe)
    assert moe.experts.usable_stacks(x) is not None and moe.experts.usable_stacks(x.float()) is None
    assert moe.experts[2:5].stacks is None
    with torch.enable_grad():
        assert moe.experts.usable_stacks(x) is None
    moe.double().bfloat16()  # new memory under the same parameters
    assert moe.experts.usable_stacks(x) is None
    mixed = packed(make_moe(), "mxfp4")
    mixed.experts[3].w1 = make_moe().experts[3].w1
    stack_experts(mixed)
    assert mixed.experts.stacks is None


def test_grouped_experts_are_added_in_ascending_order() -> None:
    """As in the loop: 2^27, then 1, which drowns, then -2^27."""
    moe = make_moe(n_routed_experts=3, num_experts_per_tok=3)
    moe.gate.weight.zero_()
    for parameter in moe.shared_experts.parameters():
        parameter.zero_()
    large, small, negative = (constant_expert(2 * value) for value in (2.0**27, 1.0, -(2.0**27)))
    for wanted, order in {0.0: (large, small, negative), 1.0: (large, negative, small)}.items():
        moe.experts = Experts(order)
        stack_experts(moe)
        x = torch.ones(1, 1, 64).bfloat16()
        assert moe.experts.usable_stacks(x) is not None
        assert moe(x, context(Numerics.of("dequantized"), 1)).flatten().tolist() == pytest.approx([wanted] * 64, rel=1e-2)
