"""Trace any torch module, given a map from its submodules to point names.

    python -m reference.peers.torch_hooks --factory PACKAGE.MODULE:FUNCTION --ckpt DIR --input-file FILE --out DIR
                                          [--no-fake-quant] [--numerics NAME] [--option NAME=VALUE ...]

The factory, FUNCTION(checkpoint, fake_quant, **options), returns an `Engine`: the module, the taps, and how to call it
with ids. --numerics is passed on as the option `numerics`. What the factory or the module raises is shown as it is; a
TraceError of the factory is a mistake of the user, as is an option that it does not take. A tap says which points the
input and the outputs of a submodule are; `{i}` in its path stands for a number and is replaced in the names. Nothing in
the module is changed: forward hooks are added and removed.
    TAPS = {"model.layers.{i}": Tap("layers.{i}.in", "layers.{i}.out"),
            "model.layers.{i}.mlp.router": Tap(None, ("layers.{i}.ffn.expert_ids", "layers.{i}.ffn.expert_weights"))}
Names, kinds and shapes of the points: reference/points.py. An example: toy_port.py; the guide: reference/PORTING.md.
Tests: tests/test_peers.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inference.numerics import MODES
from reference.points import lookup
from reference.trace_format import TraceError, TraceWriter, engine_header, read_ids


@dataclass(frozen=True)
class Tap:
    """Points of one kind of submodule."""

    input: str | None = None  # its first positional argument
    output: str | None | tuple[str | None, ...] = None  # its result, or the parts of it; None: not recorded
    change: Callable[[str, Tensor], Tensor] | None = None  # layout of a point's value, if it is another


@dataclass(frozen=True)
class Engine:
    """Someone's implementation, ready to be called."""

    name: str
    version: str
    model: nn.Module
    taps: Mapping[str, Tap]
    call: Callable[[nn.Module, Tensor], Tensor]  # model, ids [B, S] -> logits [B, S, V]
    numerics: str = "float32"
    level: str = "module"  # the deepest level at which it records something for every concept


def match_taps(model: nn.Module, taps: Mapping[str, Tap]) -> list[tuple[nn.Module, Tap, str]]:
    """(submodule, its tap, its number). Raises TraceError for a path that no submodule has, or for unknown points."""
    found = []
    for path, tap in taps.items():
        outputs = (tap.output,) if isinstance(tap.output, str) else tap.output or ()
        for name in filter(None, (tap.input, *outputs)):
            if lookup(name.replace("{i}", "0")) is None:
                raise TraceError(f"Placing taps: {name!r} is no point. reference/points.py lists them.")
        pattern = re.compile(re.escape(path).replace(r"\{i\}", r"(\d+)"))
        matches = [(match, module) for name, module in model.named_modules() if (match := pattern.fullmatch(name))]
        if not matches:
            raise TraceError(f"Placing taps: the model has no submodule called {path!r}. Print model.named_modules().")
        found += [(module, tap, match[1] if match.groups() else "") for match, module in matches]
    return found


@contextlib.contextmanager
def watching(model: nn.Module, taps: Mapping[str, Tap], writer: TraceWriter) -> Iterator[None]:
    """While active, every call of the model writes its tapped values, in the order in which they are made."""
    def add(name: str | None, tap: Tap, number: str, value: Any) -> None:
        if name is None or value is None:
            return
        value = value.detach() if tap.change is None else tap.change(name, value.detach())
        value = value.to(torch.int64) if not value.is_floating_point() and value.dtype != torch.bool else value
        is_bf16 = value.dtype == torch.bfloat16
        array = value.cpu().contiguous().view(torch.uint16).numpy() if is_bf16 else value.cpu().numpy()
        writer.add(name.replace("{i}", number), array, "BF16" if is_bf16 else None)

    handles = []
    for module, tap, number in match_taps(model, taps):
        def before(_module: nn.Module, arguments: tuple, tap: Tap = tap, number: str = number) -> None:
            add(tap.input, tap, number, arguments[0])

        def after(_module: nn.Module, _arguments: tuple, result: Any, tap: Tap = tap, number: str = number) -> None:
            names = tap.output if isinstance(tap.output, tuple) else (tap.output,)
            values = result if isinstance(tap.output, tuple) else (result[0] if isinstance(result, tuple) else result,)
            for name, value in zip(names, values):
                add(name, tap, number, value)

        if tap.input is not None:
            handles.append(module.register_forward_pre_hook(before))
        if tap.output is not None:
            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_engine(engine: Engine, checkpoint: str | Path, input_ids: np.ndarray, out: str | Path, fake_quant: bool,
                  ) -> int:
    """One call on the whole prompt; returns the number of points."""
    header = engine_header(engine.name, engine.version, checkpoint, input_ids, engine.numerics, fake_quant,
                           engine.level)
    with TraceWriter(out, header) as writer, torch.no_grad():
        writer.step(0, input_ids.shape[1])
        writer.add("ids", input_ids)
        with watching(engine.model, engine.taps, writer):
            logits = engine.call(engine.model, torch.from_numpy(input_ids))
        writer.add("logits", logits.float().numpy())
        writer.add("argmax", logits.argmax(-1).numpy())
        writer.add("cache.position", np.full(len(input_ids), input_ids.shape[1]))
    return len(writer.points)


def find_factory(name: str) -> Callable[..., Engine]:
    """"package.module:function" -> the function. Raises TraceError if there is none; errors inside are its own."""
    module, _, function = name.partition(":")
    if not module or not function or module.startswith("."):
        raise TraceError(f"Finding the factory: wanted MODULE:FUNCTION, got {name!r}.")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module imports
        raise TraceError(f"Finding the factory {name!r}: there is no module {error.name}. Write "
                         "MODULE:FUNCTION.") from None
    if not callable(getattr(found, function, None)):
        raise TraceError(f"Finding the factory {name!r}: {module} has no function {function}.")
    return getattr(found, function)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference.peers.torch_hooks", description=__doc__.splitlines()[0])
    parser.add_argument("--factory", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument("--ckpt", required=True, metavar="DIR")
    parser.add_argument("--input-file", required=True, metavar="FILE",
                        help=".json or .safetensors with input_ids, or the manifest.json of a trace; no text")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--no-fake-quant", action="store_true")
    parser.add_argument("--numerics", choices=tuple(MODES), help="passed to the factory; without it, what that does")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="passed to the factory")
    options = parser.parse_args(arguments)
    try:
        factory = find_factory(options.factory)
        named = dict(option.partition("=")[::2] for option in options.option)
        named |= {} if options.numerics is None else {"numerics": options.numerics}
        try:
            inspect.signature(factory).bind(options.ckpt, not options.no_fake_quant, **named)
        except TypeError as error:
            raise TraceError(f"Calling {options.factory}(checkpoint, fake_quant, options): it takes no such options "
                             f"({error}).") from None
        ids = read_ids(options.input_file)
        engine_header("", "", options.ckpt, ids, "float32", True, "all")  # the checkpoint and the ids, before any work
        engine = factory(options.ckpt, not options.no_fake_quant, **named)
        points = record_engine(engine, options.ckpt, ids, options.out, not options.no_fake_quant)
    except TraceError as error:
        print(f"BAD INPUT. {error}", file=sys.stderr)
        return 3
    print(f"{options.out}: {points} points of {engine.name}, one call, {ids.size} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
