"""Weight formats: every decoder and encoder of inference/quant.py against bytes that other software wrote.

Sources: bytes of the published checkpoint; golden folders (experts cast to NVFP4 by the published rule, an Engram table
as MXFP4); `mlx_quantize.safetensors`, which MLX 0.32.4 wrote on a CPU (`mx.quantize`, all widths and groups). Where MLX is
installed, the last test makes those arrays again.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from inference.quant import (AFFINE_BITS, AFFINE_GROUPS, FORMATS, PackedWeight, affine_codes, affine_minmax, as_words,
                             decode_affine, decode_fp8_blocks, decode_fp8_rows, decode_mxfp4, decode_nvfp4, e2m1_decode,
                             e8m0_to_float, encode_affine, encode_fp8_blocks, encode_fp8_rows, encode_mxfp4,
                             encode_nvfp4, mxfp4_to_nvfp4, mxfp4_top_exponent, pack_bits, pack_nibbles, unpack_bits,
                             unpack_nibbles)

GOLDEN = Path(__file__).parents[1] / "reference" / "golden"
MLX = load_file(GOLDEN / "mlx_quantize.safetensors")
AFFINE = [(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS]


def folder(name: str) -> dict[str, Tensor]:
    tensors = {}
    for path in sorted((GOLDEN / name).glob("model-*.safetensors")):
        tensors.update(load_file(path))
    return tensors


NATIVE, NVFP4 = folder("pico/checkpoint"), folder("pico-nvfp4")
GOLDEN_NVFP4 = load_file(GOLDEN / "pico-nvfp4" / "golden.safetensors")
GOLDEN_OQ = load_file(GOLDEN / "pico-oq3e-mtp" / "golden.safetensors")
NVFP4_EXPERTS = [name.removesuffix(".weight_scale_2") for name in NVFP4 if name.endswith(".weight_scale_2")]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    octets = [value.contiguous().reshape(-1).view(torch.uint8) for value in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*octets)


def octets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """BF16 values over many magnitudes, with whole zero groups."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 3, shape, generator=generator))
    values[..., :32] = 0
    return values.to(torch.bfloat16)


# --- bytes of the published checkpoint ---------------------------------------------------------------------------


def test_published_fp8_bytes():
    """layers.0.attn.wkv.weight, row 0, columns 0-7, of the published shard 3."""
    weight = bytes.fromhex("d871f2797069f0e5")
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, :8] = octets(*weight)
    wanted = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    scale = octets(0x73).view(1, 1).view(torch.float8_e8m0fnu)
    for decode in (decode_fp8_blocks, decode_fp8_rows):
        assert decode(codes.view(torch.float8_e4m3fn), scale)[0, :8].tolist() == wanted


