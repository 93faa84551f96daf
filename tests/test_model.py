"""The whole model: interface, gradients, the lag of the hyper-connections, image spans, memory that is not touched."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from safetensors.torch import load_file

import inference
from inference.image_processor import ImageInput, expand_placeholders, process_image
from inference.numerics import Numerics
from reference.metrics import relative_l2


@pytest.fixture(scope="module")
def text(traces_dir) -> torch.Tensor:
    return load_file(traces_dir / "text_prefill.float32.safetensors")["input_ids"]


@pytest.fixture(scope="module")
def picture(traces_dir):
    """ids [1, S], token types [1, S] and the two images of the recorded image prompt."""
    trace = load_file(traces_dir / "vision_prefill.float32.safetensors")
    images = [ImageInput(trace[f"image{i}.patches"], *trace[f"image{i}.grid"][1:].tolist()) for i in range(2)]
    return trace["input_ids"], trace["token_types"], images


# Parameters that only decide something discrete, or decide nothing: no gradient can reach them.
DISCRETE = (r"\.gate\.bias(_vl)?$", r"\.indexer\.")


@pytest.mark.grad
def test_gradients_reach_every_differentiable_parameter(nano_dir, picture) -> None:
    """With fake quantization off the forward is differentiable, images and drafts included."""
    model = inference.load(nano_dir, numerics="float32", fake_quant=False).requires_grad_(True)
    ids, types, images = picture
    cache = model.new_cache()
    out = model(ids, cache, token_types=types, images=[images])
    anchor = out.logits[:, -1].argmax(-1)
    draft = model.draft(anchor, cache)
    context_rows = sum(rows.square().sum() for layer, rows in out.pending.windows.items() if layer >= len(model.layers))
    loss = out.logits.square().mean() + draft.logits.square().mean() + draft.confidence.square().mean() + context_rows
    loss.backward()
    used_experts = set()
    for name, parameter in model.named_parameters():
        expert = re.match(r"(.*)\.ffn\.experts\.\d+\.(w\d)", name)
        reached = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        if any(re.search(pattern, name) for pattern in DISCRETE):
            assert parameter.grad is None, f"{name} is not meant to have a gradient"
        elif expert:
            used_experts |= {expert.group(1)} if reached else set()
        else:
            assert reached, f"{name}: no gradient"
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), f"{name}: gradient is not finite"
    assert len(used_experts) == len(model.layers) + len(model.mtp)


@pytest.mark.grad
def test_gradient_equals_a_finite_difference(nano_dir, text) -> None:
    """One directional derivative of the loss through every layer, against a central difference in float64 of the loss."""
    model = inference.load(nano_dir, numerics="float32", fake_quant=False)
    weight = model.layers[2].attn.compressor.wkv.weight.requires_grad_(True)
    direction = torch.randn_like(weight) * weight.norm() / weight.numel() ** 0.5

    def loss(values: torch.Tensor) -> torch.Tensor:
        weight.data = values
        return model(text[:, :12], model.new_cache()).logits.square().mean()

    start, step = weight.detach().clone(), 2e-3
    derivative = float((torch.autograd.grad(loss(start), weight)[0] * direction).sum())
    with torch.no_grad():
        difference = float(loss(start + step * direction) - loss(start - step * direction)) / (2 * step)
    assert abs(derivative - difference) < 2e-2 * abs(difference) + 1e-6


def test_outputs(nano, text) -> None:
    cache = nano.new_cache()
    out = nano(text, cache)
    assert out.logits.shape == (1, 45, 768) and out.logits.dtype == torch.float32
    assert out.main_hidden.shape == (1, 45, 3 * 128)
    assert cache.lengths == (45,)
    last = nano(text, nano.new_cache(), last_only=True).logits
    assert torch.equal(last, out.logits[:, -1:]) or relative_l2(last, out.logits[:, -1:]) < 1e-6


def test_the_three_numerics(nano_dir, text) -> None:
    """float32 is not BF16; native differs from dequantized by the quantized inputs; dtypes are as promised."""
    logits = {}
    for name in ("native", "dequantized", "float32"):
        model = inference.load(nano_dir, numerics=name)
        points: dict[str, torch.Tensor] = {}
        logits[name] = model(text, model.new_cache(), observe=points.__setitem__).logits
        wanted = torch.float32 if name == "float32" else torch.bfloat16
        for point in ("embed", "layers.2.attn.in", "layers.2.attn.q", "layers.2.attn.indexer.scores", "layers.9.out"):
            assert points[point].dtype == wanted, point
        for point in ("layers.2.hc_attn.comb", "layers.2.ffn.expert_weights", "layers.1.engram.gate", "logits"):
            assert points[point].dtype == torch.float32, point
    assert relative_l2(logits["native"], logits["dequantized"]) > 1e-3
    assert relative_l2(logits["dequantized"], logits["float32"]) > 1e-3
    with pytest.raises(ValueError, match="'bfloat16' is not one of native, dequantized, float32"):
        Numerics.of("bfloat16")


def test_lag_of_the_collapse_vectors(nano, text) -> None:
    """Pitfall 28: every sub-layer collapses with the pre vector of the one before it, the head with the last one."""
    points: dict[str, torch.Tensor] = {}
    nano(text, nano.new_cache(), observe=points.__setitem__)
    previous = torch.zeros(1, 45, 4)
    previous[..., 0] = 1
    for layer in range(10):
        for kind in ("attn", "ffn"):
            assert torch.equal(points[f"layers.{layer}.hc_{kind}.pre_used"], previous)
            own = points[f"layers.{layer}.hc_{kind}.pre_next"]
            assert not torch.allclose(own, previous)  # an un-lagged model would use this one
            previous = own
    assert torch.equal(points["head.pre"], previous)


def test_observer_costs_and_changes_nothing(nano, text) -> None:
    seen = []
    observed = nano(text, nano.new_cache(), observe=lambda name, value: seen.append(name)).logits
    assert torch.equal(observed, nano(text, nano.new_cache()).logits)
    assert len(seen) == len(set(seen)) and len(seen) > 300


def test_input_is_not_modified(nano, text) -> None:
    ids = text.clone()
    state = {name: value.clone() for name, value in nano.state_dict().items()}
    nano(ids, nano.new_cache())
    assert torch.equal(ids, text)
    assert all(torch.equal(value, state[name]) for name, value in nano.state_dict().items())


@pytest.mark.parametrize("ids, message", [
    (torch.zeros(1, 0, dtype=torch.int64), "S >= 1"),
    (torch.zeros(3, dtype=torch.int64), r"\[B, S\] int64"),
    (torch.zeros(1, 3), r"\[B, S\] int64"),
    (torch.tensor([[768]]), "token id 768 is outside the vocabulary 0..767"),
    (torch.tensor([[-1]]), "token id -1 is outside"),
    (torch.zeros(2, 3, dtype=torch.int64), "2 rows of ids for a cache of 1"),
    (torch.zeros(1, 1025, dtype=torch.int64), "max_position_embeddings is 1024"),
])
def test_bad_calls_are_refused_and_change_nothing(nano, ids, message) -> None:
    cache = nano.new_cache()
    with pytest.raises(ValueError, match=message):
        nano(ids, cache)
    assert cache.lengths == (0,)


def test_memory_budget_changes_no_bit(nano_dir, text) -> None:
    model = inference.load(nano_dir, numerics="native")
    whole = model(text, model.new_cache()).logits
    model.memory_budget = 1  # one row per slice
    assert torch.equal(model(text, model.new_cache()).logits, whole)


# --- images ----------------------------------------------------------------------------------------------------


def test_a_later_image_token_changes_no_earlier_position(nano_plain, picture) -> None:
    """Pitfall 21: spans are attended to causally. Only the last cells of the second image change."""
    ids, types, images = picture
    changed = dataclasses.replace(images[1], patches=images[1].patches.clone())
    changed.patches[-1] = -changed.patches[-1]
    first = int((types[0] == 0).nonzero()[1])  # start of the second span
    outputs = [nano_plain(ids, nano_plain.new_cache(), token_types=types, images=[[images[0], image]]).logits
               for image in (images[1], changed)]
    assert relative_l2(outputs[1][:, :first + 1], outputs[0][:, :first + 1]) < 1e-6
    assert relative_l2(outputs[1][:, first + 1:], outputs[0][:, first + 1:]) > 1e-3


def test_image_positions_route_with_their_own_bias(nano_dir, picture) -> None:
    """Pitfall 33: raising bias_vl on two experts sends image tokens there and no text token anywhere else."""
    ids, types, images = picture
    model = inference.load(nano_dir, numerics="float32")
    points: list[dict[str, torch.Tensor]] = [{}, {}]
    model(ids, model.new_cache(), token_types=types, images=[images], observe=points[0].__setitem__)
    gate = model.layers[0].ffn.gate
    assert gate.bias_vl.abs().sum() > 0
    gate.bias_vl[[3, 5]] += 100.0
    model(ids, model.new_cache(), token_types=types, images=[images], observe=points[1].__setitem__)
    before, after = (point["layers.0.ffn.expert_ids"] for point in points)
    image = types >= 0
    assert bool((after[image] == torch.tensor([3, 5])).all())
    assert torch.equal(before[~image], after[~image])


def test_images_stop_engram(nano, picture) -> None:
    """Pitfall 36: gates are zero in spans, hashes after one do not depend on what lies before it."""
    ids, types, images = picture
    points: list[dict[str, torch.Tensor]] = [{}, {}]
    nano(ids, nano.new_cache(), token_types=types, images=[images], observe=points[0].__setitem__)
    assert bool((points[0]["layers.1.engram.gate"][types >= 0] == 0).all())
    start = int((types[0] >= 0).nonzero()[0])
    end = int((types[0] == 3).nonzero()[0])  # end of the first span
    other = ids.clone()
    other[0, 1:start] = (other[0, 1:start] + 17) % 700 + 20
    nano(other, nano.new_cache(), token_types=types, images=[images], observe=points[1].__setitem__)
    hashes = [point["layers.1.engram.hash_ids"] for point in points]
    assert torch.equal(hashes[0][:, end + 1:], hashes[1][:, end + 1:])
    assert not torch.equal(hashes[0][:, :start], hashes[1][:, :start])


def prompt_with(nano, layout: str, images: list[ImageInput]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and types of a prompt like "i.i" (i: an image, .: three tokens of text)."""
    ids: list[int] = []
    for position, kind in enumerate(layout):
        ids += [nano.config.image_token_id] if kind == "i" else [100 + position, 101 + position, 102 + position]
    expanded, types = expand_placeholders(ids, images, nano.config.image_token_id)
    return torch.tensor([expanded]), torch.tensor([types])


