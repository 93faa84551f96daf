"""Training: every form it runs in gives the values and gradients of the plain one, and the exported model is the trained one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from PIL import Image

import inference
from inference.command import INTERRUPTED
from inference.context import Context
from inference.image_processor import process_image
from inference.kernel import sparse_attn
from inference.quant import fake_quant_fp4_e4m3, fake_quant_fp4_e8m0, fake_quant_fp8
from reference import train, training_weights
from reference.training_forms import grouped_routed, masked_attn, picture_rows, training_forms
from reference.training_weights import Masters, initial_values, stored_formats

pytestmark = pytest.mark.grad


@pytest.fixture(scope="module")
def float32_model(nano_dir):
    return inference.load(nano_dir, numerics="float32", fake_quant=False)


@pytest.fixture(scope="module")
def toy():
    """An untrained toy model with its masters, and a batch."""
    tokenizer = train.Tokenizer.load(train.CHECKPOINT)
    values = train.toy_config(tokenizer)
    config = train.Config.from_dict(values)
    model = train.build_model(config, tokenizer, torch.device("cpu"))
    masters = Masters(model, initial_values(model, 1), stored_formats(values))
    masters.publish()
    batch = train.make_batch(5, 2, 256, "train", tokenizer, config, ["picture", "text"])
    return model, masters, batch, values


def test_masked_attention_is_sparse_attention() -> None:
    torch.manual_seed(0)
    q, kv, sink = torch.randn(2, 9, 4, 32), torch.randn(2, 21, 32), torch.randn(4)
    indices = torch.stack([torch.randperm(21)[:7] for _ in range(18)]).view(2, 9, 7)
    indices[1, :, 3:] = -1
    for tensor in (q, kv, sink):
        tensor.requires_grad_(True)
    weight = torch.randn(2, 9, 4, 32)
    found = []
    for form in (sparse_attn, masked_attn):
        out = form(q, kv, sink, indices, 32**-0.5)
        found.append((out, *torch.autograd.grad((out * weight).sum(), (q, kv, sink))))
    for wanted, got in zip(*found):
        assert torch.allclose(wanted, got, atol=1e-5)


def test_grouped_experts_are_the_loop(float32_model) -> None:
    moe = float32_model.layers[3].ffn
    x = torch.randn(33, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    _, ids, weights = moe.gate(x, None)
    context = Context(float32_model.numerics, positions=torch.arange(33)[None], starts=(0,), counts=(33,))
    own = [moe.experts[2].w1.weight, moe.experts[5].w2.weight]
    for parameter in own:
        parameter.requires_grad_(True)
    found = []
    for form in (type(moe).routed, grouped_routed):
        y = form(moe, x, ids, weights, context)
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, *own), retain_graph=True)))
    for wanted, got in zip(*found):
        assert torch.allclose(wanted, got, rtol=1e-4, atol=1e-5)


def test_pictures_at_once_are_pictures_one_by_one(float32_model) -> None:
    image = process_image(Image.effect_noise((84, 126), 50).convert("RGB"), float32_model.config.vision_config)
    both = picture_rows(float32_model, torch.stack((image.patches, image.patches * 0.5)), image.patch_rows, image.patch_cols)
    assert torch.allclose(float32_model.image_rows(image), both[0], atol=1e-4)
    assert not torch.allclose(both[0], both[1], atol=1e-2)


@pytest.mark.parametrize("quantize", [fake_quant_fp8, fake_quant_fp4_e8m0, fake_quant_fp4_e4m3])
def test_gradients_pass_straight_through(quantize) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight = torch.randn(3, 64).to(torch.bfloat16)
    leaf = x.clone().requires_grad_(True)
    out = quantize(leaf)
    assert torch.equal(out, quantize(x)) and not torch.equal(out, x)
    assert torch.equal(torch.autograd.grad((out * weight).sum(), leaf)[0], weight)


def test_training_forward_is_the_models_forward(toy) -> None:
    """A packed batch with pictures, in training's forms and by the plain model: the trained weights predict the same."""
    model, batch = inference.load(train.CHECKPOINT), toy[2]
    assert len(batch.order) and bool((batch.types != train.TEXT).any())
    with torch.no_grad(), training_forms(model):
        found = train.forward(model, batch).logits
        wrong = train.forward(model, dataclasses.replace(batch, order=batch.order.flip(0))).logits
    with torch.no_grad():
        text = model(batch.ids[1:], model.new_cache(1)).logits
    # BF16 probabilities are rounded at another place, so near-ties may fall otherwise.
    assert (found[1:].argmax(-1) == text.argmax(-1)).to(torch.float32).mean() > 0.97
    assert (found[:1].argmax(-1) == wrong[:1].argmax(-1)).to(torch.float32).mean() < 0.97, "pictures are looked at"


