"""Configuration: both published forms, the plan against the published layer table, and every kind of contradiction."""

from __future__ import annotations

import copy
import json

import pytest

from inference.config import Config, TextConfig, layer_plan

CONFIGS = "inference/configs"


@pytest.fixture(scope="module")
def released_values(golden_dir) -> dict:
    return json.loads((golden_dir.parent.parent / CONFIGS / "deepseek-v4.1-flash.json").read_text())


@pytest.fixture(scope="module")
def released(released_values) -> Config:
    return Config.from_dict(released_values)


def test_released_plan_is_the_published_table(released) -> None:
    """official layer table: ratio, table, KV source, selection source, candidate role of all 43 layers."""
    plan = layer_plan(released.text_config)
    assert len(plan) == 43
    kv = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20 + [None] * 3
    index = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4 + [None] * 3
    ratio = [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3
    for layer in plan:
        i = layer.layer_id
        assert layer.compress_ratio == ratio[i]
        assert (layer.kv_source, layer.index_source) == (kv[i], index[i])
        assert layer.owns_compressor == (i in (2, 8, 14, 20))
        assert layer.owns_indexer == (i in (2, 8, 14, 20, 24, 28, 32, 36))
        assert (layer.rope_theta, layer.use_yarn) == ((160000, True) if ratio[i] else (10000, False))
        assert layer.candidate_role == {20: "publish", 24: "filter", 28: "filter", 32: "filter", 36: "filter"}.get(i, "none")
        assert layer.engram_slot == {1: 0, 14: 1}.get(i)
        assert (layer.n_routed_experts, layer.num_experts_per_tok) == ((128, 3) if i >= 40 else (384, 6))
        assert layer.is_draft_target == (i in (37, 38, 39))
        assert layer.name == (f"mtp.{i - 40}" if i >= 40 else f"layers.{i}")
    kinds = [(layer.owns_compressor, layer.owns_indexer, layer.kv_source is None) for layer in plan[:40]]
    assert kinds.count((True, True, False)) == 4 and kinds.count((False, True, False)) == 4
    assert kinds.count((False, False, False)) == 30 and kinds.count((False, False, True)) == 2


def test_both_published_forms_are_one_configuration(released, golden_dir) -> None:
    folder = golden_dir.parent.parent / CONFIGS
    flat = Config.from_file(folder / "deepseek-v4.1-flash.inference.json")
    assert flat.text_config == released.text_config
    assert flat.vision_config == released.vision_config
    assert flat.image_token_id == released.image_token_id == 129264


def test_round_trip(released, released_values, nano_config) -> None:
    assert released.to_dict() == released_values
    assert Config.from_dict(nano_config.to_dict()) == nano_config


def test_frozen_and_defaults_are_runnable() -> None:
    config = Config()
    assert len(layer_plan(config.text_config)) == 6
    with pytest.raises(AttributeError):
        config.text_config.hidden_size = 1


def test_norm_epsilons_are_not_exchanged(released) -> None:
    assert released.text_config.rms_norm_eps == 1e-20 and released.text_config.hc_eps == 1e-6


CASES = {
    "unknown key": ({"text_config": {"first_k_dense_replace": 3}}, "text_config.first_k_dense_replace: unknown key"),
    "unknown top key": ({"n_group": 8}, "n_group: unknown key"),
    "missing key": ({"text_config": {"sliding_window": "DELETE"}}, "text_config.sliding_window: missing"),
    "wrong type": ({"text_config": {"hidden_size": "128"}}, "text_config.hidden_size: wanted an integer, got '128'"),
    "bool is no integer": ({"text_config": {"index_topk": True}}, "text_config.index_topk: wanted an integer"),
    "ratio list too short": ({"text_config": {"compress_ratios": [0, 0, 2]}}, "compress_ratios has 3 entries"),
    "draft stage with ratio": ({"text_config": {"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 2]}},
                               "draft stages are window only"),
    "source missing": ({"text_config": {"kv_source_layer_ids": [4, 6], "index_source_layer_ids": [4, 6, 8]}},
                       "layer 2 has compress ratio 2 but no source layer"),
    "source of another ratio": ({"text_config": {"kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6, 8]}},
                                "layer 6 has ratio 1 but reads layer 4"),
    "source without selection": ({"text_config": {"index_source_layer_ids": [2, 6, 8]}},
                                 "layer 4 is no entry of index_source_layer_ids"),
    "source with ratio 0": ({"text_config": {"kv_source_layer_ids": [1, 2, 4, 6], "index_source_layer_ids": [1, 2, 4, 6, 8]}},
                            "layer 1 has compress ratio 0"),
    "sources out of order": ({"text_config": {"index_source_layer_ids": [4, 2, 6, 8]}}, "strictly ascending"),
    "source out of range": ({"text_config": {"engram_layer_ids": [1, 12]}}, "[12] outside the backbone layers"),
    "candidate source is none": ({"text_config": {"candidate_source_layer_id": 7}}, "candidate_source_layer_id 7"),
    "heads not divisible": ({"text_config": {"o_groups": 3}}, "o_groups 3 does not divide num_attention_heads 4"),
    "width not divisible": ({"text_config": {"hidden_size": 120}}, "hidden_size = 120 is not a multiple of 32"),
    "too many active experts": ({"text_config": {"num_experts_per_tok": 9}}, "num_experts_per_tok 9"),
    "engram lists differ": ({"text_config": {"engram_num_embeddings": [660]}}, "engram_num_embeddings has 1 entries"),
    "fixed value": ({"text_config": {"scoring_func": "sigmoid"}}, "scoring_func: only 'sqrtsoftplus'"),
    "zero": ({"text_config": {"sliding_window": 0}}, "sliding_window: must be above 0"),
    "id outside": ({"eos_token_id": 768}, "eos_token_id 768 is outside the vocabulary"),
    "rope scaling": ({"text_config": {"rope_scaling": None}}, "text_config.rope_scaling: wanted an object"),
    "rope scaling key": ({"text_config": {"rope_scaling": {"mscale": 1.0}}}, "text_config.rope_scaling.mscale: unknown key"),
}


@pytest.mark.parametrize("change, message", CASES.values(), ids=CASES.keys())
def test_contradictions_are_named(nano_config, change, message) -> None:
    values = nano_config.to_dict()

    def merge(into: dict, new: dict) -> None:
        for key, value in new.items():
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                merge(into[key], value)
            elif value == "DELETE":
                del into[key]
            else:
                into[key] = value

    merge(values, copy.deepcopy(change))
    with pytest.raises(ValueError) as caught:
        Config.from_dict(values)
    assert message in str(caught.value)


def test_several_problems_are_listed_together(nano_config) -> None:
    values = nano_config.to_dict()
    values["text_config"] |= {"bad_one": 1, "bad_two": 2}
    with pytest.raises(ValueError, match="(?s)bad_one.*bad_two"):
        Config.from_dict(values)


def test_unknown_key_of_the_flat_form(golden_dir, tmp_path) -> None:
    values = json.loads((golden_dir.parent.parent / CONFIGS / "deepseek-v4.1-flash.inference.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_hash_layers": 3}))
    with pytest.raises(ValueError, match="n_hash_layers: unknown key"):
        Config.from_file(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_unreadable_files(tmp_path, content) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="Reading the configuration"):
        Config.from_file(tmp_path)


def test_mechanisms_that_are_off_need_no_keys(nano_config) -> None:
    """No Engram, no candidates, no drafts, no vision: their keys may be missing, and the plan has none of them."""
    values = nano_config.to_dict()
    text = {key: value for key, value in values["text_config"].items()
            if not key.startswith(("engram_", "dspark_", "candidate_"))}
    text |= {"num_nextn_predict_layers": 0, "compress_ratios": text["compress_ratios"][:10]}
    config = Config.from_dict(values | {"text_config": text, "vision_config": None})
    for layer in layer_plan(config.text_config):
        assert layer.engram_slot is None and layer.candidate_role == "none" and not layer.is_draft_target


def test_general_ratios() -> None:
    config = Config(text_config=TextConfig(num_hidden_layers=5, compress_ratios=(4, 4, 0, 3, 1), kv_source_layer_ids=(0, 3, 4),
                                           index_source_layer_ids=(0, 1, 3, 4), candidate_source_layer_id=None))
    plan = layer_plan(config.text_config)
    assert [layer.kv_source for layer in plan] == [0, 0, None, 3, 4]
    assert [layer.index_source for layer in plan] == [0, 1, None, 3, 4]
