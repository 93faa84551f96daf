"""Every published family: names, formats from headers, strictness, and what `python -m inference.checkpoint` prints.

The golden folders hold one small model in five layouts; each has its logits and decoded weights in `golden.safetensors`.
Other layouts are made here by rewriting those folders byte by byte. Each defect of a file is one row of a table below.
"""

import json
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import inference
from inference.checkpoint import Checkpoint, CheckpointError, main, match_weights, whole_match
from inference.config import Config
from inference.families import NameTable, detect_family
from inference.inventory import empty_model, take_inventory
from inference.quant import PackedWeight, decode_mxfp4, encode_fp8_blocks, mxfp4_to_nvfp4
from inference.shards import DTYPES

GOLDEN = Path(__file__).parents[1] / "reference" / "golden"
FOLDERS = {"native": GOLDEN / "pico" / "checkpoint", "nvfp4": GOLDEN / "pico-nvfp4",
           "nvfp4-mxfp4": GOLDEN / "pico-nvfp4-mxfp4-engram", "oq-ngram": GOLDEN / "pico-oq3e-ngram-mtp",
           "oq": GOLDEN / "pico-oq3e-mtp"}
NATIVE, TABLE = FOLDERS["native"], "layers.1.engram.embed"
Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> safetensors tag, shape, bytes


def golden(key: str) -> dict[str, torch.Tensor]:
    return load_file((GOLDEN / "pico" if key == "native" else FOLDERS[key]) / "golden.safetensors")


@torch.no_grad()
def logits(folder: Path, numerics: str = "float32", **options: Any) -> torch.Tensor:
    model = inference.load(folder, numerics=numerics, **options)
    return model(golden("native")["input_ids"], model.new_cache()).logits


# --- folders as plain bytes --------------------------------------------------------------------------------------


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """config.json, and shard name -> its tensors."""
    shards = {}
    for path in sorted(folder.glob("model*.safetensors")):
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        shards[path.name] = {name: (entry["dtype"], entry["shape"], data[slice(*(start + end for end in
                                                                             entry["data_offsets"]))])
                             for name, entry in header.items()}
    return json.loads((folder / "config.json").read_text()), shards


