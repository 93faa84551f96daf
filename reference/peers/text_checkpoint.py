"""A tiny checkpoint with the mechanisms that text-only ports have: no Engram, no pictures, no draft stages.

    python -m reference.peers.text_checkpoint OUT_DIR

It is the "nano-like" preset of reference/tiny.py without those parts: ten layers of ratios 0, 2 and 1, two sources of
ratio 2 and one of ratio 1, candidate blocks, mixture of experts. A prompt of 33 tokens is written beside it as
prompt.json. Tests: tests/test_peers.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from reference.tiny import make_tiny, preset_config, tiny_prompts


def make_text_checkpoint(out_dir: str | Path) -> Path:
    """Write checkpoint and prompt.json into a new or empty folder and return it."""
    config = preset_config("nano-like")
    text = config["text_config"]
    config["vision_config"] = None
    text.update(engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0, dspark_target_layer_ids=[])
    text["compress_ratios"] = text["compress_ratios"][:text["num_hidden_layers"]]
    folder = make_tiny(out_dir, config, seed=2)
    ids = tiny_prompts(config).input_ids[:1]
    (folder / "prompt.json").write_text(json.dumps({"input_ids": ids.tolist()}) + "\n", encoding="utf-8")
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference.peers.text_checkpoint",
                                     description=__doc__.splitlines()[0])
    parser.add_argument("out_dir")
    options = parser.parse_args(arguments)
    try:
        folder = make_text_checkpoint(options.out_dir)
    except ValueError as error:
        print(f"BAD INPUT. {error}", file=sys.stderr)
        return 3
    print(f"{folder}: tiny text checkpoint, with a prompt in prompt.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
