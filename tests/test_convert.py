"""Converters: golden tensors reproduced byte for byte, and conversions that are stopped at any moment."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import inference
from inference.checkpoint import INDEX, UNFINISHED, Checkpoint
from inference.quant import decode_mxfp4, decode_nvfp4, encode_affine, mxfp4_to_nvfp4
from reference import jobs, shard_writer
from reference.convert import convert, main, plan_affine, plan_bf16, plan_nvfp4
from reference.shard_writer import ConversionStopped, Job, Output, Shard, TensorSpec, write
from reference.source import Source, copy_pieces, read, read_pieces

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pico() -> Path:
    return ROOT / "reference" / "golden" / "pico" / "checkpoint"


@pytest.fixture
def copy(pico: Path, tmp_path: Path) -> Path:
    """A pico checkpoint that a test may damage."""
    return Path(shutil.copytree(pico, tmp_path / "source"))


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> type, shape, bytes of every tensor."""
    return {name: (stored.dtype, stored.shape, bytes(stored.read().reshape(-1).view(torch.uint8).numpy()))
            for name, stored in Checkpoint.open(folder).tensors.items()}


def digests(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def patch_bytes(folder: Path, name: str, change) -> None:
    """Change the bytes of one stored tensor in place: change(uint8 tensor) -> uint8 tensor."""
    stored = Checkpoint.open(folder).tensors[name]
    data = change(stored.read().reshape(-1).view(torch.uint8).clone())
    with stored.shard.open("r+b") as file:
        file.seek(stored.offset)
        file.write(bytes(data.numpy()))


# --- formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", ["nvfp4", "nvfp4-mxfp4-engram"])
def test_nvfp4_reproduces_the_golden_checkpoint(format_name: str, pico: Path, golden_dir: Path, tmp_path: Path) -> None:
    before, golden = digests(pico), f"pico-{format_name}"
    output = convert(pico, tmp_path / "out", format_name, input_scale=0.003)  # the constant of the golden files
    assert tensors(tmp_path / "out") == tensors(golden_dir / golden)
    for name in ("config.json", "hf_quant_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((golden_dir / golden / name).read_text())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors(tmp_path / "out").values())
    assert "7,680 blocks" in output.summary  # 5 layers * 4 experts * 3 * 64 * 64 / 32
    assert digests(pico) == before
    made = tensors(tmp_path / "out")
    for shard in (tmp_path / "out").glob("*.safetensors"):
        assert struct.unpack("<Q", shard.read_bytes()[:8])[0] % 8 == 0
        with safe_open(shard, framework="pt") as file:  # the library of everyone else reads the same
            for name in file.keys():
                assert bytes(file.get_tensor(name).reshape(-1).view(torch.uint8).numpy()) == made[name][2]


def test_w1_and_w3_share_one_global_scale(copy: Path, tmp_path: Path) -> None:
    expert = "layers.2.ffn.experts.1."
    patch_bytes(copy, f"{expert}w3.scale", lambda scale: scale + 5)
    convert(copy, tmp_path / "out", "nvfp4")
    source, made = Checkpoint.open(copy).tensors, Checkpoint.open(tmp_path / "out").tensors
    top = {key: int(source[f"{expert}{key}.scale"].read().view(torch.uint8).max()) - 127 for key in ("w1", "w2", "w3")}
    assert top["w3"] > top["w1"]
    stored = {key: math.log2(made[f"{expert}{key}.weight_scale_2"].read()) + 8 for key in top}
    assert stored == {"w1": top["w3"], "w3": top["w3"], "w2": top["w2"]}
    for key in top:
        old = decode_mxfp4(*(source[f"{expert}{key}.{part}"].read() for part in ("weight", "scale")))
        parts = ("weight", "weight_scale", "weight_scale_2")
        new = decode_nvfp4(*(made[f"{expert}{key}.{part}"].read() for part in parts))
        assert torch.equal(old, new)
    assert not any(name.endswith("input_scale") for name in made)


def test_a_block_that_nvfp4_cannot_hold_is_an_error(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def far_below(scale: torch.Tensor) -> torch.Tensor:
        scale[7] = scale.max() - 18
        return scale

    patch_bytes(copy, "layers.0.ffn.experts.2.w2.scale", far_below)
    assert main([str(copy), str(tmp_path / "out"), "--format", "nvfp4"]) == 3
    assert "layers.0.ffn.experts.2.w2.weight" in capsys.readouterr().err
    with pytest.raises(ValueError, match="interrupted"):
        Checkpoint.open(tmp_path / "out")


def test_a_cast_that_loses_values_is_noticed(pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_code_off(weight: torch.Tensor, scale: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
        codes, *scales = mxfp4_to_nvfp4(weight, scale, top)
        codes[-1, -1] ^= 1
        return codes, *scales

    monkeypatch.setattr(jobs, "mxfp4_to_nvfp4", one_code_off)
    with pytest.raises(ValueError, match="does not reproduce its values"):
        convert(pico, tmp_path / "out", "nvfp4")


def test_a_scale_that_is_nan_is_an_error(copy: Path, tmp_path: Path) -> None:
    patch_bytes(copy, "layers.3.attn.wq_a.scale", lambda scale: scale.index_fill(0, torch.tensor([1]), 255))
    for format_name in ("nvfp4", "bf16", "affine"):
        with pytest.raises(ValueError, match=r"layers\.3\.attn\.wq_a\.scale.*255"):
            convert(copy, tmp_path / format_name, format_name)


@pytest.mark.parametrize("source", ["pico/checkpoint", "pico-nvfp4-mxfp4-engram", "pico-oq3e-mtp"])
def test_bf16_decodes_every_family(source: str, golden_dir: Path, tmp_path: Path) -> None:
    convert(golden_dir / source, tmp_path / "out", "bf16")
    wanted = inference.load(golden_dir / source, weights="resident").state_dict()
    made = Checkpoint.open(tmp_path / "out").tensors
    assert set(made) == set(wanted) and {tensor.dtype for tensor in made.values()} == {"BF16", "F32"}
    for name, value in wanted.items():
        assert torch.equal(made[name].read().float(), value.float()), name
    assert inference.load(tmp_path / "out").load_report.formats.keys() == {"BF16", "F32"}


@pytest.mark.parametrize("bits, group", [(4, 64), (3, 32)])
def test_plain_affine_is_the_minmax_rule(bits: int, group: int, pico: Path, tmp_path: Path) -> None:
    convert(pico, tmp_path / "out", "affine", bits=bits, group_size=group)
    source, made = Source.open(pico), Checkpoint.open(tmp_path / "out").tensors
    model = inference.load(tmp_path / "out")
    assert model.load_report.family.startswith("MLX")
    dense = inference.load(pico).state_dict()
    for name, expert in (("layers.1.attn.wo_a", None), ("embed", None), ("mtp.0.ffn.experts.w2", 3)):
        native = f"{name}.weight" if expert is None else name.replace("w2", f"{expert}.w2.weight")
        wanted = encode_affine(dense[native], bits, group)
        for part, value in zip(("weight", "scales", "biases"), wanted):
            stored = made[f"language_model.{name}.{part}"].read()
            stored = stored if expert is None else stored[expert]
            assert torch.equal(stored.view(torch.uint8), value.view(torch.uint8)), (name, part)
    # The router is never rounded; a table of 32 channels only fits groups of 32.
    assert made["language_model.layers.0.ffn.gate.weight"].dtype == "BF16"
    assert ("language_model.layers.1.engram.embed.scales" in made) == (group == 32)
    assert len(source.plans) == len(dense)


@pytest.mark.parametrize("format_name", ["nvfp4-mxfp4-engram", "affine", "bf16"])
def test_small_pieces_give_the_same_files(format_name: str, pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          ) -> None:
    convert(pico, tmp_path / "whole", format_name)
    monkeypatch.setattr(jobs, "read_pieces", functools.partial(read_pieces, budget=700))
    monkeypatch.setattr(jobs, "copy_pieces", functools.partial(copy_pieces, budget=700))
    convert(pico, tmp_path / "pieces", format_name)
    assert digests(tmp_path / "pieces") == digests(tmp_path / "whole")


def test_pieces_of_rows_are_the_whole(pico: Path) -> None:
    plans = Source.open(pico).plans
    for name in ("layers.1.engram.embed.weight", "layers.1.engram.wkv.weight", "layers.0.attn.wo_a.weight",
                 "layers.0.ffn.experts.0.w1.weight", "embed.weight", "layers.0.hc_attn_base"):
        pieces = list(read_pieces(plans[name], 500))
        assert len(pieces) > 1 or plans[name].shape == (24,)
        for whole, *parts in zip(read(plans[name]), *(tensors for _, tensors in pieces)):
            joined = torch.cat([part.view(torch.uint8) for part in parts])
            assert torch.equal(whole.view(torch.uint8), joined), name
        for stored in plans[name].tensors:
            parts = [part.view(torch.uint8) for _, part in copy_pieces(stored, 500)]
            assert torch.equal(torch.cat(parts), stored.read().view(torch.uint8)), stored.name


# --- stopped and continued -------------------------------------------------------------------------------------


class Killed(BaseException):
    """Like SIGKILL to the code under test: no handler of ours catches it."""


class Writes:
    """Stands for `shard_writer._put`: lets `left` writes through, then writes half of the data and fails."""

    def __init__(self, left: int, error: BaseException) -> None:
        self.left, self.error, self.original = left, error, shard_writer._put

    def __call__(self, file, data) -> None:
        if self.left == 0:
            self.original(file, data[:len(data) // 2])
            file.flush()
            raise self.error
        self.left -= 1
        self.original(file, data)


@pytest.fixture(scope="module")
def planned(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A plan, and what it writes when nothing happens."""
    output = plan_nvfp4(Source.open(pico), True, None)
    target = tmp_path_factory.mktemp("whole") / "out"
    write(output, target)
    return output, digests(target)


def small_output() -> Output:
    """Two shards, two jobs with interleaved pieces, two small files: every kind of write, few of each."""
    table = torch.arange(12, dtype=torch.float32).view(4, 3)

    def pieces():
        for row in range(4):
            yield "b", row, table[row:row + 1]
            yield "a", row, table[row:row + 1].to(torch.bfloat16)

    interleaved = Job((TensorSpec("a", "BF16", (4, 3)), TensorSpec("b", "F32", (4, 3))), pieces)
    scalar = Job((TensorSpec("c", "F32", ()),), lambda: iter([("c", 0, torch.tensor(1.5))]))
    shards = (Shard("model-1.safetensors", (interleaved,)), Shard("model-2.safetensors", (scalar,)))
    return Output(shards, {"tokenizer.json": b"{}", "config.json": b"{}"}, {"format": "small"})


def is_refused(folder: Path) -> bool:
    try:
        Checkpoint.open(folder)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_every_stop_can_be_continued(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every single write is cut in half in turn; `write` is then called again and must leave the same bytes."""
    output = small_output()
    write(output, tmp_path / "whole")
    whole = digests(tmp_path / "whole")
    for stop in range(100):
        target = tmp_path / f"out{stop}"
        with monkeypatch.context() as patch:
            patch.setattr(shard_writer, "_put", Writes(stop, error))
            try:
                write(output, target)
            except ConversionStopped as stopped:
                assert "the disk is full" in str(stopped) and str(target) in str(stopped)
            except Killed:
                pass
            else:
                break  # the writes are used up
        assert is_refused(target), stop
        write(output, target)
        assert digests(target) == whole, stop
    # state, (header, pieces, state) of two shards, two files, index
    assert stop == 1 + (1 + 8 + 1) + (1 + 1 + 1) + 2 + 1


@pytest.mark.parametrize("method", ["rename", "unlink"])
def test_a_stop_between_writes_can_be_continued(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each rename, and each removal of a file."""
    output, original = small_output(), getattr(Path, method)
    write(output, tmp_path / "whole")
    whole = digests(tmp_path / "whole")
    for stop in range(100):
        target, calls = tmp_path / f"out{stop}", iter(range(1000))

        def stopping(path: Path, *arguments) -> None:
            call = next(calls)
            if call == stop // 2 and stop % 2 == 0:
                raise Killed
            original(path, *arguments)
            if call == stop // 2:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Path, method, stopping)
            try:
                write(output, target)
            except Killed:
                pass
            else:
                break
        if not is_refused(target):  # only after the very last removal
            assert (method, stop) == ("unlink", 1) and digests(target) == whole
            continue
        write(output, target)
        assert digests(target) == whole, stop
    assert stop == (2 if method == "unlink" else 2 * (1 + 2 * 2 + 2 + 1))


def test_kill_minus_nine(pico: Path, planned: tuple, tmp_path: Path) -> None:
    """A real SIGKILL in the middle of a shard, then the same command again."""
    code = ("import os, signal, sys; from reference import shard_writer, convert; put = shard_writer._put\n"
            "def stop(file, data):\n"
            "    put(file, data)\n"
            "    if 'model-00003' in file.name and file.tell() > 100_000:\n"
            "        file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
            "shard_writer._put = stop\n"
            "sys.exit(convert.main(sys.argv[1:]))")
    command = [str(pico), str(tmp_path / "out"), "--format", "nvfp4-mxfp4-engram"]
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {UNFINISHED, "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                     "model-00003-of-00004.safetensors.partial"}
    assert is_refused(tmp_path / "out")
    kept = (tmp_path / "out" / "model-00002-of-00004.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    assert digests(tmp_path / "out") == planned[1]
    assert (tmp_path / "out" / "model-00002-of-00004.safetensors").stat().st_mtime_ns == kept  # not written again


def interrupted(output, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave `target` with one finished shard."""
    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "_write_shard", _one_shard(shard_writer._write_shard))
        with pytest.raises(Killed):
            write(output, target)


def _one_shard(original):
    calls = iter(range(2))

    def write_shard(*arguments):
        if next(calls) == 1:
            raise Killed
        return original(*arguments)

    return write_shard


def test_a_finished_shard_that_was_damaged_is_written_again(planned: tuple, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    output, whole = planned
    interrupted(output, tmp_path / "out", monkeypatch)
    shard = tmp_path / "out" / output.shards[0].file
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    write(output, tmp_path / "out")
    assert digests(tmp_path / "out") == whole


def test_an_unfinished_folder_is_continued_by_the_same_conversion_only(
        pico: Path, copy: Path, planned: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, whole = planned
    target = tmp_path / "out"
    interrupted(output, target, monkeypatch)
    before = digests(target)
    for other, difference in ((plan_nvfp4(Source.open(pico), False, None), "format"),
                              (plan_nvfp4(Source.open(pico), True, 0.5), "input_scale"),
                              (plan_bf16(Source.open(pico)), "format"),
                              (plan_nvfp4(Source.open(touched(copy)), True, None), "source")):
        with pytest.raises(ValueError, match=rf"differs in .*{difference}"):
            write(other, target)
        assert digests(target) == before
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="'notes.txt' is no part"):
        write(output, target)
    (target / "notes.txt").unlink()
    write(output, target)
    assert digests(target) == whole


def touched(folder: Path) -> Path:
    """The same bytes, written at another time."""
    os.utime(next(folder.glob("*.safetensors")), ns=(1, 1))
    return folder


def test_a_damaged_state_file_is_reported(planned: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(planned[0], tmp_path / "out", monkeypatch)
    (tmp_path / "out" / UNFINISHED).write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        write(planned[0], tmp_path / "out")


def test_two_processes_cannot_share_a_target(planned: tuple, tmp_path: Path) -> None:
    with shard_writer.target_folder(tmp_path / "out", planned[0].identity), \
            pytest.raises(ValueError, match="another process"):
        write(planned[0], tmp_path / "out")


# --- what is refused -------------------------------------------------------------------------------------------


def test_a_target_that_is_in_use_is_refused(pico: Path, planned: tuple, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "photo.jpg").write_text("mine")
    with pytest.raises(ValueError, match="already holds 1 entries, 'photo.jpg'"):
        write(planned[0], target)
    assert [path.name for path in target.iterdir()] == ["photo.jpg"]
    write(planned[0], tmp_path / "done")
    with pytest.raises(ValueError, match="already holds"):
        write(planned[0], tmp_path / "done")
    with pytest.raises(ValueError, match="is a file"):
        write(planned[0], target / "photo.jpg")
    for inside in (pico, pico / "out", pico.parent):
        with pytest.raises(ValueError, match="may not lie in it"):
            convert(pico, inside, "bf16")


@pytest.mark.parametrize("number, words", [(errno.EROFS, "read-only"), (errno.EACCES, "not writable")])
def test_a_target_that_cannot_be_written(number: int, words: str, pico: Path, tmp_path: Path,
                                         capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main([str(pico), str(tmp_path / "out"), "--format", "bf16"]) == 1
    assert words in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_seen_at_once(pico: Path, tmp_path: Path, capsys: pytest.CaptureFixture,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, 10**6))
        assert main([str(pico), str(tmp_path / "out"), "--format", "affine"]) == 0  # 995,024 bytes of tensors
        assert main([str(pico), str(tmp_path / "wide"), "--format", "bf16"]) == 1
    assert "2,186,608 bytes are still to be written" in capsys.readouterr().err
    assert main([str(pico), str(tmp_path / "wide"), "--format", "bf16"]) == 0


def test_input_that_cannot_be_used_ends_with_3(pico: Path, copy: Path, golden_dir: Path, tmp_path: Path,
                                               capsys: pytest.CaptureFixture) -> None:
    (copy / "model-00002-of-00004.safetensors").unlink()
    for arguments, words in (
            ([str(copy), "--format", "bf16"], "model-00002-of-00004.safetensors: absent"),
            ([str(tmp_path / "none"), "--format", "bf16"], "is not a folder"),
            ([str(golden_dir / "pico-oq3e-mtp"), "--format", "nvfp4"], "must be a native checkpoint"),
            ([str(pico), "--format", "affine", "--bits", "7"], "7 bits"),
            ([str(pico), "--format", "bf16", "--bits", "4"], "no option --bits"),
            ([str(pico), "--format", "oq3e-mtp"], "--calibration-text")):
        assert main([arguments[0], str(tmp_path / "out"), *arguments[1:]]) == 3
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="3"):
        main([str(pico), str(tmp_path / "out"), "--format", "gguf"])


def test_affine_of_a_quantized_source(golden_dir: Path) -> None:
    output = plan_affine(Source.open(golden_dir / "pico-nvfp4"), 8, 64)
    assert output.tensor_bytes > plan_affine(Source.open(golden_dir / "pico-nvfp4"), 4, 64).tensor_bytes