def write_folder(folder: Path, config: dict[str, Any], shards: dict[str, Tensors], source: Path = NATIVE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", folder)
    weight_map = {}
    for shard, tensors in shards.items():
        header, position = {}, 0
        for name, (tag, shape, data) in tensors.items():
            header[name] = {"dtype": tag, "shape": shape, "data_offsets": [position, position + len(data)]}
            position += len(data)
            weight_map[name] = shard
        text = json.dumps(header).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))
    # The total of the NVIDIA index is stale; nothing may depend on it.
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stored(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    tag = next(tag for tag, dtype in DTYPES.items() if dtype == tensor.dtype)
    return tag, list(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def value(entry: tuple[str, list[int], bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(entry[2]), dtype=DTYPES[entry[0]]).view(entry[1])


def shard_of(shards: dict[str, Tensors], name: str) -> Tensors:
    return next(tensors for tensors in shards.values() if name in tensors)


def change(shards: dict[str, Tensors], name: str, edit: Callable[[str, list[int], bytes], tuple] | None) -> None:
    """Replace one entry by edit(tag, shape, data), or remove it."""
    tensors = shard_of(shards, name)
    entry = tensors.pop(name)
    if edit is not None:
        tensors[name] = edit(*entry)


def problems_of(folder: Path) -> list[str]:
    """Every problem that strict matching finds; values are not read."""
    try:
        whole_match(empty_model(Config.from_file(folder)), Checkpoint.open(folder))
    except CheckpointError as error:
        return error.problems
    except ValueError as error:
        return [str(error)]
    return []


# --- the five golden folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", FOLDERS)
def test_golden_folder(key: str):
    """Logits, every decoded module, and the counts of the load report."""
    wanted = golden(key)
    model = inference.load(FOLDERS[key], numerics="float32")
    with torch.no_grad():
        found = model(wanted["input_ids"], model.new_cache()).logits
    error = (found - wanted["logits.fp32"]).norm() / wanted["logits.fp32"].norm()
    assert error < 2e-5
    weights = {name.removeprefix("weight."): tensor for name, tensor in wanted.items() if name.startswith("weight.")}
    assert len(weights) == (0 if key == "native" else 11)
    for name, tensor in weights.items():
        assert torch.equal(model.get_parameter(name).float(), tensor), name
    report, count = model.load_report, sum(1 for _ in model.parameters())
    assert sum(report.formats.values()) == count == 250
    assert sum(report.skipped.values()) == (60 if key.startswith("nvfp4") else 0)
    assert all("activations" in reason for reason in report.skipped)


def test_lossless_nvfp4_gives_the_logits_of_the_native_folder():
    assert torch.equal(logits(FOLDERS["nvfp4"]), logits(NATIVE))


def test_native_numerics_read_the_same_weights():
    assert torch.equal(logits(FOLDERS["nvfp4"], "native"), logits(NATIVE, "native"))


@pytest.mark.parametrize("key", FOLDERS)
def test_names_are_a_bijection(key: str):
    """Parameters to stored weights and back, for every parameter; together they are exactly the stored weights."""
    checkpoint, config = Checkpoint.open(FOLDERS[key]), Config.from_file(FOLDERS[key])
    names = detect_family(config, checkpoint.tensors).names
    parameters = [name for name, _ in empty_model(config).named_parameters()]
    mapped = [names.stored(name) for name in parameters]
    assert len(set(mapped)) == len(parameters)
    assert [names.parameter(*pair) for pair in mapped] == parameters
    companions = (".scale", ".scales", ".biases", ".weight_scale", ".weight_scale_2", ".input_scale")
    assert {name for name, _ in mapped} == {name for name in checkpoint.tensors if not name.endswith(companions)}


@pytest.mark.parametrize("table", [
    NameTable(), NameTable("language_model.", "ffn", True), NameTable("language_model.", "mlp", False),
    NameTable("", "ffn", True)])
def test_name_tables_are_invertible(table: NameTable):
    for name in ("layers.0.ffn.experts.17.w2.weight", "mtp.2.ffn.experts.0.w1.weight", "embed.weight", "head.weight",
                 "vision.blocks.3.mlp.w1.weight", "vision.norm.weight", "aligner.w1.bias", "image_end",
                 "layers.1.engram.embed.weight", "layers.0.ffn.shared_experts.w1.weight", "layers.7.hc_ffn_scale"):
        assert table.parameter(*table.stored(name)) == name
    assert table.stored("image_newline") == ("image_newline", None)
    stacked = "layers.0.ffn.experts.w2.weight" if table.stacked else "layers.0.ffn.experts.17.w2.weight"
    assert table.stored("layers.0.ffn.experts.17.w2.weight") == (table.prefix + stacked, 17 if table.stacked else None)


# --- other layouts of the same weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["scale", "weight_scale"])
def test_mxfp4_engram_scale_has_two_spellings(tmp_path: Path, spelling: str):
    config, shards = read_folder(FOLDERS["nvfp4-mxfp4"])
    tensors = shard_of(shards, f"{TABLE}.scale")
    tensors[f"{TABLE}.{spelling}"] = tensors.pop(f"{TABLE}.scale")
    folder = write_folder(tmp_path, config, shards)
    assert torch.equal(logits(folder), logits(FOLDERS["nvfp4-mxfp4"]))


def test_mxfp4_engram_in_a_native_folder(tmp_path: Path):
    """The formats of tables and experts are independent; the config says nothing about either."""
    config, shards = read_folder(NATIVE)
    _, other = read_folder(FOLDERS["nvfp4-mxfp4"])
    for name in (f"{TABLE}.weight", f"{TABLE}.scale"):
        change(shards, name, lambda *_, name=name: shard_of(other, name)[name])
    assert torch.equal(logits(write_folder(tmp_path, config, shards)), logits(FOLDERS["nvfp4-mxfp4"]))


def test_nvfp4_draft_experts_and_no_input_scales(tmp_path: Path):
    """A community build casts the draft experts too and ships no input_scale."""
    config, shards = read_folder(FOLDERS["nvfp4"])
    for tensors in shards.values():
        for name in [name for name in tensors if name.endswith(".input_scale")]:
            del tensors[name]
        for name in [name for name in tensors if name.startswith("mtp.") and name.endswith(".scale")]:
            base = name.removesuffix(".scale")
            if ".ffn.experts." in name:
                cast = mxfp4_to_nvfp4(value(tensors[f"{base}.weight"]), value(tensors.pop(name)))
                for part, tensor in zip(("weight", "weight_scale", "weight_scale_2"), cast):
                    tensors[f"{base}.{part}"] = stored(tensor)
    model = inference.load(write_folder(tmp_path, config, shards), numerics="float32")
    native = inference.load(NATIVE, numerics="float32")
    assert model.load_report.skipped == {}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), native.parameters()))


def test_experts_widened_to_fp8_blocks(tmp_path: Path):
    """The official converter can store experts as FP8 with 32x32 tiles."""
    config, shards = read_folder(NATIVE)
    name = "layers.0.ffn.experts.1.w1"
    tensors = shard_of(shards, f"{name}.weight")
    exact = decode_mxfp4(value(tensors[f"{name}.weight"]), value(tensors[f"{name}.scale"]))
    codes, scale = encode_fp8_blocks(exact)
    tensors[f"{name}.weight"], tensors[f"{name}.scale"] = stored(codes), stored(scale)
    model = inference.load(write_folder(tmp_path, config, shards))
    assert model.load_report.formats["FP8 E4M3, 32x32 tiles, E8M0"] == 54
    assert torch.equal(model.get_parameter(f"{name}.weight"), exact)


