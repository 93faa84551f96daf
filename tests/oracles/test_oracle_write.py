"""Trace folders have the form of the golden ones, and hold what the oracle computes."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from reference import tiny
from reference.oracles.checkpoint import load_checkpoint
from reference.oracles.model import oracle_forward
from reference.oracles.write import write_traces


def header(path) -> dict:
    """Tensor name -> (type, number of axes)."""
    with safe_open(path, "pt") as file:
        pieces = {name: file.get_slice(name) for name in file.keys()}
        return {name: (piece.get_dtype(), len(piece.get_shape())) for name, piece in pieces.items()}


def test_golden_checkpoint_gives_the_golden_form(nano, golden_trace, tmp_path, nano_folder):
    """Same names, types and axes in every float32 trace. The draft trace may list its points in another order."""
    ids = golden_trace("decode.float32")[0]["input_ids"][:, :26]
    split = 23
    vision = golden_trace("vision_prefill.float32")[0]
    images = [[vision[f"image{i}.{part}"] for i in range(2)] for part in ("patches", "grid")]
    prompt = tiny.VisionPrompt(vision["input_ids"], vision["token_types"], *images)
    write_traces(nano, tmp_path, ids, split, prompt)
    golden_folder = nano_folder.parent / "traces"
    golden = json.loads((golden_folder / "manifest.json").read_text())
    ours = json.loads((tmp_path / "manifest.json").read_text())
    assert ours["format"] == golden["format"]
    assert set(ours["traces"]) == {name for name in golden["traces"] if name.endswith("float32")} | {
        "text_prefill.float32_no_fake_quant"}
    for name, facts in ours["traces"].items():
        expected = header(golden_folder / f"{name}.safetensors")
        if name == "decode.float32":
            expected = {key: value for key, value in expected.items()
                        if not key.startswith("step") or int(key[4:].split(".")[0]) < 26}
            assert facts["split"] == golden["traces"][name]["split"] == split
        elif name == "draft_step.float32":
            assert sorted(facts["points"]) == sorted(golden["traces"][name]["points"])
        else:
            assert facts["points"] == golden["traces"][name]["points"]
        assert header(tmp_path / f"{name}.safetensors") == expected
        assert facts["fake_quant"] == golden["traces"][name]["fake_quant"]


def test_model_without_drafts_and_images(tmp_path):
    checkpoint = load_checkpoint(tiny.make_tiny(tmp_path / "checkpoint", "two-layer"))
    prompts = tiny.tiny_prompts(checkpoint.config)
    write_traces(tmp_path / "checkpoint", tmp_path / "traces", prompts.input_ids, prompts.split, prompts.vision)
    manifest = json.loads((tmp_path / "traces" / "manifest.json").read_text())
    assert list(manifest["traces"]) == ["text_prefill.float32", "text_prefill.float32_no_fake_quant", "decode.float32"]
    with safe_open(tmp_path / "traces" / "decode.float32.safetensors", "np") as file:
        assert {name.split(".")[-1] for name in file.keys()} == {"input_ids", "logits"}
        last = file.get_tensor("step32.logits")
    expected = oracle_forward(checkpoint, prompts.input_ids)["logits"][:, 32]
    np.testing.assert_array_equal(last, expected.astype(np.float32))


def test_bad_split_is_explained(tmp_path, nano):
    with pytest.raises(ValueError, match="split"):
        write_traces(nano, tmp_path, np.zeros((1, 4), int), 4)
