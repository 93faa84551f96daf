"""Sparse attention (inference/kernel.py, the torch twin): sink, empty rows, duplicates, slices, and the BF16 order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inference.kernel import sparse_attn
from reference.metrics import relative_l2

NONE = float("-inf")


def inputs(batch: int = 2, queries: int = 3, heads: int = 4, width: int = 32, rows: int = 50, chosen: int = 20,
           dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    q, kv = torch.randn(batch, queries, heads, width), torch.randn(batch, rows, width)
    index = torch.stack([torch.randperm(rows)[:chosen] for _ in range(batch * queries)]).view(batch, queries, chosen)
    return q.to(dtype), kv.to(dtype), torch.randn(heads), index, width**-0.5


def softmax_attention(q: Tensor, kv: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Without a sink, float64, loops: output [B, S, H, K] and the log of the sum of exponentials [B, S, H]."""
    out, total = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:-1], NONE, dtype=torch.float64)
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            rows = kv[b, index[b, s][index[b, s] >= 0]].double()
            if len(rows):
                logits = scale * q[b, s].double() @ rows.T
                out[b, s], total[b, s] = logits.softmax(-1) @ rows, logits.logsumexp(-1)
    return out, total


def test_sink_minus_infinity_is_a_plain_softmax() -> None:
    """Pitfalls 3 and 23: several keys, scale K^-0.5 once."""
    q, kv, sink, index, scale = inputs()
    got = sparse_attn(q, kv, torch.full_like(sink, NONE), index, scale)
    assert relative_l2(got, softmax_attention(q, kv, index, scale)[0]) < 1e-6


def test_sink_as_large_as_all_keys_halves_the_output() -> None:
    """Pitfall 23: sink = log sum exp of the scores gives exactly one half: it has no value and is not scaled."""
    q, kv, sink, index, scale = inputs(batch=1, queries=1, heads=1)
    plain, total = softmax_attention(q, kv, index, scale)
    assert abs(total.item()) > 0.5
    assert relative_l2(sparse_attn(q, kv, total.view(1).float(), index, scale), plain / 2) < 1e-6
    assert relative_l2(sparse_attn(q, kv, scale * total.view(1).float(), index, scale), plain / 2) > 1e-2


def test_every_head_has_its_own_sink() -> None:
    """Pitfall 23: out = plain * Z / (Z + exp(sink[h])); two groups of heads, each with its sinks, give the whole."""
    q, kv, _, index, scale = inputs()
    sink = torch.tensor([-2.0, 0.0, 1.5, 4.0])
    got = sparse_attn(q, kv, sink, index, scale)
    plain, total = softmax_attention(q, kv, index, scale)
    assert relative_l2(got, plain * torch.sigmoid(total - sink.double()).unsqueeze(-1)) < 1e-6
    first, second = q.split(2, dim=2)
    halves = (sparse_attn(first, kv, sink[:2], index, scale), sparse_attn(second, kv, sink[2:], index, scale))
    assert relative_l2(torch.cat(halves, dim=2), got) < 1e-6
    wrong = (halves[0], sparse_attn(second, kv, sink[:2], index, scale))  # every half with the first sinks
    assert relative_l2(torch.cat(wrong, dim=2), got) > 1e-2


