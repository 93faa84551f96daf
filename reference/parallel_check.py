"""Compare N processes that share a model (inference/parallel.py) with one process, on any devices.

    torchrun --nproc-per-node N -m reference.parallel_check [--ckpt DIR] [--device D] [--new-tokens N] [--seed S] [--json]

What it does
    Per kind of numerics, fake quantization and weights mode: all ranks run the split model, rank 0 also runs the whole one.
    It prints the relative L2 distance of the logits of two prompts (in chunks, then token by token) and of drafts, how far the
    greedy text with drafts is the same, whether all ranks had the same bits, and which part of the weights a rank holds.
What to expect
    One rank: all distances 0. Float32 without fake quantization: below FLOOR. Everything else rounds, and a value next to a
    rounding boundary may fall to the other side; the rows of that sequence differ from there on, and its text may fork.
Exit codes
    0 as expected, 1 ranks disagree, or float32 without fake quantization is above FLOOR or has another text, 3 bad input
Tests: tests/test_parallel.py
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import inference
from inference import decoding, parallel
from inference.command import Parser
from inference.model import Model
from inference.streaming import StreamedWeight
from reference.metrics import relative_l2

NANO = Path(__file__).parent / "golden" / "nano" / "checkpoint"
FLOOR = 2e-5  # ours: the bound of `verify` for float32; measured: 2.5e-6, see the map of inference/parallel.py
CASES = (("float32", False, "resident"), ("float32", True, "resident"), ("native", True, "resident"),
         ("native", True, "packed"), ("native", False, "stream"), ("dequantized", True, "resident"))
FIRST_WORD = 12  # ours: the ids below are special tokens of the tiny tokenizer


def run_model(model: Model, seed: int, new_tokens: int) -> dict[str, Tensor]:
    """Logits [2, S, V] of two random prompts, drafts after them, and greedy text with drafts; on the CPU."""
    prompts = random_prompts(model, seed)
    found = prompt_outputs(model, prompts)
    settings = decoding.Settings(max_new_tokens=new_tokens, speculate=bool(model.mtp), chunk_size=24)
    generation = decoding.generate(model, [prompts[0].tolist(), prompts[1, :25].tolist()], settings)
    for _ in generation:
        pass
    return found | {f"text_{row}": torch.tensor(tokens) for row, tokens in enumerate(generation.tokens)}


def random_prompts(model: Model, seed: int) -> Tensor:
    """Two prompts of 36 ids that begin with the begin marker: [2, 36] int64."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(FIRST_WORD, model.config.text_config.vocab_size, (2, 36), generator=generator)
    prompts[:, 0] = model.config.bos_token_id
    return prompts


def prompt_outputs(model: Model, prompts: Tensor) -> dict[str, Tensor]:
    """Logits of all ids of `prompts` [2, 36] but the last, in two chunks and single tokens; drafts after the last."""
    device, cache = model.norm.weight.device, model.new_cache(2)
    parts = [model(ids.to(device), cache).logits for ids in prompts[:, :-1].split((19, 13, 1, 1, 1), dim=1)]
    found = {"logits": torch.cat(parts, dim=1).cpu()}
    if model.mtp:
        draft = model.draft(prompts[:, -1].to(device), cache)
        found["draft_logits"], found["confidence"] = draft.logits.cpu(), draft.confidence.cpu()
    return found


def held_bytes(model: Model) -> int:
    """Bytes of weights in memory, or on disk if they are streamed."""
    weights = [getattr(module, "weight", None) for module in model.modules()]
    weights = [weight.own if isinstance(weight, parallel.SharedTable) else weight for weight in weights]
    stored = [part.size for weight in weights if isinstance(weight, StreamedWeight) for part in weight.stored]
    packed = [part.nbytes for weight in weights if hasattr(weight, "dequantize") for part in getattr(weight, "tensors", ())]
    dense = {id(weight): weight.nbytes for weight in (*weights, *model.parameters()) if isinstance(weight, Tensor)}
    return sum(stored) + sum(packed) + sum(dense.values())


