"""Vision tower and aligner: patches of one image to rows of the text model's width.

    tower:    x = patch W + b; per block x += attention(norm1(x)), x += mlp(norm2(x)); final norm
    rotation: q and k only; a head's first half pairs with its second half; half of the angles follow the patch row,
              half the patch column
    aligner:  cells of d x d patches (zero padded below and right), channel-major; linear, exact GELU, linear

Mirrors: ViT, VisionAttention and Aligner of the official inference code. Leaves out: images to patches. Attention is
bidirectional within one image. Test: tests/oracles/test_oracle_vision.py.
"""

import math

import numpy as np

from reference.oracles.basics import linear, rms_norm, silu, softmax

VISION_EPS = 1e-6  # official: RMSNorm of the vision tower; the text model uses rms_norm_eps


def rotate_halves(head: np.ndarray, row: int, column: int, theta: float) -> np.ndarray:
    """One head [X] of the patch at (row, column) -> [X]."""
    quarter = len(head) // 4
    frequencies = [theta ** (-i / quarter) for i in range(quarter)]
    angles = np.array([row * f for f in frequencies] + [column * f for f in frequencies])
    a, b = head[: 2 * quarter], head[2 * quarter :]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])


def attention(x: np.ndarray, columns: int, heads: int, theta: float, weights: dict, prefix: str) -> np.ndarray:
    """x [n, M] of one image whose grid is `columns` wide -> [n, M]."""
    fused = linear(x, weights[prefix + "wqkv.weight"], weights[prefix + "wqkv.bias"])
    q, k, v = fused.reshape(len(x), 3, heads, -1).transpose(1, 2, 0, 3)
    outputs = []
    for h in range(heads):
        rotated_q = np.array([rotate_halves(r, i // columns, i % columns, theta) for i, r in enumerate(q[h])])
        rotated_k = np.array([rotate_halves(r, i // columns, i % columns, theta) for i, r in enumerate(k[h])])
        outputs.append(softmax(rotated_q @ rotated_k.T / math.sqrt(q.shape[-1])) @ v[h])
    return linear(np.concatenate(outputs, axis=-1), weights[prefix + "wo.weight"], weights[prefix + "wo.bias"])


def tower(patches: np.ndarray, columns: int, vision_config: dict, weights: dict) -> np.ndarray:
    """patches [n, 3, P, P], row-major over a grid `columns` wide -> features [n, M]."""
    flat = np.asarray(patches, np.float64).reshape(len(patches), -1)  # channel first
    x = linear(flat, weights["vision.patch_embed.proj.weight"], weights["vision.patch_embed.proj.bias"])
    heads, theta = vision_config["num_attention_heads"], vision_config["rope_theta"]
    for block in range(vision_config["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}."
        normed = rms_norm(x, weights[prefix + "norm1.weight"], VISION_EPS)
        x = x + attention(normed, columns, heads, theta, weights, prefix + "attn.")
        normed = rms_norm(x, weights[prefix + "norm2.weight"], VISION_EPS)
        gate, up = np.split(linear(normed, weights[prefix + "mlp.w1.weight"]), 2, axis=-1)
        x = x + linear(silu(gate) * up, weights[prefix + "mlp.w2.weight"])
    return rms_norm(x, weights["vision.norm.weight"], VISION_EPS)


def merge_cells(features: np.ndarray, rows: int, columns: int, factor: int) -> np.ndarray:
    """features [rows * columns, M] -> [cells, M * factor^2]: every feature lists its factor^2 cell positions."""
    cells = []
    for top in range(0, rows, factor):
        for left in range(0, columns, factor):
            cell = np.zeros((features.shape[1], factor, factor))
            for down in range(factor):
                for right in range(factor):
                    if top + down < rows and left + right < columns:
                        cell[:, down, right] = features[(top + down) * columns + left + right]
            cells.append(cell.reshape(-1))
    return np.array(cells)


def aligner(features: np.ndarray, rows: int, columns: int, factor: int, weights: dict) -> np.ndarray:
    """features [n, M] -> text rows [ceil(rows / factor) * ceil(columns / factor), D]."""
    cells = merge_cells(features, rows, columns, factor)
    hidden = linear(cells, weights["aligner.w1.weight"], weights["aligner.w1.bias"])
    gelu = np.vectorize(lambda value: 0.5 * value * (1 + math.erf(value / math.sqrt(2))))
    return linear(gelu(hidden), weights["aligner.w2.weight"], weights["aligner.w2.bias"])
