"""One attention layer far out: does it still compute the right thing, and what does it cost?

    python -m reference.longcontext [--layer N] [--lengths N ...] [--config FILE] [--no-check]

What it does
    For every length a packed cache is filled with random codes and scales, as if that many tokens had been read, and one
    decode step of one layer (layer 20 of the released shapes by default) runs at the last position: query, indexer over
    all index keys, candidate blocks, attention over window and selected rows. Weights are random; nothing is downloaded.
    The longest step is then recomputed naively in float64 from the bytes of the cache, with numpy and the decoders of
    reference/oracles.
Inputs of the naive side
    The step's own rotated queries, index queries and new window row. So no rounding flip of a quantizer can hide or
    fake a difference; these modules are checked elsewhere.
Memory
    Peak resident memory of the process so far; lengths run in ascending order.
Tests
    tests/test_decoding_long.py (small shapes, position 200,000)
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inference.attention import Attention
from inference.cache import Cache
from inference.command import Parser, run
from inference.config import Config, LayerPlan, layer_plan
from inference.context import Context, Shared
from inference.indexer import candidate_blocks, select_columns
from inference.numerics import Numerics
from reference.oracles.quantizers import decode_e2m1, decode_e4m3, decode_e8m0
from reference.oracles.rope import rotate

RELEASED = Path(__file__).parent.parent / "inference" / "configs" / "deepseek-v4.1-flash.json"
LENGTHS = (4096, 16384, 65536, 262144, 1048576)
BOUND = 2e-5  # relative L2, the bound of all float32 comparisons here
SLICE = 65536  # rows that the naive side decodes at once
SEED = 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """The step against the naive computation."""

    scores: float  # relative L2 over all visible columns
    selection: bool  # the naive choice from the step's scores is the step's selection
    candidates: bool | None  # likewise for the candidate blocks; None where the layer has none
    swapped: float  # columns chosen by the float64 scores and not by the step: largest distance to the boundary score
    output: float  # relative L2 of the head outputs, rotated back

    @property
    def is_equal(self) -> bool:
        return (max(self.scores, self.output) <= BOUND and self.selection and self.candidates is not False
                and self.swapped <= BOUND)


def random_layer(config: Config, layer_id: int) -> Attention:
    """The attention of one layer that owns compressor and indexer, with random weights."""
    plan = layer_plan(config.text_config)[layer_id]
    if not plan.owns_compressor:
        raise ValueError(f"Far context: layer {layer_id} owns no compressed rows; try one of "
                         f"{list(config.text_config.kv_source_layer_ids)}.")
    generator = torch.Generator().manual_seed(SEED)
    attention = Attention(config.text_config, plan)
    for name, parameter in attention.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.0
        values = torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1)
        parameter.data = values.to(parameter.dtype)
    return attention.requires_grad_(False)


def random_cache(config: Config, plan: LayerPlan, tokens: int) -> Cache:
    """A packed cache of one layer that looks as if it had read `tokens` tokens. Codes and scales are random."""
    generator = torch.Generator().manual_seed(SEED + 1)
    cache = Cache(config, (plan,), 1, torch.float32, "cpu", "packed")
    cache.reserve(tokens + 64)

    def fill(stored: Tensor, code_bytes: int, code_limit: int, scales: tuple[int, int]) -> None:
        stored[..., :code_bytes] = torch.randint(0, code_limit, (*stored.shape[:-1], code_bytes), generator=generator,
                                                 dtype=torch.uint8)
        stored[..., code_bytes:] = torch.randint(*scales, (*stored.shape[:-1], stored.shape[-1] - code_bytes),
                                                 generator=generator, dtype=torch.uint8)

    text = config.text_config
    fill(cache.windows[plan.layer_id].stored, text.head_dim, 0x7F, (116, 120))  # 0x7F is NaN; 448 * 2^-9 is about 1
    fill(cache.compressed[plan.layer_id].stored, text.head_dim // 2, 256, (0x20, 0x30))  # 2^-3 .. 1/2
    fill(cache.index_keys[plan.layer_id].stored, text.index_head_dim // 2, 256, (124, 127))  # 2^-3 .. 1/2
    cache.state = dataclasses.replace(cache.state, lengths=(tokens,))
    return cache


def step(attention: Attention, cache: Cache, tokens: int = 1, observe=None) -> Tensor:
    """`tokens` tokens of random input after what the cache has. Nothing is committed. Returns [1, tokens, D]."""
    start = cache.lengths[0]
    x = torch.randn(1, tokens, attention.config.hidden_size, generator=torch.Generator().manual_seed(SEED + 2))
    context = Context(Numerics.of("float32"), positions=start + torch.arange(tokens).unsqueeze(0), starts=(start,),
                      counts=(tokens,), observe=observe)
    if observe is not None:
        observe("x", x)
    return attention(x, context, cache, Shared())[0]


def compare(attention: Attention, cache: Cache, tokens: int = 1) -> Difference:
    """Run a step and recompute its last token naively. The cache must be as `step` wants it."""
    points: dict[str, Tensor] = {}
    step(attention, cache, tokens, points.__setitem__)
    plan, text, name = attention.plan, attention.config, f"{attention.plan.name}.attn"
    position, row = cache.lengths[0] + tokens - 1, tokens - 1
    visible = (position + 1) // plan.compress_ratio

    def point(suffix: str) -> np.ndarray:
        return points[f"{name}.{suffix}"][0, row].numpy()

    def rows(store, first: int, last: int) -> np.ndarray:
        return store.stored[0, first:last].numpy()

    index_q, weight = point("indexer.q").astype(np.float64), attention.indexer.weights_proj.weight.to(torch.float64).numpy()
    head_weights = points["x"][0, row].numpy().astype(np.float64) @ weight.T / np.sqrt(index_q.size)
    scores = np.concatenate([
        np.maximum(_index_keys(rows(cache.index_keys[plan.layer_id], first, min(first + SLICE, visible))) @ index_q.T, 0)
        @ head_weights for first in range(0, visible, SLICE)])
    found = point("indexer.scores").astype(np.float64)[:visible]
    wanted = np.sort(np.argsort(-found, kind="stable")[:text.index_topk])
    chosen = point("indexer.topk")
    chosen = chosen[chosen >= 0]
    ideal = np.argsort(-scores, kind="stable")[:text.index_topk]
    boundary, swapped = scores[ideal[-1]], np.setxor1d(ideal, chosen)
    distance = float(np.abs(scores[swapped] - boundary).max() / np.abs(scores).max()) if len(swapped) else 0.0
    blocks = None
    if plan.candidate_role == "publish":
        blocks = np.array_equal(_candidates(found, text.candidate_block_size, text.candidate_topk_blocks),
                                point("indexer.candidates")[:visible])

    compressed = cache.compressed[plan.layer_id].stored[0].numpy()[chosen]
    window = _window_rows(cache.windows[plan.layer_id].stored[0].numpy())
    size = len(window)
    older = [p for p in range(max(0, position - size + 1), cache.lengths[0])]
    new = points[f"{name}.kv_quant"][0, max(0, row - size + 1):row + 1].numpy().astype(np.float64)
    kv = np.concatenate((window[[p % size for p in older]], new, _compressed_rows(compressed)))
    q, sink = point("q").astype(np.float64), attention.attn_sink.to(torch.float64).numpy()
    logits = q @ kv.T * text.head_dim**-0.5
    most = np.maximum(logits.max(axis=1), sink)[:, None]
    shares = np.exp(logits - most)
    out = shares @ kv / (shares.sum(axis=1, keepdims=True) + np.exp(sink[:, None] - most))
    frequencies = attention.frequencies("cpu").numpy()
    out = np.array([rotate(head, position, frequencies, inverse=True) for head in out])
    return Difference(_relative(found, scores), np.array_equal(wanted, chosen), blocks, distance,
                      _relative(point("out_unrotated"), out))


def _index_keys(stored: np.ndarray) -> np.ndarray:
    """[n, bytes] -> float64 [n, X]: codes, then one E8M0 scale per 32."""
    codes, scale = stored[:, :-(stored.shape[1] // 17)], stored[:, -(stored.shape[1] // 17):]
    return decode_e2m1(codes).astype(np.float64) * np.repeat(decode_e8m0(scale), 32, axis=1)


def _compressed_rows(stored: np.ndarray) -> np.ndarray:
    """[n, bytes] -> float64 [n, K]: codes, then one E4M3 scale per 16."""
    codes, scale = stored[:, :-(stored.shape[1] // 9)], stored[:, -(stored.shape[1] // 9):]
    return decode_e2m1(codes).astype(np.float64) * np.repeat(decode_e4m3(scale), 16, axis=1)


def _window_rows(stored: np.ndarray) -> np.ndarray:
    """[n, bytes] -> float64 [n, K]: codes, then one E8M0 scale per 32."""
    codes, scale = stored[:, :-(stored.shape[1] // 33)], stored[:, -(stored.shape[1] // 33):]
    return decode_e4m3(codes).astype(np.float64) * np.repeat(decode_e8m0(scale), 32, axis=1)


def _candidates(scores: np.ndarray, block_size: int, keep: int) -> np.ndarray:
    """scores [n] of all visible columns -> the columns of the kept blocks, [n] bool."""
    blocks = -(-len(scores) // block_size)
    padded = np.concatenate((scores, np.full(blocks * block_size - len(scores), -np.inf))).reshape(blocks, block_size)
    best = padded.max(axis=1)
    best[-1] = np.inf  # the newest block
    kept = np.zeros(blocks, bool)
    kept[np.argsort(-best, kind="stable")[:keep]] = True
    return np.repeat(kept, block_size)[:len(scores)]


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _timed(function, repeats: int) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def sweep(config: Config, layer_id: int, lengths: Sequence[int], check: bool, repeats: int = 3) -> bool:
    """Print one line per length; the last one is checked. Returns whether it agreed."""
    attention, text = random_layer(config, layer_id), config.text_config
    ratios = [plan.compress_ratio for plan in layer_plan(text) if plan.owns_compressor]
    row_bytes = (text.head_dim // 2 + text.head_dim // 16) + (text.index_head_dim // 2 + text.index_head_dim // 32)
    print(f"layer {layer_id}, one token at the last position, float32 numerics, {torch.get_num_threads()} thread(s)")
    print(f"{'tokens':>9} {'index keys':>10} {'step ms':>9} {'indexer ms':>10} {'rest ms':>8} {'peak MiB':>9} "
          f"{'whole model cache MiB':>22}")
    agreed = True
    for length in sorted(lengths):
        gc.collect()
        cache = random_cache(config, attention.plan, length - 1)
        whole = _timed(lambda: step(attention, cache), repeats)
        index = _timed(lambda: _index_only(attention, cache), repeats)
        total = sum(row_bytes * (length // ratio) for ratio in ratios)
        print(f"{length:9d} {length // attention.plan.compress_ratio:10d} {whole * 1e3:9.1f} {index * 1e3:10.1f} "
              f"{(whole - index) * 1e3:8.1f} {_peak_mib():9.0f} {total / 2**20:22.1f}", flush=True)
        if check and length == max(lengths):
            difference = compare(attention, cache)
            agreed = difference.is_equal
            print(f"position {length - 1} against naive float64: scores {difference.scores:.1e}, selection "
                  f"{'equal' if difference.selection else 'DIFFERENT'}, candidate blocks "
                  f"{'none' if difference.candidates is None else 'equal' if difference.candidates else 'DIFFERENT'}, "
                  f"columns that float64 would choose otherwise within {difference.swapped:.1e} of the boundary, output "
                  f"{difference.output:.1e}: {'equal' if agreed else 'DIVERGED'} (bound {BOUND}); peak {_peak_mib():.0f} MiB")
        del cache
    return agreed


def _index_only(attention: Attention, cache: Cache) -> None:
    """The part of a step that grows: scores over all keys, candidate blocks, selection."""
    plan, text = attention.plan, attention.config
    queries = torch.randn(1, 1, text.index_n_heads, text.index_head_dim)
    weights = torch.randn(1, 1, text.index_n_heads)
    positions = torch.tensor([[cache.lengths[0]]])
    keys = cache.index_keys[plan.layer_id].view((cache.lengths[0] + 1) // plan.compress_ratio)
    scores = attention.indexer.score(queries, weights, keys, positions, Context.memory_budget)
    candidate_blocks(scores, positions, plan.compress_ratio, text.candidate_block_size, text.candidate_topk_blocks)
    select_columns(scores, text.index_topk)


def _peak_mib() -> float:
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m reference.longcontext", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(RELEASED), help="config.json (default: the released shapes)")
    parser.add_argument("--layer", type=int, help="a layer that owns compressed rows (default: the last one)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens, the step's own included")
    parser.add_argument("--no-check", action="store_true", help="leave out the float64 recomputation of the longest")
    options = parser.parse_args(arguments)
    try:
        config = Config.from_file(options.config)
        layer = config.text_config.kv_source_layer_ids[-1] if options.layer is None else options.layer
        with torch.no_grad():
            agreed = sweep(config, layer, options.lengths, not options.no_check)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(run(main))
