"""Tiny checkpoints: published layout, packing, coverage of every preset, negative controls of the coverage."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from reference import tiny
from reference.oracles.checkpoint import load_checkpoint
from reference.oracles.model import oracle_forward

MULTI_MECHANISM = ["nano-like", "ratio4", "compressed"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Preset name -> loaded checkpoint."""
    folder = tmp_path_factory.mktemp("tiny")
    return {name: load_checkpoint(tiny.make_tiny(folder / name, name)) for name in tiny.PRESETS}


def layout(folder) -> dict:
    """Tensor name -> (type, shape) over all shards."""
    result = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                piece = file.get_slice(name)
                assert name not in result, f"{name} is in two shards"
                result[name] = (piece.get_dtype(), tuple(piece.get_shape()))
    return result


def test_layout_is_the_golden_one(tmp_path, nano_folder):
    folder = tiny.make_tiny(tmp_path / "checkpoint", "nano-like", shards=4)
    ours, golden = layout(folder), layout(nano_folder)
    assert ours == golden
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(golden)
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) == 4
    assert index["metadata"] == json.loads((nano_folder / "model.safetensors.index.json").read_text())["metadata"]
    assert json.loads((folder / "config.json").read_text()) == json.loads((nano_folder / "config.json").read_text())


@pytest.mark.parametrize("row_block", [1, 32])
def test_fp8_packing_is_within_half_a_step(row_block):
    values = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = tiny.pack_fp8(values, row_block)
    factors = scale.float().repeat_interleave(row_block, 0).repeat_interleave(32, 1)[:70]
    error = (codes.float() * factors - values).abs()
    assert (error <= torch.maximum(values.abs() / 16, factors * 2**-10)).all()
    assert (codes.float().abs().amax() > 224) and scale.shape == (-(-70 // row_block), 2)


def test_fp4_packing_takes_the_nearest_code():
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    packed, scale = tiny.pack_fp4(values)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    bytes_ = packed.view(torch.uint8).long()
    decoded = torch.stack([table[bytes_ & 15], table[bytes_ >> 4]], dim=-1).flatten(1)
    factors = scale.float().repeat_interleave(32, 1)
    nearest = (values[..., None] / factors[..., None] - table).abs().amin(-1)
    torch.testing.assert_close((values / factors - decoded).abs(), nearest)


def test_power_of_two_scales_turn_exactly_at_powers():
    power = torch.tensor([448.0, 448.0 * (1 + 2**-20), 448 * (1 - 2**-20), 224.0, 896.0])
    assert tiny._power_of_two_scale(power, 448.0).tolist() == [0, 1, 0, -1, 1]


@pytest.mark.parametrize("name", MULTI_MECHANISM)
def test_presets_cover_their_mechanisms(made, name):
    margins = tiny.check_coverage(made[name], tiny.tiny_prompts(made[name].config))
    decided = {key: value for key, value in margins.items() if "attn" in key and "topk" not in key}
    assert min(decided.values()) > 5e-8  # see the comment on the seeds of tiny.PRESETS


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_activations_stay_near_one(made, name):
    points = oracle_forward(made[name], tiny.tiny_prompts(made[name].config).input_ids[:1])
    for key, value in points.items():
        if key.endswith(".out"):
            assert 0.1 < np.sqrt((value**2).mean()) < 10, key
    assert 0.5 < points["logits"].std() < 3


def test_tiny_row_exposes_a_wrong_norm_epsilon(made):
    checkpoint = made["one-layer-window"]
    ids = tiny.tiny_prompts(checkpoint.config).input_ids[:1]
    right = oracle_forward(checkpoint, ids)["layers.0.attn.in"][0]
    text = {**checkpoint.config["text_config"], "rms_norm_eps": 1e-6}
    wrong = oracle_forward(checkpoint._replace(config={**checkpoint.config, "text_config": text}), ids)
    wrong = wrong["layers.0.attn.in"][0]
    row = list(ids[0]).index(tiny.TINY_TOKEN)
    assert 0.05 < np.sqrt((right[row] ** 2).mean()) < 0.2 and np.abs(wrong[row]).max() < 1e-7
    others = np.delete(np.arange(ids.shape[1]), row)
    np.testing.assert_allclose(wrong[others], right[others], rtol=1e-5)


def weakened(checkpoint, pattern, change):
    """The checkpoint with every tensor whose name contains `pattern` changed."""
    weights = {name: change(value) if pattern in name else value for name, value in checkpoint.weights.items()}
    return checkpoint._replace(weights=weights)


def with_text(checkpoint, **changes):
    """The checkpoint with other configuration values."""
    text = {**checkpoint.config["text_config"], **changes}
    return checkpoint._replace(config={**checkpoint.config, "text_config": text})


IDLE = {  # rule that must report it -> (change of the checkpoint, change of the token ids)
    "longer than two windows": (None, lambda ids: ids[:, :12]),
    "tiny-amplitude row": (None, lambda ids: np.where(ids == tiny.TINY_TOKEN, 20, ids)),
    "expert gate values pass": (lambda c: weakened(c, "w1", lambda w: w * 0.1), None),
    "expert up values pass": (lambda c: weakened(c, "w3", lambda w: w * 0.1), None),
    "layer 1: every expert is hit": (lambda c: weakened(c, "layers.1.ffn.gate.bias", lambda b: b - [9, 0, 0, 0]), None),
    "layer 0: more compressed rows": (lambda c: with_text(c, index_topk=40), None),
    "layer 2: more candidate blocks.*layer 2: the newest block.*layer 3: the candidate filter": (
        lambda c: with_text(c, candidate_topk_blocks=30), None),
    "layer 2: the last candidate block": (None, lambda ids: ids[:, :32]),
}


@pytest.mark.parametrize("rule", IDLE)
def test_coverage_fails_when_a_mechanism_is_idle(made, rule):
    change, change_ids = IDLE[rule]
    checkpoint, prompts = made["compressed"], tiny.tiny_prompts(made["compressed"].config)
    ids = prompts.input_ids[:1]
    with pytest.raises(ValueError, match=rule):
        tiny.check_coverage(change(checkpoint) if change else checkpoint,
                            prompts._replace(input_ids=change_ids(ids) if change_ids else ids))


def test_seed_decides_and_presets_can_be_changed(tmp_path):
    def embedding(name, **options):
        return load_checkpoint(tiny.make_tiny(tmp_path / name, **options)).weights["embed.weight"]

    first, again, other = (embedding(str(i), config="one-layer-window", seed=seed) for i, seed in enumerate((5, 5, 6)))
    assert (first == again).all() and (first != other).any()
    config = tiny.preset_config("one-layer-window")
    config["text_config"].update(hc_mult=3, sliding_window=3)
    checkpoint = load_checkpoint(tiny.make_tiny(tmp_path / "changed", config, seed=5, shards=1))
    assert checkpoint.weights["layers.0.hc_attn_fn"].shape == (15, 3 * 64)
    assert oracle_forward(checkpoint, np.arange(12, 22)[None])["layers.0.out"].shape == (1, 10, 3, 64)


def test_bad_requests_are_explained(tmp_path):
    with pytest.raises(ValueError, match="nano-like"):
        tiny.make_tiny(tmp_path / "new", "huge")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="empty folder"):
        tiny.make_tiny(tmp_path)
    with pytest.raises(ValueError, match="at least one shard"):
        tiny.make_tiny(tmp_path / "new", shards=0)


def test_command_line(tmp_path, monkeypatch, capsys):
    arguments = ["tiny", str(tmp_path / "model"), "--preset", "one-layer-window", "--traces", str(tmp_path / "traces")]
    monkeypatch.setattr("sys.argv", arguments)
    tiny.main()
    assert "coverage complete" in capsys.readouterr().out
    assert (tmp_path / "traces" / "manifest.json").is_file() and (tmp_path / "model" / "config.json").is_file()
    with pytest.raises(SystemExit) as stopped:  # the folder is no longer empty
        tiny.main()
    assert stopped.value.code == 1 and "empty folder" in capsys.readouterr().err
