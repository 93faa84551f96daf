"""Reads a checkpoint in the publisher's layout: every tensor dequantized once, as float64.

    dense FP8     E4M3(w[r, c]) * 2^(s[r // 32, c // 32] - 127)           scale tensor: `.scale` in place of `.weight`
    Engram FP8    E4M3(w[r, c]) * 2^(s[r, c // 32] - 127)                 one scale per row and 32 channels
    experts FP4   E2M1(code)    * 2^(s[r, c // 32] - 127)                 two codes per stored byte
    BF16, F32     as they are

Products in float32, rounded once to BF16 (exact at ordinary exponents), widened. Mirrors: the published weight files.
Leaves out: every other layout, and strictness (a missing tensor shows up as a KeyError naming it). The whole checkpoint
is held in memory: for tiny models only. Test: tests/oracles/test_oracle_checkpoint.py.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reference.oracles.engram import fold_vocabulary
from reference.oracles.quantizers import decode_bf16, decode_e2m1, decode_e4m3, decode_e8m0, round_to_bf16

BLOCK = 32  # official: rows and columns sharing one scale

RAW_TYPES = {
    "BF16": np.uint16,
    "F32": np.float32,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,  # packed FP4: two codes per byte, the sign of the byte means nothing
    "I32": np.int32,
    "I64": np.int64,
    "BOOL": np.bool_,
}


class Checkpoint(NamedTuple):
    """A checkpoint in memory."""

    config: dict  # config.json
    weights: dict  # tensor name -> float64 array, scales already applied
    token_classes: list | None  # Engram class of every token id; None when the model has no Engram


def read_safetensors(path: Path) -> dict:
    """File -> name -> (type tag, raw array with the stored shape; see RAW_TYPES)."""
    data = Path(path).read_bytes()
    header_length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_length + offset for offset in entry["data_offsets"])
        raw = np.frombuffer(data[begin:end], RAW_TYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (entry["dtype"], raw)
    return tensors


def dequantize(name: str, tag: str, raw: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """One stored tensor and its E8M0 scale bytes, if any -> float64 values of the logical shape."""
    if tag == "F32":
        return raw.astype(np.float64)
    if tag == "BF16":
        return decode_bf16(raw).astype(np.float64)
    codes = decode_e2m1(raw) if tag == "I8" else decode_e4m3(raw)
    factors = decode_e8m0(scale)
    values = np.empty(codes.shape, np.float32)
    row_block = BLOCK if tag == "F8_E4M3" and not name.endswith("engram.embed.weight") else 1
    for row in range(codes.shape[0]):
        values[row] = codes[row] * np.repeat(factors[row // row_block], BLOCK)[: codes.shape[1]]
    return round_to_bf16(values).astype(np.float64)


def load_checkpoint(directory: str | Path) -> Checkpoint:
    """Folder with config.json, tokenizer.json and *.safetensors -> Checkpoint."""
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(f"reading a checkpoint: wanted a folder with config.json, got {directory}; check the path")
    config = json.loads((directory / "config.json").read_text())
    stored = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored.update(read_safetensors(path))
    weights = {}
    for name, (tag, raw) in stored.items():
        if tag != "F8_E8M0":
            scale = stored.get(name.removesuffix(".weight") + ".scale", (None, None))[1]
            weights[name] = dequantize(name, tag, raw, scale)
    text_config = config["text_config"]
    token_classes = None
    if text_config.get("engram_layer_ids"):
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        token_classes = fold_vocabulary(tokenizer, text_config["vocab_size"])
        found, wanted = len(set(token_classes)), text_config["engram_compressed_vocab_size"]
        if found != wanted:
            raise ValueError(
                f"folding the vocabulary: config.json wants {wanted} classes, tokenizer.json gives {found}; "
                "every hash constant depends on the count, so use the tokenizer that belongs to the checkpoint"
            )
    return Checkpoint(config, weights, token_classes)