def test_published_fp4_bytes():
    """layers.0.ffn.experts.0.w1.weight, row 0, elements 0-15; byte a8 has code 8, which is -0."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :8] = octets(*bytes.fromhex("a0a8ec4aadaf42aa"))
    values = decode_mxfp4(packed.view(torch.int8), octets(0x78).view(1, 1).view(torch.float8_e8m0fnu))[0, :16]
    wanted = [0, -1, -0.0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1]  # in units of 2^-7
    assert (values * 128).tolist() == wanted
    assert torch.signbit(values[2]) and not torch.signbit(values[0])


def test_low_nibble_is_the_even_column():
    assert e2m1_decode(unpack_nibbles(octets(0x21))).tolist() == [0.5, 1.0]
    assert pack_nibbles(octets(1, 2)).tolist() == [0x21]


# --- bit streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "values", "data"), [
    (3, [1, 2, 3, 4, 5, 6, 7, 0], "d1581f"), (6, [1, 2, 63, 32, 5, 6, 7, 0], "81f083857100")])
def test_worked_bit_streams(bits: int, values: list[int], data: str):
    repeats = 32 // len(values)
    words = octets(*bytes.fromhex(data) * repeats).view(torch.uint32)
    assert unpack_bits(words, bits).tolist() == values * repeats
    assert torch.equal(pack_bits(octets(*values * repeats), bits), words)
    if bits == 3:
        assert [hex(word) for word in words.tolist()] == ["0xd11f58d1", "0x58d11f58", "0x1f58d11f"]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(AFFINE_BITS), st.integers(1, 4), st.randoms(use_true_random=False))
def test_fields_are_one_little_endian_stream(bits: int, groups: int, random):
    """Against a Python integer per row: field i is bits i*b .. (i+1)*b - 1."""
    fields = [[random.randrange(2**bits) for _ in range(32 * groups)] for _ in range(2)]
    words = pack_bits(torch.tensor(fields, dtype=torch.uint8), bits)
    assert words.shape == (2, groups * bits) and words.dtype == torch.uint32
    for row, line in zip(words, fields):
        stream = sum(value << (bits * i) for i, value in enumerate(line))
        assert sum(word << (32 * i) for i, word in enumerate(row.tolist())) == stream
    assert unpack_bits(words, bits).tolist() == fields
    assert torch.equal(unpack_bits(words.unsqueeze(0), bits), unpack_bits(words, bits).unsqueeze(0))  # stacked experts


# --- MLX ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), AFFINE)
def test_affine_encoder_equals_mlx(bits: int, group: int):
    words, scales, biases = encode_affine(MLX["values"], bits, group)
    name = f"affine{bits}_g{group}"
    assert same_bytes(words, MLX[f"{name}.weight"])
    assert same_bytes(scales, MLX[f"{name}.scales"])
    assert same_bytes(biases, MLX[f"{name}.biases"])


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_affine_decoder_equals_mlx_in_float32(bits: int):
    stored = [MLX[f"affine{bits}_g64.{part}"] for part in ("weight", "scales", "biases")]
    assert torch.equal(decode_affine(*stored, bits=bits), MLX[f"affine{bits}_g64.dequantized"])
    assert torch.equal(FORMATS[f"affine{bits}_g64"].decode(*stored), MLX[f"affine{bits}_g64.dequantized"])


@pytest.mark.parametrize(("mode", "decode"), [("mxfp4", decode_mxfp4), ("mxfp8", decode_fp8_rows)])
def test_mx_decoders_equal_mlx(mode: str, decode):
    assert torch.equal(decode(MLX[f"{mode}.weight"], MLX[f"{mode}.scales"]), MLX[f"{mode}.dequantized"])


def test_mxfp8_encoder_equals_mlx():
    """Codes and scales, but for all-zero groups: there MLX stores scale byte 1 and we store 0."""
    codes, scale = encode_fp8_rows(MLX["values"])
    zero = MLX["values"].unflatten(-1, (-1, 32)).abs().amax(-1) == 0
    assert bool(zero.any())
    assert torch.equal(as_words(codes).view(torch.int32), MLX["mxfp8.weight"].view(torch.int32))
    assert torch.equal(scale.view(torch.uint8)[~zero], MLX["mxfp8.scales"][~zero])


@pytest.mark.parametrize(("bits", "group"), AFFINE)
def test_affine_error_is_within_half_a_step(bits: int, group: int):
    values = noise(16, 256)
    words, scales, biases = encode_affine(values, bits, group)
    error = (decode_affine(words, scales, biases, bits).float() - values.float()).abs().unflatten(-1, (-1, group))
    grouped = values.float().unflatten(-1, (-1, group))
    scale, _ = affine_minmax(grouped, bits)
    # MLX moves the scale so that zero is a level; the far end can then be off by up to one step. BF16 rounds the rest.
    assert bool((error <= 1.01 * scale.abs().unsqueeze(-1) + grouped.abs().amax(-1, keepdim=True) / 100).all())
    zero = (grouped == 0) & (grouped.abs().amax(-1, keepdim=True) > 0)
    decoded_zero = decode_affine(words, scales, biases, bits).unflatten(-1, (-1, group))[zero]
    assert bool((decoded_zero.abs() <= 2.0**-7 * grouped.abs().amax()).all())
    codes = unpack_bits(words, bits).unflatten(-1, (-1, group))
    assert torch.equal(affine_codes(grouped, *affine_minmax(grouped, bits), bits), codes)


@pytest.mark.parametrize(("bits", "group", "columns"), [(7, 64, 128), (4, 16, 128), (4, 64, 96), (1, 64, 128)])
def test_affine_encoder_refuses(bits: int, group: int, columns: int):
    with pytest.raises(ValueError, match="Encoding a weight as affine"):
        encode_affine(noise(2, columns), bits, group)


# --- power-of-two scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encode", "decode", "shape"), [
    (encode_fp8_blocks, decode_fp8_blocks, (70, 100)), (encode_fp8_blocks, decode_fp8_blocks, (1, 5)),
    (encode_fp8_rows, decode_fp8_rows, (5, 96)), (encode_fp8_rows, decode_fp8_rows, (2, 5, 64)),
    (encode_mxfp4, decode_mxfp4, (5, 96)), (encode_mxfp4, decode_mxfp4, (3, 4, 64))])
def test_power_of_two_formats_round_trip(encode, decode, shape: tuple[int, ...]):
    """What a decoder returned is stored again without loss, and the first encoding is close and never saturates."""
    values = noise(*shape)
    stored = encode(values)
    decoded = decode(*stored)
    assert decoded.shape == values.shape and decoded.dtype == torch.bfloat16
    # Half a step: a quarter or a sixteenth of a value, and near zero half of the smallest step, which is 1/12 (E2M1) or
    # 2^-17 (E4M3) of the largest value at most.
    relative, near_zero = (2.0**-2, 1 / 12) if encode is encode_mxfp4 else (2.0**-4, 2.0**-17)
    exact = values.float().abs()
    assert bool(((decoded.float() - values.float()).abs() <= relative * exact + near_zero * exact.amax()).all())
    again = decode(*encode(decoded))
    assert torch.equal(again, decoded)


def test_scale_is_the_smallest_power_of_two():
    """At, below and above each boundary: amax = max * 2^k fits scale 2^k, one BF16 step more does not."""
    for largest, encode in ((448.0, encode_fp8_rows), (6.0, encode_mxfp4)):
        for exponent in (-20, -1, 0, 1, 30):
            at = torch.zeros(1, 32, dtype=torch.bfloat16)
            at[0, 3] = largest * 2.0**exponent
            above = at * 1.0078125
            assert e8m0_to_float(encode(at)[1]).item() == 2.0**exponent
            assert e8m0_to_float(encode(above)[1]).item() == 2.0 ** (exponent + 1)


def test_zero_groups_are_byte_zero():
    for encode in (encode_fp8_blocks, encode_fp8_rows, encode_mxfp4):
        codes, scale = encode(torch.zeros(32, 32))
        assert not codes.view(torch.uint8).any() and not scale.view(torch.uint8).any()


def test_encoders_refuse_partial_groups():
    for encode in (encode_fp8_rows, encode_mxfp4, encode_nvfp4):
        with pytest.raises(ValueError, match="Keep this weight in BF16"):
            encode(torch.zeros(4, 40))


def test_mxfp4_engram_table_of_the_golden_folder():
    """The folder's table was made from the FP8 rows; our encoder gives its bytes."""
    rows = decode_fp8_rows(NATIVE["layers.1.engram.embed.weight"], NATIVE["layers.1.engram.embed.scale"])
    packed, scale = encode_mxfp4(rows)
    golden = load_file(GOLDEN / "pico-nvfp4-mxfp4-engram" / "model-00004-of-00004.safetensors")
    assert same_bytes(packed, golden["layers.1.engram.embed.weight"])
    assert same_bytes(scale, golden["layers.1.engram.embed.scale"])


