"""Indexer (inference/indexer.py): visibility, scores, top-k and its tie rule, candidate blocks and order of steps.

Selections are compared with the oracle's sorts; wrong variants of the candidate steps stand beside the right one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from inference import indexer
from inference.config import TextConfig, layer_plan
from inference.context import Context
from inference.indexer import Indexer, candidate_columns, select_columns, top_columns, visible_groups
from inference.numerics import Numerics
from inference.quant import fake_quant_fp4_e8m0
from inference.rope import rope_frequencies
from reference.metrics import relative_l2
from reference.oracles import indexer as oracle

INF, NAN = float("inf"), float("nan")
# Few distinct values, so that ties are the rule.
tied_scores = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.0, 1.0, 2.0, -INF]), min_size=1, max_size=13)


def selected(scores: list[float], count: int) -> list[int]:
    return select_columns(torch.tensor(scores), count).tolist()


# --- visibility --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_group_is_visible_from_its_last_token_on(ratio: int) -> None:
    """A query at p sees floor((p + 1) / ratio) groups; for ratio 1 its own position is among them."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 23], [1000, 1001, 1002, 1003, 5, 6, 0, 11]])
    seen = visible_groups(positions, ratio, 20)
    for row, line in enumerate(positions.tolist()):
        for token, p in enumerate(line):
            assert seen[row, token].tolist() == [j * ratio + ratio - 1 <= p for j in range(20)]


# --- top-k -------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_column() -> None:
    """Pitfall 16: ReLU makes exact zeros common; all equal, equal at the boundary, and equal above it."""
    assert selected([0.0] * 6, 4) == [0, 1, 2, 3]
    assert selected([1.0, 0.0, 3.0, 1.0, 1.0, 2.0], 4) == [0, 2, 3, 5]
    assert selected([-0.0, 0.0, -0.0, 1.0], 3) == [0, 1, 3]
    assert selected([2.0, 2.0, 1.0], 2) == [0, 1]


def test_nan_and_minus_infinity_are_never_selected() -> None:
    """Pitfall 17: ascending, -1 at the end, no duplicates; also when fewer columns are left than wanted."""
    assert selected([NAN, 1.0, -INF, 2.0, NAN, 0.5], 3) == [1, 3, 5]
    assert selected([NAN, 1.0, -INF, 2.0, NAN, -INF], 4) == [1, 3, -1, -1]
    assert selected([NAN, -INF, NAN], 2) == [-1, -1]
    assert selected([-INF, 3.0, -INF], 9) == [1, -1, -1]  # never wider than the columns there are
    assert selected([INF, -5.0, INF], 2) == [0, 2]
    assert select_columns(torch.zeros(2, 3, 0), 4).shape == (2, 3, 0)


@settings(deadline=None, max_examples=150)
@given(tied_scores, st.integers(1, 15))
def test_selection_equals_the_oracle(scores: list[float], count: int) -> None:
    assert selected(scores, count) == oracle.select(torch.tensor([scores]).double().numpy(), count)[0].tolist()
    mask = top_columns(torch.tensor(scores), count)
    assert mask.nonzero().flatten().tolist() == [j for j in selected(scores, count) if j >= 0]


# --- candidate blocks --------------------------------------------------------------------------------------------


def blocks_of(columns: Tensor, size: int) -> list[int]:
    return sorted({int(j) // size for j in columns.nonzero().flatten()})


def test_newest_block_is_kept_with_the_lowest_score() -> None:
    """Pitfall 15: five blocks of 4, keep 2; the newest one scores lowest and stays, so one other stays with it."""
    scores = torch.tensor([3.0, 0, 0, 0, 9, 0, 0, 0, 5, 0, 0, 0, 7, 0, 0, 0, -8, -9, -9, -9]).view(1, 1, -1)
    kept = candidate_columns(scores, torch.tensor([[19]]), 1, block_size=4, keep=2)[0, 0]
    assert blocks_of(kept, 4) == [1, 4] and kept.sum() == 8
    unpinned = top_columns(scores.unflatten(-1, (5, 4)).amax(-1), 2)  # wrong variant
    assert unpinned[0, 0].tolist() == [False, True, False, True, False]


def test_newest_visible_block_is_pinned_not_the_last_one() -> None:
    """The pin follows the query: at position 9 of a ratio-2 layer 5 groups are visible, the newest is in block 1."""
    scores = torch.tensor([1.0, 2, 3, 4, -5] + [-INF] * 7).view(1, 1, -1)
    kept = candidate_columns(scores, torch.tensor([[9]]), 2, block_size=4, keep=1)[0, 0]
    assert blocks_of(kept, 4) == [1]
    kept = candidate_columns(scores, torch.tensor([[9]]), 2, block_size=4, keep=3)[0, 0]
    assert blocks_of(kept, 4) == [0, 1]  # block 2 is all unseen and dropped although three may stay


def test_partial_last_block_is_padded_with_minus_infinity() -> None:
    """Pitfall 15: all scores negative; padding with 0 (wrong variant) would make the last block the best one."""
    scores = torch.tensor([-1.0, -9, -9, -9, -2, -9, -9, -9, -7, -8]).view(1, 1, -1)
    seen_by_all = torch.tensor([[3]])  # the newest block is block 0, so nothing pins the partial one
    kept = candidate_columns(scores, seen_by_all, 1, block_size=4, keep=2)[0, 0]
    assert blocks_of(kept, 4) == [0, 1] and kept.shape == (10,)
    padded = torch.nn.functional.pad(scores, (0, 2)).unflatten(-1, (3, 4)).amax(-1)
    assert top_columns(padded, 2)[0, 0].tolist() == [True, False, True]


def test_a_query_that_sees_nothing_has_no_candidates() -> None:
    kept = candidate_columns(torch.full((1, 1, 6), -INF), torch.tensor([[0]]), 2, block_size=4, keep=2)
    assert not kept.any()


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0]), min_size=1, max_size=22), st.sampled_from([1, 2]),
       st.integers(2, 5), st.integers(1, 4), st.data())
