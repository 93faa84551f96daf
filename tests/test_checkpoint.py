"""Strict loading of the native layout: whatever is wrong with the files is named, together, before anything is computed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import inference
from inference.checkpoint import CheckpointError
from inference.quant import PackedWeight

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(nano_dir, tmp_path) -> Path:
    """A copy of the nano checkpoint that a test may damage."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(nano_dir, folder)
    return folder


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit(folder: Path, name: str, change) -> None:
    """Rewrite the shard that holds `name` after `change(tensors)`; the index follows."""
    path = shard_of(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    index = json.loads((folder / INDEX).read_text())
    weight_map = {key: shard for key, shard in index["weight_map"].items() if shard != path.name}
    index["weight_map"] = weight_map | {key: path.name for key in tensors}
    (folder / INDEX).write_text(json.dumps(index))


def failure(folder: Path, **options) -> str:
    with pytest.raises(ValueError) as caught:
        inference.load(folder, **options)
    return str(caught.value)


def test_loads_every_tensor(nano, nano_dir) -> None:
    assert nano.load_report.tensors == len(json.loads((nano_dir / INDEX).read_text())["weight_map"]) == 1016
    assert nano.load_report.bytes == 4884388
    assert not any(parameter.is_meta for parameter in nano.parameters())


def test_names_are_the_checkpoints(nano, nano_dir) -> None:
    stored = {name for name in json.loads((nano_dir / INDEX).read_text())["weight_map"] if not name.endswith(".scale")}
    assert {name for name, _ in nano.named_parameters()} == stored


def test_single_file(copy) -> None:
    tensors = {}
    for path in copy.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (copy / INDEX).unlink()
    save_file(tensors, copy / "model.safetensors")
    assert inference.load(copy).load_report.tensors == 1016


WEIGHT = "layers.3.ffn.experts.2.w1.weight"
DAMAGE = {
    "missing weight": (lambda t: t.pop(WEIGHT), WEIGHT, ["layers.3.ffn.experts.2.w1.weight"]),
    "missing scale": (lambda t: t.pop("layers.3.attn.wkv.scale"), "layers.3.attn.wkv.scale", ["layers.3.attn.wkv"]),
    "missing norm": (lambda t: t.pop("layers.3.attn_norm.weight"), "layers.3.attn_norm.weight", ["layers.3.attn_norm.weight"]),
    "unexpected": (lambda t: t.update({"layers.3.attn.wq.weight": torch.zeros(2, 2)}), WEIGHT, ["layers.3.attn.wq.weight"]),
    "several": (lambda t: (t.pop(WEIGHT), t.pop("layers.3.attn.attn_sink"), t.update(extra=torch.zeros(1))), WEIGHT,
                ["layers.3.ffn.experts.2.w1.weight", "layers.3.attn.attn_sink", "extra"]),
    "mis-shaped": (lambda t: t.update({"layers.3.attn.kv_norm.weight": torch.ones(32, dtype=torch.bfloat16)}),
                   "layers.3.attn.kv_norm.weight", ["layers.3.attn.kv_norm.weight", "[32]", "[64]"]),
    "transposed scale": (lambda t: t.update({"layers.3.attn.wkv.scale": t["layers.3.attn.wkv.scale"].view(torch.uint8).T
                                             .contiguous().view(torch.float8_e8m0fnu)}), "layers.3.attn.wkv.scale",
                         ["layers.3.attn.wkv.weight", "[4, 2]"]),
    "half width": (lambda t: t.update({WEIGHT: t[WEIGHT][:, :32].contiguous()}), WEIGHT, [WEIGHT, "[64, 32]"]),
    "wrong dtype": (lambda t: t.update({"layers.3.hc_attn_fn": t["layers.3.hc_attn_fn"].to(torch.bfloat16)}),
                    "layers.3.hc_attn_fn", ["layers.3.hc_attn_fn", "BF16", "F32"]),
    "float scale": (lambda t: t.update({"layers.3.attn.wkv.scale": torch.ones(2, 4)}), "layers.3.attn.wkv.scale",
                    ["layers.3.attn.wkv", "F32"]),
}


@pytest.mark.parametrize("change, name, wanted", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(copy, change, name, wanted) -> None:
    """Pitfalls 45, 41: delete, add or reshape any tensor: one error that names all of them."""
    edit(copy, name, change)
    text = failure(copy)
    for part in wanted:
        assert part in text


def test_error_carries_every_problem(copy) -> None:
    edit(copy, WEIGHT, lambda t: [t.pop(name) for name in list(t) if ".experts." in name and name.endswith("w2.weight")])
    with pytest.raises(CheckpointError) as caught:
        inference.load(copy)
    removed = sum(".experts." in problem and "w2" in problem for problem in caught.value.problems)
    assert removed >= 8


def test_truncated_shard(copy) -> None:
    """Pitfall 46: found from header and size, whatever tensor lies at the end."""
    path = shard_of(copy, WEIGHT)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    text = failure(copy)
    assert path.name in text and "truncated" in text
    path.write_bytes(data + b"\0")
    assert path.name in failure(copy)
    path.write_bytes(data[:5])
    assert path.name in failure(copy)


def test_absent_shard(copy) -> None:
    path = shard_of(copy, WEIGHT)
    path.unlink()
    text = failure(copy)
    assert path.name in text and "absent" in text


def test_tensor_in_two_shards(copy) -> None:
    other = sorted(copy.glob("*.safetensors"))[0]
    assert other != shard_of(copy, "norm.weight")
    tensors = load_file(other)
    save_file(tensors | {"norm.weight": torch.ones(128, dtype=torch.bfloat16)}, other)
    text = failure(copy)
    assert "norm.weight" in text and "two shards" in text


def test_index_that_lies(copy) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["layers.0.attn.wq.weight"] = "model-00002-of-00006.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    assert "layers.0.attn.wq.weight" in failure(copy)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../x.safetensors"}}',
                                  '{"weight_map": {"a": "x", "a": "y"}}'])