def mlx_folder(tmp_path: Path, prefix: str, stacked: bool) -> Path:
    """The oQ weights in the layout of mlx-lm: defaults, an override per module that differs, `false` for dense ones."""
    config, shards = read_folder(FOLDERS["oq"])
    section = config.pop("omlx_deepseek_v41")
    specs = {**section["quantized_modules"],
             **{name: {key: entry[key] for key in ("bits", "group_size", "mode")}
                for name, entry in section["engram_tables"].items()}}

    def rename(name: str) -> str:
        if name.startswith("language_model."):
            return prefix + name.removeprefix("language_model.")
        return name if stacked else name.replace("vision.blocks.0.ffn.", "vision.blocks.0.mlp.")

    def modules(name: str) -> list[str]:
        """One name, or one for each expert if their tensors are not stacked."""
        if stacked or ".ffn.experts." not in name:
            return [rename(name)]
        return [rename(name.replace(".experts.", f".experts.{expert}.")) for expert in range(4)]

    default = {"group_size": 64, "bits": 3}
    quantization: dict[str, Any] = {**default, "mode": "affine", rename("language_model.head"): False}
    for name, spec in specs.items():
        spec = {"group_size": 32, **{key: spec[key] for key in ("bits", "group_size", "mode") if key in spec}}
        if spec["mode"] == "affine":
            del spec["mode"]  # mlx-lm: affine where it is missing
        if spec != default:
            quantization.update(dict.fromkeys(modules(name), spec))
    config["quantization"] = config["quantization_config"] = quantization
    for shard, tensors in shards.items():
        renamed: Tensors = {}
        for name, (tag, shape, data) in tensors.items():
            new = modules(name)
            step, shape = len(data) // len(new), shape if len(new) == 1 else shape[1:]
            for number, name in enumerate(new):
                renamed[name] = (tag, shape, data[number * step:(number + 1) * step])
        shards[shard] = renamed
    return write_folder(tmp_path, config, shards)


@pytest.mark.parametrize(("prefix", "stacked"), [("language_model.", True), ("", True), ("", False)])
def test_mlx_layout(tmp_path: Path, prefix: str, stacked: bool):
    folder = mlx_folder(tmp_path, prefix, stacked)
    assert take_inventory(folder).family == "MLX (mlx-lm layout)"
    assert torch.equal(logits(folder), logits(FOLDERS["oq"]))
    again = Config.from_dict(Config.from_file(folder).to_dict())
    assert dict(again.quantization_extra)["quantization"]["group_size"] == 64


def test_mlx_overrides_decide(tmp_path: Path):
    """A wrong default, a missing override, a `false` for a packed module and an unknown module are all noticed."""
    folder = mlx_folder(tmp_path, "language_model.", stacked=True)
    config, shards = read_folder(folder)
    changes: dict[str, Callable[[dict], Any]] = {
        "config.json states affine with 4 bits": lambda q: q.update(bits=4),
        "wo_b.weight: config.json states affine with 3 bits in groups of 64; the headers say affine 6-bit":
            lambda q: q.pop("language_model.layers.0.attn.wo_b"),
        "layers.0.attn.wo_b.weight: config.json states no format (a dense weight)":
            lambda q: q.update({"language_model.layers.0.attn.wo_b": False}),
        "model.layers.0.self_attn: config.json states its format, but the files have no such module":
            lambda q: q.update({"model.layers.0.self_attn": {"bits": 4, "group_size": 64}}),
        "quantization has the format": lambda q: q.update(bits=7),
        "head.weight: config.json states affine with 8 bits in groups of 32; the headers say a dense weight":
            lambda q: q.update({"language_model.head": {"bits": 8, "group_size": 32}}),
    }
    for number, (wanted, edit) in enumerate(changes.items()):
        changed = json.loads(json.dumps(config))
        edit(changed["quantization"])
        problems = problems_of(write_folder(tmp_path / str(number), changed, shards))
        assert any(wanted in problem for problem in problems), (wanted, problems)