# --- NVFP4 -------------------------------------------------------------------------------------------------------


def test_lossless_cast_gives_the_golden_bytes():
    assert len(NVFP4_EXPERTS) == 60
    for name in NVFP4_EXPERTS:
        parent, _, projection = name.rpartition(".")
        fused = (projection,) if projection == "w2" else ("w1", "w3")
        top = max(mxfp4_top_exponent(NATIVE[f"{parent}.{part}.scale"]) for part in fused)
        stored = mxfp4_to_nvfp4(NATIVE[f"{name}.weight"], NATIVE[f"{name}.scale"], top)
        golden = [NVFP4[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")]
        assert all(same_bytes(ours, theirs) for ours, theirs in zip(stored, golden)), name
        assert torch.equal(decode_nvfp4(*stored), decode_mxfp4(NATIVE[f"{name}.weight"], NATIVE[f"{name}.scale"]))


def test_lossless_files_have_power_of_two_scales():
    for name in NVFP4_EXPERTS:
        scale, global_scale = NVFP4[f"{name}.weight_scale"].float(), NVFP4[f"{name}.weight_scale_2"]
        exponent = torch.log2(scale)
        assert torch.equal(exponent, exponent.round()) and exponent.min() >= -9 and exponent.max() <= 8
        assert torch.log2(global_scale) == torch.log2(global_scale).round()


@pytest.mark.parametrize("steps", [0, 16, 17, 18])
def test_lossless_cast_reaches_17_steps(steps: int):
    codes = pack_nibbles(torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64))
    scale = octets(127, 127 - steps).view(1, 2).view(torch.float8_e8m0fnu)
    if steps > 17:
        with pytest.raises(ValueError, match="outside 17 steps"):
            mxfp4_to_nvfp4(codes, scale)
        zeros = codes.clone()
        zeros[0, 16:] = 0x88  # -0: a group without values may lie outside
        assert torch.equal(decode_nvfp4(*mxfp4_to_nvfp4(zeros, scale)), decode_mxfp4(zeros, scale))
        return
    packed, nv_scale, global_scale = mxfp4_to_nvfp4(codes, scale)
    assert global_scale == 2.0**-8 and not (unpack_nibbles(packed) == 8).any()
    assert torch.equal(decode_nvfp4(packed, nv_scale, global_scale), decode_mxfp4(codes, scale))


def test_nvfp4_encoder():
    values = noise(8, 96)
    packed, scale, global_scale = encode_nvfp4(values)
    assert (packed.shape, packed.dtype) == ((8, 48), torch.uint8)
    assert (scale.shape, scale.dtype, global_scale.shape) == ((8, 6), torch.float8_e4m3fn, ())
    assert global_scale == values.float().abs().max() / (6 * 448)
    decoded = decode_nvfp4(packed, scale, global_scale).float()
    grouped, error = values.float().unflatten(-1, (-1, 16)), (decoded - values.float()).abs().unflatten(-1, (-1, 16))
    # half of the widest step (4 to 6) of a group whose maximum is 6, and the rounding of its E4M3 scale
    assert bool((error <= grouped.abs().amax(-1, keepdim=True) * (1 / 6 + 1 / 14) + 6 * 2.0**-9 * global_scale).all())
    assert not decoded[:, :32].any()
    zeros = encode_nvfp4(torch.zeros(2, 32))
    assert not decode_nvfp4(*zeros).any() and torch.isfinite(zeros[2])


def test_nvfp4_global_scale_need_not_be_a_power_of_two():
    """Against float64: code * scale * global, rounded to float32 and then to BF16."""
    packed, scale, _ = encode_nvfp4(noise(4, 64))
    global_scale = torch.tensor(0.0123, dtype=torch.float32)
    codes = e2m1_decode(unpack_nibbles(packed)).double()
    exact = codes * scale.double().repeat_interleave(16, -1) * global_scale.double()
    assert torch.equal(decode_nvfp4(packed, scale, global_scale), exact.float().to(torch.bfloat16))


# --- what the golden modules would notice ------------------------------------------------------------------------


def swapped(packed: Tensor) -> Tensor:
    byte = packed.view(torch.uint8)
    return (byte << 4) | (byte >> 4)


def test_golden_modules_notice_wrong_variants():
    expert = "layers.3.ffn.experts.2.w1"
    packed, scale, global_scale = (NVFP4[f"{expert}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
    wanted = GOLDEN_NVFP4[f"weight.{expert}.weight"]
    assert torch.equal(decode_nvfp4(packed, scale, global_scale).float(), wanted)
    wide = scale.float()
    wrong = {
        "nibbles swapped": decode_nvfp4(swapped(packed), scale, global_scale),
        "global scale as a reciprocal": decode_nvfp4(packed, scale, 1 / global_scale),
        "global scale left out": decode_nvfp4(packed, scale, torch.tensor(1.0)),
        "groups of 32": decode_nvfp4(packed, wide[:, ::2].to(torch.float8_e4m3fn), global_scale),
        "scale transposed": decode_nvfp4(packed, wide.T.reshape(wide.shape).to(torch.float8_e4m3fn), global_scale),
    }
    # a group of 32 became two equal halves of 16, so this file cannot tell the two group sizes apart by itself
    assert {name for name, value in wrong.items() if torch.equal(value.float(), wanted)} == {"groups of 32"}

    weight, scale = NATIVE["layers.0.attn.wq_a.weight"], NATIVE["layers.0.attn.wq_a.scale"]
    wanted = GOLDEN_NVFP4["weight.layers.0.attn.wq_a.weight"]
    assert torch.equal(decode_fp8_blocks(weight, scale).float(), wanted)
    turned = scale.view(torch.uint8).T.reshape(scale.shape).view(torch.float8_e8m0fnu)
    assert not torch.equal(decode_fp8_blocks(weight, turned).float(), wanted)
    converted = scale.float().to(torch.uint8)  # a converting copy of the scale instead of its bytes
    assert not torch.equal(decode_fp8_blocks(weight, converted).float(), wanted)

    stored = folder("pico-oq3e-mtp")
    module = "language_model.layers.3.ffn.experts.w1"
    parts = [stored[f"{module}.{part}"][2] for part in ("weight", "scales", "biases")]
    wanted = GOLDEN_OQ["weight.layers.3.ffn.experts.2.w1.weight"]
    assert torch.equal(decode_affine(*parts, bits=3).float(), wanted)
    words, scales, biases = parts
    most_significant_first = torch.tensor([[int(f"{word:032b}"[::-1], 2) for word in row] for row in words.tolist()],
                                          dtype=torch.int64).to(torch.uint32)
    for value in (decode_affine(words, biases, scales, 3), decode_affine(words, scales, torch.zeros_like(biases), 3),
                  decode_affine(words, scales.abs(), biases, 3), decode_affine(words.flip(0), scales, biases, 3),
                  decode_affine(most_significant_first, scales, biases, 3)):
        assert not torch.equal(value.float(), wanted)


def test_group_of_16_is_seen_with_general_scales():
    """A generally quantized weight has different halves: groups of 32 decode it wrongly."""
    packed, scale, global_scale = encode_nvfp4(noise(4, 128, seed=3))
    halved = scale.view(torch.uint8)[:, ::2].repeat_interleave(2, -1).view(torch.float8_e4m3fn)
    right = decode_nvfp4(packed, scale, global_scale)
    assert not torch.equal(decode_nvfp4(packed, halved, global_scale), right)


# --- packed weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(FORMATS))
def test_rows_of_a_packed_weight(key: str):
    values = noise(40, 256, seed=1)
    if key.startswith("affine"):
        bits, group = (int(part) for part in key.removeprefix("affine").split("_g"))
        stored = encode_affine(values, bits, group)
    elif key == "mxfp8":
        codes, scale = encode_fp8_rows(values)
        stored = (as_words(codes), scale.view(torch.uint8))
    else:
        encoders = {"fp8_blocks": encode_fp8_blocks, "fp8_rows": encode_fp8_rows, "mxfp4": encode_mxfp4,
                    "nvfp4": encode_nvfp4}
        stored = encoders[key](values)
    weight = PackedWeight(FORMATS[key], stored, (40, 256))
    index = torch.tensor([[3, 39, 3], [0, 17, 5]])
    assert torch.equal(weight.rows(index), weight.dequantize()[index])
    assert torch.equal(weight.to("cpu").rows(index[0]), weight.dequantize()[index[0]])
    error = (weight.dequantize().float() - values.float()).norm() / values.float().norm()
    assert error < {"affine2": 0.5, "affine3": 0.3}.get(key.split("_")[0], 0.2)


def test_frozen_arrays_equal_an_installed_mlx():
    mx = pytest.importorskip("mlx.core", reason="MLX, which wrote the frozen arrays, is not installed")
    mx.set_default_device(mx.cpu)
    values = mx.array(MLX["values"].float().numpy()).astype(mx.bfloat16)
    for bits, group in AFFINE:
        words, scales, biases = mx.quantize(values, group_size=group, bits=bits)
        name = f"affine{bits}_g{group}"
        assert MLX[f"{name}.weight"].tolist() == words.tolist()
        assert MLX[f"{name}.scales"].float().tolist() == scales.astype(mx.float32).tolist()
        assert MLX[f"{name}.biases"].float().tolist() == biases.astype(mx.float32).tolist()
    for mode in ("mxfp4", "mxfp8"):
        words, scales = mx.quantize(values, mode=mode)
        assert (MLX[f"{mode}.weight"].tolist(), MLX[f"{mode}.scales"].tolist()) == (words.tolist(), scales.tolist())
