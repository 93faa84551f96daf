"""The draft head: what it sees, what it must not see, how its two heads read the drafted tokens (pitfall 47).

The numbers themselves are checked against recorded drafts by tests/test_verify.py.
"""

from __future__ import annotations

import pytest
import torch

import inference
from inference import decoding, dspark
from inference.context import Context
from inference.rope import rotate
from reference.metrics import relative_l2


@pytest.fixture
def cache(nano):
    """After 19 tokens: the rings of 8 slots have wrapped twice."""
    cache = nano.new_cache()
    nano(torch.arange(100, 119).unsqueeze(0), cache)
    return cache


def run(nano, cache, embed=None, choose=None) -> tuple[dspark.Draft, dict[str, torch.Tensor]]:
    seen: dict[str, torch.Tensor] = {}
    anchor = torch.tensor([77])
    context = Context(nano.numerics, torch.zeros(1, 1, dtype=torch.int64), cache.lengths, (1,), observe=seen.__setitem__)
    draft = dspark.draft(nano.mtp, embed or nano.embed, nano.head, anchor, cache, context, nano.config.text_config,
                         choose or (lambda logits: logits.argmax(-1)))
    return draft, seen


def test_the_block_is_not_causal(nano, cache) -> None:
    """Another last input moves the logits of the first draft."""
    def embed(ids, numerics):
        rows = nano.embed(ids, numerics)
        return torch.cat((rows[:, :-1], 2 * rows[:, -1:]), dim=1)

    plain, changed = run(nano, cache)[0], run(nano, cache, embed)[0]
    assert relative_l2(changed.logits[:, 0], plain.logits[:, 0]) > 1e-4


def test_drafting_changes_no_memory(nano, cache) -> None:
    state = cache.state
    stores = {i: store.stored.clone() for i, store in cache.compressed.items()}
    nano.draft(torch.tensor([77]), cache)
    assert cache.state is state and all(torch.equal(cache.compressed[i].stored, rows) for i, rows in stores.items())


def test_rings_hold_rows_of_the_backbone(nano, cache) -> None:
    """Slot p mod W of a stage's ring is kv_norm(main_x wkv) of position p, rotated there, not a row of a drafted block."""
    out = nano(torch.arange(119, 122).unsqueeze(0), cache)
    main_x = nano.mtp[0].main_norm(nano.mtp[0].main_proj(out.main_hidden, nano.numerics))
    context = Context(nano.numerics, torch.arange(19, 22).unsqueeze(0), (19,), (3,))
    for stage in nano.mtp:
        assert not stage.plan.use_yarn and stage.plan.rope_theta == nano.config.text_config.rope_theta
        rows = stage.attn.window_rows(main_x, stage.attn.frequencies("cpu"), context)
        ring = cache.windows[stage.plan.layer_id].rows
        assert torch.equal(ring[0, [3, 4, 5]], rows[0])


def test_every_row_sees_the_whole_ring_and_the_whole_block() -> None:
    """The window does not slide inside the block; before the ring is full the absent slots are no rows."""
    indices = dspark.block_indices((19, 3), 8, 5)
    assert indices.shape == (2, 5, 13) and torch.equal(indices[:, :1].expand_as(indices), indices)
    assert indices[0, 0].tolist() == [3, 4, 5, 6, 7, 0, 1, 2, 8, 9, 10, 11, 12]
    assert indices[1, 0].tolist() == [0, 1, 2, -1, -1, -1, -1, -1, 8, 9, 10, 11, 12]
    held = dspark.block_indices((19, 3), 8, 5, (14, 3))
    assert held[0, 0].tolist() == [6, 7, 0, 1, 2, -1, -1, -1, 8, 9, 10, 11, 12]
    assert held[1, 0].tolist() == [-1] * 8 + [8, 9, 10, 11, 12]


