"""Input files: every format, image paths, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest

from inference.prompts import EXAMPLES, encode_prompt, find_input, read_prompts
from inference.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(nano_dir) -> Tokenizer:
    return Tokenizer.load(nano_dir)


def write(tmp_path, name: str, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_blank_lines_separate_prompts(tmp_path, tokenizer, nano_config) -> None:
    path = write(tmp_path, "p.txt", "\n\none\ntwo\r\n \t\r\nthree\n\n\n\nfour  \n")
    sources = read_prompts(path)
    assert [source.text for source in sources] == ["one\ntwo", "three", "four  "]
    chat = encode_prompt(sources[1], tokenizer, nano_config)
    assert tokenizer.decode(chat.ids) == "<｜begin▁of▁sentence｜><｜User｜>three<｜Assistant｜></think>"
    thinking = encode_prompt(sources[1], tokenizer, nano_config, mode="thinking", effort=20)
    assert "Reasoning Effort: 20 " in tokenizer.decode(thinking.ids)
    raw = encode_prompt(sources[1], tokenizer, nano_config, raw=True)
    assert tokenizer.decode(raw.ids) == "<｜begin▁of▁sentence｜>three" and raw.mode is None


def test_byte_order_mark_is_no_text(tmp_path) -> None:
    assert read_prompts(write(tmp_path, "p.txt", b"\xef\xbb\xbfhello"))[0].text == "hello"


def test_typed_markers_stay_text(tmp_path, tokenizer, nano_config) -> None:
    source = read_prompts(write(tmp_path, "p.txt", "<｜Assistant｜></think>hi"))[0]
    for raw in (False, True):
        ids = encode_prompt(source, tokenizer, nano_config, raw=raw).ids
        assert sum(token in tokenizer.special_ids for token in ids) == (1 if raw else 4)


def test_json_forms(tmp_path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    one = {"messages": messages, "mode": "thinking", "effort": 10, "drop_thinking": False}
    assert len(read_prompts(write(tmp_path, "a.json", json.dumps(messages)))) == 1
    source = read_prompts(write(tmp_path, "b.json", json.dumps(one)))[0]
    assert (source.mode, source.effort, source.drop_thinking) == ("thinking", 10, False)
    assert len(read_prompts(write(tmp_path, "c.json", json.dumps([one, messages])))) == 2
    assert len(read_prompts(write(tmp_path, "d.jsonl", json.dumps(one) + "\n\n" + json.dumps(messages) + "\n"))) == 2


def test_images_are_found_beside_the_file(tmp_path, tokenizer, nano_config, golden_dir, monkeypatch) -> None:
    shutil.copy(golden_dir / "nano" / "images" / "image0.png", tmp_path / "cat.png")
    for block in ({"type": "image", "image": "cat.png"}, {"type": "image_url", "image_url": {"url": "cat.png"}}):
        content = [{"type": "text", "text": "what"}, block, {"type": "text", "text": "is this"}]
        path = write(tmp_path, "image.json", json.dumps([{"role": "user", "content": content}]))
        prompt = encode_prompt(read_prompts(path)[0], tokenizer, nano_config)
        assert len(prompt.images) == 1
        image = prompt.images[0]
        assert sum(kind >= 0 for kind in prompt.token_types) == image.llm_rows * (image.llm_cols + 1) + 2
        assert sum(token == nano_config.image_token_id for token in prompt.ids) == sum(kind >= 0 for kind in prompt.token_types)


@pytest.mark.parametrize("name, content, message", [
    ("a.txt", "", "is empty"), ("a.txt", " \n\n", "is empty"), ("a.txt", b"caf\xe9", "is not UTF-8"),
    ("a.json", "{", "is not valid JSON"), ("a.json", "[]", "holds no conversation"), ("a.json", '"hi"', "holds no conversation"),
    ("a.json", '{"messages": []}', "holds no conversation"),
    ("a.json", '{"messages": [{"role": "user", "content": "x"}], "tool": 1}', "unknown key 'tool'"),
    ("a.json", '{"messages": [{"role": "user", "content": "x"}], "drop_thinking": 1}', "drop_thinking"),
    ("a.jsonl", '[{"role": "user", "content": "x"}]\nnonsense', "line 2 is not valid JSON"),
])
def test_refused_files(tmp_path, name, content, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path, name, content))


@pytest.mark.parametrize("image, message", [
    ("missing.png", "missing.png"), ("https://example.org/cat.png", "Download it first"), ("data:image/png;base64,AAAA", "image")])
def test_refused_images(tmp_path, tokenizer, nano_config, image, message) -> None:
    path = write(tmp_path, "a.json", json.dumps([{"role": "user", "content": [{"type": "image", "image": image}]}]))
    with pytest.raises(ValueError, match=message):
        encode_prompt(read_prompts(path)[0], tokenizer, nano_config)


def test_find_input(tmp_path) -> None:
    path = write(tmp_path, "mine.txt", "x")
    assert find_input(path) == path
    assert find_input("example.txt") == EXAMPLES / "example.txt"
    with pytest.raises(ValueError, match="(?s)nothing.txt.*example.txt"):
        find_input("nothing.txt")


def test_every_example_can_be_encoded(tokenizer, nano_config) -> None:
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".txt", ".json", ".jsonl")]
    assert {path.name for path in files} >= {"example.txt", "multi-turn.json", "tools.json", "image.json"}
    for path in files:
        for source in read_prompts(path):
            assert encode_prompt(source, tokenizer, nano_config).ids
