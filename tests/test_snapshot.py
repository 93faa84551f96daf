"""Leaving and coming back: snapshots on disk, kept states in memory, rollback where nothing is lost, errors elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inference
from inference import decoding, snapshot
from inference.decoding import Settings
from inference.sampling import Sampling
from reference.metrics import relative_l2
from tests.test_decoding_batch import state_tensors

ROOT = Path(__file__).parent.parent
SETTINGS = Settings(max_new_tokens=11, sampling=Sampling(0.9, 0.95), speculate=True, stop_ids=())
PROMPTS = [[100, 101, 102, 103, 104], [200] * 19]


def started(model, steps: int = 9) -> decoding.Generation:
    run = decoding.generate(model, PROMPTS, SETTINGS, torch.Generator().manual_seed(3))
    for _ in range(steps):
        next(run)
    return run


def test_another_process_continues_with_the_same_bits(nano, nano_dir, tmp_path) -> None:
    """Sampling with drafts, two rows: tokens, statistics and the logits of a later call are equal."""
    run = started(nano)
    run.save(tmp_path / "run")
    program = (
        "import json, sys, torch; torch.set_num_threads(1); import inference; from inference import decoding\n"
        f"model = inference.load({str(nano_dir)!r}, numerics='float32', weights='packed')\n"
        f"run = decoding.resume(model, {str(tmp_path / 'run')!r})\n"
        "rest = list(run)\n"
        "with torch.no_grad(): logits = model(torch.tensor([[30, 31], [32, 33]]), run.cache).logits\n"
        f"torch.save({{'tokens': run.tokens, 'rounds': len(run.rounds), 'logits': logits}}, {str(tmp_path / 'out.pt')!r})\n")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    for _ in run:
        pass
    there = torch.load(tmp_path / "out.pt")
    assert there["tokens"] == run.tokens and all(len(tokens) == 11 for tokens in run.tokens)
    assert there["rounds"] == len(run.rounds)
    assert torch.equal(there["logits"], nano(torch.tensor([[30, 31], [32, 33]]), run.cache).logits)


def test_every_tensor_comes_back(nano, nano_plain, tmp_path) -> None:
    """Packed and plain caches, rows of different lengths, an open group, a prefill that skipped rows."""
    for model, kind in ((nano, "packed"), (nano, "bf16"), (nano_plain, "bf16")):
        cache = model.new_cache(2, kind)
        prompts = [decoding.Prompt(list(range(100, 121)), None), decoding.Prompt(list(range(300, 312)), None)]
        decoding.prefill(model, prompts, cache, "replay", chunk_size=5)
        snapshot.save(tmp_path / "cache", model, cache, {"note": "x"}, {"more": torch.arange(3)})
        loaded, extra, tensors = snapshot.load(tmp_path / "cache", model)
        assert extra == {"note": "x"} and tensors["more"].tolist() == [0, 1, 2] and loaded.kind == kind
        assert loaded.lengths == (21, 12) and loaded.window_starts(7) == cache.window_starts(7) == (13, 4)
        for row in range(2):
            wanted, found = state_tensors(cache, row), state_tensors(loaded, row)
            assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
        ids = torch.tensor([[50, 51], [52, 53]])
        assert torch.equal(model(ids, cache).logits, model(ids, loaded).logits)
        model(torch.arange(400, 440).expand(2, -1), loaded)  # and it can grow


def test_saving_over_an_older_snapshot(nano, tmp_path) -> None:
    run = started(nano, 4)
    run.save(tmp_path / "run")
    next(run)
    run.save(tmp_path / "run")
    assert decoding.resume(nano, tmp_path / "run").tokens == run.tokens
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="is no snapshot"):
        run.save(tmp_path / "other")


def test_what_does_not_belong_here_is_refused(nano, nano_plain, nano_dir, golden_dir, tmp_path) -> None:
    folder = tmp_path / "run"
    started(nano, 4).save(folder)
    with pytest.raises(ValueError, match="another configuration"):
        decoding.resume(inference.load(golden_dir / "pico" / "checkpoint", numerics="float32"), folder)
    for model, what in ((nano_plain, "another fake quant"), (inference.load(nano_dir, numerics="native"), "another numerics"),
                        (inference.load(nano_dir, numerics="float32", as_published_index_keys=True), "as published")):
        with pytest.raises(ValueError, match=what):
            decoding.resume(model, folder)
    other = inference.load(nano_dir, numerics="float32")
    other.layers[3].ffn.experts[0].w2.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="another weights"):
        decoding.resume(other, folder)
    other = inference.load(nano_dir, numerics="float32")
    other.layers[1].attn_norm.weight.data[5] *= 2
    with pytest.raises(ValueError, match="another weights"):
        decoding.resume(other, folder)


def test_damage_is_refused(nano, tmp_path) -> None:
    for damage in ("cut", "changed", "json", "format", "absent", "no generation"):
        folder = tmp_path / damage.replace(" ", "_")
        started(nano, 4).save(folder)
        tensors, state = folder / "state.safetensors", folder / "state.json"
        data = tensors.read_bytes()
        if damage == "cut":
            tensors.write_bytes(data[:-1])
        elif damage == "changed":
            tensors.write_bytes(data[:-100] + bytes(100))
        elif damage == "json":
            state.write_text("{")
        elif damage == "absent":
            tensors.unlink()
        else:
            values = json.loads(state.read_text())
            values.update({"format": 99} if damage == "format" else {"extra": {}})
            state.write_text(json.dumps(values))
        with pytest.raises(ValueError, match="snapshot|no generation"):
            decoding.resume(nano, folder)
    with pytest.raises(ValueError, match="has not begun"):
        decoding.generate(nano, [[100]]).save(tmp_path / "early")


# --- in memory -------------------------------------------------------------------------------------------------


def test_a_kept_state_can_be_restored(nano) -> None:
    """Pitfall 49: continue with A, restore, continue with B: equals a fresh B. The rings wrap in between."""
    start, a, b = (torch.randint(8, 768, (1, count), generator=torch.Generator().manual_seed(count)) for count in (21, 30, 17))
    cache = nano.new_cache()
    nano(start, cache)
    kept = cache.state
    nano(a, cache)
    cache.restore(kept)
    assert cache.lengths == (21,)
    branch = nano(b, cache).logits
    fresh = nano.new_cache()
    nano(start, fresh)
    assert torch.equal(branch, nano(b, fresh).logits)
    cache.restore(kept)  # and once more
    assert torch.equal(nano(b, cache).logits, branch)


def test_states_that_cannot_be_restored_are_refused(nano) -> None:
    cache, other = nano.new_cache(), nano.new_cache()
    ids = torch.arange(100, 107).unsqueeze(0)
    nano(ids, cache)
    nano(ids, other)
    with pytest.raises(ValueError, match="another cache"):
        cache.restore(other.state)
    kept = cache.state
    cache.rollback((4,))
    nano(ids, cache)  # overwrites rows 4 .. 6 of what was kept
    with pytest.raises(ValueError, match="went back to"):
        cache.restore(kept)
    assert cache.lengths == (11,)


@pytest.mark.parametrize("length", range(1, 30))
def test_rollback_is_exact_or_refused(nano_plain, length) -> None:
    """Every length, every target: where `rollback` agrees, the rest of the text is that of never having gone further."""
    ids = torch.randint(8, 768, (1, length), generator=torch.Generator().manual_seed(1))
    after = torch.randint(8, 768, (1, 3), generator=torch.Generator().manual_seed(2))
    legal = []
    for target in range(max(0, length - 9), length + 1):
        cache = nano_plain.new_cache()
        nano_plain(ids, cache)
        before = cache.state
        try:
            cache.rollback((target,))
        except ValueError as error:
            assert "no longer has position" in str(error) and cache.state is before
            continue
        legal.append(target)
        if target == length or (length > 10 and length % 5):
            continue
        fresh = nano_plain.new_cache()
        if target:
            nano_plain(ids[:, :target], fresh)
        for step in (nano_plain.draft(after[:, 0], cache).logits, nano_plain(after, cache).logits):
            wanted = nano_plain.draft(after[:, 0], fresh).logits if step.shape[1] == 5 else nano_plain(after, fresh).logits
            assert relative_l2(step, wanted) < 2e-5
    if length <= 8:  # nothing has left a ring of 8 slots; an odd target needs the open group's token
        assert legal == [target for target in range(max(0, length - 9), length + 1) if target % 2 == 0 or target >= length - 1]
    else:  # the draft rings need all 8 rows
        assert legal == [length]


def test_rollback_without_draft_stages_reaches_one_token_further(nano_dir) -> None:
    """The backbone's windows need W - 1 rows, so one token can be taken back at any length."""
    model = inference.load(nano_dir, numerics="float32", fake_quant=False)
    model.mtp, model.plan = torch.nn.ModuleList(), model.plan[:10]
    ids, after = torch.randint(8, 768, (1, 24)), torch.randint(8, 768, (1, 3))
    for length in (23, 24):
        cache, fresh = model.new_cache(), model.new_cache()
        model(ids[:, :length], cache)
        with pytest.raises(ValueError, match="no longer has position"):
            cache.rollback((length - 2,))
        cache.rollback((length - 1,))
        model(ids[:, :length - 1], fresh)
        assert relative_l2(model(after, cache).logits, model(after, fresh).logits) < 2e-5


def test_rollbacks_without_meaning_are_refused(nano) -> None:
    cache = nano.new_cache(2)
    nano(torch.arange(100, 112).view(2, 6), cache)
    for lengths in ((7, 6), (6,), (-1, 6)):
        with pytest.raises(ValueError, match="one length per sequence"):
            cache.rollback(lengths)
    cache.rollback((4, 6))
    assert cache.lengths == (4, 6)
