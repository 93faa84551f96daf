"""How a comparison is shown: text for a terminal, JSON, and a plot.

The text has one verdict line, one table (a row per concept), a bar per layer of added error, notes and a receipt: what
was compared, what was not, the measured noise, and the strongest sentence that the run supports.
Bars are logarithmic, from 1e-9 to 1: the first tall bar is a bug (of replayed modules: every tall one), a slow ramp is
precision.
Imports numpy only (matplotlib for `plot`). Tests: tests/test_compare.py
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from reference.compare_points import Result
from reference.points import LEVELS, layer_number, layer_of, lookup
from reference.tolerances import bound_for
from reference.trace_format import Trace

if TYPE_CHECKING:
    from reference.compare import Comparison

BAR_WIDTH, BAR_FLOOR = 36, -9  # characters; decimal exponent at which a bar has no length
_CODES = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


def use_color(stream: TextIO) -> bool:
    """Colors on a terminal only, and never when NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class _Paint:
    def __init__(self, color: bool) -> None:
        self.color = color

    def __call__(self, text: str, *names: str) -> str:
        codes = ";".join(_CODES[name] for name in names)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.color and names else text


def number(value: float | None) -> str:
    """Two digits; a dash for nothing, "exact" for zero."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "differs"
    return "exact" if value == 0 else f"{value:.1e}"


def bar(value: float) -> str:
    """A logarithmic bar: empty at 1e-9, full at 1."""
    if value <= 0:
        return ""
    share = 1.0 if math.isinf(value) else (math.log10(value) - BAR_FLOOR) / -BAR_FLOOR
    return "█" * max(1, min(BAR_WIDTH, round(share * BAR_WIDTH))) if share > 0 else "▏"


def as_text(comparison: Comparison, details: bool = False, color: bool = False) -> str:
    """The whole terminal view."""
    paint = _Paint(color)
    tint = {0: "green", 1: "red"}.get(comparison.code, "yellow")
    sides = comparison.tested, comparison.baseline
    names = [Path(side).name for side in sides]
    tested, baseline = names if names[0] != names[1] else sides
    lines = [paint(comparison.verdict, tint, "bold"), paint(f"  tested = {tested}, baseline = {baseline}", "dim")]
    if comparison.first is not None and comparison.code == 1:
        lines += _first_lines(comparison, paint)
    if comparison.results:
        lines += ["", *_concept_table(comparison, paint)]
        lines += _layer_bars(comparison, paint)
    if details:
        lines += ["", *(_detail_line(result) for result in comparison.results)]
    if comparison.notes:
        lines += ["", *(f"note: {note}" for note in _shortened(comparison.notes, 12))]
    if comparison.receipt:
        lines += ["", *(paint(line, "dim") for line in comparison.receipt)]
    return "\n".join(lines)


def _first_lines(comparison: Comparison, paint: _Paint) -> list[str]:
    first = comparison.first
    lines = [f"  {first.detail}" if first.detail else ""]
    if not math.isinf(first.error):
        lines.append(f"  relative L2 {number(first.error)} (bound {comparison.bound.of(first.path):.0e}), max abs "
                     f"{number(first.numbers.get('max_abs'))}, cosine {first.numbers.get('cosine') or 0:.9f}")
    lines += _origin_lines(comparison, paint)
    places = [number for number, result in enumerate(comparison.results) if result is first]
    for result in comparison.results[places[0] + 1:places[0] + 4] if places else ():
        lines.append(paint(f"  after the first: {result.name} {result.label()} {number(result.error)}", "dim"))
    return [line for line in lines if line]


def _origin_lines(comparison: Comparison, paint: _Paint) -> list[str]:
    """Inherited or added, when modules were replayed."""
    first, lines = comparison.first, []
    for added in comparison.added:
        if added.error:
            continue
        wrong = [result.path for result in added.results if result.bad]
        own = next((result for result in added.results if result.path == first.path), None)
        if added.side == "tested" and own is not None:
            word = "ADDED here" if own.bad else "inherited"
            lines.append(paint(f"  {word}: from its recorded inputs this point {_off(own)}", "bold"))
        elif added.side == "tested" and wrong:
            lines.append(paint(f"  ADDED between the recorded points up to {wrong[0]}", "bold"))
        if wrong:
            lines.append(f"  wrong from recorded inputs in the {added.side} trace:")
            lines += [f"    {line}" for line in _grouped(wrong)]
        else:
            lines.append(f"  {added.side}: every module agrees from its recorded inputs")
    return lines


def _off(result: Result) -> str:
    """How far a replayed point is from its recomputation, in words."""
    if result.error == 0:
        return "is right"
    if math.isinf(result.error):
        return "is decided differently" if lookup(result.path).kind == "discrete" else "has another shape or infinities"
    return f"is off by {number(result.error)}" + ("" if result.bad else ", within bounds")


def _grouped(paths: list[str]) -> list[str]:
    """Paths of one kind on one line: attn.q in layers 2, 3, 4."""
    layers: dict[str, list[str]] = {}
    for path in paths:
        layer = layer_of(path)
        layers.setdefault(path if layer is None else path.replace(f"{layer}.", ""), []).append(layer or "")
    return [kind if not names[0] else f"{kind} in {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
            for kind, names in layers.items()]


def _concept_table(comparison: Comparison, paint: _Paint) -> list[str]:
    rows: dict[str, list[Result]] = {}
    for result in comparison.results:
        if result.verdict != "skipped":
            rows.setdefault(lookup(result.path).concept, []).append(result)
    head = f"{'concept':<18}{'points':>7}  {'decisions':<22}{'worst rel. L2':>13}{'of bound':>10}  at"
    lines = [paint(head, "bold")]
    for concept, results in rows.items():
        floats = [result for result in results if lookup(result.path).kind == "float"]
        decisions = [result for result in results if lookup(result.path).kind == "discrete"]
        worst = max(floats, key=lambda result: result.error, default=None)
        excess = max((result.excess for result in floats), default=None)
        share = "-" if excess is None else f"{excess:.0%}" if excess < 100 else "over"
        bad = any(result.bad for result in results)
        line = (f"{concept:<18}{len(results):>7}  {_decision_words(decisions):<22}"
                f"{number(None if worst is None else worst.error):>13}{share:>10}  "
                f"{'' if worst is None or not worst.error else worst.name}")
        lines.append(paint(line.rstrip(), "red") if bad else line.rstrip())
    for concept, names in comparison.skipped.items():
        if concept not in rows:
            lines.append(paint(f"{concept:<18}{'none':>7}  not in the tested trace ({len(names)} points)", "yellow"))
    return lines


def _decision_words(decisions: list[Result]) -> str:
    if not decisions:
        return "-"
    counts: dict[str, int] = {}
    for result in decisions:
        counts[result.verdict] = counts.get(result.verdict, 0) + 1
    order = ("different", "shape", "near-tie", "tie", "equal")
    return ", ".join(f"{counts[word]} {word}" for word in order if word in counts)


def added_by_layer(comparison: Comparison) -> tuple[dict[str, float], str]:
    """Error per layer, and what it is: replayed from recorded inputs, or the growth of the end-to-end error."""
    for added in comparison.added:
        if added.by_layer and (added.culprit or added.side == "tested"):
            meaning = f"added by every layer of the {added.side} trace, from its recorded inputs, log scale"
            return dict(sorted(added.by_layer.items(), key=_layer_key)), meaning
    from reference.compare import growth_by_layer  # it imports this module

    return growth_by_layer(comparison), ("increase of the error per layer, log scale (give --ckpt for what each one "
                                         "adds)")


def _layer_key(item: tuple[str, float]) -> tuple[str, int]:
    stem, _, number_text = item[0].partition(".")
    return stem, int(number_text)


def _layer_bars(comparison: Comparison, paint: _Paint) -> list[str]:
    layers, meaning = added_by_layer(comparison)
    if not layers:
        return []
    lines = ["", paint(meaning, "bold")]
    limit = comparison.bound.module if comparison.added else comparison.bound.end
    for name, value in layers.items():
        tint = "red" if value > limit else "green"
        lines.append(f"{name:<10} {number(value):>8} {paint(bar(value), tint)}".rstrip())
    return lines


def _detail_line(result: Result) -> str:
    numbers = result.numbers
    nmse = "-" if numbers.get("nmse_db") is None else f"{numbers['nmse_db']:.0f} dB"
    return (f"{result.label():<18}{number(result.error):>9} {number(numbers.get('max_abs')):>9} {nmse:>8}  "
            f"{result.name}  {result.detail}").rstrip()


def _shortened(notes: list[str], most: int) -> list[str]:
    return notes if len(notes) <= most else [*notes[:most], f"... and {len(notes) - most} more"]


def receipt(comparison: Comparison, tested: Trace, baseline: Trace, compared: list[Result]) -> list[str]:
    """What was compared, what was not, the noise, and what may be said."""
    bound, quant = comparison.bound, bool(baseline.switch("fake_quant"))
    tokens = int(baseline.input_ids.shape[1])
    skipped = [f"{len(names)} {concept}" for concept, names in comparison.skipped.items()]
    extra = [f"{len(names)} {concept}" for concept, names in comparison.extra.items()]
    by_digest = sum(result.detail.startswith("statistics only") for result in compared)
    lines = [f"compared: {len(compared)} points of {_who(tested)} against {_who(baseline)}, "
             f"{len(baseline.input_ids)} x {tokens} tokens, {bound.pair}, level {_level(tested, baseline)}"]
    logits = next((result for result in compared if result.path == "logits" and result.numbers), None)
    if logits is not None:
        lines.append(f"logits: largest difference {logits.numbers['max_abs']:.2g}")
    if skipped or extra:
        lines.append("not compared: " + "; ".join(
            f"{word} ({', '.join(parts)})" for word, parts in (("only in the baseline", skipped),
                                                               ("only in the tested trace", extra)) if parts))
    if by_digest:
        lines.append(f"{by_digest} points by statistics only: their values are not on record")
    noise = []
    for trace in (tested, baseline):
        own = bound_for(trace.numerics, trace.numerics, quant)
        noise.append(f"{trace.numerics} {own.floor:.1e}" if own.floor else f"{trace.numerics} not measured")
    lines.append(f"noise of the arithmetic itself, end to end: {', '.join(dict.fromkeys(noise))}; bound "
                 f"{bound.end:.0e} ({bound.reason})")
    lines.append(f"this run supports: {_claim(comparison, tested, compared)}")
    return lines


def _who(trace: Trace) -> str:
    return f"{trace.manifest['producer'].get('name', '?')} ({Path(trace.origin).name})"


def _level(tested: Trace, baseline: Trace) -> str:
    return LEVELS[min(LEVELS.index(trace.manifest["level"]) for trace in (tested, baseline))]


def _claim(comparison: Comparison, tested: Trace, compared: list[Result]) -> str:
    if comparison.code == 1 and tested.only_weights:
        return "these are not the same weights"
    if comparison.code == 1 and comparison.bound.is_loose and not any(added.culprit for added in comparison.added):
        return "nothing yet: in BF16 one rounding can grow this far; --ckpt decides, module by module"
    if comparison.code == 1:
        return "the two do not compute the same function on these tokens"
    if comparison.code == 2:
        return "nothing about the concepts that are missing"
    if tested.only_weights:
        return "the weights above are the same bits; nothing about what is computed with them"
    concepts = {lookup(result.path).concept for result in compared}
    layers = {layer_number(result.path) for result in compared} - {None}
    where = f"{len(concepts)} concepts" + (f" in {len(layers)} layers" if layers else "")
    modules = bool(comparison.added) and not any(added.culprit or added.error for added in comparison.added)
    if comparison.bound.is_loose:
        how = (f"module by module (bound {comparison.bound.module:.0e})" if modules else "end to end within the bound "
               "above (in BF16 that is a sanity check; give --ckpt to judge every module)")
    else:
        how = f"end to end {'and module by module ' if modules else ''}within the bound above"
    calls = f"{len(tested.steps)} calls" if len(tested.steps) > 1 else "one call"
    return f"on these tokens, in {calls}, {where} agree {how}; nothing about other lengths or modes"


# --- machine-readable --------------------------------------------------------------------------------------------


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, with infinities as the text "inf" (JSON has none)."""
    layers, meaning = added_by_layer(comparison)
    return _plain({
        "verdict": comparison.verdict, "code": comparison.code, "tested": comparison.tested,
        "baseline": comparison.baseline,
        "bound": None if comparison.bound is None else vars(comparison.bound) | {"floor": comparison.bound.floor},
        "first": None if comparison.first is None else _result_json(comparison.first),
        "points": [_result_json(result) for result in comparison.results],
        "layers": {"meaning": meaning, "error": layers}, "skipped": comparison.skipped, "extra": comparison.extra,
        "added": [{"side": added.side, "error": added.error, "by_layer": added.by_layer, "flips": added.flips,
                   "culprit": None if added.culprit is None else _result_json(added.culprit),
                   "wrong": [result.path for result in added.results if result.bad]} for added in comparison.added],
        "notes": comparison.notes, "receipt": comparison.receipt})


