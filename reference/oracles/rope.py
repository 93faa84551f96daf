"""Rotary position embedding of the text model: adjacent channel pairs, only the last channels of a vector.

    angle(position, pair) = position * frequency[pair]
    (a, b) -> (a cos - b sin, a sin + b cos)          (a, b) = channels (2 * pair, 2 * pair + 1) of the rotated part

Window-only layers (ratio 0): base rope_theta, plain. Layers with compressed KV: base compress_rope_theta with YaRN.
There is no magnitude factor (no mscale): rotations keep the norm. Leaves out: the vision tower's rotation, which pairs
differently (vision.py). Mirrors: precompute_freqs_cis and apply_rotary_emb of the official inference code.
Test: tests/oracles/test_oracle_rope.py.
"""

import math

import numpy as np


def rotary_frequencies(text_config: dict, ratio: int) -> np.ndarray:
    """Frequencies of one layer kind in float64, [R/2]. ratio: 0 = window only, above 0 = compressed KV."""
    width = text_config["qk_rope_head_dim"]
    base = text_config["rope_theta"] if ratio == 0 else text_config["compress_rope_theta"]
    frequencies = [base ** (-2 * pair / width) for pair in range(width // 2)]
    if ratio == 0:
        return np.array(frequencies, np.float64)  # official: window-only layers switch YaRN off

    yarn = text_config["rope_scaling"]

    def pair_that_turns(times: float) -> float:
        """Real-valued pair index whose rotation completes `times` turns within the original context length."""
        length = yarn["original_max_position_embeddings"]
        return width * math.log(length / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(yarn["beta_slow"])), width - 1)
    result = []
    for pair, frequency in enumerate(frequencies):
        ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)  # official: 0.001 avoids a division by zero
        result.append(frequency * (1 - ramp) + frequency / yarn["factor"] * ramp)
    return np.array(result, np.float64)


def rotate(vector: np.ndarray, position: int, frequencies: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Rotate the last 2 * len(frequencies) channels of one vector [D] (float64) to `position`; inverse rotates back."""
    result = np.array(vector, np.float64)
    start = len(vector) - 2 * len(frequencies)
    for pair, frequency in enumerate(frequencies):
        # official: the angle is a float32 product; far from the origin its rounding is part of the trained model
        angle = float(np.float32(position) * np.float32(frequency))
        if inverse:
            angle = -angle
        a, b = vector[start + 2 * pair], vector[start + 2 * pair + 1]
        result[start + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        result[start + 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return result