def test_large_sink_does_not_overflow() -> None:
    q, kv, sink, index, scale = inputs()
    assert not sparse_attn(q, kv, torch.full_like(sink, 200.0), index, scale).any()
    assert bool(torch.isfinite(sparse_attn(1e3 * q, kv, sink, index, scale)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sink", [0.7, NONE])
@pytest.mark.parametrize("chosen", [3, 64, 130])
def test_a_row_without_keys_gives_exact_zeros(dtype: torch.dtype, sink: float, chosen: int) -> None:
    """Pitfall 18: all indices -1, NaN in the slot that -1 would read, with and without a sink."""
    q, kv, sinks, index, scale = inputs(rows=200, chosen=chosen, dtype=dtype)
    kv[:, 0] = float("nan")
    index[index == 0] = 1
    index[0, 1] = -1
    got = sparse_attn(q, kv, torch.full_like(sinks, sink), index, scale)
    assert not got[0, 1].any() and bool(torch.isfinite(got).all())
    index[1, 2, ::2] = -1  # some entries absent: NaN must not leak through 0 * NaN either
    assert bool(torch.isfinite(sparse_attn(q, kv, torch.full_like(sinks, sink), index, scale)).all())


def test_absent_entries_contribute_nothing_wherever_they_stand() -> None:
    """-1 in front, between and behind; a whole block of 64 absent entries first."""
    q, kv, sink, index, scale = inputs(chosen=9)
    wanted = sparse_attn(q, kv, sink, index, scale)
    absent = torch.full((2, 3, 1), -1)
    for before, after in ((70, 0), (0, 70), (3, 5), (64, 64)):
        padded = torch.cat((absent.expand(-1, -1, before), index, absent.expand(-1, -1, after)), dim=-1)
        assert relative_l2(sparse_attn(q, kv, sink, padded, scale), wanted) < 1e-6
    assert relative_l2(sparse_attn(q, kv, sink, torch.cat((absent.clamp_min(0), index), -1), scale), wanted) > 1e-3


def test_a_duplicate_counts_twice() -> None:
    """A recent token can be a window row and a compressed row; dropping the copy (wrong variant) changes the output."""
    q, kv, sink, index, scale = inputs(batch=1, queries=1, chosen=5)
    twice = torch.cat((index, index[..., :1]), dim=-1)
    # The same as a second, equal row under another number.
    both = torch.cat((kv, kv[:, index[0, 0, :1]]), dim=1)
    other = torch.cat((index, torch.tensor([[[50]]])), dim=-1)
    assert torch.equal(sparse_attn(q, kv, sink, twice, scale), sparse_attn(q, both, sink, other, scale))
    assert relative_l2(sparse_attn(q, kv, sink, twice, scale), sparse_attn(q, kv, sink, index, scale)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_give_the_same_bits(dtype: torch.dtype) -> None:
    """A small memory budget only cuts the query rows apart."""
    q, kv, sink, index, scale = inputs(queries=7, rows=150, chosen=100, dtype=dtype)
    whole = sparse_attn(q, kv, sink, index, scale)
    row_bytes = 4 * 2 * (2 * 64 * 32 + 4 * (64 * 3 + 32 * 2))
    for budget in (1, 3 * row_bytes):
        assert torch.equal(sparse_attn(q, kv, sink, index, scale, memory_budget=budget), whole)


# --- the BF16 path -----------------------------------------------------------------------------------------------


def official_order(q: Tensor, kv: Tensor, sink: Tensor, index: Tensor, scale: float, block: int = 64,
                   round_probabilities: bool = True, running: bool = True) -> Tensor:
    """One head of one query in plain float32 loops: q [K], kv [N, K], index [k] -> [K] BF16.

    running: probabilities relative to the maximum so far (official) or to the final one.
    """
    logits = [float(scale * (q.float() @ kv[t].float())) for t in index]
    maximum, denominator, out = -1e30, 0.0, torch.zeros(len(q))
    for first in range(0, len(index), block):
        part = logits[first:first + block]
        new = max(max(part), maximum) if running else max(logits)
        rescale = math.exp(maximum - new)
        probabilities = torch.tensor([math.exp(logit - new) for logit in part])
        denominator = denominator * rescale + float(probabilities.sum())
        values = probabilities.bfloat16().float() if round_probabilities else probabilities
        out = out * rescale + values @ kv[index[first:first + block]].float()
        maximum = new
    return (out / (denominator + math.exp(float(sink) - maximum))).bfloat16()


def test_bf16_follows_the_official_order() -> None:
    """Blocks of 64, running maximum, probabilities rounded for the value product but not for the denominator.

    Float32 summation order is free, so a few values may sit one BF16 step off (measured: 0.5 percent at most); a wrong
    variant moves 8 percent or more.
    """
    q, kv, sink, index, scale = inputs(batch=1, queries=8, width=64, rows=300, chosen=200, dtype=torch.bfloat16)
    got = sparse_attn(q, kv, sink, index, scale)
    assert got.dtype == torch.bfloat16

    def share_that_differs(**variant) -> float:
        wanted = torch.stack([official_order(q[0, s, h], kv[0], sink[h], index[0, s], scale, **variant)
                              for s in range(8) for h in range(4)]).view(8, 4, -1)
        assert relative_l2(got[0], wanted) < 1e-2
        return float((got[0] != wanted).double().mean())

    assert share_that_differs() < 0.02
    assert share_that_differs(round_probabilities=False) > 0.05
    assert share_that_differs(running=False) > 0.05
    assert share_that_differs(block=128) > 0.05


@torch.enable_grad()
def test_gradients_with_an_empty_row() -> None:
    """Against one softmax over rows and sink in float64; the empty row sends nothing back, not NaN."""
    q, kv, sink, index, scale = inputs()
    index[0, 1] = -1
    index[1, 2, 5:] = -1
    weight = torch.randn(q.shape)
    given = [x.requires_grad_() for x in (q, kv, sink)]
    got = torch.autograd.grad((sparse_attn(*given, index, scale) * weight).sum(), given)

    wide = [x.detach().double().requires_grad_() for x in given]
    present = (index.unsqueeze(-1) == torch.arange(kv.shape[1])).any(-2).unsqueeze(2)  # [B, S, 1, N]
    logits = (scale * torch.einsum("bshk,bnk->bshn", wide[0], wide[1])).masked_fill(~present, NONE)
    shares = torch.cat((logits, wide[2].view(1, 1, -1, 1).expand(*q.shape[:3], 1)), dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("bshn,bnk->bshk", shares, wide[1])
    wanted = torch.autograd.grad((out * weight).sum(), wide)
    for mine, right in zip(got, wanted):
        assert relative_l2(mine, right) < 1e-5


@pytest.mark.parametrize("empty", ["rows", "count", "queries"])
def test_nothing_to_look_at_is_zeros(empty) -> None:
    q, kv, sink, index, scale = inputs()
    cut = {"rows": (q, kv[:, :0], sink, torch.full_like(index, -1)), "count": (q, kv, sink, index[..., :0]),
           "queries": (q[:, :0], kv, sink, index[:, :0])}[empty]
    out = sparse_attn(*cut, scale)
    assert out.shape == cut[0].shape and torch.equal(out, torch.zeros_like(out))


@torch.enable_grad()
@pytest.mark.parametrize("sink", [90.0, 1e30, float("inf")])
def test_a_sink_far_above_all_logits_takes_everything(sink) -> None:
    q, kv, _, index, scale = inputs()
    given = [q.requires_grad_(), kv.requires_grad_(), torch.full((4,), sink, requires_grad=True)]
    out = sparse_attn(*given, index, scale)
    assert float(out.abs().max()) < 1e-30
    assert all(float(gradient.abs().max()) < 1e-30 for gradient in torch.autograd.grad(out.sum(), given))
