"""Vision tower and aligner against recorded numbers, the float64 oracle, and deliberately wrong variants.

Bounds: float32 is within relative L2 2e-5 of the recorded run (measured: 8e-7). Native: the aligner alone, fed the
recorded features, is within 1e-2 (measured: 4e-3). Through the whole tower BF16 rounding adds up to 1.1e-2 (measured),
hence 1.5e-2.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from inference import vision
from inference.config import Config, VisionConfig
from inference.layers import RMSNorm
from inference.numerics import Numerics
from inference.vision import Aligner, VisionTower, merge_cells, rotate_halves, rotation_angles
from reference.oracles import vision as oracle

NANO = Path(__file__).parent.parent / "reference" / "golden" / "nano"
FLOAT32, NATIVE = Numerics.of("float32"), Numerics.of("native")
BOUND = 2e-5
IMAGES = ("", "#1")  # suffixes of the recorded points


def relative_l2(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.fixture(scope="module")
def nano():
    """(tower, aligner, recorded points) of the nano checkpoint."""
    config = Config.from_file(NANO / "checkpoint")
    tower, aligner = VisionTower(config.vision_config), Aligner(config.vision_config, config.text_config.hidden_size)
    stored = load_file(NANO / "checkpoint" / "model-00001-of-00006.safetensors")
    for module, prefix in ((tower, "vision."), (aligner, "aligner.")):
        # Strict: every stored name is a parameter and the other way round.
        module.load_state_dict({name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)})
    return tower, aligner, load_file(NANO / "traces" / "vision_prefill.float32.safetensors")


@torch.no_grad()
def run(nano, suffix: str, numerics: Numerics) -> tuple[torch.Tensor, torch.Tensor]:
    tower, aligner, recorded = nano
    index = IMAGES.index(suffix)
    _, rows, cols, _, _ = recorded[f"image{index}.grid"].tolist()
    features = tower(recorded[f"image{index}.patches"], rows, cols, numerics)
    return features, aligner(features, rows, cols, numerics)


@pytest.mark.parametrize("suffix", IMAGES)
def test_float32_equals_recorded_numbers(nano, suffix):
    features, cells = run(nano, suffix, FLOAT32)
    assert features.dtype == cells.dtype == torch.float32
    assert relative_l2(features, nano[2]["vision.out" + suffix]) < BOUND
    assert relative_l2(cells, nano[2]["aligner.out" + suffix]) < BOUND


@pytest.mark.parametrize("suffix", IMAGES)
def test_native_stays_close_and_quantizes_no_input(nano, suffix):
    features, cells = run(nano, suffix, NATIVE)
    assert features.dtype == cells.dtype == torch.bfloat16
    assert relative_l2(features, nano[2]["vision.out" + suffix]) < 1.5e-2
    assert relative_l2(cells, nano[2]["aligner.out" + suffix]) < 1.5e-2
    _, rows, cols, _, _ = nano[2][f"image{IMAGES.index(suffix)}.grid"].tolist()
    alone = nano[1](nano[2]["vision.out" + suffix].to(torch.bfloat16), rows, cols, NATIVE)
    assert relative_l2(alone, nano[2]["aligner.out" + suffix]) < 1e-2
    # "dequantized" differs from "native" only in the FP8 rounding of linear inputs; the vision path has none.
    unquantized = run(nano, suffix, Numerics.of("dequantized"))
    assert torch.equal(features, unquantized[0]) and torch.equal(cells, unquantized[1])


def _adjacent_pairs(x, angles):
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def _columns_first(rows, cols, width, theta, device="cpu"):
    by_row, by_column = rotation_angles(rows, cols, width, theta, device).chunk(2, dim=-1)
    return torch.cat((by_column, by_row), dim=-1)


def _frequencies_of_one_long_axis(rows, cols, width, theta, device="cpu"):
    exponent = torch.arange(width // 2).float() / (width // 2)  # X/2 frequencies, split between the axes
    by_row, by_column = (1.0 / theta**exponent).chunk(2)
    row, column = torch.arange(rows).repeat_interleave(cols), torch.arange(cols).repeat(rows)
    return torch.cat((row[:, None] * by_row, column[:, None] * by_column), dim=-1)


def _cell_major(features, rows, cols, factor):
    cells = merge_cells(features, rows, cols, factor)
    return cells.unflatten(1, (features.shape[1], -1)).transpose(1, 2).flatten(1)


def _transposed_cells(features, rows, cols, factor):
    cells = merge_cells(features, rows, cols, factor)
    return cells.unflatten(1, (features.shape[1], factor, factor)).transpose(2, 3).flatten(1)


def _padded_above(features, rows, cols, factor):
    grid = F.pad(features.unflatten(0, (rows, cols)), (0, 0, -cols % factor, 0, -rows % factor, 0))
    return merge_cells(grid.flatten(0, 1), grid.shape[0], grid.shape[1], factor)


WRONG_VARIANTS = {
    "adjacent pairs": ("rotate_halves", _adjacent_pairs),
    "turned the other way": ("rotate_halves", lambda x, angles: rotate_halves(x, -angles)),
    "no rotation": ("rotate_halves", lambda x, angles: x),
    "column angles first": ("rotation_angles", _columns_first),
    "rows and columns exchanged": ("rotation_angles", lambda rows, cols, *rest: rotation_angles(cols, rows, *rest)),
    "different frequencies per axis": ("rotation_angles", _frequencies_of_one_long_axis),
    "cell-major": ("merge_cells", _cell_major),
    "cell transposed": ("merge_cells", _transposed_cells),
    "padded above": ("merge_cells", _padded_above),
}

@pytest.mark.parametrize("name", WRONG_VARIANTS)
def test_wrong_variants_leave_the_bound(nano, monkeypatch, name):
    attribute, variant = WRONG_VARIANTS[name]
    monkeypatch.setattr(vision, attribute, variant)
    _, cells = run(nano, "#1", FLOAT32)  # 10 x 7 patches: not square, no multiple of 3
    assert relative_l2(cells, nano[2]["aligner.out#1"]) > 100 * BOUND


def test_tanh_gelu_leaves_the_bound(nano, monkeypatch):
    exact = F.gelu
    monkeypatch.setattr(vision.F, "gelu", lambda x: exact(x, approximate="tanh"))
    assert relative_l2(run(nano, "", FLOAT32)[1], nano[2]["aligner.out"]) > 2 * BOUND


def test_norms_use_the_vision_eps(nano):
    norms = [module for module in nano[0].modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 5  # two per block, one at the end
    tiny = torch.full((1, 64), 1e-3)  # mean square 1e-6 = eps: half the power is lost; with the text eps nothing is
    for norm in norms:
        assert torch.allclose(norm(tiny), norm.weight.float() * 0.5**0.5, rtol=1e-4)


def test_rotation_angles():
    """X = 8: two frequencies, 1 and theta^-1/2, for both axes; float64 closed form."""
    angles = rotation_angles(3, 5, 8, 100.0)
    for row in range(3):
        for column in range(5):
            assert angles[row * 5 + column].tolist() == pytest.approx([row, row / 10, column, column / 10], rel=1e-6)
    released = rotation_angles(2, 2, 64, 10000.0)  # heads of 64: 16 frequencies per axis
    wanted = 10000.0 ** (-2 * torch.arange(16, dtype=torch.float64) / 32)
    assert released.shape == (4, 32)
    assert torch.allclose(released[3].double(), wanted.repeat(2), rtol=1e-6, atol=0)


def test_rotation_pairs_halves():
    """A unit vector on channel j of the first half becomes cos on j and sin on j + X/2."""
    angles = rotation_angles(2, 3, 8, 100.0)[5:6]  # patch (1, 2): angles 1, 0.1, 2, 0.2
    for j, angle in enumerate((1.0, 0.1, 2.0, 0.2)):
        turned = rotate_halves(torch.eye(8)[j].view(1, 1, 8), angles).flatten()
        wanted = torch.zeros(8)
        wanted[j], wanted[j + 4] = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        assert torch.allclose(turned, wanted, atol=1e-6), f"channel {j}: {turned.tolist()}"


def test_rotation_is_float32_inside():
    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    angles = rotation_angles(2, 3, 8, 100.0)
    assert torch.equal(rotate_halves(x, angles), rotate_halves(x.float(), angles).to(torch.bfloat16))


@pytest.mark.parametrize("rows, cols", [(6, 9), (5, 8), (4, 7)])  # all three give 2 x 3 cells
def test_every_index_goes_through_the_unshuffle(rows, cols):
    """Patch k, feature m holds 1000 m + k + 1. Walk over every output number and say where it came from."""
    width, factor = 4, 3
    features = 1000 * torch.arange(width) + torch.arange(rows * cols)[:, None] + 1
    merged = merge_cells(features, rows, cols, factor)
    assert merged.shape == (6, width * 9)
    for cell_row in range(2):
        for cell_col in range(3):
            for m in range(width):
                for down in range(factor):
                    for right in range(factor):
                        row, col = cell_row * factor + down, cell_col * factor + right
                        wanted = 1000 * m + row * cols + col + 1 if row < rows and col < cols else 0
                        where = cell_row * 3 + cell_col, m * 9 + down * 3 + right
                        assert merged[where].item() == wanted, f"cell {where[0]}, value {where[1]}"
    for wrong in (_cell_major, _transposed_cells):
        assert not torch.equal(wrong(features, rows, cols, factor), merged)
    by_columns = merged.unflatten(0, (2, 3)).transpose(0, 1).flatten(0, 1)
    assert not torch.equal(by_columns, merged)


def test_equals_the_oracle_at_another_shape():
    """Random weights, grid 5 x 8, cells of 2 x 2, heads of 8: nothing is shared with the recorded run."""
    config = VisionConfig(num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=20,
                          patch_size=2, rope_theta=100.0, downsample_ratio=2)
    tower, aligner = VisionTower(config), Aligner(config, 10)
    generator = torch.Generator().manual_seed(51)
    weights = {}
    for module, prefix in ((tower, "vision."), (aligner, "aligner.")):
        for name, parameter in module.named_parameters():
            fan_in = parameter.shape[-1] if parameter.dim() == 2 else 4
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / fan_in**0.5)
            weights[prefix + name] = parameter.detach().double().numpy()
    patches = torch.randn(40, 3, 2, 2, generator=generator)
    with torch.no_grad():
        features = tower(patches, 5, 8, FLOAT32)
        cells = aligner(features, 5, 8, FLOAT32)
    settings = {"num_attention_heads": 3, "num_hidden_layers": 2, "rope_theta": 100.0}
    wanted = oracle.tower(patches.double().numpy(), 8, settings, weights)
    assert relative_l2(features, torch.from_numpy(wanted)) < BOUND
    assert relative_l2(cells, torch.from_numpy(oracle.aligner(wanted, 5, 8, 2, weights))) < BOUND


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest result of any operation holds."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("numerics", [FLOAT32, NATIVE], ids=lambda numerics: numerics.name)
def test_memory_grows_linearly_with_patches(nano, numerics):
    """No operation may hold the [H, P, P] scores: 8,649 patches (the largest square) would need gigabytes."""
    count = 25 * 26  # more than 588, so that the scores of one head alone would be larger than the input
    with torch.no_grad(), LargestTensor() as largest:
        nano[0](torch.zeros(count, 3, 14, 14, dtype=torch.bfloat16), 25, 26, numerics)
    assert largest.numbers == count * 588, f"{largest.numbers / count} numbers per patch, wanted the input's 588"


def test_observer_sees_every_point(nano):
    tower, aligner, recorded = nano
    seen = {}
    with torch.no_grad():
        features = tower(recorded["image0.patches"], 6, 9, FLOAT32, observe=seen.__setitem__)
        cells = aligner(features, 6, 9, FLOAT32, observe=seen.__setitem__)
    assert list(seen) == ["vision.patches", "vision.blocks.0.out", "vision.blocks.1.out", "vision.out",
                          "aligner.merged", "aligner.out"]
    assert seen["vision.patches"] is recorded["image0.patches"] and seen["vision.out"] is features
    assert seen["aligner.out"] is cells and seen["aligner.merged"].shape == (6, 9 * 64)
    assert torch.equal(tower.norm(seen["vision.blocks.1.out"]), features)


def test_patches_of_another_grid_are_refused(nano):
    tower, _, recorded = nano
    with pytest.raises(ValueError, match=r"6 rows x 8 columns needs patches of shape \(48, 3, 14, 14\), got \(54"):
        tower(recorded["image0.patches"], 6, 8, FLOAT32)
