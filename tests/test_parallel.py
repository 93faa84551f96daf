"""Several gloo processes share a model: the same text, logits within the floor, own bytes only; wrong variants are caught."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import inference
from inference import parallel
from inference.checkpoint import Checkpoint
from inference.config import Config
from inference.context import Context
from inference.generate import main
from inference.matching import WeightPlan
from inference.moe import stack_experts
from inference.parallel import Ranks, SharedTable
from inference.shards import StoredTensor
from reference.metrics import relative_l2
from reference.parallel_check import FLOOR
from reference.tiny import make_tiny, preset_config

ROOT = Path(__file__).parent.parent
WRONG = ("no sum of the output projection", "no sum at all", "experts of the next rank", "logits gathered in the wrong order",
         "sinks of the first heads", "output groups of the first rank", "visibility counted from the first own key")


@pytest.fixture(scope="module")
def four_groups(tmp_path_factory) -> Path:
    """A checkpoint with every mechanism of the text model in four layers, which splits over four."""
    config = preset_config("nano-like")
    config["vision_config"] = None
    config["text_config"].update(
        num_hidden_layers=4, compress_ratios=[0, 2, 1, 1, 0], kv_source_layer_ids=[1, 2], index_source_layer_ids=[1, 2, 3],
        candidate_source_layer_id=2, engram_layer_ids=[1, 2], num_nextn_predict_layers=1, dspark_target_layer_ids=[1, 2, 3],
        o_groups=4)
    return make_tiny(tmp_path_factory.mktemp("parallel") / "checkpoint", config, seed=3)


def launch(count: int, *arguments: str) -> list[subprocess.CompletedProcess]:
    """Run python with these arguments in `count` processes that find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                                "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, *arguments], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) for rank in range(count)]
    try:
        outputs = [process.communicate(timeout=120) for process in started]
        return [subprocess.CompletedProcess(process.args, process.returncode, *output)
                for process, output in zip(started, outputs)]
    finally:
        for process in started:
            process.kill()


