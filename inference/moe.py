"""Mixture of experts: a router with two biases, routed experts, one shared expert.

What it computes, per token x [D]
    score    sqrt(softplus(x Wg)), float32
    choice   the A largest of score + bias; inside an image span `bias_vl` replaces `bias`
    weight   the unbiased scores of the chosen, divided by (their sum + 1e-20), times the routed scaling factor
    expert   h = silu(min(x w1, limit)) * clamp(x w3, -limit, limit) * weight in float32, cast, y = h w2
    output   float32 sum of the routed experts in ascending id order, plus the shared expert (weight 1), one cast
Two forms of the routed experts
    loop     one expert after the other; the reference, any device, any numerics, with gradients
    grouped  experts.py: all of them in three grouped products, for BF16 weights in one block of memory (`stack_experts`)
Mirrors
    official: classes `Gate`, `Expert`, `MoE`. No token is dropped; there is no capacity and no group limit.
Tests
    tests/test_moe.py, tests/test_cuda.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.config import LayerPlan, TextConfig
from inference.context import Context
from inference.experts import Stack, grouped_experts, stack_weights
from inference.layers import Linear, empty_parameter
from inference.numerics import Numerics

ROUTE_EPS = 1e-20  # official: a literal in the gate, unrelated to rms_norm_eps


class Gate(nn.Module):
    """The router. `weight` is widened to float32: the choice is decided there."""

    def __init__(self, config: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.active, self.scale = plan.num_experts_per_tok, config.routed_scaling_factor
        self.weight = empty_parameter(plan.n_routed_experts, config.hidden_size)
        self.bias = empty_parameter(plan.n_routed_experts, dtype=torch.float32)
        self.bias_vl = empty_parameter(plan.n_routed_experts, dtype=torch.float32)

    def forward(self, x: Tensor, image_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, D], image_mask [n] bool or None -> scores [n, E] float32, ids [n, A] int64 ascending, weights [n, A]."""
        logits = F.linear(x.to(torch.float32), self.weight.to(torch.float32))
        scores = F.softplus(logits).sqrt()  # official: gate temperature 1, softplus in its stable form
        bias = self.bias if image_mask is None else torch.where(image_mask.unsqueeze(-1), self.bias_vl, self.bias)
        # ours: ids ascending, which is the order in which experts are added up; ties go to the lower id.
        ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :self.active].sort(-1).values
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + ROUTE_EPS) * self.scale
        return scores, ids, weights


class Expert(nn.Module):
    """One expert, routed or shared: the shared one has the same shape and the same clamps."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, quantize_input=True)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, quantize_input=True)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, quantize_input=True)

    def forward(self, x: Tensor, weight: Tensor | None, numerics: Numerics) -> Tensor:
        """x [n, D], weight [n, 1] float32 or None (1) -> [n, D], activation dtype."""
        gate = self.w1(x, numerics).to(torch.float32).clamp_max(self.limit)  # from above only
        up = self.w3(x, numerics).to(torch.float32).clamp(-self.limit, self.limit)
        hidden = F.silu(gate) * up
        if weight is not None:
            hidden = weight * hidden  # before w2: the weight takes part in the quantization of its input
        return self.w2(hidden.to(x.dtype), numerics)


class Experts(nn.ModuleList):
    """The routed experts of one layer. `stacks`: their w1, w3, w2 as one block each, once `stack_experts` made them."""

    stacks: tuple[Stack, Stack, Stack] | None = None

    def usable_stacks(self, x: Tensor) -> tuple[Stack, Stack, Stack] | None:
        """The blocks, if products of x may take them: on its device, in BF16, no gradients, and still the weights."""
        if self.stacks is None or x.dtype != torch.bfloat16 or self.stacks[0].device != x.device:
            return None
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self[0].parameters()):
            return None
        return self.stacks if all(stack.holds(getattr(self[end], name).weight, end) for end in (0, -1)
                                  for name, stack in zip(("w1", "w3", "w2"), self.stacks)) else None


class MoE(nn.Module):
    def __init__(self, config: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.name = f"{plan.name}.ffn"
        self.gate = Gate(config, plan)
        self.experts = Experts(Expert(config) for _ in range(plan.n_routed_experts))
        self.shared_experts = Expert(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        context.record(f"{self.name}.in", x)
        tokens = x.flatten(0, 1)
        mask = None if context.image_mask is None else context.image_mask.flatten()
        scores, ids, weights = self.gate(tokens, mask)
        context.record(f"{self.name}.gate_scores", scores.unflatten(0, x.shape[:2]))
        context.record(f"{self.name}.expert_ids", ids.unflatten(0, x.shape[:2]))
        context.record(f"{self.name}.expert_weights", weights.unflatten(0, x.shape[:2]))
        total = self.routed(tokens, ids, weights, context)
        shared = self.shared_experts(tokens, None, context.numerics)
        context.record(f"{self.name}.shared", shared.unflatten(0, x.shape[:2]))
        out = (total + shared.to(torch.float32)).to(x.dtype).unflatten(0, x.shape[:2])
        context.record(f"{self.name}.out", out)
        return out

    def routed(self, tokens: Tensor, ids: Tensor, weights: Tensor, context: Context) -> Tensor:
        """tokens [n, D], ids and weights [n, A], ids ascending -> float32 sum of the routed experts [n, D]."""
        stacks = self.experts.usable_stacks(tokens) if isinstance(self.experts, Experts) else None
        if stacks is not None:
            return grouped_experts(tokens, ids, weights, stacks, self.experts[0].limit, context.numerics,
                                   context.memory_budget)
        total = torch.zeros_like(tokens, dtype=torch.float32)
        for expert_id in ids.unique().tolist():
            token, slot = (ids == expert_id).nonzero(as_tuple=True)
            y = self.experts[expert_id](tokens[token], weights[token, slot].unsqueeze(-1), context.numerics)
            total = total.index_add(0, token, y.to(torch.float32))
        return total


def stack_experts(model: nn.Module) -> nn.Module:
    """Lay the routed experts of every MoE in `model` out for the grouped form; gives `model` back.

    Their weights keep their names and values, and become parts of one block each, so that no memory is added. Layers
    whose weights are streamed, not of one format, or not BF16 stay with the loop. Call it once the weights are on their device.
    """
    for experts in [module for module in model.modules() if isinstance(module, Experts) and len(module)]:
        stacks = [stack_weights([getattr(expert, name) for expert in experts]) for name in ("w1", "w3", "w2")]
        experts.stacks = tuple(stacks) if all(stack is not None for stack in stacks) else None
    return model
