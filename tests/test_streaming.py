"""Weights in memory, packed in memory, or on disk: equal outputs, and what the last mode reads and keeps.

Models are the golden pico folders: five layers of four experts (two used per token), one Engram layer, one draft stage.
"""

import io
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import inference
from inference.checkpoint import Checkpoint, CheckpointError, main
from inference.image_processor import ImageInput
from inference.layers import Embedding, Linear
from inference.shards import StoredTensor
from inference.streaming import Stream, StreamedWeight

GOLDEN = Path(__file__).parents[1] / "reference" / "golden"
NATIVE = GOLDEN / "pico" / "checkpoint"
FOLDERS = [NATIVE, *(GOLDEN / f"pico-{name}" for name in ("nvfp4", "nvfp4-mxfp4-engram", "oq3e-ngram-mtp", "oq3e-mtp"))]
IDS = load_file(GOLDEN / "pico" / "golden.safetensors")["input_ids"]
TABLE_SHARD = "model-00004-of-00004.safetensors"


@torch.no_grad()
def run(model: torch.nn.Module, ids: torch.Tensor = IDS, split: int = 20, observe=None) -> list[torch.Tensor]:
    """A prompt, three single tokens and a draft: all paths that read weights."""
    cache = model.new_cache()
    outputs = [model(ids[:, :split], cache, observe=observe).logits]
    outputs += [model(ids[:, i:i + 1], cache, observe=observe).logits for i in range(split, split + 3)]
    draft = model.draft(ids[:, split + 3], cache, observe=observe)
    return [*outputs, draft.logits, draft.confidence]


def stream_of(model: torch.nn.Module) -> Stream:
    return model.embed.weight.stream


# --- equal outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "numerics"), [
    *((folder, "float32") for folder in FOLDERS), (NATIVE, "native"), (FOLDERS[-1], "native")],
    ids=lambda value: value if isinstance(value, str) else value.name)
def test_three_modes_are_bit_equal(folder: Path, numerics: str):
    resident = run(inference.load(folder, numerics=numerics))
    for mode in ("packed", "stream"):
        for wanted, found in zip(resident, run(inference.load(folder, numerics=numerics, weights=mode)), strict=True):
            assert torch.equal(wanted, found)


