"""Full-size checkpoints without weights: released totals, and the same code on the smallest golden configuration."""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inference.checkpoint import UNFINISHED, Checkpoint
from inference.inventory import take_inventory
from inference.quant import FORMATS as WEIGHT_FORMATS
from inference.shards import StoredTensor
from inference.tokenizer import Tokenizer
from reference import fullsize
from reference.fullsize import main, make
from reference.fullsize_check import check, describe, part_of
from reference.fullsize_data import PROMPT, STEPS, RealData, convert
from reference.fullsize_layout import FORMATS, PUBLISHED, RELEASED, Release, disk_bytes, place, plan_output

GOLDEN = Path(__file__).parent.parent / "reference" / "golden"
TINY = GOLDEN / "pico" / "checkpoint"
GOLDEN_FOLDERS = {"native": "pico/checkpoint", "nvfp4": "pico-nvfp4", "nvfp4-mxfp4-engram": "pico-nvfp4-mxfp4-engram",
                  "oq3e-ngram-mtp": "pico-oq3e-ngram-mtp", "oq3e-mtp": "pico-oq3e-mtp"}


def make_tiny(folder: Path, format_name: str, seed: int = 0) -> Path:
    make(folder, format_name, seed, json.loads((TINY / "config.json").read_text()),
         (TINY / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module", params=FORMATS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of each format. Shared: copy it before changing it."""
    return make_tiny(tmp_path_factory.mktemp("fullsize") / request.param, request.param)


# --- layout ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released() -> Iterator[Release]:
    release = Release.of(json.loads(RELEASED.read_text()))
    gc.freeze()  # half a million objects that every collection would visit
    yield release
    gc.unfreeze()


@pytest.mark.parametrize(("format_name", "tensors", "size", "shards"), [
    ("native", 96_085, 510_286_023_000, 48), ("nvfp4", 188_245, 527_273_322_840, 48),
    ("nvfp4-mxfp4-engram", 143_317, 429_390_891_608, 48), ("oq3e-ngram-mtp", 2_282, 459_747_934_040, 65),
    ("oq3e-mtp", 2_284, 355_296_826_440, 65)])
def test_released_totals(released: Release, format_name: str, tensors: int, size: int, shards: int) -> None:
    output = plan_output(released, format_name)
    assert (output.tensor_count, output.tensor_bytes, len(output.shards)) == (tensors, size, shards)
    assert PUBLISHED[format_name] == (tensors, size)


def test_released_types_and_shards(released: Release) -> None:
    """Totals by type of the published files, and what stands in which shard."""
    specs = {spec.name: (spec, shard.file) for shard in released.output.shards for spec in shard.specs}
    elements = Counter()
    for spec, _ in specs.values():
        elements[spec.dtype] += math.prod(spec.shape)
    assert elements == {"BF16": 1_976_441_856, "F32": 42_307_282, "F8_E4M3": 204_015_223_296,
                        "I8": 557_171_343_360 // 2, "F8_E8M0": 23_563_015_184}
    for name, shape, number in (
            ("aligner.w1.weight", (5120, 9216), 1), ("embed.weight", (129280, 5120), 2),
            ("layers.0.attn.wo_a.scale", (256, 128), 3), ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), 42),
            ("mtp.0.main_proj.weight", (5120, 15360), 43), ("mtp.2.markov_head.embed.weight", (129280, 256), 46),
            ("layers.1.engram.embed.scale", (384006168, 8), 47), ("layers.14.engram.wkv.scale", (800, 192), 48)):
        assert (specs[name][0].shape, specs[name][1]) == (shape, f"model-{number:05d}-of-00048.safetensors"), name
    engram = [name for name, (_, file) in specs.items() if "-00047-" in file]
    assert sorted(name.removeprefix("layers.1.engram.") for name in engram) == [
        "embed.scale", "embed.weight", "k_weight", "q_weight", "wkv.scale", "wkv.weight"]


def test_a_wrong_total_is_an_error(released: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "native", (96_085, 510_286_023_001))
    with pytest.raises(ValueError, match="510286023000.*published are.*510286023001"):
        plan_output(released, "native")


def headers(folder: Path) -> dict[str, StoredTensor]:
    return Checkpoint.open(folder).tensors


def test_tiny_headers_equal_the_golden_ones(tiny: Path) -> None:
    """Names, types and shapes of checkpoints that other code wrote; the widths of affine codes may differ."""
    made, golden = headers(tiny), headers(GOLDEN / GOLDEN_FOLDERS[tiny.name])
    if tiny.name == "nvfp4-mxfp4-engram":  # the golden one has input scales and MXFP4 drafts, as NVIDIA has
        made = {name: tensor for name, tensor in made.items() if not name.startswith("mtp.0.ffn.experts")}
        golden = {name: tensor for name, tensor in golden.items()
                  if not name.startswith("mtp.0.ffn.experts") and not name.endswith(".input_scale")}
    assert set(made) == set(golden)
    for name, tensor in made.items():
        shapes = [one.shape[:-1] if one.dtype == "U32" else one.shape for one in (tensor, golden[name])]
        assert tensor.dtype == golden[name].dtype and shapes[0] == shapes[1], name


def test_tiny_totals(tiny: Path) -> None:
    """Tensors and bytes from those of the native golden checkpoint, by the rules of each format."""
    native = headers(TINY)
    count, size = len(native), sum(tensor.size for tensor in native.values())
    experts = [tensor for name, tensor in native.items() if ".ffn.experts." in name and name.endswith(".weight")]
    backbone = [tensor for tensor in experts if tensor.name.startswith("layers.")]
    table = native["layers.1.engram.embed.weight"]
    if tiny.name == "nvfp4":  # a scale per 16 instead of per 32 values, a global scale, an input scale
        count += 2 * len(backbone)
        size += sum(tensor.size // 16 + 8 for tensor in backbone)
    elif tiny.name == "nvfp4-mxfp4-engram":
        count += len(experts)
        size += sum(tensor.size // 16 + 4 for tensor in experts) - table.size // 2
    elif tiny.name != "native":
        table_names = 3 if tiny.name == "oq3e-mtp" else 2
        golden = headers(GOLDEN / GOLDEN_FOLDERS[tiny.name])
        assert sum(".engram.embed." in name for name in golden) == table_names
        count = len(golden)
        size = sum(tensor.size for tensor in headers(tiny).values())  # bits: see test_oq.py
    record = json.loads((tiny / "fullsize.json").read_text())
    inventory = take_inventory(tiny)
    assert (inventory.tensors, inventory.bytes) == (record["tensors"], record["bytes"]) == (count, size)
    assert not inventory.problems
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == count and index.get("metadata", {}).get("total_size", size) == size
    assert ("total_size" in index.get("metadata", {})) == (not tiny.name.startswith("oq"))


# --- data --------------------------------------------------------------------------------------------------------


def test_real_weights_are_the_listed_ones(tiny: Path) -> None:
    """Every byte of a hole is zero; every listed parameter has values, of the size that its draw has."""
    record = json.loads((tiny / "fullsize.json").read_text())
    release = Release.of(json.loads((TINY / "config.json").read_text()), tiny)
    layout = place(release, plan_output(release, tiny.name))
    real = RealData.choose(layout.config, Tokenizer.load(tiny), 0)
    assert set(record["real_parameters"]) | set(record["real_rows"]) < set(layout.plans)
    for name, plan in layout.plans.items():
        parts = [tensor if tensor.dim() else tensor.unsqueeze(0) for tensor in map(StoredTensor.read, plan.tensors)]
        parts = [part.view(torch.uint8) for part in parts]
        if name in record["real_rows"]:
            rows = real.rows[name]
            assert len(rows) == record["real_rows"][name] > 0
            hole = torch.ones(plan.shape[0], dtype=torch.bool).index_fill(0, rows, False)
            assert not any(bool(part[hole].any()) for part in parts), name
            parts = [part[rows] for part in parts]
        elif name not in record["real_parameters"]:
            assert not any(bool(part.any()) for part in parts), name
            continue
        wanted = real.stored(layout, name)
        for part, values in zip(parts, wanted, strict=True):
            assert torch.equal(part.flatten(), values.contiguous().flatten().view(torch.uint8)), name
        assert any(bool(part.any()) for part in parts), name


def test_selection_of_the_released_layers(released: Release, tmp_path: Path) -> None:
    """One layer of each kind that owns something, the last one, and the ends of the draft."""
    real = RealData.choose(released.model.config, Tokenizer.load(), 0)
    assert real.layers == ("layers.1", "layers.2", "layers.14", "layers.20", "layers.24", "layers.39", "mtp.0", "mtp.2")
    assert real.experts["layers.39"] == (0, 383) and real.experts["mtp.2"] == (0, 127)
    assert len(real.tokens) == PROMPT + STEPS and real.tokens[0] == 0
    rows = real.rows["layers.14.engram.embed.weight"]
    assert 200 < len(rows) <= 24 * 10 and int(rows.max()) < 384_016_682  # some of 240: early n-grams share the padding
    assert set(real.tokens) | {128799, 129279} <= set(real.rows["embed.weight"].tolist())
    assert real.selection("layers.3.attn.wq_b.weight", "fp8_blocks") is None
    assert real.selection("layers.3.ffn.gate.weight", "BF16") is not None
    assert real.selection("layers.39.ffn.experts.382.w1.weight", "mxfp4") is None
    assert real.selection("vision.blocks.0.norm1.weight", "BF16") is None


def test_values_have_their_size() -> None:
    real = RealData(3, (), (), {"layers.1": (0, 3)}, {})
    for name, kind, wanted in (("layers.1.attn.wq_b.weight", "fp8_blocks", 1.2 / 256**0.5),
                               ("layers.1.ffn.experts.0.w2.weight", "mxfp4", 0.5 / 256**0.5),
                               ("layers.1.engram.embed.weight", "fp8_rows", 1.0)):
        values = WEIGHT_FORMATS[kind].decode(*real.draw(name, kind, (512, 256))).float()
        assert wanted / 2 < float(values.square().mean().sqrt()) < 2 * wanted, name
        assert abs(float(values.mean())) < 0.05 * wanted
    bias = real.draw("layers.1.ffn.gate.bias", "F32", (4,))[0]
    assert bool((bias[[0, 3]] > 7).all()) and bool((bias[1:3].abs() < 1).all())
    first, second = (real.draw(f"layers.{layer}.hc_attn_base", "F32", (9,))[0] for layer in (1, 2))
    assert not torch.equal(first, second)


def test_formats_that_keep_values_keep_them() -> None:
    real = RealData(0, (), (), {}, {})
    for kind, key, name in (("mxfp4", "nvfp4", "layers.0.ffn.experts.0.w1.weight"),
                            ("fp8_blocks", "mxfp8", "layers.0.attn.wkv.weight")):
        drawn = real.draw(name, kind, (96, 64))
        assert torch.equal(WEIGHT_FORMATS[key].decode(*convert(key, kind, drawn)), WEIGHT_FORMATS[kind].decode(*drawn))
        assert torch.equal(convert(None, kind, drawn)[0], WEIGHT_FORMATS[kind].decode(*drawn))


# --- check -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    with torch.no_grad():
        folders = {name: make_tiny(tmp_path_factory.mktemp("check") / name, name) for name in FORMATS}
        return {name: (check(folder), folder) for name, folder in folders.items()}


@pytest.mark.parametrize("format_name", FORMATS)
def test_check_passes(results: dict, format_name: str) -> None:
    result, folder = results[format_name]
    assert result.problems == []
    assert set(result.seconds) == {"load", "prompt, 8 tokens", "decode step 1", "decode step 2", "draft"}
    assert {"attention weights", "routed experts", "Engram rows", "vocabulary heads"} <= set(result.parts)
    assert result.parts["Engram rows"].reads == 3
    assert result.parts["vocabulary heads"].reads == 4 + 5  # the head; the Markov head for every drafted token
    # 2 of 4 experts, which the bias decides; in layers without real products the router does
    assert 2 <= result.experts_per_layer <= 4 and 0 < result.peak < 2**34
    running = sum(value for name, value in result.seconds.items() if name != "load")
    assert sum(part.read + part.decode + part.product for part in result.parts.values()) < running
    text = describe(folder, result)
    assert f"{result.tensors:,} tensors" in text and "GiB" in text and result.digest in text


def test_check_counts_what_is_read(results: dict) -> None:
    """Per forward every attention weight of the backbone once; heads as dense BF16."""
    result, folder = results["native"]
    stored = headers(folder)
    attention = sum(tensor.size for name, tensor in stored.items()
                    if name.startswith("layers.") and ".attn." in name and tensor.dtype.startswith("F8"))
    plain = ("compressor.wkv.weight", "compressor.wgate.weight", "indexer.wk.weight", "indexer.weights_proj.weight")
    attention += sum(tensor.size for name, tensor in stored.items() if name.endswith(plain))
    assert result.parts["attention weights"].bytes == 3 * attention
    head, markov = stored["head.weight"].size, stored["mtp.0.markov_head.head.weight"].size
    assert result.parts["vocabulary heads"].bytes == 4 * head + 5 * markov


def test_lossless_formats_give_equal_logits(results: dict) -> None:
    """Native and NVFP4 stand for the same values; the others do not."""
    digests = {name: result.digest for name, (result, _) in results.items()}
    assert digests["native"] == digests["nvfp4"]
    assert len(set(digests.values())) == 4


def test_fused_projections_share_their_global_scale(results: dict) -> None:
    stored = headers(results["nvfp4"][1])
    for expert in (0, 3):
        first, second = (stored[f"layers.1.ffn.experts.{expert}.{key}.weight_scale_2"].read() for key in ("w1", "w3"))
        assert first == second > 0


def test_seed_changes_values(results: dict, tmp_path: Path) -> None:
    assert check(make_tiny(tmp_path / "other", "native", seed=1)).digest != results["native"][0].digest


@pytest.mark.parametrize(("name", "row", "wanted"), [
    ("embed.weight", "token", "embedding rows differ"),
    ("layers.1.engram.embed.weight", "hash", "layers.1.engram.embed.weight: rows differ"),
    ("head.weight", "hole", "zero in other places"),
    ("layers.1.ffn.gate.bias", None, "layers.1: expert 3 was not chosen"),
    ("norm.weight", None, "are not finite")])
def test_check_notices_wrong_values(tmp_path: Path, name: str, row: str | None, wanted: str) -> None:
    folder = make_tiny(tmp_path / "broken", "native")
    stored = headers(folder)[name]
    config = Release.of(json.loads((TINY / "config.json").read_text())).model.config
    real = RealData.choose(config, Tokenizer.load(folder), 0)
    at = {"token": real.tokens[2], "hash": int(real.rows["layers.1.engram.embed.weight"][5]), "hole": 0, None: 0}[row]
    if row == "hole":
        at = min(set(range(config.text_config.vocab_size)) - set(real.rows[name].tolist()))
    step = stored.size // stored.shape[0]
    with stored.shard.open("r+b") as file:
        file.seek(stored.offset + at * step)
        old = file.read(step)
        file.seek(stored.offset + at * step)
        if name == "layers.1.ffn.gate.bias":  # the first favored expert and all others exchange their biases
            file.write(torch.tensor([0.0, 20.0, 20.0, 0.0]).numpy().tobytes())
        elif name == "norm.weight":
            file.write(torch.full((stored.shape[0],), 3e38, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
        else:
            file.write(bytes(octet ^ 0x01 for octet in old))
    problems = check(folder).problems
    assert any(wanted in problem for problem in problems), problems


def test_check_notices_another_seed(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "broken", "native")
    record = json.loads((folder / "fullsize.json").read_text())
    (folder / "fullsize.json").write_text(json.dumps(record | {"seed": 1, "tensors": 5}))
    problems = check(folder).problems
    assert any("embedding rows" in problem for problem in problems)
    assert any("wanted (5," in problem for problem in problems)


def test_parts_cover_all_weights(released: Release) -> None:
    names = [name for name, _ in released.model.named_parameters() if name.endswith(".weight")]
    assert Counter(part_of(name) for name in names if ".experts." in name) == {
        "routed experts": 40 * 384 * 3, "routed experts, draft": 3 * 128 * 3}
    for name, part in (("layers.14.engram.embed.weight", "Engram rows"),
                       ("mtp.2.markov_head.head.weight", "vocabulary heads"),
                       ("layers.14.engram.wkv.weight", "Engram projections"),
                       ("mtp.2.markov_head.embed.weight", "embedding rows"), ("head.weight", "vocabulary heads"),
                       ("layers.2.attn.indexer.wq_b.weight", "attention weights"),
                       ("mtp.0.attn.wkv.weight", "other weights, draft"), ("aligner.w1.weight", "other weights")):
        assert name in names and part_of(name) == part, name


# --- what is refused, and interruptions -----------------------------------------------------------------------------


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("here")
    assert main(["make", str(tmp_path / "full"), "--format", "native"]) == 3
    assert "full is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["something"]
    assert main(["make", str(tmp_path / "full" / "something"), "--format", "native"]) == 3
    assert main(["check", str(TINY)]) == 3
    assert "has no fullsize.json" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "nowhere")]) == 3
    assert "has no fullsize.json" in capsys.readouterr().err
    for cache in ("-1", "nan", "inf"):
        assert main(["check", str(TINY), "--expert-cache", cache]) == 3
        assert "--expert-cache must be" in capsys.readouterr().err
    with pytest.raises(ValueError, match="wanted a format among"):
        make(tmp_path / "new", "nvfp8")
    for wrong in (["--format", "nvfp8"], [], ["--format", "native", "--seed", "x"]):
        with pytest.raises(SystemExit) as stopped:
            main(["make", str(tmp_path / "new"), *wrong])
        assert stopped.value.code == 3 and len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_damaged_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny(tmp_path / "made", "native")
    record = (folder / "fullsize.json").read_text()
    for wrong in ("", "[]", "{}", record.replace('"native"', '"other"'), record.replace('"seed": 0', '"seed": null')):
        (folder / "fullsize.json").write_text(wrong)
        assert main(["check", str(folder)]) == 3, wrong
        assert "no fullsize.json of a finished checkpoint" in capsys.readouterr().err
    (folder / "fullsize.json").write_text(record)
    shard = max(folder.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    assert main(["check", str(folder)]) == 3
    assert f"{shard.name}: truncated" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code", "wanted"), [
    (OSError(28, "No space left on device"), 3, "No space left on device"), (KeyboardInterrupt(), 130, "stopped")])
def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                    error: BaseException, code: int, wanted: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fullsize.Release, "of", fail)
    assert main(["make", str(tmp_path / "new"), "--format", "native"]) == code
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["choose", "_record", "disk_full"])
def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    folder, seen = tmp_path / "made", []

    def interrupt(*_: object, **__: object) -> None:
        seen.append(sorted(path.name for path in folder.iterdir()))
        with pytest.raises(ValueError, match="interrupted"):
            Checkpoint.survey(folder)
        raise OSError(28, "No space left on device") if moment == "disk_full" else KeyboardInterrupt

    if moment == "choose":
        monkeypatch.setattr(fullsize.RealData, "choose", interrupt)
    else:
        monkeypatch.setattr(fullsize, "_record", interrupt)
    with pytest.raises(OSError if moment == "disk_full" else KeyboardInterrupt):
        make_tiny(folder, "native")
    assert UNFINISHED in seen[0] and "model.safetensors.index.json" not in seen[0]
    assert not folder.exists()
    folder.mkdir()
    with pytest.raises(OSError if moment == "disk_full" else KeyboardInterrupt):
        make_tiny(folder, "native")
    assert list(folder.iterdir()) == []


def test_a_file_system_without_holes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Path.stat

    class Full:
        def __init__(self, real: object) -> None:
            self.real, self.st_blocks = real, 1 << 17

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    def full(self: Path, **options: bool) -> object:
        found = status(self, **options)
        return Full(found) if self.name.endswith(".probe") else found

    monkeypatch.setattr(Path, "stat", full)
    with pytest.raises(ValueError, match="no sparse files"):
        make_tiny(tmp_path / "made", "native")
    assert not (tmp_path / "made").exists()


def test_files_are_sparse(tmp_path: Path) -> None:
    values = json.loads((TINY / "config.json").read_text())
    values["vision_config"] |= {"hidden_size": 4096, "intermediate_size": 16384}  # vision is a hole
    record = make(tmp_path / "made", "native", 0, values, (TINY / "tokenizer.json").read_bytes())
    assert record["bytes"] > 500_000_000 > 40 * disk_bytes(tmp_path / "made")
