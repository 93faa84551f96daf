"""The command line: read prompts, run the model, print text and numbers.

    python -m inference.generate [--ckpt DIR] [--input-file FILE | --prompt TEXT] [--max-new-tokens N] [--temperature T]
                                 [--top-p P] [--seed S] [--device D] [--numerics native|dequantized|float32] [--no-fake-quant]
                                 [--weights resident|packed|stream] [--engram-dir DIR] [--expert-cache GIB] [--raw] [--mode chat|thinking] [--effort N] [--json]
                                 [--batch-size N] [--chunk N] [--cache packed|bf16] [--prefill full|halo|replay]
                                 [--spec | --no-spec] [--confidence-threshold C] [--compile]
What it does
    Reads all prompts, then completes them (decoding.py), `--batch-size` at a time, until the end marker, `--max-new-tokens` or
    the context limit. Same seed and options, same text; in another batch up to near-ties in BF16. After each prompt a line with speed, peak memory and cache bytes per
    token; with drafts a second one with the accepted length.
    With torchrun --nproc-per-node N in place of python, N processes share the model (parallel.py); the first one prints.
Exit codes
    0 done, 3 bad input (one line says what was wanted, what arrived and what to try).
Mirrors official: generate.py of the inference code, which knows no input formats. Tests: tests/test_generate.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from inference import decoding, parallel
from inference.cache import KINDS
from inference.checkpoint import WEIGHT_MODES, load
from inference.command import Parser
from inference.compiled import compiled_forms
from inference.config import PREFILL_MODES
from inference.encoding import parse_completion
from inference.model import Model
from inference.numerics import MODES
from inference.prompts import Prompt, Source, encode_prompt, find_input, read_prompts
from inference.sampling import Sampling
from inference.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent.parent / "reference" / "toyworld" / "checkpoint"
SMALL_WIDTH = 512  # ours: below this width an operation is too short to be worth more than one thread


@dataclass(frozen=True)
class Stats:
    """Numbers of one prompt. Times are those of its batch, memory is the peak of the whole process so far."""

    prompt_tokens: int
    completion_tokens: int
    stopped_by: str  # "end marker", "max_new_tokens" or "context limit"
    prefill_tokens_per_second: float  # of the batch
    decode_tokens_per_second: float | None  # of the batch; None when nothing was decoded after the first token
    peak_memory_mib: float
    cache_bytes_per_token: float

    def line(self) -> str:
        decode = "-" if self.decode_tokens_per_second is None else f"{self.decode_tokens_per_second:.1f}"
        return (f"[{self.prompt_tokens} prompt tokens at {self.prefill_tokens_per_second:.1f} tok/s, "
                f"{self.completion_tokens} new at {decode} tok/s, stopped by {self.stopped_by}; peak memory "
                f"{self.peak_memory_mib:.0f} MiB, cache {self.cache_bytes_per_token:.0f} bytes per token]")


class _TextStream:
    """Prints a completion as its tokens arrive; a character of several tokens waits until it is whole."""

    def __init__(self, tokenizer: Tokenizer, silent: bool) -> None:
        self.tokenizer, self.silent = tokenizer, silent
        self.ids: list[int] = []
        self._printed = ""

    def add(self, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if not self.silent and not text.endswith("\ufffd") and text.startswith(self._printed):
            print(_visible(text[len(self._printed):]), end="", flush=True)
            self._printed = text

    def finish(self) -> str:
        text = self.tokenizer.decode(self.ids)
        if not self.silent:
            print(_visible(text[len(self._printed):]))
        return text


def run_batch(model: Model, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: argparse.Namespace,
              ) -> Iterator[tuple[str, list[int], Stats, decoding.Stats]]:
    """Complete a batch. Gives text, ids and numbers per prompt, and the numbers of the whole batch.

    The text of a batch of one is printed as it comes, unless --json.
    """
    # One generator per prompt: its text does not depend on what else is in the batch.
    generators = [torch.Generator().manual_seed(options.seed) for _ in prompts]
    cache = model.new_cache(len(prompts), kind=options.cache)
    streams = [_TextStream(tokenizer, silent=options.json or len(prompts) > 1) for _ in prompts]
    start, first = time.perf_counter(), None
    generation = decoding.generate(model, prompts, _settings(options), generators, cache)
    with tqdm(total=options.max_new_tokens * len(prompts), desc="generating", unit="tok", leave=False,
              disable=None if options.json or len(prompts) > 1 else True) as progress:
        for row, ids in generation:
            first = first or time.perf_counter()
            for token in ids:
                streams[row].add(token)
            progress.update(len(ids))
    end = time.perf_counter()
    prompt_tokens, new = sum(len(prompt.ids) for prompt in prompts), generation.stats.new_tokens - len(prompts)
    for prompt, stream, stopped_by in zip(prompts, streams, generation.stopped_by):
        stats = Stats(len(prompt.ids), len(stream.ids), stopped_by, prompt_tokens / (first - start),
                      new / (end - first) if new else None, _peak_memory(model), cache.bytes_per_token())
        yield stream.finish(), stream.ids, stats, generation.stats


def _peak_memory(model: Model) -> float:
    """MiB: of the GPU if the model is on one, else the peak resident memory of the process."""
    device = model.norm.weight.device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    scale = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m inference.generate", description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", default=str(BUNDLED), help="checkpoint folder (default: the bundled one)")
    parser.add_argument("--input-file", help=".txt, .json or .jsonl, as given or under inference/examples/")
    parser.add_argument("--prompt", help="one prompt instead of a file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most probable token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cpu; under torchrun the process's own GPU, if there is one")
    parser.add_argument("--numerics", default="native", choices=sorted(MODES))
    parser.add_argument("--no-fake-quant", action="store_true", help="keep KV and index rows unquantized")
    parser.add_argument("--weights", default="resident", choices=WEIGHT_MODES)
    parser.add_argument("--engram-dir", help="folder with the shards of the Engram tables, if not with the others")
    parser.add_argument("--expert-cache", type=float, default=4.0, help="GiB of recently used experts kept by --weights stream")
    parser.add_argument("--raw", action="store_true", help="a .txt prompt is continued as it stands, no chat format")
    parser.add_argument("--mode", default="chat", choices=("chat", "thinking"))
    parser.add_argument("--effort", default="high", help="thinking effort: 1..100, low, high or max")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts that run together")
    parser.add_argument("--chunk", type=int, default=1024, help="prompt tokens per call of the model")
    parser.add_argument("--cache", choices=KINDS, help="how cache rows are stored (default: packed, unless --no-fake-quant)")
    parser.add_argument("--prefill", default="full", choices=PREFILL_MODES,
                        help="prompt tokens that the decoder layers run; replay is approximate")
    parser.add_argument("--spec", action=argparse.BooleanOptionalAction, default=None,
                        help="draft and verify (default: if the checkpoint has draft stages)")
    parser.add_argument("--confidence-threshold", type=float, default=0.0, help="do not send drafts that are less sure; 0: all")
    parser.add_argument("--compile", action="store_true",
                        help="torch.compile the small operations; a minute or more, the first time")
    options = parser.parse_args(arguments)
    options.effort = int(options.effort) if re.fullmatch("-?[0-9]{1,9}", options.effort) else options.effort
    if options.max_new_tokens < 1:
        raise ValueError(f"Generating: --max-new-tokens must be at least 1, got {options.max_new_tokens}.")
    if not 0 <= options.expert_cache <= 2**20:
        raise ValueError(f"Generating: --expert-cache must be 0 to 2^20 GiB, got {options.expert_cache}.")
    if options.batch_size < 1:
        raise ValueError(f"Generating: --batch-size must be at least 1, got {options.batch_size}.")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"Generating: --seed must be between 0 and 2^63 - 1, got {options.seed}.")
    if options.prompt is not None and options.input_file is not None:
        raise ValueError("Generating: give --prompt or --input-file, not both.")
    if options.prompt is not None and not options.prompt.strip():
        raise ValueError("Generating: --prompt is empty.")
    if options.cache == "packed" and options.no_fake_quant:
        raise ValueError("Generating: --cache packed stores codes and scales, which --no-fake-quant does without. Drop one.")
    _settings(options)
    return options


def _settings(options: argparse.Namespace) -> decoding.Settings:
    return decoding.Settings(
        max_new_tokens=options.max_new_tokens, sampling=Sampling(options.temperature, options.top_p),
        speculate=bool(options.spec), confidence_threshold=options.confidence_threshold, prefill=options.prefill,
        chunk_size=options.chunk)


def run(arguments: list[str] | None = None, ranks: parallel.Ranks | None = None) -> int:
    """The command, without the conversion of errors to exit codes. ranks: processes that run it together."""
    options = _parse(arguments)
    if options.prompt is not None:
        sources = [Source(text=options.prompt)]
    else:
        sources = read_prompts(find_input(options.input_file or "example.txt"))
    tokenizer = Tokenizer.load(options.ckpt)
    device = options.device or "cpu" if ranks is None else parallel.choose_device(options.device)
    model = load(options.ckpt, device, options.numerics, not options.no_fake_quant, weights=options.weights,
                 engram_dir=options.engram_dir, expert_cache=int(options.expert_cache * 2**30), ranks=ranks)
    if model.config.text_config.hidden_size < SMALL_WIDTH:
        torch.set_num_threads(1)
    if options.spec is None:
        options.spec = len(model.mtp) > 0
    # All prompts are read before the first runs: a mistake in the last one should not cost the others.
    prompts = [encode_prompt(source, tokenizer, model.config, raw=options.raw, mode=options.mode, effort=options.effort)
               for source in sources]
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    limit = model.config.text_config.max_position_embeddings
    if len(longest.ids) > limit:
        raise ValueError(f"Generating: prompt {prompts.index(longest) + 1} has {len(longest.ids)} tokens, "
                         f"max_position_embeddings is {limit}. Shorten it.")
    with compiled_forms(device) if options.compile else contextlib.nullcontext():
        _complete(model, tokenizer, prompts, options)
    return 0


def _complete(model: Model, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: argparse.Namespace) -> None:
    """Run and print all prompts, `--batch-size` at a time."""
    for first in range(0, len(prompts), options.batch_size):
        batch = prompts[first:first + options.batch_size]
        if len(batch) == 1 and not options.json:
            _print_prompt(tokenizer, batch[0], first + 1, len(prompts))
        for number, (text, ids, stats, totals) in enumerate(run_batch(model, tokenizer, batch, options), first + 1):
            if options.json:
                result = _result(tokenizer, prompts[number - 1], text, ids, stats, totals)
                print(json.dumps(result, ensure_ascii=False), flush=True)
                continue
            if len(batch) > 1:
                _print_prompt(tokenizer, prompts[number - 1], number, len(prompts))
                print(_visible(text))
            print(stats.line())
            if number == first + len(batch):
                print(f"[{totals.line()}]")


def _print_prompt(tokenizer: Tokenizer, prompt: Prompt, number: int, count: int) -> None:
    print(f"\n--- prompt {number} of {count}\n{_visible(tokenizer.decode(prompt_text_ids(prompt)))}\n--- completion")


def _visible(text: str) -> str:
    """Control characters as symbols: a model's noise must not drive the terminal."""
    return text.translate({code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421})