@pytest.fixture(scope="module")
def worker_lines(four_groups, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("parallel") / "lines"
    for done in launch(4, "tests/parallel_worker.py", str(four_groups), str(out)):
        assert done.returncode == 0, done.stderr
    return [json.loads(line) for rank in range(4) for line in Path(f"{out}.{rank}").read_text().splitlines()]


def test_one_two_and_four_ranks_give_the_text_of_the_whole_model(worker_lines) -> None:
    lines = [line for line in worker_lines if "world" in line]
    assert sorted(line["world"] for line in lines) == [1, 1, 2, 2, 4, 4]
    for line in lines:
        assert line["ranks_agree"], line
        if line["world"] == 1:
            assert line["equal_rows"] == line["rows"] and line["draft"] == 0 and line["same_text"], line
        elif line["numerics"] == "float32":
            assert line["worst_row"] < FLOOR and line["draft"] < FLOOR and line["same_text"], line
            assert line["worst_row"] > 0, "no sum has another order, so nothing was split"
        else:  # a BF16 rounding may fall to the other side, in one sequence, say; parts rounded before the sum move every row
            assert line["equal_rows"] >= line["rows"] // 4, line
        if line["world"] == 4:
            assert line["rank_bytes"] < 0.7 * line["whole_bytes"], line


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_far_off(worker_lines, name) -> None:
    distance = {line["wrong"]: line["distance"] for line in worker_lines if "wrong" in line}[name]
    assert distance > 100 * FLOOR


def test_torchrun_generates_what_one_process_does(capsys) -> None:
    """The command of the README: an image, drafts, sampling, two ranks."""
    arguments = ["--input-file", "image.json", "--numerics", "float32", "--json", "--max-new-tokens", "5", "--seed", "3"]
    assert main(arguments) == 0
    wanted = json.loads(capsys.readouterr().out)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                           "inference.generate", *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "every rank has printed"
    found = json.loads(done.stdout)
    assert found["completion_ids"] == wanted["completion_ids"] and found["batch"] == wanted["batch"]
    assert found["batch"]["drafts_sent"] > 0


def test_a_world_size_that_does_not_divide_is_one_error(tmp_path, nano_config) -> None:
    folder = make_tiny(tmp_path / "ratio4", "ratio4")  # six heads in three groups
    ended = launch(2, "-m", "inference.generate", "--ckpt", str(folder), "--prompt", "hello", "--max-new-tokens", "2")
    assert [(done.returncode, done.stdout) for done in ended] == [(3, ""), (3, "")] and ended[1].stderr == ""
    message = ended[0].stderr
    assert message.count("error:") == 1 and message.count("\n") == 1 and "3 output groups (o_groups)" in message
    assert "n_routed_experts" not in message and "work with this checkpoint: 1. Set --nproc-per-node" in message
    with pytest.raises(ValueError) as error:
        parallel.check_world_size(nano_config, 3)
    for name in ("num_attention_heads", "o_groups", "n_routed_experts", "index_n_heads", "dspark_n_routed_experts"):
        assert name in str(error.value)
    assert "vocab_size" not in str(error.value) and "checkpoint: 1, 2. Set" in str(error.value)


def test_world_sizes_of_the_released_model() -> None:
    config = Config.from_file(ROOT / "inference" / "configs" / "deepseek-v4.1-flash.json")
    for size in (1, 2, 4, 8):  # 4 does not divide the rows of the second Engram table; the last rank has fewer
        parallel.check_world_size(config, size)
    with pytest.raises(ValueError, match=r"8 output groups \(o_groups\) do not divide by 16.*checkpoint: 1, 2, 4, 8\. Set"):
        parallel.check_world_size(config, 16)
    with pytest.raises(ValueError, match=r"129280 vocabulary entries \(vocab_size\) do not divide by 3"):
        parallel.check_world_size(config, 3)
    narrow = dataclasses.replace(config, text_config=dataclasses.replace(config.text_config, o_lora_rank=24))
    with pytest.raises(ValueError, match=r"192 output channels .* give 24 to each, wanted a multiple of 32"):
        parallel.check_world_size(narrow, 8)
    few = dataclasses.replace(config, text_config=dataclasses.replace(config.text_config, engram_num_embeddings=(9, 800)))
    with pytest.raises(ValueError, match="9 Engram rows are too few for 8"):
        parallel.check_world_size(few, 8)


def test_a_rank_reads_its_own_bytes_only(four_groups, monkeypatch) -> None:
    """Of what is split, every byte is read by exactly one rank; of the rest, by each."""
    reads: list[tuple[str, int, int]] = []
    fill = StoredTensor._fill

    def recorded(self, file, data, start) -> None:
        reads.append((self.shard.name, self.offset + start, data.numel()))
        fill(self, file, data, start)

    monkeypatch.setattr(StoredTensor, "_fill", recorded)
    stored = Checkpoint.open(four_groups).tensors.values()
    split_name = re.compile(r"(^|\.)(embed|head|wq_b|weights_proj|wo_a|wo_b)\.(weight|scale)$|attn_sink$|\.ffn\.experts\.")
    seen = {tensor.name: torch.zeros(tensor.size, dtype=torch.int32) for tensor in stored}
    for rank in range(4):
        reads.clear()
        inference.load(four_groups, numerics="float32", weights="packed", ranks=Ranks(rank, 4))
        for shard, begin, count in reads:
            [tensor] = [t for t in stored if t.shard.name == shard and t.offset <= begin < t.offset + t.size]
            seen[tensor.name][begin - tensor.offset:begin - tensor.offset + count] += 1
        if rank == 0:
            whole = sum(tensor.size for tensor in stored)
            assert sum(count for _, _, count in reads) < 0.6 * whole
    for name, times in seen.items():
        wanted = 1 if split_name.search(name) else 4
        assert times.eq(wanted).all(), f"{name}: bytes read {times.unique().tolist()} times, wanted {wanted}"


@pytest.mark.parametrize("weights", ["resident", "packed", "stream"])
def test_parts_put_together_are_the_whole_weight(four_groups, weights) -> None:
    def values(module: torch.nn.Module) -> torch.Tensor:
        weight = module.weight.own if isinstance(module.weight, SharedTable) else module.weight
        return weight if isinstance(weight, torch.Tensor) else weight.dequantize()

    whole = inference.load(four_groups, weights="resident")
    parts = [inference.load(four_groups, weights=weights, ranks=Ranks(rank, 4)) for rank in range(4)]
    for name, axis in (("layers.1.attn.wq_b", 0), ("layers.0.attn.wo_a", 0), ("layers.2.attn.wo_b", 1), ("mtp.0.attn.wo_b", 1),
                       ("layers.3.attn.indexer.wq_b", 0), ("layers.1.attn.indexer.weights_proj", 0), ("embed", 0), ("head", 0),
                       ("layers.1.engram.embed", 0), ("mtp.0.markov_head.embed", 0), ("mtp.0.markov_head.head", 0)):
        put_together = torch.cat([values(part.get_submodule(name)) for part in parts], dim=axis)
        assert torch.equal(put_together, values(whole.get_submodule(name))), name
    for rank, part in enumerate(parts):
        assert [len(layer.ffn.experts) for layer in (*part.layers, *part.mtp)] == [2, 2, 2, 2, 1]
        assert torch.equal(values(part.layers[3].ffn.experts[1].w2), values(whole.layers[3].ffn.experts[2 * rank + 1].w2))
        assert torch.equal(part.layers[1].attn.attn_sink, whole.layers[1].attn.attn_sink[rank:rank + 1])


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_of_all_ranks_add_up_to_the_layer(four_groups, grouped) -> None:
    """In both forms of moe.py, and for a rank that no token chose."""
    class Alone(Ranks):
        def summed(self, x: torch.Tensor) -> torch.Tensor:
            return x

    prepare = stack_experts if grouped else lambda model: model
    whole = prepare(inference.load(four_groups))
    parts = [prepare(inference.load(four_groups, ranks=Alone(rank, 4))) for rank in range(4)]
    tokens = torch.randn(7, 128).bfloat16()
    ids = torch.tensor([[0, 1], [0, 3], [1, 2], [2, 7], [1, 3], [0, 7], [2, 3]])  # none of rank 2's experts, 4 and 5
    context = Context(whole.numerics, torch.arange(7).unsqueeze(0), (0,), (7,))
    given = tokens, ids, torch.rand(7, 2), context
    wanted = whole.layers[1].ffn.routed(*given)
    sums = [part.layers[1].ffn.routed(*given) for part in parts]
    assert not sums[2].any() and all(sums[rank].any() for rank in (0, 1, 3))
    # BF16 products of other numbers of rows may be rounded otherwise in one entry.
    assert relative_l2(sum(sums), wanted) < (1e-3 if grouped else 1e-6)
    assert relative_l2(sum(sums[1:]), wanted) > 0.1


def test_parts_that_cut_a_block_are_refused() -> None:
    """Half a tile of 32 columns has no scale of its own."""
    stored = (StoredTensor("wo_b.weight", "F8_E4M3", (128, 64), Path("shard"), 8, 8192),
              StoredTensor("wo_b.scale", "F8_E8M0", (4, 2), Path("shard"), 8200, 8))
    plan = WeightPlan("layers.0.attn.wo_b.weight", "fp8_blocks", stored, (128, 64))
    half = parallel._own_part(plan, 1, Ranks(1, 2))
    assert half.shape == (128, 32) and [part.shape for part in half.tensors] == [(128, 32), (4, 1)]
    assert [(part.offset, part.size, part.pitch) for part in half.tensors] == [(40, 4096, 64), (8201, 4, 2)]
    with pytest.raises(ValueError, match=r"wo_b.weight over 4 processes: columns 0 to 16 of 64 are no whole blocks"):
        parallel._own_part(plan, 1, Ranks(0, 4))


def test_what_only_one_rank_found_is_told(monkeypatch) -> None:
    """A failed rank is silent if rank 0 has reported a failure, and speaks if it has not."""
    monkeypatch.setattr(parallel, "WAIT", timedelta(milliseconds=50))
    store = dist.HashStore()
    assert not parallel._was_reported(store)
    store.set("reported", "3")
    assert parallel._was_reported(store)


def test_a_gpu_for_every_process(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [parallel.choose_device(name) for name in (None, "cuda", "cpu", "cuda:0")] == ["cuda:1", "cuda:1", "cpu", "cuda:0"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3 processes on a machine with 2 GPUs.*--nproc-per-node to at most 2"):
        parallel.choose_device("cuda")


def test_the_check_needs_ranks(capsys) -> None:
    from reference.parallel_check import main as check

    assert check([]) == 3 and "single process" in capsys.readouterr().err
