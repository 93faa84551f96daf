"""Hyper-connections (inference/hyper_connections.py) against scalar loops; the lag of `pre` through a whole model."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from inference.config import TextConfig
from inference.hyper_connections import Mixes, collapse, compute_mixes, expand, first_pre, sinkhorn, split_mixes
from reference.metrics import relative_l2
from reference.oracles import hyper_connections as oracle

EPS = 1e-6


def scalar_mixes(u: list[float], base: list[float], scale: list[float], copies: int, rounds: int,
                 rows_last: bool = False) -> tuple[list, list, list]:
    """Every number on its own. rows_last: the wrong variant whose rounds end with the rows."""
    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    pre = [sigmoid(u[c] * scale[0] + base[c]) + EPS for c in range(copies)]
    post = [2 * sigmoid(u[copies + c] * scale[1] + base[copies + c]) for c in range(copies)]
    comb = []
    for i in range(copies):
        place = [2 * copies + copies * i + j for j in range(copies)]
        powers = [math.exp(u[k] * scale[2] + base[k]) for k in place]
        comb.append([power / sum(powers) + EPS for power in powers])

    def divide_rows() -> None:
        for i in range(copies):
            comb[i] = [value / (sum(comb[i]) + EPS) for value in comb[i]]

    def divide_columns() -> None:
        for j in range(copies):
            total = sum(row[j] for row in comb) + EPS
            for row in comb:
                row[j] /= total

    for count in range(rounds):
        if rows_last:
            divide_columns()
            divide_rows()
        else:
            if count > 0:
                divide_rows()
            divide_columns()
    return pre, post, comb


# --- coefficients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 20])
@pytest.mark.parametrize("copies", [2, 4])
def test_mixes_equal_a_scalar_loop(copies: int, rounds: int) -> None:
    """Pitfall 25. A round that ends with the rows (wrong variant) shows after one round; later both have converged."""
    u, base = 2 * torch.randn(copies * (2 + copies)), torch.randn(copies * (2 + copies))
    u[-1] += 3  # rows and columns must not happen to be balanced
    scale = torch.tensor([0.7, 1.3, 0.9])
    mixes = split_mixes(u, base, scale, copies, rounds, EPS)
    numbers = [values.double().tolist() for values in (u, base, scale)]
    for got, wanted in zip((mixes.pre_next, mixes.post, mixes.comb), scalar_mixes(*numbers, copies, rounds)):
        torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64), rtol=2e-6, atol=1e-7)
    if rounds == 1:
        wrong = torch.tensor(scalar_mixes(*numbers, copies, rounds, rows_last=True)[2])
        assert not torch.allclose(mixes.comb, wrong, rtol=1e-4)


def test_only_pre_has_an_epsilon() -> None:
    """Pitfall 25: far below zero pre is 1e-6 and post is 0; far above 1 + 1e-6 and 2."""
    low, high = (split_mixes(torch.full((24,), value), torch.zeros(24), torch.ones(3), 4, 20, EPS)
                 for value in (-200.0, 200.0))
    assert low.pre_next.tolist() == pytest.approx([1e-6] * 4) and low.post.tolist() == [0.0] * 4
    assert bool((high.pre_next == torch.tensor(1.0) + EPS).all()) and high.post.tolist() == [2.0] * 4


def test_columns_sum_to_one_and_rows_only_nearly() -> None:
    """Pitfall 25: the last step is a column step."""
    comb = sinkhorn(4 * torch.randn(50, 4, 4), 20, EPS)
    columns, rows = comb.sum(-2), comb.sum(-1)
    assert (columns - 1).abs().max() < 3e-6
    assert (rows - 1).abs().max() > 10 * (columns - 1).abs().max()


def stream_inputs(amplitude: float = 1.0, tokens: int = 3) -> tuple[TextConfig, Tensor, Tensor, Tensor, Tensor]:
    config = TextConfig(hidden_size=64)
    streams = torch.randn(1, tokens, 4, 64) * torch.tensor([1.0, 5.0, 0.2, 2.0]).view(4, 1) * amplitude
    return config, streams, torch.randn(24, 256) / 16, torch.randn(24), torch.tensor([0.8, 1.1, 0.6])


@pytest.mark.parametrize("amplitude", [1.0, 1e-11])
def test_mixes_of_streams_equal_the_oracle(amplitude: float) -> None:
    """Pitfall 27: the statistic uses the norm's 1e-20; at amplitude 1e-11 the two constants swapped give other mixes.

    One statistic over all streams (their sizes differ here): one per stream, as Engram has it, differs.
    """
    config, streams, fn, base, scale = stream_inputs(amplitude)
    mixes = compute_mixes(streams, fn, base, scale, config)
    arrays = [values.double().numpy() for values in (streams[0], fn, base, scale)]
    values = dataclasses.asdict(config)
    for got, wanted in zip((mixes.pre_next, mixes.post, mixes.comb), oracle.mixes(*arrays, values)):
        assert got.dtype == torch.float32 and relative_l2(got[0], torch.from_numpy(wanted)) < 2e-6
    if amplitude == 1e-11:
        swapped = oracle.mixes(*arrays, values | {"rms_norm_eps": 1e-6})
        assert relative_l2(mixes.pre_next[0], torch.from_numpy(swapped[0])) > 1e-2
    per_stream = (streams / streams.square().mean(-1, keepdim=True).sqrt()).flatten(-2) @ fn.T
    assert relative_l2(split_mixes(per_stream, base, scale, 4, 20, EPS).pre_next, mixes.pre_next) > 1e-2


def test_mixes_of_bf16_streams_stay_float32() -> None:
    config, streams, fn, base, scale = stream_inputs()
    narrow = compute_mixes(streams.bfloat16(), fn, base, scale, config)
    wide = compute_mixes(streams.bfloat16().float(), fn, base, scale, config)
    for got, wanted in zip(dataclasses.astuple(narrow), dataclasses.astuple(wide)):
        assert got.dtype == torch.float32 and torch.equal(got, wanted)


# --- collapse and expand -----------------------------------------------------------------------------------------


def test_collapse_and_expand_equal_the_oracle() -> None:
    """Pitfall 26: comb is asymmetric, so a transposed sum differs. BF16 streams: float32 inside, one cast."""
    streams, y, pre, post = torch.randn(1, 3, 4, 32), torch.randn(1, 3, 32), torch.rand(1, 3, 4), torch.rand(1, 3, 4)
    comb = sinkhorn(3 * torch.randn(1, 3, 4, 4), 20, EPS)
    assert (comb - comb.mT).abs().max() > 0.1
    arrays = [values[0].double().numpy() for values in (y, streams, post, comb)]
    wanted = torch.from_numpy(oracle.expand(*arrays))
    mixes = Mixes(pre, post, comb)
    assert relative_l2(expand(streams, y, mixes)[0], wanted) < 1e-6
    assert relative_l2(expand(streams, y, dataclasses.replace(mixes, comb=comb.mT))[0], wanted) > 1e-2
    wanted = torch.from_numpy(oracle.collapse(arrays[1], pre[0].double().numpy()))
    assert relative_l2(collapse(streams, pre)[0], wanted) < 1e-6
    narrow, y16 = streams.bfloat16(), y.bfloat16()
    assert torch.equal(expand(narrow, y16, mixes), expand(narrow.float(), y16.float(), mixes).bfloat16())
    assert torch.equal(collapse(narrow, pre), collapse(narrow.float(), pre).bfloat16())


def test_comb_carries_its_first_index_to_its_second() -> None:
    """Pitfall 26, by hand: comb[i, i + 1] = 1 moves stream i into stream i + 1."""
    streams = torch.arange(4.0).view(1, 1, 4, 1)
    shift = torch.eye(4).roll(1, dims=1).view(1, 1, 4, 4)
    moved = expand(streams, torch.zeros(1, 1, 1), Mixes(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), shift))
    assert moved.flatten().tolist() == [3.0, 0.0, 1.0, 2.0]


# --- the lag -----------------------------------------------------------------------------------------------------


def test_first_collapse_reads_stream_zero() -> None:
    """One-hot, float32, also for BF16 streams; a mean over the streams (wrong variant) is not the same."""
    streams = torch.randn(2, 3, 4, 8).bfloat16()
    pre = first_pre(streams)
    assert pre.dtype == torch.float32 and torch.equal(collapse(streams, pre), streams[:, :, 0])
    assert not torch.equal(collapse(streams, torch.full((2, 3, 4), 0.25)), streams[:, :, 0])


def check_lag(points: dict[str, Tensor], stages: list[str], modules, streams: Tensor, head: str,
              head_pre: Tensor) -> None:
    """Every collapse uses the pre of the sub-layer before; the values show it, not only the recorded name.

    streams: what enters the first stage. Its copies are equal, so there the norm hides which pre was used.
    """
    chain = [f"{stage}.hc_{kind}" for stage in stages for kind in ("attn", "ffn")]
    first = points[f"{chain[0]}.pre_used"]
    assert torch.equal(first, torch.tensor([1.0, 0, 0, 0]).expand_as(first))
    for before, after in itertools.pairwise(chain):
        assert torch.equal(points[f"{after}.pre_used"], points[f"{before}.pre_next"]), after
    assert torch.equal(head_pre, points[f"{chain[-1]}.pre_next"])
    for stage, layer in zip(stages, modules):
        for kind in ("attn", "ffn"):
            streams = points[f"{stage}.mid"] if kind == "ffn" else points.get(f"{stage}.engram.out", streams)
            norm, name = getattr(layer, f"{kind}_norm"), f"{stage}.hc_{kind}"
            lagged, unlagged = (norm(collapse(streams, points[f"{name}.{pre}"])) for pre in ("pre_used", "pre_next"))
            assert torch.equal(points[f"{stage}.{kind}.in"], lagged)
            assert (stage, kind) == (stages[0], "attn") or relative_l2(unlagged, lagged) > 1e-2  # the wrong variant
            assert torch.equal(layer.mixes(kind, streams).comb, points[f"{name}.comb"])
        streams = points[f"{stage}.out"]
    assert torch.equal(points[head], collapse(streams, head_pre))


def test_pre_lags_by_one_sublayer(nano) -> None:
    """Pitfall 28: two collapses per layer and the head, over all ten layers; mixes are taken after Engram."""
    points, ids = {}, torch.arange(30, 51)[None]
    nano(ids, nano.new_cache(), observe=points.__setitem__)
    stages = [layer.plan.name for layer in nano.layers]
    check_lag(points, stages, nano.layers, points["layers.0.in"], "head.collapsed", points["head.pre"])
    assert sum("engram.out" in name for name in points) == 2


def test_draft_starts_afresh(nano) -> None:
    """Pitfall 28: draft stage 0 collapses stream 0, whatever the backbone ended with; the head uses the last pre."""
    points, cache = {}, nano.new_cache()
    nano(torch.arange(30, 51)[None], cache)
    nano.draft(torch.tensor([51]), cache, observe=points.__setitem__)
    stages = [layer.plan.name for layer in nano.mtp]
    embedded = nano.embed(points["mtp.block_ids"], nano.numerics).unsqueeze(2).expand(-1, -1, 4, -1)
    check_lag(points, stages, nano.mtp, embedded, "mtp.head.collapsed", points["mtp.2.hc_ffn.pre_next"])
