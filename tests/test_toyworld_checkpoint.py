"""The bundled trained checkpoint: it answers, it equals the float64 oracles, and decoding is as exact on it as on random weights."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

import inference
from inference.decoding import Settings, generate, resume
from inference.generate import BUNDLED, main
from reference.oracles.checkpoint import load_checkpoint
from reference.oracles.write import write_traces
from reference.toyworld.corpus import episode, load_tokenizer
from reference.verify import verify

ANSWERS = {"example.txt": ["In the river.", "Code of Emil Pratt: soft clock."],
           "multi-turn.json": ["Finn keeps the big ladder in the well.</think>In the well."],
           "tools.json": ["Here it is.</think>In the barn."], "image.json": ["A red circle."]}


def completions(capsys, *arguments: str) -> list[dict]:
    assert main(["--temperature", "0", "--max-new-tokens", "40", "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", list(ANSWERS))
def test_examples_are_answered(capsys, name) -> None:
    found = [record["text"] for record in completions(capsys, "--input-file", name)]
    assert len(found) == len(ANSWERS[name])
    for text, wanted in zip(found, ANSWERS[name]):
        assert text.startswith(wanted), text


def test_equals_the_oracles(tmp_path) -> None:
    tokenizer = load_tokenizer()
    ids = np.array([episode(seed, 128, "test", tokenizer, kind="text").ids[:50] for seed in (1, 2)], dtype=np.int64)
    write_traces(load_checkpoint(BUNDLED), tmp_path, ids, 44, None)
    verdicts = verify(BUNDLED, tmp_path)
    assert len(verdicts) == 4 and all(verdict.code == 0 for verdict in verdicts), verdicts


def test_drafts_change_speed_and_not_text(capsys) -> None:
    """In float32: here the corpus ends half of its sentences with a newline, and one row and six round apart in BF16."""
    prompt = "Mira keeps the brass key in the barn. The password of Tom is river seven. List: barn mill inn cave. Copy:"
    plain, drafted = (completions(capsys, "--raw", "--numerics", "float32", "--prompt", prompt, option)[0]
                      for option in ("--no-spec", "--spec"))
    assert plain["completion_ids"] == drafted["completion_ids"] and plain["text"].startswith(" barn mill inn cave.")


def test_steps_equal_one_call() -> None:
    model = inference.load(BUNDLED, numerics="float32", fake_quant=False)
    ids = torch.tensor([episode(7, 160, "test", load_tokenizer(), kind="text").ids])
    whole = model(ids, model.new_cache(1)).logits
    cache = model.new_cache(1)
    parts = torch.cat([model(part, cache).logits for part in ids.split((90, 1, 30, 39), dim=1)], dim=1)
    assert (whole - parts).norm() / whole.norm() < 2e-5


def test_every_way_of_decoding_gives_the_same_text(tmp_path) -> None:
    """A batch, chunks, the exact short prefill, drafts, and a run that is saved and resumed halfway."""
    model = inference.load(BUNDLED, numerics="float32", fake_quant=False)
    prompts = [episode(seed, length, "test", load_tokenizer(), kind="text").ids for seed, length in ((1, 128), (2, 200), (3, 300))]
    plain = Settings(max_new_tokens=16, stop_ids=())
    wanted = [tokens_of(model, [prompt], plain)[0] for prompt in prompts]
    assert len({tuple(text) for text in wanted}) == 3
    assert tokens_of(model, prompts, plain) == wanted
    for changed in ({"chunk_size": 37}, {"prefill": "halo", "chunk_size": 50}, {"speculate": True}):
        assert tokens_of(model, prompts, dataclasses.replace(plain, **changed)) == wanted, changed
    run = generate(model, prompts, dataclasses.replace(plain, speculate=True))
    for _ in range(7):
        next(run)
    assert 0 < sum(map(len, run.tokens)) < 48
    run.save(tmp_path / "run")
    resumed = resume(model, tmp_path / "run")
    for _ in resumed:
        pass
    assert resumed.tokens == wanted


def tokens_of(model: inference.Model, prompts: list[list[int]], settings: Settings) -> list[list[int]]:
    run = generate(model, prompts, settings)
    for _ in run:
        pass
    return run.tokens


def test_packed_caches_hold_the_same_rows() -> None:
    model = inference.load(BUNDLED)
    ids = torch.tensor([episode(4, 200, "test", load_tokenizer(), kind="text").ids])
    logits = []
    for kind in ("bf16", "packed"):
        cache = model.new_cache(1, kind=kind)
        logits.append(torch.cat([model(part, cache).logits for part in ids.split((180, 1, 19), dim=1)], dim=1))
    assert torch.equal(*logits)


def test_is_small() -> None:
    files = list(BUNDLED.iterdir())
    assert sum(path.stat().st_size for path in files) < 16e6 and max(path.stat().st_size for path in files) < 5e6
