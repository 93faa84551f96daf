"""Record what the model computes, as a trace that `python -m reference.compare` reads.

    python -m reference.trace --ckpt DIR --input-file FILE --out DIR [--level layer|module|all] [--layers 0-3,8]
                              [--summary] [--numerics ...] [--weights ...] [--no-fake-quant] [--chunks 23,1*] [--draft]

Input files
    .json         {"input_ids": [...] or [[...], ...]} or {"prompt": "text"}; "images": ["picture.png", ...], one per
                  image id in the ids (paths relative to the file); "token_types" where the ids hold whole image spans
                  already
    .txt          a prompt, encoded with the tokenizer of the checkpoint
    .safetensors  the inputs of a golden trace: input_ids, token_types, imageN.patches, imageN.grid
Chunks
    Tokens per call, in order: "23,1*" is 23, then one by one to the end. "6/2" runs six tokens and accepts two, as
    after a rejected draft; the next call starts with the third again. Without it, one call takes the whole prompt.
What is derived
    argmax, window positions, margins, folded ids, placeholders, cache digests and the unfinished group are no dump
    points of the model; they are computed here from those (or, for two products, taken with a forward hook), right
    after them.
Memory
    Values are written as they come; nothing is collected. `--level layer` of the released model is about 0.4 GB per
    1,000 tokens in BF16.
Exit codes
    0 written, 3 input or options that cannot be used.
Tests
    tests/test_trace.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import inference
from inference.cache import Cache
from inference.checkpoint import WEIGHT_MODES
from inference.command import Parser, run
from inference.image_processor import START, TEXT, ImageInput, expand_placeholders, process_image
from inference.layers import dense_weight
from inference.model import Model
from inference.numerics import MODES
from inference.tokenizer import Tokenizer
from reference.points import LEVELS
from reference.trace_format import (Trace, TraceWriter, digest, facts, open_trace, parse_chunks, read_tensors,
                                    widen_bfloat16)

FULL_DIGEST = 2**30  # ours: bytes of weights up to which every byte enters their digest
LARGE_TABLE = 2**28  # ours: elements above which a weight is not digested (Engram tables of the release)


Call = tuple[int, int, bool]  # tokens, how many of them are accepted, whether a draft follows


@dataclass(frozen=True)
class Inputs:
    """What a run is fed. B rows of one length."""

    input_ids: Tensor  # [B, S] int64
    token_types: Tensor | None = None  # [B, S] int64, image spans written out; None = text
    images: tuple[ImageInput, ...] = ()  # of the first row, in order; images need B = 1

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.input_ids.numel() == 0:
            raise ValueError("Reading the input: input_ids must be [B, S], not empty, got "
                             f"{list(self.input_ids.shape)}.")
        if self.images and len(self.input_ids) != 1:
            raise ValueError("Reading the input: images are recorded for one sequence at a time; split the batch.")


def as_array(value: Tensor) -> tuple[np.ndarray, str | None]:
    """A tensor as numpy, and its tag where numpy has no such dtype."""
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.uint16).numpy(), "BF16"
    return value.numpy(), None


# --- running -----------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """What a run hands its points to: a TraceWriter, or whoever looks at them at once."""

    def step(self, start: int, count: int, kept: int | None = None, draft: bool = False) -> None: ...

    def wants(self, path: str) -> bool: ...

    def add(self, path: str, value: np.ndarray, tag: str | None = None, keep: bool = True) -> None: ...


class Tracer:
    """Runs a model call by call and passes every dump point on to a sink."""

    def __init__(self, model: Model, writer: Sink) -> None:
        self.model, self.writer = model, writer
        self._kept: dict[str, Tensor] = {}  # what derived points of this call need
        self._phase, self._images = "forward", []

    def run(self, inputs: Inputs, calls: Sequence[Call]) -> Cache:
        """All calls from position 0 on. Returns the cache."""
        cache = self.model.new_cache(len(inputs.input_ids))
        with torch.no_grad(), self._hooks():
            for call in calls:
                self._call(inputs, cache, *call)
        return cache

    def _call(self, inputs: Inputs, cache: Cache, count: int, kept: int, draft: bool) -> None:
        start = cache.lengths[0]
        device = self.model.norm.weight.device
        ids = inputs.input_ids[:, start:start + count].to(device)
        types = None if inputs.token_types is None else inputs.token_types[:, start:start + count].to(device)
        self._kept, self._phase, self._start = {"ids": ids}, "forward", start
        self.writer.step(start, count, kept, draft)
        images = None
        if types is not None:
            before = int((inputs.token_types[0, :start] == START).sum())
            self._images = list(inputs.images[before:before + int((types[0] == START).sum())])
            images = [list(self._images)]
            self._add("vision.placeholders", types)
        out = self.model(ids, cache, token_types=types, images=images, commit=False, observe=self._observe)
        cache.commit(out.pending, (kept,) * len(ids))
        self._cache_points(cache)
        if draft:
            self._phase = "draft"
            anchor = out.logits[:, kept - 1].argmax(-1)
            drafted = self.model.draft(anchor, cache, observe=self._observe)
            following = inputs.input_ids[:, start + kept:start + kept + drafted.ids.shape[1]].to(device)
            agrees = drafted.ids[:, :following.shape[1]] == following
            self._add("mtp.accepted", agrees.to(torch.int64).cumprod(1).sum(1))

    def _observe(self, name: str, value: Tensor) -> None:
        """One dump point, with what is derived from it around it."""
        if self._phase == "forward" and name.startswith("mtp.") and name.endswith((".kv_pre_rope", ".kv")):
            # The context rows of a draft stage come from the function that also makes window rows.
            name = name.replace(".kv_pre_rope", ".context_kv_pre_rope").removesuffix(".kv")
            name += "" if name.endswith("_pre_rope") else ".context_kv_pre_quant"
        if name == "vision.patches":
            image = self._images.pop(0)
            self._add("vision.grid", torch.tensor([image.patch_rows, image.patch_cols, image.llm_rows, image.llm_cols]))
        elif name.endswith(".engram.hash_ids"):
            folded = self.model.engram_hash.fold(self._kept["ids"], self._kept.get("image_mask"))
            self._add(name.replace("hash_ids", "folded_ids"), folded)
        elif name.endswith(".attn.all_index"):
            self._window_positions(name, value)
        elif name == "mtp.logits" and "markov_bias" in self._kept:
            self._add("mtp.markov_bias", self._kept.pop("markov_bias"))
        self._add(name, value)
        if name.endswith((".scores", ".gate_scores", ".candidates")) or name == "image_mask":
            self._kept[name] = value
        elif name.endswith(".indexer.topk"):
            self._index_margin(name.removesuffix("topk"), value)
        elif name.endswith(".ffn.expert_ids"):
            self._expert_margin(name.removesuffix("expert_ids"), value)
        elif name == "logits":
            self._add("argmax", value.argmax(-1))

    def _add(self, path: str, value: Tensor, keep: bool = True) -> None:
        if self.writer.wants(path):
            array, tag = as_array(value)
            self.writer.add(path, array, tag, keep)

    def _window_positions(self, name: str, index: Tensor) -> None:
        """The window part of the kernel's index as absolute positions: slots of the ring, then rows of this call."""
        window = self.model.config.text_config.sliding_window
        index, start = index[..., :window], self._start
        newest = start - 1 - (start - 1 - index) % window  # last position before the call that fell into this slot
        position = torch.where(index < window, newest, start + index - window)
        self._add(name.replace("all_index", "window_index"), position.masked_fill(index < 0, -1))

    def _index_margin(self, prefix: str, chosen: Tensor) -> None:
        if not self.writer.wants(f"{prefix}margin"):
            return
        scores = self._kept[f"{prefix}scores"].to(torch.float32)
        source = self.model.config.text_config.candidate_source_layer_id
        candidates = self._kept.get(f"layers.{source}.attn.indexer.candidates")
        if candidates is not None and f"layers.{source}." not in prefix:
            scores = scores.masked_fill(~candidates, float("-inf"))
        self._add(f"{prefix}margin", _margin(scores, chosen))

    def _expert_margin(self, prefix: str, chosen: Tensor) -> None:
        if not self.writer.wants(f"{prefix}margin"):
            return
        gate = self.model.get_submodule(f"{prefix}gate")
        mask = self._kept.get("image_mask") if self._phase == "forward" else None
        bias = gate.bias if mask is None else torch.where(mask.unsqueeze(-1), gate.bias_vl, gate.bias)
        self._add(f"{prefix}margin", _margin(self._kept[f"{prefix}gate_scores"] + bias, chosen))

    def _cache_points(self, cache: Cache) -> None:
        """State after the call, in the order of positions, so that it does not depend on how the tokens were cut."""
        self._add("cache.position", torch.tensor(cache.lengths))
        length = cache.lengths[0]  # rows of a trace have one length
        for plan in self.model.plan:
            layer = plan.layer_id
            ring = cache.windows[layer].rows
            self._digest(f"cache.{plan.name}.window", _in_order(ring, length))
            if layer in cache.tails:
                opened = length % plan.compress_ratio
                tail = torch.stack([part.rows[:, :opened] for part in cache.tails[layer]], dim=1)
                self._digest(f"cache.{plan.name}.tail", tail)
                if opened:
                    self._add(f"{plan.name}.attn.compressor.tail", tail)
            if layer in cache.compressed:
                groups = length // cache.ratios[layer]
                self._digest(f"cache.{plan.name}.compressed", cache.compressed[layer].rows[:, :groups])
                self._digest(f"cache.{plan.name}.index_keys", cache.index_keys[layer].rows[:, :groups])
        if self.model.engram_hash is not None:
            self._digest("cache.engram_history", cache.engram_look_back())

    def _digest(self, path: str, rows: Tensor) -> None:
        """[B, ...] -> point [B, 4]: the SHA-256 of every sequence's rows as four numbers."""
        if self.writer.wants(path):
            arrays = [as_array(row) for row in rows]
            digests = [digest(array, tag or str(array.dtype)) for array, tag in arrays]
            numbers = [np.frombuffer(bytes.fromhex(each), "<i8") for each in digests]
            self.writer.add(path, np.stack(numbers))

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Two products that the model does not show: gates of a pooling compressor, Markov bias of every draft."""
        handles = []
        for name, module in self.model.named_modules():
            if name.endswith(".attn.compressor.wgate") and module is not None:
                path = name.replace("wgate", "score")
                handles.append(module.register_forward_hook(
                    lambda _module, _args, output, path=path: self._add(path, output)))
            elif name.endswith(".markov_head.head"):
                handles.append(module.register_forward_hook(self._collect_bias))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _collect_bias(self, _module: nn.Module, _args: tuple, output: Tensor) -> None:
        before = self._kept.get("markov_bias")
        row = output.unsqueeze(1)
        self._kept["markov_bias"] = row if before is None else torch.cat((before, row), dim=1)


def _margin(scores: Tensor, chosen: Tensor) -> Tensor:
    """scores [..., N], chosen [..., k] (-1 none) -> [...] float32: lowest chosen minus highest other (inf: none)."""
    if not scores.shape[-1]:
        return torch.full(scores.shape[:-1], float("inf"), device=scores.device)
    mask = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool, device=scores.device)
    mask = mask.scatter(-1, chosen.to(torch.int64) % (scores.shape[-1] + 1), True)[..., :-1]  # -1 -> the extra column
    last = scores.masked_fill(~mask, float("inf")).amin(-1)
    first = scores.masked_fill(mask, float("-inf")).amax(-1)
    return (last - first).to(torch.float32)


def _in_order(ring: Tensor, length: int) -> Tensor:
    """Rows of a ring [B, W, ...] by ascending position; those never written are left out."""
    size = ring.shape[1]
    return ring[:, torch.arange(max(0, length - size), length) % size]


def weight_digests(model: Model, writer: TraceWriter) -> None:
    """Record a digest of every dequantized weight as point weights.NAME: BF16 or float32, as the release has it."""
    for name, module in model.named_modules():
        values = dict(module.named_parameters(recurse=False))
        if "weight" not in values and hasattr(module, "weight"):
            values["weight"] = module.weight  # packed or streamed: no parameter of the module
        for attribute, value in values.items():
            path = f"weights.{name}.{attribute}" if name else f"weights.{attribute}"
            if not writer.wants(path) or math.prod(value.shape) > LARGE_TABLE:
                continue
            dense = value if isinstance(value, Tensor) else value.dequantize()
            narrow = dense_weight(dense, torch.bfloat16)
            array, tag = as_array(narrow if torch.equal(narrow.to(dense.dtype), dense) else dense)
            writer.add(path, array, tag, keep=False)


# --- what a trace says about itself ------------------------------------------------------------------------------


def config_digest(model: Model) -> str:
    """SHA-256 of what the configuration says about the computation: its text and vision sections."""
    values = model.config.to_dict()
    kept = {key: values.get(key) for key in ("text_config", "vision_config", "image_token_id")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def weights_digest(folder: Path) -> str:
    """SHA-256 over the shards; above 1 GiB only over their names, sizes, first and last MiB ("sampled:...")."""
    shards = sorted(folder.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in shards)
    checksum = hashlib.sha256()
    for path in shards:
        checksum.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            if total <= FULL_DIGEST:
                while block := file.read(1 << 22):
                    checksum.update(block)
            else:
                checksum.update(file.read(1 << 20))
                file.seek(max(0, path.stat().st_size - (1 << 20)))
                checksum.update(file.read(1 << 20))
    return ("" if total <= FULL_DIGEST else "sampled:") + checksum.hexdigest()


def git_commit() -> str:
    """The commit of this project, "" outside a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                               timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def describe(model: Model, folder: str | Path, inputs: Inputs, level: str, weights: str = "resident",
             revision: str = "") -> dict[str, Any]:
    """The header of a trace of this model; see TraceWriter."""
    numerics = model.numerics
    types = None if inputs.token_types is None else inputs.token_types.tolist()
    folder = Path(folder)
    return {
        "producer": {"name": "reference", "version": "1"},
        "model": {"id": folder.resolve().name, "revision": revision, "config_digest": config_digest(model),
                  "weights_digest": weights_digest(folder)},
        "facts": facts(model.config.to_dict()),
        "run": {"numerics": numerics.name, "dtype": str(numerics.dtype).removeprefix("torch."),
                "device": str(model.norm.weight.device), "threads": torch.get_num_threads(), "seed": None,
                "torch": torch.__version__, "git_commit": git_commit(), "weights": weights},
        "switches": {"fake_quant": numerics.fake_quant, "input_fp8": numerics.quantize_inputs,
                     "as_published_index_keys": model.as_published_index_keys},
        "inputs": {"input_ids": inputs.input_ids.tolist(), "token_types": types,
                   "image_digests": [digest(*as_array(image.patches)) for image in inputs.images]},
        "level": level}


