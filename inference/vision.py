"""Vision tower and aligner: the patches of one image become rows of the text model's width.

What it computes
    tower    x = patch W + b;  per block: x += attention(norm1(x)), x += mlp(norm2(x));  final norm
    rotation q and k only: angles (row f_0 .. row f_last, column f_0 .. column f_last) with f_i = theta^(-i / (X/4)) for
             a head of X channels; channel j of the first half of a head pairs with channel j of the second half
    aligner  cells of d x d patches (zeros below and right), channel-major;  w2 gelu(w1 cell + b1) + b2
Inputs and outputs
    patches [P, 3, p, p] of ONE image, row-major over its grid -> features [P, M] -> [cells, D], cells row-major.
    P patches of p x p pixels, M vision width, D text width, H heads of X channels, d = downsample_ratio.
Mirrors
    official: the ViT and the aligner of the official inference code; parameter names are the checkpoint's.
Leaves out
    Pixels to patches and where the rows go in a prompt (image_processor.py); position of the text model (rope.py: it
    pairs *adjacent* channels, so the two rotations share no code on purpose).
Tests
    tests/test_vision.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference.config import VisionConfig
from inference.layers import Linear, RMSNorm
from inference.numerics import Numerics

VISION_NORM_EPS = 1e-6  # official: a constant of the vision code; the text model's rms_norm_eps is 1e-20

# Called with a point name and the tensor there; used to record or compare internals.
Observer = Callable[[str, Tensor], None]


@functools.lru_cache(maxsize=16)  # per size and device: copying them there anew would stop the host
def rotation_angles(grid_rows: int, grid_cols: int, head_width: int, theta: float,
                    device: torch.device | str = "cpu") -> Tensor:
    """Angles of all patches in row-major order: [P, X/2] float32 radians, row angles first, then column angles.

    Both axes use the same X/4 frequencies (official: 16 for heads of 64), fastest first.
    """
    # Computed on the CPU whatever the device, as in rope.py: pow differs in the last bit between devices.
    exponent = torch.arange(head_width // 4, dtype=torch.float32) / (head_width // 4)
    frequencies = (1.0 / theta**exponent).to(device)
    row = torch.arange(grid_rows, dtype=torch.float32, device=device).repeat_interleave(grid_cols)
    column = torch.arange(grid_cols, dtype=torch.float32, device=device).repeat(grid_rows)
    return torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=-1)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Turn x [P, H, X] by angles [P, X/2], the same for all heads: (a, b) -> (a cos - b sin, b cos + a sin).

    a is the first half of the channels, b the second. Float32 inside, one cast back to the dtype of x (official).
    """
    assert angles.shape == (x.shape[0], x.shape[2] // 2), f"angles {tuple(angles.shape)} for x {tuple(x.shape)}"
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def merge_cells(features: Tensor, grid_rows: int, grid_cols: int, factor: int) -> Tensor:
    """Features [P, M] of a grid -> [ceil(rows/d) * ceil(cols/d), M * d^2], cells row-major, any dtype.

    A cell is channel-major (official): for each of the M features its d^2 positions, row-major within the cell. Patches
    that the last row or column of cells lacks are zeros, below and to the right.
    """
    count, width = features.shape
    assert count == grid_rows * grid_cols, f"{count} features for a grid of {grid_rows} x {grid_cols}"
    grid = features.unflatten(0, (grid_rows, grid_cols))
    grid = F.pad(grid, (0, 0, 0, -grid_cols % factor, 0, -grid_rows % factor))
    cells = grid.unflatten(1, (-1, factor)).unflatten(0, (-1, factor))  # [cell row, row in it, cell col, col in it, M]
    return cells.permute(0, 2, 4, 1, 3).reshape(-1, width * factor * factor)


class PatchEmbedding(nn.Module):
    """One linear layer over a flattened patch, with bias (official: no convolution, no learned positions)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Linear(3 * config.patch_size**2, config.hidden_size, bias=True)

    def forward(self, patches: Tensor, numerics: Numerics) -> Tensor:
        """patches [P, 3, p, p] -> [P, M] in the activation dtype."""
        return self.proj(patches.flatten(1), numerics)  # channel-first: all of red, then green, then blue


class VisionAttention(nn.Module):
    """Every patch attends to every patch of its image; no mask, no cache."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)  # q, then k, then v
        self.wo = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, angles: Tensor, numerics: Numerics) -> Tensor:
        """x [P, M] activation dtype, angles [P, X/2] float32 -> [P, M]."""
        q, k, v = self.wqkv(x, numerics).unflatten(-1, (3, self.heads, -1)).unbind(1)  # each [P, H, X]
        q, k = rotate_halves(q, angles), rotate_halves(k, angles)
        # The fused operation never holds the [H, P, P] scores (4.8 GB in float32 for 8,649 patches and 16 heads). It
        # scales by X^-0.5 (official) and keeps the softmax in float32 whatever the dtype. Without the batch of one,
        # torch would choose an operation that does hold them.
        q, k, v = (head.transpose(0, 1).unsqueeze(0) for head in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.wo(mixed.squeeze(0).transpose(0, 1).flatten(1), numerics)


class VisionMLP(nn.Module):
    """w2 (silu(gate) * up), gate and up being the two halves of w1 x. Unlike the text experts: no clamp (official)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.w2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, numerics: Numerics) -> Tensor:
        """x [P, M] -> [P, M], activation dtype."""
        gate, up = self.w1(x, numerics).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up, numerics)


class VisionBlock(nn.Module):
    """Attention and MLP, each behind its norm and added to the stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, VISION_NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, VISION_NORM_EPS)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, angles: Tensor, numerics: Numerics) -> Tensor:
        """x [P, M] activation dtype, angles [P, X/2] float32 -> [P, M]."""
        x = x + self.attn(self.norm1(x), angles, numerics)
        return x + self.mlp(self.norm2(x), numerics)


