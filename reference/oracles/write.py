"""Writes oracle numbers as a trace folder: manifest.json and one safetensors file per trace, inputs beside the points.

    text_prefill.float32                 every point of one prompt
    text_prefill.float32_no_fake_quant   the same without cache rounding: inputs of decisions, layer outputs, logits
    vision_prefill.float32               a prompt with images, if one is given
    draft_step.float32                   one draft after split + 1 tokens, if the model drafts
    decode.float32                       teacher-forced: prefill.logits after `split` tokens, then step{i}.logits (and
                                         step{i}.mtp.*) after token i was fed at position i

Floats are stored as float32. Leaves out: anything native (BF16). Test: tests/oracles/test_oracle_write.py.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from reference.oracles.checkpoint import Checkpoint
from reference.oracles.dspark import oracle_draft
from reference.oracles.model import as_checkpoint, oracle_forward

# ours: the points kept in the traces that are not complete, named as in the complete one
SUMMARY = re.compile(
    r"(.*\.(hash_ids|topk|candidates|expert_ids)|layers\.\d+\.(engram\.)?out|vision\.out.*|aligner\.out.*|embed"
    r"|head\.collapsed|logits|mtp\.main_hidden)$"
)


class VisionPrompt(NamedTuple):
    """A prompt with images, as oracle_forward takes it."""

    input_ids: np.ndarray  # int64 [1, S]
    token_types: np.ndarray  # int64 [1, S]: -1 text, 0 start, 1 image, 2 newline, 3 end
    patches: list  # per image float32 [n, 3, P, P], values on the BF16 grid
    grids: list  # per image int64 [5]: start position, patch rows, patch columns, text rows, text columns


def stored(value: np.ndarray) -> torch.Tensor:
    """float64 -> float32; integers and booleans as they are."""
    value = np.asarray(value)
    return torch.from_numpy(np.array(value, np.float32 if value.dtype == np.float64 else value.dtype))


def decode_points(checkpoint: Checkpoint, input_ids: np.ndarray, split: int, whole: dict) -> dict[str, np.ndarray]:
    """input_ids [B, S] and their oracle_forward -> the points of decode.float32.

    The model is causal and its selections depend on visible rows only, so what follows a truncated prompt stands in the
    row of its last token in the whole run; tests check that against real truncation.
    """
    logits, hidden = whole["logits"], whole.get("mtp.main_hidden")
    points = {"prefill.logits": logits[:, split - 1]}
    if hidden is not None:
        points["prefill.mtp.main_hidden"] = hidden[:, :split]
    for i in range(split, input_ids.shape[1]):
        points[f"step{i}.logits"] = logits[:, i]
        if checkpoint.config["text_config"].get("num_nextn_predict_layers"):
            anchor = logits[:, i].argmax(axis=-1)
            draft = oracle_draft(checkpoint, input_ids[:, : i + 1], anchor, main_hidden=hidden[:, : i + 1])
            points[f"step{i}.mtp.main_hidden"] = hidden[:, i : i + 1]
            for name in ("mtp.draft_ids", "mtp.logits", "mtp.confidence"):
                points[f"step{i}.{name}"] = draft[name]
    return points


def write_traces(
    checkpoint: Checkpoint | str | Path,
    out_dir: str | Path,
    input_ids: np.ndarray,
    split: int,
    vision_prompt: VisionPrompt | None = None,
) -> Path:
    """Run the oracle and write out_dir; an existing trace of the same name is replaced.

    checkpoint     folder in the publisher's layout, or what load_checkpoint returned
    input_ids      int64 [B, S]; the prefill and draft traces use its first row, the decode trace all rows
    split          number of tokens in the first call of the decode trace, 1 <= split < S
    returns        out_dir
    """
    checkpoint, out_dir = as_checkpoint(checkpoint), Path(out_dir)
    input_ids = np.asarray(input_ids, np.int64)
    if input_ids.ndim != 2 or not 1 <= split < input_ids.shape[1]:
        raise ValueError(f"writing traces: wanted input_ids [B, S] and 1 <= split < S, got {input_ids.shape}, {split}")
    out_dir.mkdir(parents=True, exist_ok=True)
    manifest = {"format": 1, "producer": "reference.oracles, float64 stored as float32", "traces": {}}

    def write(name: str, inputs: dict, points: dict, **facts) -> None:
        tensors = {key: stored(value) for key, value in {**points, **inputs}.items()}
        for key in tensors:
            if key.endswith(".patches"):
                tensors[key] = tensors[key].to(torch.bfloat16)
        save_file(tensors, out_dir / f"{name}.safetensors")
        manifest["traces"][name] = {"inputs": sorted(inputs), **facts, "points": list(points), "numerics": "float32"}

    text = {"input_ids": input_ids[:1]}
    whole = oracle_forward(checkpoint, input_ids)
    write("text_prefill.float32", text, {name: value[:1] for name, value in whole.items()}, fake_quant=True)
    points = oracle_forward(checkpoint, input_ids[:1], fake_quant=False)
    kept = {name: value for name, value in points.items() if SUMMARY.match(name)}
    write("text_prefill.float32_no_fake_quant", text, kept, fake_quant=False)
    if vision_prompt is not None:
        inputs = {"input_ids": vision_prompt.input_ids, "token_types": vision_prompt.token_types}
        for i, (patches, grid) in enumerate(zip(vision_prompt.patches, vision_prompt.grids)):
            inputs.update({f"image{i}.patches": patches, f"image{i}.grid": grid})
        ids, types, patches, grids = vision_prompt
        points = oracle_forward(checkpoint, ids, True, types, patches, grids)
        more = ("ffn.out", "engram.gate")
        kept = {name: value for name, value in points.items() if SUMMARY.match(name) or name.endswith(more)}
        write("vision_prefill.float32", inputs, kept, fake_quant=True)
    if checkpoint.config["text_config"].get("num_nextn_predict_layers"):
        anchor, hidden = whole["logits"][:1, split].argmax(axis=-1), whole["mtp.main_hidden"][:1, : split + 1]
        points = oracle_draft(checkpoint, input_ids[:1, : split + 1], anchor, main_hidden=hidden)
        write("draft_step.float32", text, points, fake_quant=True, split=split)
    note = "teacher-forced: token i of input_ids is fed at position i; the draft anchor is the argmax of that step"
    points = decode_points(checkpoint, input_ids, split, whole)
    write("decode.float32", {"input_ids": input_ids}, points, fake_quant=True, split=split, note=note)
    (out_dir / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return out_dir
