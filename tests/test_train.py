"""Training: every form it runs in gives the values and gradients of the plain one, and the exported model is the trained one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from PIL import Image

import inference
from inference.context import Context
from inference.image_processor import process_image
from inference.kernel import sparse_attn
from inference.quant import fake_quant_fp4_e4m3, fake_quant_fp4_e8m0, fake_quant_fp8
from reference import train
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
        watch = train.IndexLoss(model)
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
    assert int(loads.sum()) == batch.ids.numel() * 4 and int(loads[1].sum()) > 0
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


@pytest.mark.parametrize("arguments", [["backbone", "out"], ["draft", "out", "--steps", "1"],
                                       ["backbone", "out", "--from", "nowhere", "--steps", "1"]])
def test_bad_input(arguments) -> None:
    with pytest.raises((ValueError, SystemExit)):
        train.main(arguments)