def test_candidates_equal_the_oracle(values: list[float], ratio: int, block: int, keep: int, data) -> None:
    """Every position of a prompt: mask unseen columns, block maximum, pin, keep, then filter and select."""
    length = len(values) * ratio + data.draw(st.integers(0, ratio - 1))
    positions = torch.arange(length)[None]
    unseen = ~visible_groups(positions, ratio, len(values))
    scores = torch.tensor(values).expand(1, length, -1).masked_fill(unseen, -INF)
    wanted = oracle.candidate_rows(scores[0].double().numpy(), ratio, block, keep)
    kept = candidate_columns(scores, positions, ratio, block, keep)
    assert kept[0].tolist() == wanted.tolist()
    filtered = scores.masked_fill(~kept, -INF)
    assert select_columns(filtered, 3)[0].tolist() == oracle.select(filtered[0].double().numpy(), 3).tolist()


def test_order_of_steps() -> None:
    """Pitfall 15: top-k before the filter (wrong variant) leaves holes where the right order finds the next best."""
    scores = torch.tensor([9.0, 8, 1, 1, 7, 6, 1, 1, 5, 4, 3, 2]).view(1, 1, -1)
    kept = candidate_columns(scores, torch.tensor([[11]]), 1, block_size=4, keep=2)
    assert blocks_of(kept[0, 0], 4) == [0, 2]
    assert select_columns(scores.masked_fill(~kept, -INF), 4).flatten().tolist() == [0, 1, 8, 9]
    early = select_columns(scores, 4).flatten()
    assert [int(j) for j in early if kept[0, 0, j]] == [0, 1]


# --- scores ------------------------------------------------------------------------------------------------------


def small_indexer(numerics: str) -> tuple[Indexer, Context, Tensor, tuple[Tensor, ...]]:
    """An indexer of the released shape (32 heads of 128), 7 queries at positions 70 .. 76, 37 keys of ratio 2."""
    config = TextConfig(index_n_heads=32, index_head_dim=128)
    plan = layer_plan(config)[2]
    module = Indexer(config, plan)
    for name, parameter in module.named_parameters():
        parameter.copy_(torch.randn(parameter.shape) / (parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1))
    mode = Numerics.of(numerics)
    context = Context(mode, positions=torch.arange(70, 77)[None], starts=(70,), counts=(7,))
    keys = fake_quant_fp4_e8m0(torch.randn(1, 37, 128)).to(mode.dtype)
    x, q_latent = torch.randn(1, 7, 128).to(mode.dtype), torch.randn(1, 7, 64).to(mode.dtype)
    return module, context, rope_frequencies(config, plan), (x, q_latent, keys)


