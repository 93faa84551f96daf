"""Calls of any length: a prompt in chunks equals the prompt in one call, images included, within bounded memory.

Measured on nano in float32: where two runs do the same operations (one chunk) they are bit-equal; otherwise products of
different height round differently. Of 150 random cases without fake quantization all agree to 7e-7 (relative L2 of the
logits); with it 130 agree to 2.6e-6, in 19 that noise takes a window row's value across a rounding boundary, in one it
decides a near-tie of the router. Such a case is not tolerated but traced: `first_difference` must be the outcome of a
rounding or a choice, and everything computed before it must agree. (reference/flips.py proves flips by taking them the other
way; it does not watch the router, and looks no further than 1e-5 of a channel's own size, where noise goes with the row's.)
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from inference import decoding
from inference.cache import Cache
from inference.context import Context, Shared
from inference.image_processor import TEXT, ImageInput
from inference.prompts import Prompt
from reference.metrics import relative_l2

BOUND = 2e-5
FLOOR = 5e-6  # measured: 2.6e-6


@pytest.fixture(scope="module")
def picture(traces_dir) -> Prompt:
    """The recorded image prompt: two spans."""
    trace = load_file(traces_dir / "vision_prefill.float32.safetensors")
    images = [ImageInput(trace[f"image{i}.patches"], *trace[f"image{i}.grid"][1:].tolist()) for i in range(2)]
    return Prompt(trace["input_ids"][0].tolist(), trace["token_types"][0].tolist(), images)


def in_chunks(model, prompt: Prompt, sizes: list[int], observe=None, spans=None) -> torch.Tensor:
    """Logits of all tokens [1, S, V], computed in calls of these sizes."""
    cache, parts, start, used = model.new_cache(), [], 0, 0
    for size in sizes:
        ids = torch.tensor([prompt.ids[start:start + size]])
        if prompt.token_types is None:
            out = model(ids, cache, observe=observe)
        else:
            types = torch.tensor([prompt.token_types[start:start + size]])
            count = int((types != TEXT).sum())
            out = model(ids, cache, token_types=types, image_rows=[spans[used:used + count]], observe=observe)
            used += count
        parts.append(out.logits)
        start += ids.shape[1]
    assert start == len(prompt.ids) == cache.lengths[0]
    return torch.cat(parts, dim=1)


CHOICES = (".kv_quant", ".compressor.kv", ".indexer.k", ".indexer.q", ".expert_ids", ".topk")  # of a rounding, a ranking
AGREES = 1e-5  # of a token's row: above float32 noise (4e-6), below the effect of any flip on what follows it


def first_difference(model, ids: torch.Tensor, sizes: list[int]) -> str | None:
    """The first observed point at which a prompt in chunks is not what it is in one call; None if they agree everywhere."""
    whole: dict[str, torch.Tensor] = {}
    model(ids, model.new_cache(), observe=whole.__setitem__)
    cache, start = model.new_cache(), 0
    for size in sizes:
        points: dict[str, torch.Tensor] = {}
        model(ids[:, start:start + size], cache, observe=points.__setitem__)
        for name, found in points.items():
            first = start
            if name.startswith("mtp.") or name.endswith((".scores", ".candidates", ".all_index", ".latent")):
                continue  # no part of the logits; as wide as what is known, or not per token: their results are compared
            if name.endswith((".compressor.kv", ".indexer.k")):
                first = start // model.plan[int(name.split(".")[1])].compress_ratio  # one row per group
            wanted = whole[name][:, first:first + found.shape[1]]
            if name.endswith(".topk"):
                rows = [[set(row.tolist()) - {-1} for row in each[0]] for each in (found, wanted)]
                differs = rows[0] != rows[1]
            elif name.endswith(CHOICES):
                differs = not torch.equal(found, wanted)
            else:
                rows = [each.double().unsqueeze(-1).flatten(2) for each in (found, wanted)]  # [1, S, everything else]
                off, norm = (rows[0] - rows[1]).norm(dim=-1), rows[1].norm(dim=-1)
                differs = bool((off > AGREES * norm.clamp_min(1e-3)).any())
            if differs:
                return name
        start += size
    return None


def random_sizes(draw, length: int) -> list[int]:
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5)))
    return [after - before for before, after in zip([0, *cuts], [*cuts, length])]


@st.composite
def cases(draw):
    """A seed, a prompt length and chunk sizes that sum to it."""
    length = draw(st.integers(2, 60))
    return draw(st.integers(0, 10**6)), random_sizes(draw, length)


@pytest.mark.parametrize("name", ["nano", "nano_plain"])  # fake quantization with a packed cache; neither
@settings(max_examples=7, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_random_chunks(request, name, case) -> None:
    model, (seed, sizes) = request.getfixturevalue(name), case
    prompt = Prompt(torch.randint(8, 768, (sum(sizes),), generator=torch.Generator().manual_seed(seed)).tolist(), None)
    whole = in_chunks(model, prompt, [sum(sizes)])
    if relative_l2(in_chunks(model, prompt, sizes), whole) >= FLOOR:
        point = first_difference(model, torch.tensor([prompt.ids]), sizes)
        assert point is not None and point.endswith(CHOICES), f"{sizes} differs, first at {point}"


@pytest.mark.parametrize("mutant", ["history", "windows", "tails"])
def test_a_forgotten_state_is_traced_to_what_it_spoils(nano, mutant) -> None:
    """What `first_difference` says when a chunk border loses something: a point that no rounding can excuse."""
    ids = torch.randint(8, 768, (1, 25), generator=torch.Generator().manual_seed(1))
    commit = Cache.commit

    def forgetful(self, pending, counts=None):
        lost = {"history": {"folded_ids": None}, "windows": {"windows": {}}, "tails": {"tails": {}}}[mutant]
        commit(self, dataclasses.replace(pending, **lost), counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "commit", forgetful)
        point = first_difference(nano, ids, [11, 14])
    expected = {"history": "layers.1.engram.hash_ids", "windows": "layers.0.attn.out_rotated",
                "tails": "layers.2.attn.compressor.kv"}
    assert point == expected[mutant]


def test_one_chunk_is_bit_equal(nano) -> None:
    prompt = Prompt(list(range(100, 140)), None)
    logits = decoding.prefill(nano, [prompt], nano.new_cache(), chunk_size=40)
    assert torch.equal(logits, nano(torch.tensor([prompt.ids]), nano.new_cache(), last_only=True).logits[:, -1])


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_chunks_through_images(nano_plain, picture, data) -> None:
    """Borders anywhere: inside a span, between its start and first cell, between the two images."""
    spans = torch.cat([nano_plain.image_rows(image) for image in picture.images])
    types = torch.tensor([picture.token_types])
    whole = nano_plain(torch.tensor([picture.ids]), nano_plain.new_cache(), token_types=types, images=[picture.images]).logits
    sizes = random_sizes(data.draw, len(picture.ids))
    assert relative_l2(in_chunks(nano_plain, picture, sizes, spans=spans), whole) < FLOOR


@pytest.mark.parametrize("size", [5, 16])
def test_prefill_cuts_images(nano_plain, picture, size) -> None:
    """`decoding.prefill` slices ids, types and image rows at the same places; a text prompt shares its calls."""
    text = Prompt(list(range(200, 230)), None)
    cache = nano_plain.new_cache(2)
    logits = decoding.prefill(nano_plain, [picture, text], cache, chunk_size=size)
    types = torch.tensor([picture.token_types])
    wanted = nano_plain(torch.tensor([picture.ids]), nano_plain.new_cache(), token_types=types, images=[picture.images]).logits
    assert relative_l2(logits[:1], wanted[:, -1]) < FLOOR
    assert relative_l2(logits[1:], nano_plain(torch.tensor([text.ids]), nano_plain.new_cache()).logits[:, -1]) < FLOOR
    assert cache.lengths == (len(picture.ids), 30)


def test_image_rows_that_do_not_fit_are_refused(nano_plain, picture) -> None:
    ids, types = torch.tensor([picture.ids]), torch.tensor([picture.token_types])
    spans = torch.cat([nano_plain.image_rows(image) for image in picture.images])
    for keywords, message in (
            ({"token_types": types, "image_rows": [spans[1:]]}, "must agree"),
            ({"token_types": types, "image_rows": [None]}, "must agree"),
            ({"image_rows": [spans]}, "must agree"),
            ({"token_types": types, "image_rows": [spans], "images": [picture.images]}, "not both"),
            ({"token_types": types, "image_rows": [spans, spans]}, "2 sequences")):
        cache = nano_plain.new_cache()
        with pytest.raises(ValueError, match=message):
            nano_plain(ids, cache, **keywords)
        assert cache.lengths == (0,)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.shape, self.operation = 0, (), ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > self.bytes:
                self.bytes, self.shape = value.untyped_storage().nbytes(), tuple(value.shape)
                self.operation = str(function)
        return result


def test_a_long_prompt_stays_within_the_memory_budget(nano) -> None:
    """Scores, masks, running counts and gathered rows of 1,200 x 1,200 (token, row) pairs never exist at once.

    Layer 6 publishes candidate blocks, layer 8 filters with them. Everything else is linear in the prompt.
    """
    tokens, text = 1200, nano.config.text_config
    x = torch.randn(1, tokens, text.hidden_size)

    def run(budget: int) -> tuple[torch.Tensor, LargestTensor]:
        cache, shared = Cache(nano.config, nano.plan, 1, torch.float32, "cpu", "packed"), Shared()
        context = Context(nano.numerics, torch.arange(tokens).unsqueeze(0), (0,), (tokens,), memory_budget=budget)
        outputs = []
        with LargestTensor() as largest:
            for layer_id in (6, 8):
                out, shared, _, _ = nano.layers[layer_id].attn(x, context, cache, shared)
                outputs.append(out)
        return torch.cat(outputs), largest

    budget = 1 << 20
    linear = tokens * text.num_attention_heads * text.head_dim * 4  # queries and head outputs, 1.2 MiB
    sliced, largest = run(budget)
    assert largest.bytes <= max(budget, 2 * linear), f"{largest.operation} gave {largest.shape}"
    whole, largest = run(1 << 34)
    assert largest.bytes > 8 * linear  # what the budget prevents
    assert relative_l2(sliced, whole) < 1e-6


def test_products_of_all_heads_stay_within_the_budget(nano) -> None:
    """300 x 2,000 scores of 8 heads: 18 MiB of products, of which a sixteenth exists at a time."""
    indexer, queries, weights = nano.layers[6].attn.indexer, torch.randn(1, 300, 8, 32), torch.randn(1, 300, 8)
    keys, positions = torch.randn(1, 2000, 32), torch.arange(1700, 2000).unsqueeze(0)
    with LargestTensor() as largest:
        scores = indexer.score(queries, weights, keys, positions, 1 << 20)
    assert largest.bytes <= scores.nbytes == 300 * 2000 * 4
    whole = indexer.score(queries, weights, keys, positions, 1 << 34)
    assert torch.equal(scores.isfinite(), whole.isfinite())
    assert relative_l2(scores.nan_to_num(neginf=0), whole.nan_to_num(neginf=0)) < 1e-6


def test_budget_changes_no_selection(nano_plain) -> None:
    """With one row per slice the whole model still gives the same logits; selections follow one by one."""
    ids = torch.randint(8, 768, (2, 70), generator=torch.Generator().manual_seed(3))
    whole = nano_plain(ids, nano_plain.new_cache(2)).logits
    budget = nano_plain.memory_budget
    try:
        nano_plain.memory_budget = 1
        assert relative_l2(nano_plain(ids, nano_plain.new_cache(2)).logits, whole) < FLOOR
    finally:
        nano_plain.memory_budget = budget


def test_first_row_context_is_the_call(nano_plain) -> None:
    """`Context.later` and `pick` cut every row at its own place."""
    context = Context(nano_plain.numerics, torch.tensor([[3, 4, 5, 6], [10, 11, 12, 13]]), (3, 10), (4, 2),
                      image_mask=torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool))
    later = context.later([5, 0])
    assert (later.starts, later.counts, later.ends) == ((5, 10), (2, 2), (7, 12))
    assert later.positions.tolist() == [[5, 6], [10, 11]] and later.image_mask.tolist() == [[False, True], [True, False]]
    values = torch.arange(8).view(2, 4, 1)
    assert later.pick(values, context).flatten(1).tolist() == [[2, 3], [4, 5]]
    gone = context.later([100, 100])
    assert gone.counts == (0, 0) and gone.positions.shape == (2, 0) and gone.pick(values, context).shape == (2, 0, 1)
    flat = dataclasses.replace(context, window_starts=torch.tensor((1, 2))).without_padding()
    assert flat.positions.tolist() == [[3, 4, 5, 6, 10, 11]] and flat.counts == (6,) and flat.window_starts is None
