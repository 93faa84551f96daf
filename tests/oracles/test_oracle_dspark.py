"""Drafting against the golden draft step and all drafts of the golden decode run."""

import numpy as np
import pytest

from reference.oracles import attention
from reference.oracles.dspark import oracle_draft
from reference.oracles.model import oracle_forward

COMMITTED = 24  # the golden draft follows a prompt of 23 tokens and one further token


def test_one_step_with_all_internals(nano, golden_trace, compare):
    inputs, golden = golden_trace("draft_step.float32")
    points = oracle_draft(nano, inputs["input_ids"][:, :COMMITTED], golden["anchor"])
    assert compare(points, golden) == []


@pytest.mark.parametrize("row", [0, 1])
def test_decode_run(nano, golden_trace, error_of, row):
    """Logits, conditioning and every draft after each teacher-forced step.

    Row 0 is the prompt of text_prefill.float32, whose one turned code (see test_oracle_model.py) is grafted.
    """
    inputs, golden = golden_trace("decode.float32")
    ids, grafts = inputs["input_ids"][row : row + 1], None
    if row == 0:
        prompt, recorded = golden_trace("text_prefill.float32")
        np.testing.assert_array_equal(ids, prompt["input_ids"])
        grafts = {"layers.6.attn.kv_quant": recorded["layers.6.attn.kv_quant"]}
    whole = oracle_forward(nano, ids, grafts=grafts)
    split = golden["prefill.mtp.main_hidden"].shape[1]
    assert error_of(whole["logits"][0, split - 1], golden["prefill.logits"][row]) < 2e-5
    assert error_of(whole["mtp.main_hidden"][0, :split], golden["prefill.mtp.main_hidden"][row]) < 2e-5
    steps = range(split, ids.shape[1])
    for i in steps:
        expected = {key: golden[f"step{i}.{key}"][row : row + 1] for key in
                    ("logits", "mtp.main_hidden", "mtp.draft_ids", "mtp.logits", "mtp.confidence")}
        anchor = whole["logits"][:, i].argmax(axis=-1)
        draft = oracle_draft(nano, None, anchor, main_hidden=whole["mtp.main_hidden"][:, : i + 1])
        assert error_of(whole["logits"][:, i], expected["logits"]) < 2e-5, i
        np.testing.assert_array_equal(draft["mtp.draft_ids"], expected["mtp.draft_ids"])
        for key in ("mtp.main_hidden", "mtp.logits", "mtp.confidence"):
            assert error_of(draft[key], expected[key]) < 2e-5, (i, key)
    assert len(steps) == 22


def test_block_rows_see_later_block_rows(nano, golden_trace, monkeypatch):
    """No causal mask in the block: hiding the last row from the first changes the first prediction."""
    inputs, golden = golden_trace("draft_step.float32")
    hidden = oracle_forward(nano, inputs["input_ids"][:, :COMMITTED])["mtp.main_hidden"]
    plain = oracle_draft(nano, None, golden["anchor"], main_hidden=hidden)
    right = attention.attend_back_rotated

    def causal(q, visible, *rest):
        return right(q, [rows[: len(rows) - len(q) + 1 + s] for s, rows in enumerate(visible)], *rest)

    monkeypatch.setattr(attention, "attend_back_rotated", causal)
    masked = oracle_draft(nano, None, golden["anchor"], main_hidden=hidden)
    assert np.abs(plain["mtp.logits"][0, 0] - masked["mtp.logits"][0, 0]).max() > 1e-3


def test_context_is_the_last_window(nano, golden_trace):
    """Conditioning older than the window does not matter, the oldest inside it does."""
    inputs, golden = golden_trace("draft_step.float32")
    hidden = oracle_forward(nano, inputs["input_ids"][:, :COMMITTED])["mtp.main_hidden"]
    window = nano.config["text_config"]["sliding_window"]
    plain = oracle_draft(nano, None, golden["anchor"], main_hidden=hidden)["mtp.logits"]
    outside, inside = hidden.copy(), hidden.copy()
    outside[:, : COMMITTED - window] = 1.0
    inside[:, COMMITTED - window] = 1.0
    np.testing.assert_array_equal(oracle_draft(nano, None, golden["anchor"], main_hidden=outside)["mtp.logits"], plain)
    assert (oracle_draft(nano, None, golden["anchor"], main_hidden=inside)["mtp.logits"] != plain).any()


def test_model_without_drafts_is_an_error(nano):
    text = {**nano.config["text_config"], "num_nextn_predict_layers": 0}
    with pytest.raises(ValueError, match="draft stages"):
        oracle_draft(nano._replace(config={**nano.config, "text_config": text}), np.array([[0]]), np.array([0]))
