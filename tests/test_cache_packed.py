"""Packed caches: nothing is lost, sizes are the report's, only what is read is decoded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import inference
from inference import cache as cache_module
from inference.cache import Cache, Rows
from inference.config import Config, layer_plan
from inference.packing import COMPRESSED, INDEX_KEY, WINDOW
from inference.quant import (dequantize_groups, e2m1_decode, fake_quant_fp4_e4m3, fake_quant_fp4_e8m0, fake_quant_fp8,
                             quantize_fp4_e4m3)
from reference.longcontext import _compressed_rows, _index_keys, _window_rows

RELEASED = Path(__file__).parent.parent / "inference" / "configs" / "deepseek-v4.1-flash.json"
FORMATS = ((WINDOW, fake_quant_fp8, _window_rows), (COMPRESSED, fake_quant_fp4_e4m3, _compressed_rows),
           (INDEX_KEY, fake_quant_fp4_e8m0, _index_keys))


def rows_of_every_size() -> torch.Tensor:
    """Rows [n, 64] whose groups have amplitudes from far below the floors of all scales to far above."""
    exponents = torch.arange(-140, 40).to(torch.float64)
    rows = torch.randn(len(exponents), 12, 64, dtype=torch.float64) * 2 ** exponents[:, None, None]
    rows[:, 0, ::3] = 0.0
    rows[:, 1] = rows[:, 1, :1]  # one magnitude
    return torch.cat((rows.flatten(0, 1), torch.zeros(1, 64))).to(torch.float32)


@pytest.mark.parametrize("packing, fake_quant, naive", FORMATS, ids=[f[0].name for f in FORMATS])
def test_packing_gives_the_same_values_again(packing, fake_quant, naive) -> None:
    """In BF16 and float32, against `unpack` and against a decoder that shares no code with it."""
    for dtype in (torch.bfloat16, torch.float32):
        values = fake_quant(rows_of_every_size().to(dtype))
        finite = values.isfinite().all(-1) & (values.abs() < 2.0**30).all(-1)
        values = values[finite]
        stored = packing.pack(values)
        assert stored.dtype == torch.uint8 and stored.shape == (len(values), packing.width(64))
        assert torch.equal(packing.unpack(stored, dtype), values)
        assert np.array_equal(naive(stored.numpy()), values.to(torch.float64).numpy())


def test_every_code_and_scale_of_a_window_row() -> None:
    """The quantizer gives back whatever it has given: every largest code, every scale down to the floor."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)[:127]
    for exponent in range(-22, 30):
        for largest in codes[codes >= (0 if exponent == -22 else 224)]:
            group = codes[codes <= largest]
            rows = torch.nn.functional.pad(group, (0, -len(group) % 31)).view(-1, 31)
            rows = torch.cat((rows, largest.expand(len(rows), 1)), dim=1) * 2.0**exponent
            assert torch.equal(WINDOW.unpack(WINDOW.pack(rows), torch.float32), rows)


@pytest.mark.parametrize("scale", [*range(1, 32), 100, 0x7E])
def test_every_code_and_scale_of_a_compressed_row(scale) -> None:
    """Every scale byte with every largest code that its quantizer can give, subnormal scales first."""
    factor = torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    for largest in range(8):
        codes = torch.randint(0, largest + 1, (50, 16), dtype=torch.uint8)
        codes = codes + 8 * torch.randint(0, 2, (50, 16), dtype=torch.uint8)  # signs
        codes[:, 3] = largest
        values = dequantize_groups(e2m1_decode(codes), factor.expand(50, 1), torch.float32)
        assert torch.equal(COMPRESSED.unpack(COMPRESSED.pack(values), torch.float32), values)


def test_quantizing_twice_would_lose_values() -> None:
    """The reason for looking for the scale: amax 9.5 * 2^-9 has a subnormal scale, and a second pass finds another."""
    row = torch.tensor([9.5, 4.0, *[1.0] * 14]) * 2.0**-9
    values = fake_quant_fp4_e4m3(row)
    assert not torch.equal(fake_quant_fp4_e4m3(values), values)
    codes, scale = quantize_fp4_e4m3(values)  # what packing by the quantizer would store
    assert not torch.equal(dequantize_groups(e2m1_decode(codes), scale.to(torch.float32), torch.float32), values)
    assert torch.equal(COMPRESSED.unpack(COMPRESSED.pack(values.unsqueeze(0)), torch.float32)[0], values)


@pytest.mark.parametrize("packing, fake_quant, naive", FORMATS, ids=[f[0].name for f in FORMATS])
def test_rows_that_are_no_codes_are_refused(packing, fake_quant, naive) -> None:
    values = fake_quant(torch.randn(3, 64))
    values[1, 5] += values[1, 5].abs() * 0.01 + 1e-3
    with pytest.raises(ValueError, match=f"Packing {packing.name}: its values are no codes"):
        packing.pack(values)