def compare(path: Path, ranks: parallel.Ranks, device: str, numerics: str, fake_quant: bool, weights: str, seed: int = 0,
            new_tokens: int = 24) -> dict | None:
    """One line of the table, on rank 0; None on the others. Every rank makes this call."""
    with torch.no_grad():
        model = inference.load(path, device, numerics, fake_quant, weights=weights, ranks=ranks)
        split = run_model(model, seed, new_tokens)
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in split.values())).hexdigest()
        digests: list = [None] * ranks.size
        dist.all_gather_object(digests, (digest, held_bytes(model)), group=ranks.group)
        if ranks.rank:
            return None
        model = inference.load(path, device, numerics, fake_quant, weights=weights)
        whole = run_model(model, seed, new_tokens)
    line = {"numerics": numerics, "fake_quant": fake_quant, "weights": weights,
            "ranks_agree": len({digest for digest, _ in digests}) == 1, "whole_bytes": held_bytes(model),
            "rank_bytes": max(held for _, held in digests)}
    rows = [relative_l2(a, b) for a, b in zip(split["logits"].flatten(0, 1), whole["logits"].flatten(0, 1))]
    line["median_row"], line["worst_row"], line["equal_rows"] = sorted(rows)[len(rows) // 2], max(rows), rows.count(0.0)
    line["rows"] = len(rows)
    if "draft_logits" in whole:
        line["draft"] = relative_l2(split["draft_logits"], whole["draft_logits"])
    texts = [(split[name].tolist(), whole[name].tolist()) for name in whole if name.startswith("text_")]
    same = [next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), min(map(len, pair))) for pair in texts]
    line["same_text"], line["same_tokens"] = all(a == b for a, b in texts), [f"{n}/{len(b)}" for n, (_, b) in zip(same, texts)]
    return line


def is_expected(line: dict) -> bool:
    """Whether a line is as the map of this module says."""
    exact = line["numerics"] == "float32" and not line["fake_quant"]
    return line["ranks_agree"] and (not exact or line["same_text"] and line["worst_row"] < FLOOR)


def _show(line: dict) -> str:
    quant = "fake quant" if line["fake_quant"] else "no fake quant"
    return (f"{line['numerics']:11} {quant:13} {line['weights']:8} logits: median row {line['median_row']:.1e}, worst "
            f"{line['worst_row']:.1e}, {line['equal_rows']}/{line['rows']} bit-equal; drafts {line.get('draft', 0):.1e}; "
            f"same greedy tokens {', '.join(line['same_tokens'])}; ranks {'agree' if line['ranks_agree'] else 'DISAGREE'}; "
            f"{line['rank_bytes'] / line['whole_bytes']:.0%} of the weights a rank")


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the map of this module."""
    parser = Parser(prog="python -m reference.parallel_check", description="N processes against one.")
    parser.add_argument("--ckpt", type=Path, default=NANO, help="checkpoint folder (default: nano, random weights)")
    parser.add_argument("--device", help="default: the process's own GPU, if there is one, else cpu")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")

    def work(ranks: parallel.Ranks | None) -> int:
        options = parser.parse_args(arguments)
        if ranks is None:
            raise ValueError("Comparing ranks: this is a single process. Start it with torchrun --nproc-per-node N -m "
                             "reference.parallel_check.")
        device, code = parallel.choose_device(options.device), 0
        print(f"{ranks.size} ranks on {device}, torch {torch.__version__}", file=sys.stderr)
        for numerics, fake_quant, weights in CASES:
            line = compare(options.ckpt, ranks, device, numerics, fake_quant, weights, options.seed, options.new_tokens)
            if line is not None:
                print(json.dumps(line) if options.json else _show(line), flush=True)
                code = code or int(not is_expected(line))
        return code

    return parallel.run(work)


if __name__ == "__main__":
    sys.exit(main())