def prompt_text_ids(prompt: Prompt) -> list[int]:
    """The prompt's ids with every image span shortened to one placeholder, for printing."""
    if prompt.token_types is None:
        return prompt.ids
    return [token for token, kind in zip(prompt.ids, prompt.token_types) if kind <= 0]  # text, or the start of a span


def _result(tokenizer: Tokenizer, prompt: Prompt, text: str, ids: list[int], stats: Stats, totals: decoding.Stats) -> dict:
    """What --json prints. `message` is the parsed completion, `message_error` why there is none."""
    result = {"prompt_ids": prompt.ids, "completion_ids": ids, "text": text, "stats": asdict(stats), "batch": {
        "prefill": totals.prefill, "layer_rows": totals.layer_rows, "full_layer_rows": totals.full_layer_rows,
        "accepted_length": totals.accepted_length, "drafts_sent": totals.sent, "drafts_accepted": totals.accepted,
        "calls_saved": totals.saved_calls, "rounds_by_accepted_drafts": totals.histogram}}
    if prompt.mode is not None:
        try:
            result["message"] = parse_completion(ids, prompt.mode, tokenizer, ended=False)
        except ValueError as error:
            result["message_error"] = str(error)
    return result


def main(arguments: list[str] | None = None) -> int:
    return parallel.run(lambda ranks: run(arguments, ranks))


if __name__ == "__main__":
    sys.exit(main())
