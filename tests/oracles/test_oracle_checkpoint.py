"""Reading the publisher's layout: golden bytes, agreement with torch's own types, errors."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open

from reference.oracles.checkpoint import dequantize, load_checkpoint


def test_golden_bytes_of_the_released_weights():
    """official: layer 0 of the published files, wkv (FP8, scale byte 0x73) and expert 0 w1 (FP4, scale byte 0x78)."""
    codes = np.zeros((1, 32), np.uint8)
    codes[0, :8] = list(bytes.fromhex("d871f2797069f0e5"))
    values = dequantize("layers.0.attn.wkv.weight", "F8_E4M3", codes, np.array([[0x73]], np.uint8))
    assert values[0, :8].tolist() == [
        -0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :8] = list(bytes.fromhex("a0a8ec4aadaf42aa"))
    values = dequantize("layers.0.ffn.experts.0.w1.weight", "I8", packed, np.array([[0x78]], np.uint8))
    assert (values[0, :16] * 128).tolist() == [0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1]


def test_every_fp8_tensor_agrees_with_torch(nano, nano_folder):
    checked = 0
    for path in nano_folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if tensor.dtype == torch.float8_e4m3fn:
                    scale = file.get_tensor(name.replace(".weight", ".scale")).float()
                    rows = 1 if name.endswith("engram.embed.weight") else 32
                    factors = scale.repeat_interleave(rows, 0).repeat_interleave(32, 1)
                    expected = tensor.float() * factors[: tensor.shape[0], : tensor.shape[1]]
                    np.testing.assert_array_equal(nano.weights[name], expected.bfloat16().double().numpy())
                    checked += 1
                elif tensor.dtype in (torch.bfloat16, torch.float32):
                    np.testing.assert_array_equal(nano.weights[name], tensor.double().numpy())
    assert checked > 50


def test_wrong_class_count_is_an_error(nano_folder, tmp_path):
    folder = shutil.copytree(nano_folder, tmp_path / "checkpoint", copy_function=shutil.copyfile)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="639 classes, tokenizer.json gives 638"):
        load_checkpoint(folder)


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        load_checkpoint(tmp_path)
