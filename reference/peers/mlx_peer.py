"""Run mlx-lm's `deepseek_v41` on a checkpoint and write a trace.

    python -m reference.peers.mlx_peer --ckpt DIR --input-file FILE --out DIR [--chunks 22,1*] [--no-fake-quant]
                                       [--numerics float32|dequantized]

For whom: mlx-lm 0.32.2 has an implementation of this model that shares no line with ours. It covers the text backbone:
no Engram, no pictures, no draft stages (a checkpoint without them: python -m reference.peers.text_checkpoint).
Environment: its own, with `pip install "mlx[cpu]" mlx-lm==0.32.2`; this file and what it imports need numpy besides,
not torch. Run it with that Python, from the root of this project.
How: functions and classes of its module are wrapped from outside while a call runs. Expert ids are written in ascending
order. What it leaves out: scores of the indexer and gates, which that code does not keep in a variable of its own.
Tests: tests/test_peers.py (skipped where mlx-lm is not installed)
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

from reference.trace_format import TraceError, TraceWriter, engine_header, parse_chunks, read_ids

NUMERICS = {"float32": "float32", "dequantized": "bfloat16"}


class Watcher:
    """Wraps the functions of mlx-lm's module and writes what goes through them."""

    def __init__(self, module: Any, model: Any, writer: TraceWriter) -> None:
        self.module, self.model, self.writer = module, model, writer
        self.names = {}  # id of a submodule -> path
        for number, layer in enumerate(model.layers):
            self.names[id(layer)] = f"layers.{number}"
            self.names[id(layer.attn_hc)], self.names[id(layer.ffn_hc)] = (f"layers.{number}.hc_{kind}"
                                                                           for kind in ("attn", "ffn"))
        self.layer = ""  # "" outside layers
        self.pre: Any = None  # mix that collapses the next sub-layer
        self.in_indexer = False
        self.shape = (1, 1)

    def add(self, path: str, value: Any) -> None:
        if self.writer.wants(path):
            is_bf16 = str(value.dtype).endswith("bfloat16")
            array = np.array(value.astype(import_module("mlx.core").float32) if is_bf16 else value)
            self.writer.add(path, array.astype(np.int64) if array.dtype.kind in "iu" else array)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While active, every watched function reports."""
        module = self.module
        watched: list[tuple[Any, str, Callable]] = [
            (module.DecoderLayer, "__call__", self._layer), (module.HyperConnection, "__call__", self._mixes),
            (module.Attention, "__call__", self._attention), (module.Compressor, "__call__", self._compressor),
            (module.Indexer, "__call__", self._indexer), (module.MoE, "__call__", self._experts),
            (module.Router, "__call__", self._router), (module.SharedMLP, "__call__", self._shared),
            (module, "_expand", self._expand), (module, "_collapse", self._collapse),
            (module, "_fake_quant_fp8", self._window), (module, "_fake_quant_fp4", self._compressed),
            (module, "_sparse_attention", self._sparse), (module, "_apply_rope", self._rope)]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
        try:
            for (owner, name, report), (_, _, original) in zip(watched, before):
                setattr(owner, name, _wrapped(original, report))
            yield
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)

    def _layer(self, call: Callable, layer: Any, streams: Any, pre_mix: Any, **rest: Any) -> Any:
        self.layer, self.pre, self.shape = self.names[id(layer)], pre_mix, streams.shape[:2]
        if self.layer == "layers.0":
            self.add("embed", streams[:, :, 0])
        self.add(f"{self.layer}.in", streams)
        self.seen_mid = False
        streams, pre_mix = call(layer, streams, pre_mix, **rest)
        self.add(f"{self.layer}.out", streams)
        self.layer = ""
        return streams, pre_mix

    def _mixes(self, call: Callable, mixes: Any, streams: Any) -> Any:
        name = self.names[id(mixes)]
        self.add(f"{name}.pre_used", self.pre)
        pre, post, comb = call(mixes, streams)
        for part, value in (("pre_next", pre), ("post", post), ("comb", comb)):
            self.add(f"{name}.{part}", value)
        self.pre = pre
        return pre, post, comb

    def _attention(self, call: Callable, attention: Any, x: Any, **rest: Any) -> Any:
        self.add(f"{self.layer}.attn.in", x)
        out = call(attention, x, **rest)
        self.add(f"{self.layer}.attn.out", out)
        return out

    def _window(self, call: Callable, rows: Any, *rest: Any) -> Any:
        self.add(f"{self.layer}.attn.kv", rows)
        rounded = call(rows, *rest)
        self.add(f"{self.layer}.attn.kv_quant", rounded)
        return rounded

    def _compressed(self, call: Callable, rows: Any, **rest: Any) -> Any:
        rounded = call(rows, **rest)
        kind = "indexer.q" if self.in_indexer else "compressor.kv" if rest.get("e4m3_scale") else "indexer.k"
        self.add(f"{self.layer}.attn.{kind}", rounded)
        return rounded

    def _compressor(self, call: Callable, compressor: Any, *rest: Any) -> Any:
        latent, first = call(compressor, *rest)
        if latent is not None:
            self.add(f"{self.layer}.attn.compressor.latent", latent)
        return latent, first

    def _indexer(self, call: Callable, indexer: Any, *rest: Any, **named: Any) -> Any:
        self.in_indexer = True
        topk, candidates = call(indexer, *rest, **named)
        self.in_indexer = False
        if indexer.is_candidate_source and candidates is not None:
            self.add(f"{self.layer}.attn.indexer.candidates", candidates)
        self.add(f"{self.layer}.attn.indexer.topk", topk)
        return topk, candidates

    def _sparse(self, call: Callable, q: Any, *rest: Any, **named: Any) -> Any:
        self.add(f"{self.layer}.attn.q", q)
        out = call(q, *rest, **named)
        self.add(f"{self.layer}.attn.out_rotated", out)
        return out

    def _rope(self, call: Callable, x: Any, rope: Any, **named: Any) -> Any:
        out = call(x, rope, **named)
        if named.get("inverse"):
            self.add(f"{self.layer}.attn.out_unrotated", out)
        return out

    def _expand(self, call: Callable, *rest: Any) -> Any:
        streams = call(*rest)
        if not self.seen_mid:
            self.add(f"{self.layer}.mid", streams)
        self.seen_mid = True
        return streams

    def _collapse(self, call: Callable, streams: Any, mix: Any) -> Any:
        out = call(streams, mix)
        if not self.layer:
            self.add("head.pre", mix)
            self.add("head.collapsed", out)
        return out

    def _experts(self, call: Callable, experts: Any, x: Any) -> Any:
        self.add(f"{self.layer}.ffn.in", x)
        out = call(experts, x)
        self.add(f"{self.layer}.ffn.out", out)
        return out

    def _router(self, call: Callable, router: Any, x: Any) -> Any:
        ids, weights = call(router, x)
        order = np.argsort(np.array(ids), axis=-1)
        for name, value in (("expert_ids", np.array(ids).astype(np.int64)), ("expert_weights", np.array(weights))):
            ordered = np.take_along_axis(value, order, -1)
            self.writer.add(f"{self.layer}.ffn.{name}", ordered.reshape(*self.shape, -1))
        return ids, weights

    def _shared(self, call: Callable, shared: Any, x: Any) -> Any:
        out = call(shared, x)
        self.add(f"{self.layer}.ffn.shared", out.reshape(*self.shape, -1))
        return out


def _wrapped(original: Callable, report: Callable) -> Callable:
    @functools.wraps(original)
    def call(*rest: Any, **named: Any) -> Any:
        return report(original, *rest, **named)
    return call


def run(checkpoint: str | Path, input_ids: np.ndarray, out: str | Path, schedule: list[tuple[int, int]], numerics: str,
        fake_quant: bool) -> int:
    """Run all calls and write the trace; returns the number of points. Needs mlx and mlx-lm."""
    mx, module, utils = (import_module(name) for name in ("mlx.core", "mlx_lm.models.deepseek_v41", "mlx_lm.utils"))
    mx.set_default_device(mx.cpu)
    model, _ = utils.load_model(Path(checkpoint))
    model.set_dtype(getattr(mx, NUMERICS[numerics]))
    header = engine_header("mlx-lm", metadata.version("mlx-lm"), checkpoint, input_ids, numerics, fake_quant, "module",
                           NUMERICS[numerics])
    header["run"]["mlx"] = metadata.version("mlx")
    quantizers = {name: getattr(module, name) for name in ("_fake_quant_fp8", "_fake_quant_fp4")}
    try:
        if not fake_quant:
            for name in quantizers:
                setattr(module, name, lambda x, *rest, **named: x)
        with TraceWriter(out, header) as writer:
            watcher, cache, position = Watcher(module, model, writer), model.make_cache(), 0
            for count, kept in schedule:
                if count != kept:
                    raise TraceError("Running mlx-lm: its cache cannot take tokens back. Leave out the /N of --chunks.")
                ids = input_ids[:, position:position + count]
                writer.step(position, count)
                writer.add("ids", ids)
                with watcher.active():
                    hidden = model.model(mx.array(ids), cache)
                    watcher.add("norm", hidden)
                    logits = model.lm_head(hidden)
                watcher.add("logits", logits)
                watcher.add("argmax", mx.argmax(logits, axis=-1))
                position += count
                writer.add("cache.position", np.array([cache[0].offset] * len(ids)))
            return len(writer.points)
    finally:
        for name, original in quantizers.items():
            setattr(module, name, original)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference.peers.mlx_peer", description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", required=True, metavar="DIR")
    parser.add_argument("--input-file", required=True, metavar="FILE", help=".json or .safetensors with input_ids")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--chunks", help="tokens per call, for instance 22,1*")
    parser.add_argument("--no-fake-quant", action="store_true")
    parser.add_argument("--numerics", choices=tuple(NUMERICS), default="float32")
    options = parser.parse_args(arguments)
    try:
        version = metadata.version("mlx-lm")
        import_module("mlx_lm.models.deepseek_v41")
    except ImportError as error:
        print(f"BAD INPUT. mlx-lm cannot be used here ({error}). Make an environment of its own with: pip install "
              "\"mlx[cpu]\" mlx-lm==0.32.2 numpy, and run this command with its Python.", file=sys.stderr)
        return 3
    try:
        ids = read_ids(options.input_file)
        schedule = parse_chunks(options.chunks or f"{ids.shape[1]}", ids.shape[1])
        points = run(options.ckpt, ids, options.out, schedule, options.numerics, not options.no_fake_quant)
    except ValueError as error:
        print(f"BAD INPUT. {error}", file=sys.stderr)
        return 3
    print(f"{options.out}: {points} points of mlx-lm {version}, {len(schedule)} call(s), {ids.size} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