def record(model: Model, folder: str | Path, inputs: Inputs, out: str | Path, level: str = "module", *,
           schedule: Sequence[tuple[int, int]] | None = None, draft: bool = False, summary: bool = False,
           layers: frozenset[str] | None = None, digest_weights: bool = False, weights: str = "resident",
           revision: str = "") -> Trace:
    """Run `model` (loaded from `folder`) on `inputs`, write the trace `out` and open it."""
    if draft and not model.mtp:
        raise ValueError("Recording drafts: this checkpoint has no draft stages. Leave --draft out.")
    absent = sorted((layers or set()) - {name for name, _ in model.named_modules()})
    if absent:
        raise ValueError(f"Recording some layers: this model has no {', '.join(absent[:3])}; it has layers "
                         f"0-{len(model.layers) - 1} and {len(model.mtp)} draft stage(s), mtp.0 and so on.")
    header = describe(model, folder, inputs, level, weights, revision)
    header["layers"] = None if layers is None else sorted(layers)
    with TraceWriter(out, header, summary, layers) as writer:
        if digest_weights:
            weight_digests(model, writer)
        tokens = inputs.input_ids.shape[1]
        Tracer(model, writer).run(inputs, [(*call, draft) for call in schedule or [(tokens, tokens)]])
    return open_trace(out)