def test_images_are_bit_equal():
    """The vision tower and its aligner are streamed as well."""
    patches = torch.randn(6 * 6, 3, 14, 14, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    image = ImageInput(patches, patch_rows=6, patch_cols=6, llm_rows=2, llm_cols=2)
    with torch.no_grad():
        rows = [inference.load(NATIVE, weights=mode).image_rows(image) for mode in ("resident", "stream")]
    assert torch.equal(*rows)


def test_streaming_keeps_only_small_tensors_in_memory():
    model = inference.load(NATIVE, weights="stream")
    for name, module in model.named_modules():
        if isinstance(module, Linear | Embedding):
            assert isinstance(module.weight, StreamedWeight), name
    assert sum(parameter.nbytes for parameter in model.parameters()) < 0.3 * 1_324_168


def test_unknown_mode():
    with pytest.raises(ValueError, match="one of resident, packed, stream, got 'mmap'"):
        inference.load(NATIVE, weights="mmap")


# --- what is read ------------------------------------------------------------------------------------------------


def test_only_routed_experts_are_read():
    model = inference.load(NATIVE, weights="stream")
    routed: set[str] = set()

    def observe(name: str, value: torch.Tensor) -> None:
        if name.endswith(".ffn.expert_ids"):
            routed.update(f"{name.removesuffix('.expert_ids')}.experts.{expert}.{part}.weight"
                          for expert in value.unique().tolist() for part in ("w1", "w2", "w3"))

    with torch.no_grad():
        model(IDS[:, :2], model.new_cache(), observe=observe)
    stream = stream_of(model)
    assert set(stream.cached) == routed and 0 < len(routed) < 5 * 4 * 3
    assert (stream.hits, stream.misses) == (0, len(routed))


def test_stacked_experts_are_read_one_by_one():
    """Of a stacked tensor [4, 64, ...] only the slices of routed experts are read."""
    model = inference.load(GOLDEN / "pico-oq3e-mtp", weights="stream")
    with torch.no_grad():
        model(IDS[:, :1], model.new_cache())
    stream = stream_of(model)
    assert len(stream.cached) == 5 * 2 * 3
    one = 64 * 64 * 3 // 8 + 2 * 64 * 2  # words, scales and biases of one projection
    assert stream.cached_bytes == len(stream.cached) * one


def test_engram_rows_are_read_by_position_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    model = inference.load(NATIVE, weights="stream")
    seen: list[torch.Tensor] = []
    reads: dict[str, list[tuple[int, int]]] = {}
    whole, fill = StoredTensor.read, StoredTensor._fill

    def read(stored: StoredTensor) -> torch.Tensor:
        assert ".embed." not in stored.name, "a table was read whole"
        return whole(stored)

    def record(stored: StoredTensor, file, data: torch.Tensor, start: int) -> None:
        if ".engram.embed." in stored.name:
            reads.setdefault(stored.name, []).append((start, len(data)))
        fill(stored, file, data, start)

    monkeypatch.setattr(StoredTensor, "read", read)
    monkeypatch.setattr(StoredTensor, "_fill", record)
    with torch.no_grad():
        model(IDS, model.new_cache(),
              observe=lambda name, value: seen.append(value) if name.endswith("hash_ids") else None)
    ids = seen[0].unique().tolist()
    assert len(ids) < seen[0].numel()  # some rows occur twice and are read once
    for name, width in (("layers.1.engram.embed.weight", 32), ("layers.1.engram.embed.scale", 1)):
        starts = [start for start, _ in reads[name]]
        assert starts == sorted(starts)
        assert [row for start, size in reads[name] for row in range(start // width, (start + size) // width)] == ids
        assert len(starts) < len(ids)  # neighbors are read together


def test_streamed_rows():
    model = inference.load(GOLDEN / "pico-oq3e-mtp", weights="stream")
    weight = model.layers[1].engram.embed.weight
    index = torch.tensor([[7, 0, 383], [7, 8, 9]])
    assert torch.equal(weight.rows(index), weight.dequantize()[index])
    assert weight.to("cpu").rows(index[:, :0]).shape == (2, 0, 32)
    for bad in (-1, 384):
        with pytest.raises(IndexError, match=f"row {bad} of 384"):
            weight.rows(torch.tensor([0, bad]))


# --- what is kept ------------------------------------------------------------------------------------------------

EXPERT = 64 * 64 // 2 + 64 * 2  # bytes of one projection of one expert: codes and scales


@pytest.mark.parametrize("projections", [0, 1, 7, 1000])
def test_cache_of_experts_is_bounded(projections: int):
    model = inference.load(NATIVE, weights="stream", expert_cache=projections * EXPERT + EXPERT // 2)
    wanted = run(inference.load(NATIVE))
    assert all(torch.equal(a, b) for a, b in zip(wanted, run(model), strict=True))
    stream = stream_of(model)
    assert stream.cached_bytes == len(stream.cached) * EXPERT <= stream.cache_bytes
    if projections < 1000:
        assert len(stream.cached) == projections
    else:
        misses = stream.misses
        run(model)
        assert stream.misses == misses == len(stream.cached)  # everything was kept


def test_least_recently_used_expert_goes_first():
    model = inference.load(NATIVE, weights="stream", expert_cache=2 * EXPERT)
    a, b, c = (model.layers[0].ffn.experts[i].w1.weight for i in range(3))
    for weight in (a, b, a, c):
        weight.dequantize()
    assert list(stream_of(model).cached) == [a.name, c.name]
    assert (stream_of(model).hits, stream_of(model).misses) == (1, 3)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process size from /proc (Linux)")
def test_reading_rows_of_a_large_table_does_not_grow_the_process(tmp_path: Path):
    """4000 rows all over a table of 8 GiB (a sparse file). With a mapping the same reads take 248 MiB."""
    rows, width = 2**25, 256
    path = tmp_path / "table"
    with path.open("wb") as file:
        file.truncate(rows * width)
    stored = StoredTensor("table", "U8", (rows, width), path, 0, rows * width)
    index = torch.randint(rows, (4000,), generator=torch.Generator().manual_seed(0)).unique()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    stored.read_rows(index[:10])
    before = resident()
    assert stored.read_rows(index).shape == (len(index), width)
    assert resident() - before < 6 * 2**20


# --- defects at use ----------------------------------------------------------------------------------------------


def patched(tmp_path: Path, name: str, row: int) -> Path:
    """A copy of the native folder with byte 255 as the first scale of one row."""
    folder = shutil.copytree(NATIVE, tmp_path / "x")
    stored = Checkpoint.open(folder).tensors[name]
    with stored.shard.open("r+b") as file:
        file.seek(stored.offset + row * stored.size // stored.shape[0])
        file.write(b"\xff")
    return folder


def test_bad_scale_of_an_expert_is_found_when_it_is_used(tmp_path: Path):
    folder = patched(tmp_path, "layers.0.ffn.experts.1.w2.scale", 5)
    model = inference.load(folder, weights="stream")
    with pytest.raises(ValueError, match=r"layers.0.ffn.experts.1.w2.scale: scale byte 255 \(NaN\) at \[5, 0\]"):
        run(model)
    assert "layers.0.ffn.experts.1.w2.weight" not in stream_of(model).cached
    with pytest.raises(CheckpointError):
        inference.load(folder, weights="packed")


def test_bad_scale_of_a_row_is_found_when_it_is_used(tmp_path: Path):
    model = inference.load(patched(tmp_path, "layers.1.engram.embed.scale", 77), weights="stream")
    table = model.layers[1].engram.embed.weight
    table.rows(torch.tensor([76, 78]))
    with pytest.raises(ValueError, match=r"layers.1.engram.embed.scale: scale byte 255 \(NaN\) at \[77, 0\]"):
        table.rows(torch.tensor([76, 77, 78]))


def test_files_that_change_under_a_model(tmp_path: Path):
    folder = shutil.copytree(NATIVE, tmp_path / "x")
    model = inference.load(folder, weights="stream")
    table = model.layers[1].engram.embed.weight
    path = folder / TABLE_SHARD
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"layers.1.engram.embed.weight: .*{TABLE_SHARD} ended after"):
        table.rows(torch.tensor([0, 383]))
    path.unlink()
    with pytest.raises(ValueError, match=f"{TABLE_SHARD} cannot be opened"):
        table.rows(torch.tensor([0]))


# --- Engram tables on another disk -------------------------------------------------------------------------------


def split_folders(tmp_path: Path) -> tuple[Path, Path]:
    folder, other = shutil.copytree(NATIVE, tmp_path / "weights"), tmp_path / "tables"
    other.mkdir()
    (folder / TABLE_SHARD).rename(other / TABLE_SHARD)
    return folder, other


@pytest.mark.parametrize("mode", ["resident", "packed", "stream"])
def test_engram_folder(tmp_path: Path, mode: str):
    folder, other = split_folders(tmp_path)
    with pytest.raises(CheckpointError, match=f"{TABLE_SHARD}: absent"):
        inference.load(folder, weights=mode)
    model = inference.load(folder, weights=mode, engram_dir=other)
    assert all(torch.equal(a, b) for a, b in zip(run(inference.load(NATIVE)), run(model), strict=True))


def test_engram_folder_comes_first_and_must_hold_a_table(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder, other = split_folders(tmp_path)
    with pytest.raises(ValueError, match=f"holds no table of .*Wanted {TABLE_SHARD}"):
        inference.load(folder, engram_dir=tmp_path)
    (folder / TABLE_SHARD).write_bytes(b"a damaged copy")
    assert Checkpoint.open(folder, other).tensors["layers.1.engram.embed.weight"].shard.parent == other
    assert main([str(folder), "--engram-dir", str(other)]) == 0
    assert "Complete" in capsys.readouterr().out
    assert main([str(folder)]) == 3


# --- progress ----------------------------------------------------------------------------------------------------


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture):
    run(inference.load(NATIVE, weights="stream"))
    assert capsys.readouterr() == ("", "")


def test_progress_on_request(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    model = inference.load(NATIVE, weights="stream", progress=True)
    assert "reading weights" in capsys.readouterr().err
    run(model)
    text = capsys.readouterr().err
    assert "layers" in text and "expert weights kept" in text
    assert stream_of(model).bar is None
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(torch.tensor([[10**6]]), model.new_cache())
    assert stream_of(model).bar is None
    quiet = inference.load(NATIVE, weights="stream", progress=False)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    capsys.readouterr()
    monkeypatch.setattr("sys.stderr", terminal)
    run(quiet)
    assert terminal.getvalue() == ""


# --- reading -----------------------------------------------------------------------------------------------------


def test_stored_tensor_reads_slices_and_rows(tmp_path: Path):
    values = torch.arange(3 * 5 * 2, dtype=torch.int32).view(3, 5, 2)
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<7s", b"padding") + values.numpy().tobytes())  # an odd offset in the file
    stored = StoredTensor("x", "I32", (3, 5, 2), path, 7, values.nbytes)
    assert torch.equal(stored.read(), values)
    assert torch.equal(stored.slice(2).read(), values[2]) and stored.slice(2).name == "x[2]"
    assert torch.equal(stored.slice(1).slice(4).read(), values[1, 4])
    assert torch.equal(stored.slice(1).read_rows(torch.tensor([0, 1, 4])), values[1][[0, 1, 4]])
    assert stored.slice(0).read_rows(torch.tensor([], dtype=torch.int64)).shape == (0, 2)


def test_index_of_the_golden_folders_is_json():
    """The table shard that these tests move is the one that the index names."""
    index = json.loads((NATIVE / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["layers.1.engram.embed.weight"] == TABLE_SHARD