def test_index_gradients_reach_index_weights_only(toy) -> None:
    model, masters, batch, _ = toy
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("mtp.") and not name.endswith(("gate.bias", "gate.bias_vl")))
    with training_forms(model):
        watch = train.IndexLoss(model, batch.real)
        output = train.forward(model, batch, watch)
        value = watch.value()
        index = {name: p for name, p in model.named_parameters() if ".indexer." in name}
        torch.autograd.backward(value, inputs=list(index.values()), retain_graph=True)
        reached = {name for name, p in index.items() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
        assert reached == set(index), "every index weight learns from the attention"
        loss = train.next_token_loss(output.logits, batch)
        gradients = torch.autograd.grad(loss, list(index.values()), allow_unused=True)
        assert all(gradient is None for gradient in gradients), "the selection passes no gradient on"
    assert 0 < float(value.detach()) < 5
    loads = watch.loads["layers.3.ffn"]
    image = batch.types != train.TEXT
    padding = ~batch.real
    assert padding.any() and bool((batch.ids[padding] == model.config.pad_token_id).all())
    assert not bool((batch.ids[~padding] == model.config.pad_token_id).any()), "and episodes hold no padding"
    assert loads.sum(1).tolist() == [int((batch.real & kind).sum()) * 4 for kind in (~image, image)], "padding is no load"
    assert image.any()
    before = masters.values["layers.3.ffn.gate.bias"].clone()
    train.balance(masters, watch.loads)
    moved = masters.values["layers.3.ffn.gate.bias"] - before
    assert moved[loads[0].argmax()] < 0 < moved[loads[0].argmin()]
    for parameter in model.parameters():
        parameter.grad = None


def test_smoke_run_learns_and_exports_what_was_trained(tmp_path) -> None:
    log = tmp_path / "log.jsonl"
    out, drafted = tmp_path / "backbone", tmp_path / "draft"
    assert train.main(["backbone", str(out), "--smoke", "--steps", "5", "--log", str(log), "--device", "cpu"]) == 0
    assert train.main(["draft", str(drafted), "--from", str(out), "--smoke", "--steps", "3", "--log", str(log),
                       "--device", "cpu"]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [record["loss"] for record in records if record["stage"] == "backbone"]
    assert losses[-1] < losses[0] - 0.5
    before, after = inference.load(out), inference.load(drafted)
    changed = {name for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters()) if not torch.equal(a, b)}
    assert changed and all(name.startswith("mtp.") for name in changed), "the draft stage leaves the backbone as it is"
    train.plot(log, tmp_path / "log.png")
    assert Image.open(tmp_path / "log.png").width > 800


def test_published_weights_survive_the_file(toy, tmp_path) -> None:
    """Rounding before the forward and rounding into the file are the same rounding."""
    model, masters, _, values = toy
    masters.publish()
    train.export(masters.values, masters.formats, values, train.CHECKPOINT / "tokenizer.json", tmp_path)
    loaded = dict(inference.load(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to(torch.float32), loaded[name].to(torch.float32)), name


def folder_content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_failed_export_leaves_the_old_checkpoint(toy, tmp_path, monkeypatch) -> None:
    _, masters, _, values = toy
    tokenizer = train.CHECKPOINT / "tokenizer.json"
    (tmp_path / "model-00099-of-00099.safetensors").write_bytes(b"of an older checkpoint")
    train.export(masters.values, masters.formats, values, tokenizer, tmp_path)
    before = folder_content(tmp_path)
    assert not any("00099" in name or name.startswith(".") for name in before)
    written = []

    def full_disk(tensors, path) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path.write_bytes(b"half"))

    monkeypatch.setattr(training_weights, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        train.export(masters.values, masters.formats, values, tokenizer, tmp_path)
    assert folder_content(tmp_path) == before


@pytest.fixture
def quick(toy, monkeypatch):
    """Makes runs of `train.main` quick: the model exists, and steps are a function of their number, given by the test."""
    model, masters, batch, values = toy
    monkeypatch.setattr(train, "build_model", lambda *arguments: model)
    monkeypatch.setattr(train, "initial_values", lambda *arguments: masters.values)
    monkeypatch.setattr(train, "stored_formats", lambda *arguments: masters.formats)
    monkeypatch.setattr(train, "loader", lambda *arguments: iter(lambda: batch, None))

    def prepare(step) -> list[int]:
        done = []

        class Stub:
            def __init__(self, model, own, settings) -> None:
                self.masters = own

            def __call__(self, batch) -> dict[str, torch.Tensor]:
                done.append(len(done) + 1)
                return step(len(done), self.masters)

        monkeypatch.setattr(train, "Step", Stub)
        return done

    yield prepare
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def fine(number, masters) -> dict[str, torch.Tensor]:
    return {"loss": torch.tensor(1.0), "index": torch.tensor(1.0)}


@pytest.mark.parametrize("bad_step, steps, done", [(1, "6", 1), (2, "6", 3), (2, "2", 2)])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(quick, tmp_path, bad_step, steps, done) -> None:
    """Found at the reports (steps 1, 3, 6 ..) and at the end."""
    made = quick(lambda number, masters: {"loss": torch.tensor(float("nan") if number >= bad_step else 1.0)})
    (tmp_path / "config.json").write_text("the old checkpoint")
    with pytest.raises(ValueError, match="loss is nan.*--rate"):
        train.main(["backbone", str(tmp_path), "--smoke", "--steps", steps, "--report-every", "3", "--device", "cpu"])
    assert len(made) == done and folder_content(tmp_path) == {"config.json": b"the old checkpoint"}


def test_weights_that_are_not_finite_are_not_exported(quick, tmp_path) -> None:
    def spoil(number, masters) -> dict[str, torch.Tensor]:
        masters.values["norm.weight"].fill_(float("inf"))
        return fine(number, masters)

    quick(spoil)
    with pytest.raises(ValueError, match="1 of .* norm.weight"):
        train.main(["backbone", str(tmp_path), "--smoke", "--steps", "1", "--device", "cpu"])
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_the_run_early_and_exports(quick, tmp_path, capsys) -> None:
    def interrupted(number, masters) -> dict[str, torch.Tensor]:
        if number == stop:
            raise KeyboardInterrupt
        masters.values["norm.weight"].fill_(number)
        return fine(number, masters)

    stop = 3
    quick(interrupted)
    command = ["backbone", str(tmp_path), "--smoke", "--rate", "1e-30", "--device", "cpu"]
    assert train.main(command) == INTERRUPTED
    assert "stopped after step 2" in capsys.readouterr().err
    assert float(inference.load(tmp_path).norm.weight[0]) == 2.0
    before, stop = folder_content(tmp_path), 1
    quick(interrupted)
    with pytest.raises(KeyboardInterrupt):  # nothing is learned yet
        train.main(command)
    assert folder_content(tmp_path) == before


@pytest.mark.parametrize("out, log, reason", [
    ("file", None, "OUT"), ("file/below", None, "OUT"), ("new", "nowhere/log", "--log"), ("new", "new", "--log"),
    ("new", "file", "file: line 1 is not JSON")])
def test_what_cannot_be_written_is_refused_before_the_first_step(quick, tmp_path, out, log, reason) -> None:
    made = quick(fine)
    (tmp_path / "file").write_text("text\n")
    with pytest.raises(ValueError, match=reason):
        train.main(["backbone", str(tmp_path / out), "--smoke", "--device", "cpu",
                    *(["--log", str(tmp_path / log)] if log else [])])
    assert not made and (tmp_path / "file").read_text() == "text\n"


def test_smoke_keeps_what_is_given(quick, tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(train, "train", lambda model, masters, clock, *rest: seen.append(clock.settings))
    monkeypatch.setattr(train, "export", lambda *arguments: None)
    for more in ([], ["--long", "300", "--anchors", "7", "--report-every", "9", "--minutes", "2"]):
        assert train.main(["backbone", str(tmp_path), "--smoke", "--device", "cpu", *more]) == 0
    assert [(s.long, s.short, s.anchors, s.report_every, s.steps, s.minutes) for s in seen] == [
        (256, 128, 4, 2, 6, None), (300, 128, 7, 9, None, 2.0)]


GOOD = '{"stage": "draft", "tokens": 5, "accepted": 1.5}\n'


@pytest.mark.parametrize("content, reason", [
    ("", "is empty"), ("[1]\n", "line 1 has no stage"),
    (GOOD + '{"stage": "draft", "accepted": 1}\n', "line 2 has no number 'tokens'"),
    (GOOD + GOOD[:20], "line 2 is not JSON, or is cut off"), (GOOD + GOOD[:-1], "line 2 is cut off"),
    ('{"stage": "backbone", "tokens": 5, "loss": 1, "index": 1, "answers": [1]}\n', "line 1 has answers"),
    ("\xff", "decode"), (None, "No such file")])
def test_a_file_that_is_no_log_is_named(tmp_path, content, reason) -> None:
    log = tmp_path / "some.jsonl"
    if content is not None:
        log.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"some.jsonl.*{reason}"):
        train.main(["plot", str(log), str(tmp_path / "log.png")])
    assert not (tmp_path / "log.png").exists()


@pytest.mark.parametrize("arguments", [["draft", "out", "--steps", "1"], ["backbone", "out", "--minutes", "1", "--steps", "1"],
                                       ["backbone", "out", "--st", "1"]])
def test_bad_options(arguments) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(arguments)
    assert stopped.value.code == 3


@pytest.mark.parametrize("arguments, reason", [
    ([], "--minutes or --steps"), (["--steps", "-3"], "--steps must be at least 1, got -3"), (["--steps", "0"], "--steps"),
    (["--smoke", "--steps", "0"], "--steps"), (["--minutes", "0"], "--minutes"), (["--minutes", "nan"], "--minutes"),
    (["--minutes", "inf"], "--minutes"), (["--rate", "nan"], "--rate"), (["--rate", "0"], "--rate"),
    (["--short", "10"], "--short must be at least 128"), (["--long", "127"], "--long"), (["--long", "4096"], "at most 2048"),
    (["--batch-tokens", "0"], "--batch-tokens"), (["--workers", "-1"], "--workers"),
    (["--report-every", "0"], "--report-every"),
    (["--smoke", "--anchors", "0"], "--anchors"), (["--seed", "-1"], "--seed"), (["--seed", str(2**63)], "--seed"),
    (["--device", "tpu9"], "tpu9"), (["--device", "meta"], "meta"), (["--shares", "-1", "1", "1"], "--shares"),
    (["--shares", "0", "0", "0"], "--shares"), (["--shares", "nan", "1", "1"], "--shares"),
    (["--phases", "0.5", "0.4"], "--phases"), (["--phases", "nan", "1"], "--phases"), (["--from", "nowhere"], "nowhere")])
def test_values_that_cannot_be_used_are_named(quick, tmp_path, arguments, reason) -> None:
    made = quick(fine)
    if arguments and not {"--steps", "--minutes", "--smoke"} & set(arguments):
        arguments = ["--steps", "1", *arguments]
    with pytest.raises((ValueError, OSError), match=reason):
        train.main(["backbone", str(tmp_path / "out"), *arguments])
    assert not made and not (tmp_path / "out").exists()