@pytest.mark.parametrize("layout", ["i", "i.", ".i", "i.i", ".ii.", "ii"])
def test_images_anywhere_equal_token_by_token(nano_plain, golden_dir, layout) -> None:
    """Spans first, last, side by side: one call equals text decoded after the call that holds the images."""
    files = ["image0.png", "image1.png"][:layout.count("i")]
    images = [process_image(golden_dir / "nano" / "images" / name, nano_plain.config.vision_config) for name in files]
    ids, types = prompt_with(nano_plain, layout, images)
    cache = nano_plain.new_cache()
    whole = nano_plain(ids, cache, token_types=types, images=[images]).logits
    after = torch.tensor([[200, 201, 202]])
    steps = torch.cat([nano_plain(after[:, i:i + 1], cache).logits for i in range(3)], dim=1)
    both_ids = torch.cat((ids, after), dim=1)
    both_types = torch.cat((types, torch.full((1, 3), -1)), dim=1)
    one_shot = nano_plain(both_ids, nano_plain.new_cache(), token_types=both_types, images=[images]).logits
    assert relative_l2(torch.cat((whole, steps), 1), one_shot) < 2e-5


def test_one_token_image(nano_plain) -> None:
    """The smallest span: one cell between its delimiters (start, image, newline, end)."""
    side = nano_plain.config.vision_config.patch_size
    image = ImageInput(torch.randn(4, 3, side, side).to(torch.bfloat16), 2, 2, 1, 1)
    ids, types = prompt_with(nano_plain, ".i.", [image])
    assert types[0].tolist() == [-1] * 3 + [0, 1, 2, 3] + [-1] * 3
    logits = nano_plain(ids, nano_plain.new_cache(), token_types=types, images=[[image]]).logits
    assert torch.isfinite(logits).all()


