"""The command line: output, repeatability, and thirty kinds of bad input, each with a clear message and exit code 3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.generate import main
from reference.quality import NANO

QUICK = ["--max-new-tokens", "3"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_example_file(capsys) -> None:
    code, out, err = run(capsys, "--input-file", "example.txt", *QUICK)
    assert code == 0 and err == ""
    assert out.count("--- completion") == 2 and "<｜User｜>What is the code of Emil Pratt?<｜Assistant｜></think>" in out
    assert out.count("tok/s") == 4 and out.count("cache ") == 2 and "peak memory" in out


@pytest.mark.parametrize("name", ["multi-turn.json", "tools.json", "image.json"])
def test_the_other_examples(capsys, name) -> None:
    code, out, err = run(capsys, "--input-file", name, *QUICK)
    assert code == 0 and err == "" and "3 new at" in out


def test_same_seed_same_text(capsys) -> None:
    def ids(*arguments: str) -> list[int]:
        code, out, _ = run(capsys, "--prompt", "hello there", "--max-new-tokens", "12", "--json", *arguments)
        assert code == 0
        return json.loads(out)["completion_ids"]

    assert ids("--seed", "7") == ids("--seed", "7") != ids("--seed", "8")
    greedy = ids("--temperature", "0")
    assert greedy == ids("--temperature", "0", "--seed", "5")
    assert greedy == ids("--temperature", "0", "--weights", "packed")
    assert ids("--temperature", "0", "--numerics", "float32") == ids("--top-p", "1e-9", "--numerics", "float32")


def test_batches_and_drafts_change_no_text(capsys) -> None:
    """Alone or together, drafted or not, packed or plain: the greedy float32 text of every prompt is the same."""
    def texts(*arguments: str) -> list[list[int]]:
        code, out, _ = run(capsys, "--input-file", "example.txt", "--temperature", "0", "--numerics", "float32", "--json",
                           "--max-new-tokens", "6", *arguments)
        assert code == 0
        return [json.loads(line)["completion_ids"] for line in out.splitlines()]

    expected = texts("--no-spec")
    assert len(expected) == 2
    for arguments in (["--spec"], ["--batch-size", "2"], ["--no-spec", "--cache", "bf16", "--chunk", "5"],
                      ["--spec", "--confidence-threshold", "0.6", "--prefill", "halo"]):
        assert texts(*arguments) == expected, arguments


def test_the_approximate_prefill_says_so(capsys) -> None:
    code, out, _ = run(capsys, "--input-file", "example.txt", "--prefill", "replay", *QUICK)
    assert code == 0 and "prefill replay (approximate)" in out


def test_json_result(capsys) -> None:
    code, out, _ = run(capsys, "--prompt", "hi", "--json", *QUICK)
    result = json.loads(out)
    assert code == 0 and set(result) >= {"prompt_ids", "completion_ids", "text", "stats"}
    assert result["stats"]["completion_tokens"] == len(result["completion_ids"])
    assert ("message" in result) != ("message_error" in result)
    code, out, _ = run(capsys, "--prompt", "hi", "--raw", "--json", *QUICK)
    assert "message" not in json.loads(out)


def test_stops_at_the_end_marker(capsys, tmp_path) -> None:
    """A checkpoint whose head always prefers the end marker stops after one token."""
    folder = copy_of_nano(tmp_path)
    edit(folder, "head.weight", lambda t: torch.zeros_like(t))
    code, out, _ = run(capsys, "--ckpt", folder, "--prompt", "hi", "--temperature", "0", "--json")
    result = json.loads(out)
    assert code == 0 and result["completion_ids"][0] == 0  # all logits equal: the lowest id
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0, "bos_token_id": 1}))
    result = json.loads(run(capsys, "--ckpt", folder, "--prompt", "hi", "--temperature", "0", "--json")[1])
    assert result["completion_ids"] == [0] and result["stats"]["stopped_by"] == "end marker"


def test_stops_at_the_context_limit(capsys, tmp_path) -> None:
    folder = copy_of_nano(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 12
    (folder / "config.json").write_text(json.dumps(config))
    code, out, err = run(capsys, "--ckpt", folder, "--prompt", "hi", "--json")
    stats = json.loads(out)["stats"]
    assert code == 0 and stats["stopped_by"] == "context limit"
    assert stats["prompt_tokens"] + stats["completion_tokens"] == 13  # the last one needs no position of its own
    code, _, err = run(capsys, "--ckpt", folder, "--prompt", "a much longer prompt than that, with many words")
    assert code == 3 and "max_position_embeddings is 12" in err


def copy_of_nano(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    if not folder.exists():
        shutil.copytree(NANO, folder)
    return folder


def edit(folder: Path, name: str, change) -> None:
    path = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)


def damaged(tmp_path: Path, kind: str) -> list:
    """Arguments of a run with a damaged checkpoint."""
    folder = copy_of_nano(tmp_path)
    config_path, shard = folder / "config.json", folder / "model-00002-of-00006.safetensors"
    config = json.loads(config_path.read_text())
    text = config["text_config"]
    if kind == "no config":
        config_path.unlink()
        return ["--ckpt", folder]
    if kind == "broken config":
        config_path.write_text("{")
        return ["--ckpt", folder]
    if kind == "unknown config key":
        text["hash_layers"] = 3
    elif kind == "ratio list too short":
        text["compress_ratios"] = text["compress_ratios"][:-1]
    elif kind == "source layer missing":
        text["kv_source_layer_ids"], text["index_source_layer_ids"] = [4, 6], [4, 6, 8]
    elif kind == "vocabulary mismatch":
        text["vocab_size"] = 1000
    elif kind == "class count":
        text["engram_compressed_vocab_size"] = 600
    elif kind == "shape mismatch":
        text["moe_intermediate_size"] = 96
    elif kind == "absent shard":
        shard.unlink()
    elif kind == "truncated shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "NaN scale":
        edit(folder, "layers.2.attn.wkv.scale", lambda t: torch.full_like(t.view(torch.uint8), 255).view(t.dtype))
    elif kind == "broken tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()  # the packaged one has another vocabulary
    config_path.write_text(json.dumps(config))
    return ["--ckpt", folder]


BAD_CHECKPOINTS = {
    "no config": "config.json does not exist", "broken config": "not readable JSON",
    "unknown config key": "text_config.hash_layers: unknown key", "ratio list too short": "compress_ratios has 12 entries",
    "source layer missing": "no source layer", "vocabulary mismatch": "vocab_size 1000", "class count": "600 classes",
    "shape mismatch": "layers.0.ffn.experts.0.w1.weight", "absent shard": "absent", "truncated shard": "truncated",
    "NaN scale": "layers.2.attn.wkv.scale", "broken tokenizer": "tokenizer", "no tokenizer": "129280",
}


@pytest.mark.parametrize("kind, message", BAD_CHECKPOINTS.items(), ids=BAD_CHECKPOINTS.keys())
def test_bad_checkpoints(capsys, tmp_path, kind, message) -> None:
    code, out, err = run(capsys, *damaged(tmp_path, kind), "--prompt", "hi", *QUICK)
    assert code == 3 and message in err and "Traceback" not in err
    assert "completion" not in out


BAD_ARGUMENTS = {
    "no such file": (["--input-file", "nowhere.txt"], "no file nowhere.txt"),
    "no such checkpoint": (["--ckpt", "/nowhere", "--prompt", "x"], "not a folder"),
    "negative temperature": (["--prompt", "x", "--temperature", "-1"], "temperature"),
    "NaN temperature": (["--prompt", "x", "--temperature", "nan"], "temperature"),
    "top-p of zero": (["--prompt", "x", "--top-p", "0"], "top_p"),
    "top-p above one": (["--prompt", "x", "--top-p", "1.5"], "top_p"),
    "no new tokens": (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
    "not a number": (["--prompt", "x", "--seed", "abc"], "--seed"),
    "negative seed": (["--prompt", "x", "--seed", "-4"], "--seed"),
    "unknown numerics": (["--prompt", "x", "--numerics", "fp16"], "fp16"),
    "unknown device": (["--prompt", "x", "--device", "quantum"], "quantum"),
    "unknown flag": (["--prompt", "x", "--frobnicate"], "--frobnicate"),
    "empty prompt": (["--prompt", " "], "empty"),
    "two sources": (["--prompt", "x", "--input-file", "example.txt"], "not both"),
    "batch of none": (["--prompt", "x", "--batch-size", "0"], "--batch-size"),
    "chunk of none": (["--prompt", "x", "--chunk", "0"], "chunk_size"),
    "threshold above one": (["--prompt", "x", "--confidence-threshold", "1.5"], "confidence_threshold"),
    "packed without quantization": (["--prompt", "x", "--cache", "packed", "--no-fake-quant"], "--no-fake-quant"),
    "effort out of range": (["--prompt", "x", "--mode", "thinking", "--effort", "101"], "101"),
    "effort without a meaning": (["--prompt", "x", "--mode", "thinking", "--effort", "medium"], "medium"),
    "image marker in the text": (["--prompt", "look: <｜deepseek_image｜>"], "deepseek_image"),
}


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments(capsys, arguments, message) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 3 and message in err and "Traceback" not in err
    assert "completion" not in out


@pytest.mark.parametrize("content, message", [(b"", "is empty"), (b"\xff\xfe", "is not UTF-8"), (b"[", "is not valid JSON")])
def test_bad_input_files(capsys, tmp_path, content, message) -> None:
    path = tmp_path / ("a.json" if content == b"[" else "a.txt")
    path.write_bytes(content)
    code, _, err = run(capsys, "--input-file", path)
    assert code == 3 and message in err


def test_a_bad_last_prompt_costs_nothing(capsys, tmp_path) -> None:
    """All prompts are read before the first one runs."""
    path = tmp_path / "a.jsonl"
    path.write_text('[{"role": "user", "content": "fine"}]\n[{"role": "wizard", "content": "?"}]\n')
    code, out, err = run(capsys, "--input-file", path)
    assert code == 3 and "wizard" in err and "completion" not in out