def test_unreadable_index(copy, text) -> None:
    (copy / INDEX).write_text(text)
    assert INDEX in failure(copy)


def test_unreadable_header(copy) -> None:
    path = shard_of(copy, WEIGHT)
    path.write_bytes(struct.pack("<Q", 10) + b"not json!!" + bytes(10))
    assert path.name in failure(copy)


def test_nan_scale_and_nan_weights(copy) -> None:
    """Pitfall 39: E8M0 byte 255 is NaN and refused, as are NaN codes and values; all of them are listed."""
    def poison(tensors) -> None:
        for name, value in (("layers.3.attn.wkv.scale", 255), ("layers.3.attn.wq_a.weight", 0x7F)):
            raw = tensors[name].view(torch.uint8).clone()
            raw[1, 0] = value
            tensors[name] = raw.view(tensors[name].dtype)
        tensors["layers.3.hc_ffn_base"] = tensors["layers.3.hc_ffn_base"].clone().index_fill(0, torch.tensor(3), float("nan"))

    edit(copy, WEIGHT, poison)
    text = failure(copy)
    for name in ("layers.3.attn.wkv.scale", "layers.3.attn.wq_a.weight", "layers.3.hc_ffn_base"):
        assert name in text


def test_no_folder_and_no_checkpoint(tmp_path) -> None:
    assert "is not a folder" in failure(tmp_path / "nothing")
    assert "neither" in failure(tmp_path)


def test_vocabulary_mismatches(copy) -> None:
    """Pitfall 34: another tokenizer is an error that names it, never a silent rehash."""
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] = 637
    (copy / "config.json").write_text(json.dumps(config))
    text = failure(copy)
    assert "638" in text and "637" in text and "tokenizer" in text
    config["text_config"] |= {"engram_compressed_vocab_size": 638, "vocab_size": 800}
    (copy / "config.json").write_text(json.dumps(config))
    text = failure(copy)
    assert "800" in text and "768" in text and "tokenizer" in text


def test_engram_rows_must_be_the_sum_of_the_primes(copy) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["engram_num_embeddings"] = [661, 864]
    (copy / "config.json").write_text(json.dumps(config))
    assert "primes" in failure(copy)


def test_packed_equals_resident(nano_dir, traces_dir) -> None:
    ids = load_file(traces_dir / "text_prefill.float32.safetensors")["input_ids"]
    resident, packed = (inference.load(nano_dir, weights=mode) for mode in ("resident", "packed"))
    assert isinstance(packed.layers[0].attn.wkv.weight, PackedWeight)
    assert torch.equal(resident(ids, resident.new_cache()).logits, packed(ids, packed.new_cache()).logits)


@pytest.mark.parametrize("options, message", [
    ({"numerics": "fp16"}, "native, dequantized, float32"),
    ({"weights": "fast"}, "weights must be one of"),
    ({"device": "gpu0"}, "device"),
])
def test_bad_options(nano_dir, options, message) -> None:
    assert message in failure(nano_dir, **options)