class VisionTower(nn.Module):
    """The `vision.` part of the checkpoint. No input of its linear layers is quantized (official: all BF16)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, VISION_NORM_EPS)

    def forward(self, patches: Tensor, grid_rows: int, grid_cols: int, numerics: Numerics,
                observe: Observer | None = None) -> Tensor:
        """patches [P, 3, p, p] of one image, any float dtype, P = grid_rows * grid_cols -> [P, M] activation dtype.

        observe: called with "vision.patches", "vision.blocks.{k}.out" and "vision.out". Raises ValueError for patches
        that are not this grid's.
        """
        side = self.config.patch_size
        wanted = (grid_rows * grid_cols, 3, side, side)
        if patches.shape != wanted:
            raise ValueError(f"Vision tower: a grid of {grid_rows} rows x {grid_cols} columns needs patches of shape "
                             f"{wanted}, got {tuple(patches.shape)}. Pass one image, as "
                             "image_processor.process_image gives it.")
        observe = observe or _ignore
        observe("vision.patches", patches)
        head_width = self.config.hidden_size // self.config.num_attention_heads
        angles = rotation_angles(grid_rows, grid_cols, head_width, self.config.rope_theta, patches.device)
        x = self.patch_embed(patches, numerics)
        for index, block in enumerate(self.blocks):
            x = block(x, angles, numerics)
            observe(f"vision.blocks.{index}.out", x)
        x = self.norm(x)
        observe("vision.out", x)
        return x


class Aligner(nn.Module):
    """The `aligner.` part of the checkpoint: d x d patches become one row of the text model."""

    def __init__(self, config: VisionConfig, text_width: int) -> None:
        super().__init__()
        self.factor = config.downsample_ratio
        self.w1 = Linear(config.hidden_size * self.factor**2, text_width, bias=True)
        self.w2 = Linear(text_width, text_width, bias=True)

    def forward(self, features: Tensor, grid_rows: int, grid_cols: int, numerics: Numerics,
                observe: Observer | None = None) -> Tensor:
        """features [P, M] of one image, P = grid_rows * grid_cols -> [cells, D] in the activation dtype.

        observe: called with "aligner.merged" and "aligner.out".
        """
        observe = observe or _ignore
        merged = merge_cells(features, grid_rows, grid_cols, self.factor)
        observe("aligner.merged", merged)
        out = self.w2(F.gelu(self.w1(merged, numerics)), numerics)  # official: exact (erf), not the tanh form
        observe("aligner.out", out)
        return out


def _ignore(name: str, tensor: Tensor) -> None:
    """The observer of a run that nobody watches."""