@pytest.mark.parametrize("numerics", ["native", "dequantized", "float32"])
def test_packed_and_plain_caches_give_the_same_bits(nano_dir, numerics) -> None:
    """Prefill in chunks, ragged steps, a verification whose tail is dropped, drafts; rings wrap several times."""
    model = inference.load(nano_dir, numerics=numerics)
    ids = torch.randint(8, 768, (2, 60), generator=torch.Generator().manual_seed(1))
    caches = model.new_cache(2), model.new_cache(2, "bf16")
    assert [cache.kind for cache in caches] == ["packed", "bf16"]
    start = 0
    calls = ((21, (21, 16), None), (1, (1, 0), None), (6, (6, 6), (3, 1)), (13, None, None), (1, None, None))
    for count, lengths, kept in calls:
        results = []
        for cache in caches:
            out = model(ids[:, start:start + count], cache, lengths=lengths, commit=False)
            cache.commit(out.pending, kept)
            draft = model.draft(ids[:, start], cache)
            real = out.logits[torch.arange(count).expand(2, -1) < torch.tensor(lengths or (count,) * 2).unsqueeze(1)]
            results.append((real, draft.logits, draft.confidence))
        assert all(torch.equal(*pair) for pair in zip(*results))
        start += count
    for ring, plain in zip(caches[0].windows.values(), caches[1].windows.values()):
        assert torch.equal(ring.rows, plain.rows)
    for kind in ("compressed", "index_keys"):
        for source in caches[0].ratios:
            rows, plain = (getattr(cache, kind)[source].rows for cache in caches)
            used = max(caches[0].lengths) // caches[0].ratios[source]
            assert torch.equal(rows[0, :used], plain[0, :used])


def test_sizes_at_the_released_shapes() -> None:
    """report: 890 bytes per token of compressed rows and index keys; window rings 2,703,360 bytes whatever the length."""
    config = Config.from_file(RELEASED)
    plan, tokens = layer_plan(config.text_config), 64
    cache = Cache(config, plan, 1, torch.bfloat16, "cpu", "packed")
    cache.reserve(tokens)
    sizes = cache.bytes_allocated()
    assert (sizes["compressed rows"] + sizes["index keys"]) / tokens == 890 == cache.bytes_per_token()
    assert sizes["window rings"] == 2_703_360 and sizes["draft rings"] == 202_752
    assert sizes["compressor tails"] == 2 * 12_288  # two slots each, although one open token is all that is ever read
    assert {cache.compressed[i].stored.shape[2] for i in cache.ratios} == {288}
    assert {cache.index_keys[i].stored.shape[2] for i in cache.ratios} == {68}
    plain = Cache(config, plan, 1, torch.bfloat16, "cpu")
    plain.reserve(tokens)
    sizes = plain.bytes_allocated()
    assert (sizes["compressed rows"] + sizes["index keys"]) / tokens == 3200 == plain.bytes_per_token()


def test_growth_is_amortized(nano) -> None:
    """25 calls move a store to a bigger place a few times, not 25 times (test_cache.py does it row by row)."""
    ids, cache, places = torch.randint(8, 768, (1, 250)), nano.new_cache(), set()
    for start in range(0, 250, 10):
        nano(ids[:, start:start + 10], cache, last_only=True)
        places.add(cache.compressed[6].stored.data_ptr())
    assert cache.lengths == (250,) and len(places) <= 6


def test_a_step_decodes_only_what_it_selects(nano, monkeypatch) -> None:
    """With 400 tokens in the cache a step decodes index_topk compressed rows per layer, and every index key once."""
    cache = nano.new_cache()
    nano(torch.randint(8, 768, (1, 400)), cache)
    decoded: dict[str, int] = {}
    plain = Rows._values

    def counting(self, stored):
        decoded[self.packing.name] = decoded.get(self.packing.name, 0) + stored.shape[0] * stored.shape[1]
        return plain(self, stored)

    monkeypatch.setattr(cache_module.Rows, "_values", counting)
    nano(torch.tensor([[30]]), cache)
    readers = sum(plan.kv_source is not None for plan in nano.plan)
    assert decoded[COMPRESSED.name] == readers * nano.config.text_config.index_topk
    assert decoded[INDEX_KEY.name] == sum(401 // plan.compress_ratio for plan in nano.plan if plan.owns_indexer)


def test_kinds_that_cannot_be_are_refused(nano_plain, nano) -> None:
    assert nano_plain.new_cache().kind == "bf16" and nano.new_cache().kind == "packed"
    with pytest.raises(ValueError, match="fake_quant=False"):
        nano_plain.new_cache(1, "packed")
    with pytest.raises(ValueError, match="packed, bf16"):
        nano.new_cache(1, "fp16")


def test_a_ring_keeps_the_last_rows() -> None:
    """Against a plain loop: any start, any count, more rows than slots, nothing at all; other slots keep their bits."""
    ring = cache_module.Ring.empty(2, 4, 1, torch.float32, "cpu")
    wanted = torch.zeros(2, 4)
    generator = torch.Generator().manual_seed(0)
    positions = [0, 0]
    for step in range(40):
        counts = torch.randint(0, 7, (2,), generator=generator).tolist()
        rows = torch.randn(2, 7, 1, generator=generator)
        before = ring.stored.clone()
        new = ring.write(rows, positions, counts)
        assert torch.equal(ring.stored, before)  # a ring never changes
        ring = new
        for batch, count in enumerate(counts):
            for number in range(count):
                wanted[batch, (positions[batch] + number) % 4] = rows[batch, number, 0]
            positions[batch] += count
        assert torch.equal(ring.rows.squeeze(-1), wanted)


def test_state_is_replaced_as_a_whole(nano, monkeypatch) -> None:
    """An exception inside `commit` leaves the cache at the call before."""
    cache = nano.new_cache()
    nano(torch.arange(100, 119).unsqueeze(0), cache)
    out = nano(torch.tensor([[40, 41, 42]]), cache, commit=False)
    state, calls = cache.state, []

    def failing(self, *arguments):
        calls.append(self)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return write(self, *arguments)

    write = cache_module.Ring.try_write
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.Ring, "try_write", failing)
        with pytest.raises(KeyboardInterrupt):
            cache.commit(out.pending)
    assert cache.state is state and dataclasses.asdict(state)["lengths"] == (19,)
    cache.commit(out.pending)
    assert cache.lengths == (22,)