# --- input and options -------------------------------------------------------------------------------------------


def parse_layers(text: str | None) -> frozenset[str] | None:
    """"0-2,8,mtp.0" -> names of layers; None for all."""
    if text is None:
        return None
    names = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if first.startswith("mtp.") and first[4:].isdigit() and not dash:
            names.add(first)
        elif first.isdigit() and last.isdigit() and int(last) >= int(first):
            names.update(f"layers.{i}" for i in range(int(first), int(last) + 1))
        else:
            raise ValueError(f"Reading --layers {text!r}: {part!r} is none of 3, 0-3, mtp.0.")
    return frozenset(names)


def read_inputs(path: str | Path, model: Model, checkpoint: str | Path) -> Inputs:
    """The input file of a run; see the top of this file. Raises ValueError for anything else."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"Reading the input: {path} is not a file.")
    if path.suffix == ".safetensors":
        return _golden_inputs(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        return Inputs(torch.tensor([Tokenizer.load(Path(checkpoint)).encode(text, allow_special=True)]))
    try:
        values = json.loads(text)
        unknown = set(values) - {"input_ids", "prompt", "token_types", "images"}
        if unknown or ("input_ids" in values) == ("prompt" in values):
            raise ValueError(f"keys {sorted(values)}")
        if "prompt" in values:
            ids = Tokenizer.load(Path(checkpoint)).encode(values["prompt"], allow_special=True)
        else:
            ids = values["input_ids"]
        input_ids = torch.tensor(ids if ids and isinstance(ids[0], list) else [ids], dtype=torch.int64)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"Reading the input: {path} must be a .txt, .safetensors or JSON file with input_ids or "
                         f"prompt, and optionally images and token_types ({error}).") from None
    if not values.get("images"):
        return Inputs(input_ids)
    vision = model.config.vision_config
    if vision is None:
        raise ValueError(f"Reading the input: {path} has images, but the configuration has no vision_config.")
    images = tuple(process_image(str(path.parent / image), vision) for image in values["images"])
    if "token_types" in values:
        return Inputs(input_ids, torch.tensor(values["token_types"]).view_as(input_ids), images)
    expanded, types = expand_placeholders(input_ids[0].tolist(), images, model.config.image_token_id)
    return Inputs(torch.tensor([expanded]), torch.tensor([types]), images)


def _golden_inputs(path: Path) -> Inputs:
    header, read = read_tensors(path)
    if "input_ids" not in header:
        raise ValueError(f"Reading the input: {path} has no input_ids.")
    types = torch.from_numpy(read("token_types")) if "token_types" in header else None
    images = []
    while f"image{len(images)}.patches" in header:
        name = f"image{len(images)}.patches"
        _, rows, columns, llm_rows, llm_columns = read(f"image{len(images)}.grid").tolist()
        values = read(name)
        values = widen_bfloat16(values) if header[name]["dtype"] == "BF16" else values
        patches = torch.from_numpy(values.copy()).to(torch.bfloat16)
        images.append(ImageInput(patches, rows, columns, llm_rows, llm_columns))
    if types is not None and bool((types == TEXT).all()):
        types = None
    return Inputs(torch.from_numpy(read("input_ids")).to(torch.int64), types, tuple(images))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.trace", description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument("--input-file", required=True, metavar="FILE", help="prompt: .json, .txt or .safetensors")
    parser.add_argument("--out", required=True, metavar="DIR", help="trace folder to write")
    parser.add_argument("--level", choices=LEVELS, default="module")
    parser.add_argument("--layers", help="only these of the layers that the model has, for instance 0-3,8,mtp.0; "
                        "points outside layers are always kept")
    parser.add_argument("--summary", action="store_true", help="the manifest alone: digests and statistics")
    parser.add_argument("--numerics", choices=tuple(MODES), default="native")
    parser.add_argument("--no-fake-quant", action="store_true", help="KV and index caches unquantized: the logic alone")
    parser.add_argument("--weights", choices=WEIGHT_MODES, default="resident", help="where the weights are")
    parser.add_argument("--engram-dir", metavar="DIR", help="where the shards with the Engram tables are")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch threads, 1 or more")
    parser.add_argument("--chunks", help="tokens per call, for instance 23,1* or 8,6/2,1*")
    parser.add_argument("--draft", action="store_true", help="draft after every call")
    parser.add_argument("--as-published-index-keys", action="store_true")
    parser.add_argument("--digest-weights", action="store_true",
                        help="also record a digest of every dequantized weight")
    parser.add_argument("--revision", default="", help="of the checkpoint, for the manifest")
    options = parser.parse_args(arguments)
    try:
        if options.threads is not None:
            if options.threads < 1:
                raise ValueError(f"Reading --threads: wanted 1 or more, got {options.threads}.")
            torch.set_num_threads(options.threads)
        model = inference.load(options.ckpt, options.device, options.numerics, not options.no_fake_quant,
                               weights=options.weights, as_published_index_keys=options.as_published_index_keys,
                               engram_dir=options.engram_dir)
        inputs = read_inputs(options.input_file, model, options.ckpt)
        schedule = parse_chunks(options.chunks, inputs.input_ids.shape[1]) if options.chunks else None
        trace = record(model, options.ckpt, inputs, options.out, options.level, schedule=schedule, draft=options.draft,
                       summary=options.summary, layers=parse_layers(options.layers),
                       digest_weights=options.digest_weights, weights=options.weights, revision=options.revision)
    except (ValueError, OSError) as error:
        print(f"BAD INPUT. {error}", file=sys.stderr)
        return 3
    print(f"{options.out}: {len(trace.entries)} points of {len(trace.steps)} call(s), {inputs.input_ids.numel()} "
          f"tokens, {trace.numerics}, fake quantization {'on' if trace.switch('fake_quant') else 'off'}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