def test_oq_table_outside_the_index(tmp_path: Path):
    """engram_tables may name the file and keys of a table that the index does not list."""
    config, shards = read_folder(FOLDERS["oq-ngram"])
    entry = config["omlx_deepseek_v41"]["engram_tables"][f"language_model.{TABLE}"]
    config["omlx_deepseek_v41"]["engram_in_index"] = False
    tensors = shard_of(shards, entry["weight_key"])
    for part in ("weight", "scale"):
        tensors[f"{TABLE}.{part}"] = tensors.pop(entry[f"{part}_key"])  # names of the release
        entry[f"{part}_key"] = f"{TABLE}.{part}"
    folder = write_folder(tmp_path, config, shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for part in ("weight", "scale"):
        del index["weight_map"][f"{TABLE}.{part}"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(folder), logits(FOLDERS["oq-ngram"]))


def test_oq_table_as_mxfp8(tmp_path: Path):
    """The kept FP8 rows may also be tagged as MLX words and bytes."""
    config, shards = read_folder(FOLDERS["oq-ngram"])
    entry = config["omlx_deepseek_v41"]["engram_tables"][f"language_model.{TABLE}"]
    tensors = shard_of(shards, entry["weight_key"])
    _, shape, data = tensors.pop(entry["weight_key"])
    tensors[entry["weight_key"]] = ("U32", [shape[0], shape[1] // 4], data)
    tensors[entry["scale_key"] + "s"] = ("U8", *tensors.pop(entry["scale_key"])[1:])
    entry.update(scale_key=entry["scale_key"] + "s", bits=8, mode="mxfp8")
    assert torch.equal(logits(write_folder(tmp_path, config, shards)), logits(FOLDERS["oq-ngram"]))


def test_one_file_without_an_index(tmp_path: Path):
    config, shards = read_folder(FOLDERS["oq"])
    tensors = {name: entry for part in shards.values() for name, entry in part.items()}
    folder = write_folder(tmp_path, config, {"model.safetensors": tensors})
    (folder / "model.safetensors.index.json").unlink()
    assert problems_of(folder) == []


# --- defects: each row is one change of a good folder and what must be said about it --------------------------------

W1, NV = "layers.2.ffn.experts.3.w1", "layers.0.ffn.experts.0.w2"
OQ = "language_model.layers.0.attn.wq_a"
STACK = "language_model.layers.3.ffn.experts.w2"


def transpose(tag: str, shape: list[int], data: bytes) -> tuple:
    return tag, shape[::-1], data


def retag(tag: str) -> Callable:
    return lambda _, shape, data: (tag, shape, data)


def reshape(*shape: int) -> Callable:
    def edit(tag: str, _: list[int], data: bytes) -> tuple:
        size = math.prod(shape) * DTYPES[tag].itemsize
        return tag, list(shape), (data * (size // max(1, len(data)) + 1))[:size]
    return edit


def table(**parts: tuple[str, list[int]] | None) -> Callable[[dict[str, Tensors]], None]:
    """Replace the parts of the Engram table by zeros of other tags and shapes; None removes a part."""
    def edit(shards: dict[str, Tensors]) -> None:
        tensors = shard_of(shards, f"{TABLE}.weight")
        for part, layout in parts.items():
            tensors.pop(f"{TABLE}.{part}", None)
            if layout is not None:
                tag, shape = layout
                tensors[f"{TABLE}.{part}"] = (tag, shape, bytes(math.prod(shape) * DTYPES[tag].itemsize))
    return edit


def on(name: str, edit: Callable | None) -> Callable[[dict[str, Tensors]], None]:
    return lambda shards: change(shards, name, edit)


def add(like: str, name: str) -> Callable[[dict[str, Tensors]], None]:
    def edit(shards: dict[str, Tensors]) -> None:
        tensors = shard_of(shards, like)
        tensors[name] = tensors[like]
    return edit


def rename(old: str, new: str) -> Callable[[dict[str, Tensors]], None]:
    def edit(shards: dict[str, Tensors]) -> None:
        tensors = shard_of(shards, old)
        tensors[new] = tensors.pop(old)
    return edit


def move(name: str) -> Callable[[dict[str, Tensors]], None]:
    def edit(shards: dict[str, Tensors]) -> None:
        entry = shard_of(shards, name).pop(name)
        shards["model-00001-of-00004.safetensors"][name] = entry
    return edit


def drop_drafts(shards: dict[str, Tensors]) -> None:
    for tensors in shards.values():
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]


DEFECTS = [
    # family, change, text of a problem, number of problems or None
    ("native", on(f"{W1}.scale", reshape(64, 4)), f"{W1}.weight: wanted", 1),  # groups of 16
    ("native", on(f"{W1}.scale", transpose), f"{W1}.weight: wanted", 1),
    ("native", on(f"{W1}.scale", retag("U8")), "with scale U8", 1),
    ("native", on(f"{W1}.scale", None), f"{W1}.weight: wanted", 1),
    ("native", on(f"{W1}.weight", reshape(64, 64)), f"{W1}.weight: wanted", 1),  # one code a byte
    ("native", on(f"{W1}.weight", retag("F8_E4M3")), "got F8_E4M3 [64, 32] with scale", 1),  # FP4 read as FP8
    ("native", on("mtp.0.main_proj.scale", transpose), "mtp.0.main_proj.weight: wanted", 1),
    ("native", on("mtp.0.main_proj.scale", reshape(1, 2)), "mtp.0.main_proj.weight: wanted", 1),  # 128x128
    ("native", on("mtp.0.main_proj.scale", reshape(64, 6)), "mtp.0.main_proj.weight: wanted", 1),  # 1x32 on a dense one
    ("native", on("layers.0.attn.wo_a.scale", retag("F32")), "layers.0.attn.wo_a", None),
    ("native", add("layers.0.attn.wo_a.scale", "layers.0.attn.wo_a.weight_scale_inv"),
     "layers.0.attn.wo_a.weight_scale_inv: unexpected", 1),
    ("native", on("layers.1.attn.compressor.wkv.weight", reshape(32, 64)), "layers.1.attn.compressor.wkv.weight", 1),
    ("native", on("layers.0.hc_attn_fn", lambda tag, shape, data: ("BF16", shape, data[::2])),
     "layers.0.hc_attn_fn: wanted F32", 1),
    ("native", on("layers.4.ffn.gate.bias_vl", None), "layers.4.ffn.gate.bias_vl: missing, wanted [4]", 1),
    ("native", add(f"{W1}.scale", f"{W1}.weight_scale"), f"{W1}.weight: wanted", 1),  # two scales
    ("native", rename(f"{W1}.scale", f"{W1}.weight_scale"), f"{W1}.weight: wanted", 1),  # an Engram table's spelling
    ("native", drop_drafts, "mtp.0.attn.wkv.weight: missing", 40),
    ("native", table(scale=("F8_E8M0", [12, 1])), f"{TABLE}.weight: wanted", 1),  # tiles instead of rows
    ("native", table(weight=("U8", [384, 16]), scale=None, weight_scale=("F8_E4M3", [384, 2])), "an NVFP4 table", 1),
    ("native", table(weight=("I8", [384, 32]), scale=("F32", [384, 1])), "an INT8 table", 1),
    ("native", table(weight=("I8", [384, 32]), scale=None), "an INT8 table", 1),
    ("native", table(scale=("F32", [384, 1])), "an FP8 table with float32 scales", 1),
    ("native", table(weight=("U8", [384, 16]), weight_scale=("F8_E8M0", [384, 1])), f"{TABLE}.weight: wanted", 1),
    ("nvfp4", on(f"{NV}.weight_scale_2", None), f"{NV}.weight: wanted", 1),
    ("nvfp4", on(f"{NV}.weight_scale", None), f"{NV}.weight: wanted", 1),
    ("nvfp4", on(f"{NV}.weight_scale", transpose), f"{NV}.weight: wanted", 1),
    ("nvfp4", on(f"{NV}.weight_scale", reshape(64, 2)), f"{NV}.weight: wanted", 1),  # groups of 32
    ("nvfp4", on(f"{NV}.weight_scale", retag("F8_E8M0")), f"{NV}.weight: wanted", 1),
    ("nvfp4", on(f"{NV}.weight_scale_2", lambda *_: ("F32", [64], bytes(256))), f"{NV}.weight: wanted", 1),
    ("nvfp4", on(f"{NV}.weight", retag("I8")), f"{NV}.weight: wanted", 1),
    ("nvfp4", add(f"{NV}.input_scale", "layers.9.input_scale"), "layers.9.input_scale: unexpected", 1),
    ("nvfp4", drop_drafts, "mtp.0.ffn.experts.0.w1.weight: missing", 40),
    ("nvfp4", table(weight_scale_2=("F32", []), weight=("U8", [384, 16]), scale=None,
                    weight_scale=("F8_E4M3", [384, 2])), "an NVFP4 table", 1),
    ("oq", on(f"{OQ}.biases", None), "layers.0.attn.wq_a.weight: wanted", 1),
    ("oq", on(f"{OQ}.scales", None), "layers.0.attn.wq_a.weight: wanted", 1),
    ("oq", on(f"{OQ}.scales", transpose), "layers.0.attn.wq_a.weight: wanted", 1),
    ("oq", on(f"{OQ}.biases", retag("F16")), "layers.0.attn.wq_a.weight: wanted", 1),
    ("oq", on(f"{OQ}.weight", reshape(64, 10)), "the headers say affine 5-bit, group 64", 1),
    ("oq", on(f"{OQ}.weight", reshape(64, 9)), "layers.0.attn.wq_a.weight: wanted", 1),  # 4.5 bits
    ("oq", lambda shards: [change(shards, f"{OQ}.{part}", reshape(64, 2)) for part in ("scales", "biases")],
     "config.json states affine with 4 bits in groups of 64; the headers say affine 4-bit, group 32", 1),
    ("oq", add("language_model.layers.0.attn.wq_a.scales", "language_model.mtp.0.main_proj.biases"),
     "mtp.0.main_proj.weight: wanted", 1),  # mx formats have no biases
    ("oq", add(f"{STACK}.biases", "language_model.layers.9.ffn.experts.w2.biases"), "unexpected, BF16 [4, 64, 1]", 1),
    ("oq", on(f"{STACK}.weight", reshape(3, 64, 6)), "experts.w2.weight: wanted 4 experts stacked", 1),
    ("oq", on(f"{STACK}.biases", None), "experts.w2.weight: wanted 4 times", 1),
    ("oq", lambda shards: [change(shards, f"{STACK}.{part}", None) for part in ("weight", "scales", "biases")],
     "experts.w2.weight: missing, wanted 4 times [64, 64]", 2),
    ("oq", move(f"{OQ}.scales"), "its tensors are in 2 shards, wanted one", 1),
    ("oq", on("language_model.mtp.0.main_proj.scales", retag("F8_E8M0")), "mtp.0.main_proj.weight: wanted", 1),
    ("oq", on("language_model.head.weight", None), "head.weight: missing", 1),
    ("oq", on("vision.blocks.0.ffn.w1.weight", None), "vision.blocks.0.mlp.w1.weight: missing", 1),
]


@pytest.mark.parametrize(("key", "edit", "text", "count"), DEFECTS, ids=lambda x: x if isinstance(x, str) else "")
def test_defect_is_named(tmp_path: Path, key: str, edit: Callable, text: str, count: int | None):
    config, shards = read_folder(FOLDERS[key])
    edit(shards)
    problems = problems_of(write_folder(tmp_path, config, shards))
    assert any(text in problem for problem in problems), problems
    assert count is None or len(problems) == count, problems


OQ_CONFIG_DEFECTS: list[tuple[str, Callable[[dict], Any]]] = [
    ("only version 1 is known", lambda c: c.update(version=2)),
    ("draft tensors were left out", lambda c: c.update(excluded_draft_tensors=2401)),
    ("wants the objects quantized_modules", lambda c: c.update(quantized_modules=None)),
    ("config.json states affine with 3 bits in groups of 64; the headers say affine 4-bit",
     lambda c: c["quantized_modules"][OQ].update(bits=3)),
    ("layers.0.attn.wq_a.weight: config.json states no format", lambda c: c["quantized_modules"].pop(OQ)),
    ("embed.weight: config.json states affine with 4 bits in groups of 64; the headers say a dense weight",
     lambda c: c["quantized_modules"].update({"language_model.embed": {"bits": 4, "group_size": 64}})),
    ("nowhere: config.json states its format, but the files have no such module",
     lambda c: c["quantized_modules"].update({"nowhere": {"bits": 4, "group_size": 64}})),
    ("config.json states quantize_input False, but for this layer it is True",
     lambda c: c["quantized_modules"][OQ].update(quantize_input=False)),
    ("which is not known", lambda c: c["quantized_modules"][OQ].update(bits=7)),
    ("which is not known", lambda c: c["quantized_modules"][OQ].update(rotation="hadamard")),
    ("config.json states affine with 4 bits in groups of 32; the headers say affine 3-bit, group 32",
     lambda c: c["engram_tables"][f"language_model.{TABLE}"].update(bits=4)),
    ("states no bits (FP8 rows); the headers say affine 3-bit",
     lambda c: c["engram_tables"][f"language_model.{TABLE}"].update(bits=None)),
    ("engram_tables in config.json says other.safetensors",
     lambda c: c["engram_tables"][f"language_model.{TABLE}"].update(weight_file="other.safetensors")),
    ("language_model.layers.3.engram.embed: config.json states an Engram table, but the model has none",
     lambda c: c["engram_tables"].update({"language_model.layers.3.engram.embed": {"weight_key": "x"}})),
]


@pytest.mark.parametrize(("text", "edit"), OQ_CONFIG_DEFECTS)
def test_oq_section_must_fit_the_files(tmp_path: Path, text: str, edit: Callable):
    config, shards = read_folder(FOLDERS["oq"])
    edit(config["omlx_deepseek_v41"])
    problems = problems_of(write_folder(tmp_path, config, shards))
    assert any(text in problem for problem in problems), problems


@pytest.mark.parametrize(("key", "name", "byte", "text"), [
    ("native", f"{W1}.scale", 255, "scale byte 255"), ("nvfp4", f"{NV}.weight_scale", 0x7F, "code 0x7F"),
    ("oq", "language_model.mtp.0.main_proj.scales", 255, "scale byte 255"),
    ("oq", "language_model.mtp.0.ffn.experts.w1.scales", 255, "scale byte 255"),
    ("oq", "language_model.mtp.0.main_proj.weight", 0xFF, "code 0x7F"),
    ("oq-ngram", f"language_model.{TABLE}.scale", 255, "scale byte 255")])
def test_values_that_no_weight_may_have(tmp_path: Path, key: str, name: str, byte: int, text: str):
    config, shards = read_folder(FOLDERS[key])
    change(shards, name, lambda tag, shape, data: (tag, shape, data[:-1] + bytes([byte])))
    with pytest.raises(CheckpointError, match=text) as raised:
        inference.load(write_folder(tmp_path, config, shards), weights="packed")
    assert len(raised.value.problems) == 1 and raised.value.problems[0].startswith(name)


def test_affine_values_must_be_finite(tmp_path: Path):
    config, shards = read_folder(FOLDERS["oq"])
    change(shards, f"{OQ}.biases", lambda tag, shape, data: (tag, shape, b"\xc0\x7f" + data[2:]))
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        inference.load(write_folder(tmp_path, config, shards))


def test_extreme_scales_are_allowed(tmp_path: Path):
    """The smallest scale, 2^-127, and the largest one that 6 can be multiplied with in BF16."""
    config, shards = read_folder(NATIVE)
    change(shards, f"{W1}.scale", lambda tag, shape, data: (tag, shape, bytes([0, 252] * (len(data) // 2))))
    folder = write_folder(tmp_path, config, shards)
    model = inference.load(folder, weights="packed")
    weight = model.get_submodule(W1).weight.dequantize()
    assert torch.isfinite(weight).all() and weight[:, 32:].abs().max() == 6 * 2.0**125
    assert 0 < weight[:, :32].abs().max() <= 6 * 2.0**-127  # subnormal in BF16


# --- files -------------------------------------------------------------------------------------------------------


def test_unfinished_export_is_refused(tmp_path: Path):
    folder = shutil.copytree(FOLDERS["oq"], tmp_path / "x")
    (folder / "conversion.inprogress.json").write_text("{}")
    assert "export was interrupted" in problems_of(folder)[0]


@pytest.mark.parametrize("key", ["native", "oq"])
def test_shard_with_the_bytes_of_another(tmp_path: Path, key: str):
    folder = shutil.copytree(FOLDERS[key], tmp_path / "x")
    target, source = "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"
    shutil.copy(folder / source, folder / target)
    wanted = f"{target}: holds the tensors that the index lists in {source}; the file was replaced or renamed"
    assert problems_of(folder) == [wanted]


def test_two_shards_with_exchanged_names(tmp_path: Path):
    folder = shutil.copytree(NATIVE, tmp_path / "x")
    first, second = (folder / f"model-0000{i}-of-00004.safetensors" for i in (2, 3))
    first.rename(folder / "swap")
    second.rename(first)
    (folder / "swap").rename(second)
    assert len(problems_of(folder)) == 2 and all("replaced or renamed" in problem for problem in problems_of(folder))


def test_tensors_that_share_bytes(tmp_path: Path):
    folder = shutil.copytree(NATIVE, tmp_path / "x")
    path = folder / "model-00004-of-00004.safetensors"
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    weight = header[f"{TABLE}.weight"]["data_offsets"]
    header[f"{TABLE}.weight"]["data_offsets"] = [weight[0] - 8, weight[1] - 8]  # into the bytes of the scale before it
    text = json.dumps(header).encode()
    last = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[start:start + last])
    problems = problems_of(folder)
    assert len(problems) >= 1 and f"{TABLE}.weight" in problems[0] and "overlaps the tensor before it" in problems[0]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.switch_mlp.gate_proj.weight",
                                  "language_model.layers.0.ffn.switch_mlp.up_proj.scales",
                                  "language_model.embed_tokens.weight"])
def test_names_of_mlx_model_classes_are_refused(tmp_path: Path, name: str):
    config, shards = read_folder(NATIVE)
    add("embed.weight", name)(shards)
    problems = problems_of(write_folder(tmp_path, config, shards))
    assert len(problems) == 1 and "name of an MLX model class" in problems[0] and name in problems[0]


def test_nothing_is_loaded_from_a_folder_with_a_defect(tmp_path: Path):
    config, shards = read_folder(FOLDERS["oq"])
    change(shards, f"{OQ}.biases", None)
    folder = write_folder(tmp_path, config, shards)
    for mode in ("resident", "packed", "stream"):
        with pytest.raises(CheckpointError, match="Nothing was loaded"):
            inference.load(folder, weights=mode)


# --- configuration -----------------------------------------------------------------------------------------------


def test_sections_of_exporters_are_kept_and_nothing_else(tmp_path: Path):
    values = json.loads((FOLDERS["oq"] / "config.json").read_text())
    config = Config.from_dict(values)
    assert dict(config.quantization_extra) == {"omlx_deepseek_v41": values["omlx_deepseek_v41"]}
    again = config.to_dict()
    assert again["omlx_deepseek_v41"] == values["omlx_deepseek_v41"] and again["text_config"] == values["text_config"]
    assert Config.from_dict(json.loads(json.dumps(again))) == config
    for key in ("quantization_extra", "omlx_deepseek_v5"):
        with pytest.raises(ValueError, match=f"{key}: unknown key"):
            Config.from_dict({**values, key: {}})


# --- inventory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "engram", "experts"), [
    ("native", 8.25, 4.25), ("nvfp4", 8.25, 4.5 + 32 / 4096), ("nvfp4-mxfp4", 4.25, 4.5 + 32 / 4096),
    ("oq-ngram", 8.25, 3.5), ("oq", 4.0, 3.5)])
def test_inventory_adds_up(key: str, engram: float, experts: float):
    """Every stored byte and tensor is in one row of both tables; bits per weight are those of the format."""
    inventory = take_inventory(FOLDERS[key])
    files = sorted(FOLDERS[key].glob("model-*.safetensors"))
    payload = sum(path.stat().st_size - 8 - struct.unpack("<Q", path.read_bytes()[:8])[0] for path in files)
    assert inventory.problems == () and inventory.bytes == payload
    for rows in (inventory.formats, inventory.parts):
        assert sum(row.bytes for row in rows) == payload
        assert sum(row.tensors for row in rows) == inventory.tensors
        assert sum(row.logical for row in rows) == 1_019_180 and sum(row.weights for row in rows) == 250
    bits = {row.name: row.bits for row in inventory.parts}
    assert (bits["Engram tables"], bits["routed experts"]) == (engram, experts)
    if key == "oq":
        assert {row.name: (row.weights, row.tensors, row.bits) for row in inventory.formats if "bit" in row.name} == {
            "affine 8-bit, group 64": (20, 60, 8.5), "affine 6-bit, group 64": (4, 12, 6.5),
            "affine 4-bit, group 64": (22, 66, 4.5), "affine 3-bit, group 64": (60, 45, 3.5),
            "affine 3-bit, group 32": (1, 3, 4.0)}
    report = json.loads((FOLDERS[key] / "quantization_report.json").read_text()) if key.startswith("oq") else None
    assert report is None or report["tensor_bytes"] == inventory.bytes


@pytest.mark.parametrize("key", ["native", "oq"])
@pytest.mark.parametrize("numerics", ["native", "float32"])
def test_inventory_memory_is_what_loading_holds(key: str, numerics: str):
    memory = take_inventory(FOLDERS[key]).memory
    for mode in ("resident", "packed"):
        model = inference.load(FOLDERS[key], numerics=numerics, weights=mode)
        held = sum(parameter.nbytes for parameter in model.parameters())
        weights = [getattr(module, "weight", None) for module in model.modules()]
        held += sum(tensor.nbytes for weight in weights if isinstance(weight, PackedWeight) for tensor in weight.tensors)
        assert memory[mode][numerics] == held
    model = inference.load(FOLDERS[key], numerics=numerics, weights="stream")
    experts = sum(row.bytes for row in take_inventory(FOLDERS[key]).parts if row.name == "routed experts")
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert memory["stream"][numerics] - held >= experts


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main([str(FOLDERS["nvfp4"])]) == 0
    text = capsys.readouterr().out
    for wanted in ("NVFP4 (NVIDIA Model Optimizer); Engram tables as FP8 E4M3, 1x32, E8M0", "496 tensors",
                   "NVFP4 E2M1, 1x16, E4M3 times F32 60 180 245,760 138,480 4.5078",
                   "input_scale (not used)", "total without Engram tables", "resident", "packed", "stream", "Complete"):
        assert wanted in " ".join(text.split())
    assert main([str(FOLDERS["oq"]), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["family"] == "oQ (oMLX)" and values["engram"] == "affine 3-bit, group 32" and values["problems"] == []
    assert {"name": "affine 6-bit, group 64", "weights": 4, "tensors": 12, "logical": 16384, "bytes": 13312,
            "bits_per_weight": 6.5} in values["formats"]

    folder = shutil.copytree(NATIVE, tmp_path / "x")
    (folder / "model-00003-of-00004.safetensors").unlink()
    assert main([str(folder)]) == 3
    text = capsys.readouterr().out
    assert "model-00003-of-00004.safetensors: absent" in text and "mtp.0.attn.wkv.weight: missing" in text
    assert "Complete" not in text
    assert main([str(folder), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["problems"][0].startswith("model-00003-of-00004.safetensors: absent")
    assert main([str(tmp_path)]) == 3
    assert "has neither" in capsys.readouterr().err
    assert main([str(tmp_path), "--json"]) == 3
    assert "has neither" in json.loads(capsys.readouterr().out)["error"]


def test_command_line_as_a_module():
    done = subprocess.run([sys.executable, "-m", "inference.checkpoint", str(NATIVE)], capture_output=True, text=True,
                          cwd=GOLDEN.parents[1], check=False)
    assert done.returncode == 0 and "native (DeepSeek)" in done.stdout


def test_matching_is_linear():
    """Twice the experts cost about twice the look-ups, counted and not timed."""
    class Counting(dict):
        reads = 0

        def get(self, *arguments):
            Counting.reads += 1
            return super().get(*arguments)

    checkpoint, config = Checkpoint.open(FOLDERS["oq"]), Config.from_file(FOLDERS["oq"])
    tensors = Counting(checkpoint.tensors)
    match = match_weights(empty_model(config), Checkpoint(checkpoint.folder, tensors))
    assert not match.problems and Counting.reads <= 6 * len(match.plans)