def recorded_scores(numerics: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores [7, 37], and what they are made of: queries [7, 32, 128], head weights [7, 32], keys [37, 128]."""
    module, context, frequencies, (x, q_latent, keys) = small_indexer(numerics)
    points: dict[str, Tensor] = {}
    context = dataclasses.replace(context, observe=points.__setitem__)
    scores = module.scores(x, q_latent, keys, frequencies, context)
    weights = module.weights_proj(x, context.numerics) / 64  # (128 * 32)^-0.5, exact
    return scores[0], points["layers.2.attn.indexer.q"][0], weights[0], keys[0]


def literal_scores(queries: Tensor, weights: Tensor, keys: Tensor, rounds: tuple[bool, bool, bool]) -> Tensor:
    """float64, rounding to BF16 (or not) the product with a key, its weighted form, and the sum over heads."""
    def rounded(value: Tensor, active: bool) -> Tensor:
        return value.bfloat16().double() if active else value

    products = rounded(torch.einsum("sjx,nx->sjn", queries.double(), keys.double()), rounds[0]).clamp_min(0)
    weighted = rounded(products * weights.double().unsqueeze(-1), rounds[1])
    return rounded(weighted.sum(1), rounds[2])


def test_scores_are_rounded_to_bf16_three_times() -> None:
    """The roundings make ties, so they are part of the result; leaving out any one of them (wrong variants) differs."""
    scores, queries, weights, keys = recorded_scores("native")
    assert scores.dtype == torch.bfloat16
    seen = scores > -INF
    right = literal_scores(queries, weights, keys, (True, True, True))
    assert torch.equal(scores.double()[seen], right[seen])
    for rounds in ((False, True, True), (True, False, True), (True, True, False)):
        assert not torch.equal(literal_scores(queries, weights, keys, rounds)[seen], right[seen])


def test_float32_scores_equal_the_oracle() -> None:
    scores, queries, weights, keys = recorded_scores("float32")
    wanted = literal_scores(queries, weights, keys, (False, False, False))
    wanted = wanted.masked_fill(~visible_groups(torch.arange(70, 77), 2, 37), -INF)
    assert relative_l2(scores, wanted) < 1e-6
    assert bool((scores < 0).any())  # head weights are negative too: no score may be cut at zero
    assert bool((scores[:3, -1] == -INF).all() and (scores[3:] > -INF).all())  # group 36 is visible from 73 on


def test_score_slices_give_the_same_bits(monkeypatch) -> None:
    """A small memory budget only cuts queries and keys apart."""
    module, context, frequencies, (x, q_latent, keys) = small_indexer("native")
    whole = module.scores(x, q_latent, keys, frequencies, context)
    monkeypatch.setattr(indexer, "MIN_COLUMNS", 5)
    for budget in (1, 3 * 3 * 32 * 37 * 2):  # one query and 5 keys at a time, more of both
        sliced = module.scores(x, q_latent, keys, frequencies, dataclasses.replace(context, memory_budget=budget))
        assert torch.equal(sliced, whole)


@pytest.mark.parametrize("numerics", ["native", "float32"])
def test_queries_are_quantized_after_rotation(numerics: str) -> None:
    """FP4 codes with a power-of-two scale per 32, the rotated part included; no norm: twice wq_b is twice the query."""
    module, context, frequencies, (x, q_latent, keys) = small_indexer(numerics)
    points: dict[str, Tensor] = {}
    context = dataclasses.replace(context, observe=points.__setitem__)
    module.scores(x, q_latent, keys, frequencies, context)
    queries = points["layers.2.attn.indexer.q"]
    assert torch.equal(queries, fake_quant_fp4_e8m0(queries))
    module.wq_b.weight = nn.Parameter(2 * module.wq_b.weight)
    module.scores(x, q_latent, keys, frequencies, context)
    assert torch.equal(points["layers.2.attn.indexer.q"], 2 * queries)


# --- in the model ------------------------------------------------------------------------------------------------


def test_later_indexers_obey_the_candidates(nano) -> None:
    """Nano: layer 6 publishes candidates and ignores them itself, layer 8 selects inside them only."""
    points: dict[str, Tensor] = {}
    nano(torch.arange(50, 95)[None], nano.new_cache(), observe=points.__setitem__)
    text = nano.config.text_config
    published, later = (points[f"layers.{i}.attn.indexer.scores"][0] for i in (6, 8))
    candidates = points["layers.6.attn.indexer.candidates"][0]
    wanted = oracle.candidate_rows(published.double().numpy(), 1, text.candidate_block_size, text.candidate_topk_blocks)
    assert candidates.tolist() == wanted.tolist()
    own, obeying = (points[f"layers.{i}.attn.indexer.topk"][0] for i in (6, 8))
    assert torch.equal(own, select_columns(published, text.index_topk))
    assert torch.equal(obeying, select_columns(later.masked_fill(~candidates, -INF), text.index_topk))
    # Both rules matter for this prompt: the other one gives another selection.
    assert not torch.equal(own, select_columns(published.masked_fill(~candidates, -INF), text.index_topk))
    assert not torch.equal(obeying, select_columns(later, text.index_topk))


def test_a_nan_score_does_not_drop_its_block() -> None:
    """Pitfall 17, candidate path: block 0 holds the best finite column beside the NaN and is kept."""
    scores = torch.tensor([float("nan"), 9, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]).view(1, 1, -1)
    kept = candidate_columns(scores, torch.tensor([[11]]), ratio=1, block_size=4, keep=2)[0, 0]
    assert kept.tolist() == [True] * 4 + [False] * 4 + [True] * 4