def test_markov_bias_and_confidence_follow_the_drafted_tokens(nano, cache) -> None:
    """Row k adds the bias of token k - 1 (the anchor first) and judges itself by that token and the un-normed hidden."""
    forced = iter([200, 300, 400, 500, 600])
    draft, seen = run(nano, cache, choose=lambda logits: torch.tensor([next(forced)]))
    assert draft.ids[0].tolist() == [77, 200, 300, 400, 500, 600]
    last = nano.mtp[-1]
    hidden = seen["mtp.head.collapsed"]
    for k, previous in enumerate([77, 200, 300, 400, 500]):
        embedded = last.markov_head.embed.weight[previous].to(torch.float64)
        bias = last.markov_head.head.weight.to(torch.float64) @ embedded
        assert relative_l2(draft.logits[0, k], seen["mtp.base_logits"][0, k].to(torch.float64) + bias) < 1e-6
        features = torch.cat((hidden[0, k].to(torch.float64), embedded))
        wanted = last.confidence_head.proj.weight[0].to(torch.float64) @ features
        assert abs(float(draft.confidence[0, k]) - float(wanted)) < 1e-5 * max(1.0, abs(float(wanted)))
        normed = torch.cat((last.norm(hidden[:, k])[0].to(torch.float64), embedded))
        assert abs(float(wanted - last.confidence_head.proj.weight[0].to(torch.float64) @ normed)) > 1e-3


def test_draft_right_after_prefill(nano_plain) -> None:
    """The prompt fills the draft rings by itself: one call, or token by token, gives the same first draft."""
    ids = torch.arange(100, 121).unsqueeze(0)
    once, stepwise = nano_plain.new_cache(), nano_plain.new_cache()
    nano_plain(ids, once)
    for position in range(21):
        nano_plain(ids[:, position:position + 1], stepwise)
    drafts = [nano_plain.draft(torch.tensor([50]), cache) for cache in (once, stepwise)]
    assert relative_l2(drafts[0].logits, drafts[1].logits) < 2e-5 and torch.equal(drafts[0].ids, drafts[1].ids)
    empty = nano_plain.draft(torch.tensor([50]), nano_plain.new_cache())  # no context row at all: still finite
    assert torch.isfinite(empty.logits).all()


def test_block_positions_follow_the_last_committed_one(nano, cache) -> None:
    """Rows of the block are rotated to positions length .. length + 4."""
    _, seen = run(nano, cache)
    for stage in nano.mtp:
        before, after = (seen[f"{stage.attn.name}.{point}"] for point in ("kv_pre_rope", "kv"))
        frequencies = stage.attn.frequencies("cpu")
        assert torch.equal(rotate(before, torch.arange(19, 24).unsqueeze(0), frequencies), after)
        assert not torch.equal(rotate(before, torch.arange(20, 25).unsqueeze(0), frequencies), after)


def test_drafts_are_routed_as_text(nano_dir) -> None:
    """`bias_vl` of the draft stages is stored and never used."""
    model = inference.load(nano_dir, numerics="float32")
    cache = model.new_cache()
    model(torch.arange(100, 119).unsqueeze(0), cache)
    before = model.draft(torch.tensor([77]), cache).logits
    for stage in model.mtp:
        stage.ffn.gate.bias_vl += torch.linspace(0, 100, stage.ffn.gate.bias_vl.numel())
    assert torch.equal(model.draft(torch.tensor([77]), cache).logits, before)
    for stage in model.mtp:
        stage.ffn.gate.bias += torch.linspace(0, 100, stage.ffn.gate.bias.numel())
    assert not torch.equal(model.draft(torch.tensor([77]), cache).logits, before)


def test_conditioning_is_the_plain_mean_of_what_enters_the_targets(nano) -> None:
    points = {}
    out = nano(torch.arange(100, 119).unsqueeze(0), nano.new_cache(), observe=points.__setitem__)
    wanted = torch.cat([points[f"layers.{i}.in"].mean(2) for i in (7, 8, 9)], dim=-1)
    assert torch.equal(out.main_hidden, wanted)


def test_what_cannot_be_drafted_is_refused(nano, nano_dir, cache) -> None:
    with pytest.raises(ValueError, match="one anchor for each of the 1 sequences"):
        nano.draft(torch.tensor([1, 2]), cache)
    model = inference.load(nano_dir, numerics="float32")
    model.mtp = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="no draft stages"):
        model.draft(torch.tensor([1]), model.new_cache())
    with pytest.raises(ValueError, match="speculate needs draft stages"):
        decoding.generate(model, [[100]], decoding.Settings(speculate=True))
    list(decoding.generate(model, [[100]], decoding.Settings(max_new_tokens=2)))


def test_noise_token_fills_the_block(nano, cache) -> None:
    _, seen = run(nano, cache)
    text = nano.config.text_config
    assert seen["mtp.block_ids"].tolist() == [[77, *[text.dspark_noise_token_id] * (text.dspark_block_size - 1)]]
    assert torch.equal(seen["mtp.0.hc_attn.pre_used"][0, 0], torch.tensor([1.0, 0.0, 0.0, 0.0]))  # a fresh start