def test_batch_rows_with_different_images(nano_plain, golden_dir) -> None:
    config = nano_plain.config.vision_config
    image = process_image(golden_dir / "nano" / "images" / "image0.png", config)
    other = dataclasses.replace(image, patches=image.patches.flip(0))
    ids, types = prompt_with(nano_plain, ".i.", [image])
    text_ids = torch.full_like(ids, 77)
    together = nano_plain(torch.cat((ids, ids, text_ids)), nano_plain.new_cache(3),
                          token_types=torch.cat((types, types, torch.full_like(types, -1))), images=[[image], [other], []]).logits
    alone = [nano_plain(ids, nano_plain.new_cache(), token_types=types, images=[[image]]).logits,
             nano_plain(ids, nano_plain.new_cache(), token_types=types, images=[[other]]).logits,
             nano_plain(text_ids, nano_plain.new_cache()).logits]
    for row in range(3):
        assert relative_l2(together[row:row + 1], alone[row]) < 2e-5
    assert relative_l2(together[0], together[1]) > 1e-3


def test_image_ids_without_types_are_refused(nano, picture) -> None:
    ids, types, images = picture
    with pytest.raises(ValueError, match="image"):
        nano(ids, nano.new_cache())
    with pytest.raises(ValueError, match="image"):
        nano(ids, nano.new_cache(), token_types=types, images=[images[:1]])
    with pytest.raises(ValueError, match="image"):
        nano(ids, nano.new_cache(), images=[images])