def _result_json(result: Result) -> dict[str, Any]:
    kept = ("name", "verdict", "error", "excess", "margin", "position", "index", "detail")
    return {**{name: getattr(result, name) for name in kept}, **result.numbers}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else str(value)
    return value.item() if hasattr(value, "item") else value


def plot(comparison: Comparison, path: str | Path) -> str:
    """Draw the error of every layer into a PNG; returns what to tell the user."""
    try:
        import matplotlib
    except ImportError:
        return f"No plot was written to {path}: matplotlib is not installed. Install it with: pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers, meaning = added_by_layer(comparison)
    if not layers:
        return f"No plot was written to {path}: the traces have no layer outputs in common."
    ends = {result.path.removesuffix(".out"): result.error for result in comparison.results
            if result.path.removesuffix(".out") in layers}
    figure, axes = pyplot.subplots(figsize=(max(5, len(layers) * 0.35), 3.5), layout="constrained")
    finite = [max(1e-9, min(value, 1.0)) for value in layers.values()]
    axes.bar(range(len(layers)), finite, color=["tab:red" if value > comparison.bound.module else "tab:blue"
                                                for value in layers.values()], label=meaning.partition(" (")[0])
    axes.plot([list(layers).index(name) for name in ends], [max(1e-9, min(value, 1.0)) for value in ends.values()],
              "k.-", label="end to end, at the output")
    axes.axhline(comparison.bound.end, color="tab:gray", linestyle="--", label=f"bound {comparison.bound.end:.0e}")
    axes.set(yscale="log", ylim=(10.0**BAR_FLOOR, 3), ylabel="relative L2", xlabel="layer")
    axes.set_title(comparison.verdict[:100], fontsize="small")
    axes.set_xticks(range(len(layers)), [name.removeprefix("layers.") for name in layers], rotation=90)
    axes.legend(fontsize="x-small", loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"{path}: error of {len(layers)} layers"
