"""The names of the values that a trace records, and what each of them is.

A full name is `step{n}.{path}`: n counts the calls of a run, the path is the place in the model, spelled like the
checkpoint (`layers.7.attn.q`, `mtp.1.ffn.expert_ids`). A path that occurs twice in a call (two images) gets `#1`.
For every path the table says
    kind     discrete (a decision) or float
    level    the least detailed trace that has it: layer, module or all
    concept  the mechanism it belongs to; a comparison in which a whole concept is absent is not called equal
    rows     what its second axis counts, so that traces cut into other calls can be aligned:
             token (absolute position), group (compressed row), draft (position of the anchor), call (nothing), image
    how      how two values of it are compared (see reference/compare_points.py)
Imports nothing but the standard library. Tests: tests/test_trace.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

LEVELS = ("layer", "module", "all")
DISCRETE, FLOAT = "discrete", "float"
# Kinds of comparison. exact: same entries. set: rows of ids, order free. selection: columns chosen by a score. mask:
# the same as booleans. choice: one id chosen by a score. close: floats. info: recorded to judge others. own: meaningful
# between runs of one producer only (its private layout, or the bytes of its floats).


@dataclass(frozen=True)
class Point:
    path: str  # "{layer}" stands for layers.N and mtp.N, "{n}" for any other number
    kind: str
    level: str
    concept: str
    rows: str
    how: str
    shape: str  # [B, S, ...]; letters: B rows, S tokens, N groups, G drafts, C streams, D width, H heads, K head width

    @property
    def depth(self) -> int:
        return LEVELS.index(self.level)


def _table() -> tuple[Point, ...]:
    points: list[Point] = []

    def add(concept: str, rows: str, lines: str) -> None:
        for line in lines.strip().splitlines():
            path, kind, level, how, shape = line.split(maxsplit=4)
            depth = "LMA".index(level)
            points.append(Point(path, DISCRETE if kind == "D" else FLOAT, LEVELS[depth], concept, rows, how, shape))

    add("weights", "call", """
        weights                               D A exact      digest of one dequantized weight
    """)
    add("input", "token", """
        ids                                   D L exact      [B, S]
        image_mask                            D L exact      [B, S]
    """)
    add("vision", "token", """
        vision.placeholders                   D M exact      [B, S] token types
    """)
    add("vision", "image", """
        vision.grid                           D M exact      [4] patch rows, patch columns, text rows, text columns
        vision.patches                        F M close      [P, 3, p, p]
        vision.blocks.{n}.out                 F M close      [P, M]
        vision.out                            F L close      [P, M]
        aligner.merged                        F M close      [cells, M d d]
        aligner.out                           F L close      [cells, D]
    """)
    add("embedding", "token", """
        embed                                 F L close      [B, S, D]
    """)
    add("streams", "token", """
        {layer}.in                            F L close      [B, S, C, D]
        {layer}.mid                           F L close      [B, S, C, D] after attention is written back
        {layer}.out                           F L close      [B, S, C, D]
    """)
    add("engram", "token", """
        {layer}.engram.folded_ids             D M exact      [B, S]
        {layer}.engram.hash_ids               D M exact      [B, S, columns]
        {layer}.engram.rows                   F M close      [B, S, columns, channels]
        {layer}.engram.gate                   F M close      [B, S, C]
        {layer}.engram.out                    F M close      [B, S, C, D]
    """)
    for kind in ("attn", "ffn"):
        add("hyper-connections", "token", f"""
        {{layer}}.hc_{kind}.pre_used          F M close      [B, S, C] collapses this sub-layer
        {{layer}}.hc_{kind}.pre_next          F M close      [B, S, C] collapses the next one
        {{layer}}.hc_{kind}.post              F M close      [B, S, C]
        {{layer}}.hc_{kind}.comb              F M close      [B, S, C, C]
        """)
    add("attention", "token", """
        {layer}.attn.in                       F M close      [B, S, D]
        {layer}.attn.q_latent                 F M close      [B, S, Q]
        {layer}.attn.q                        F M close      [B, S, H, K] after rotary
        {layer}.attn.kv_pre_rope              F A close      [B, S, K]
        {layer}.attn.kv                       F M close      [B, S, K] after rotary
        {layer}.attn.kv_quant                 F M close      [B, S, K] after fake quantization
        {layer}.attn.window_index             D A exact      [B, S, W] absolute positions, -1 none
        {layer}.attn.all_index                D M own        [B, S, k] what the kernel receives
        {layer}.attn.out_rotated              F A close      [B, S, H, K]
        {layer}.attn.out_unrotated            F M close      [B, S, H, K]
        {layer}.attn.o_groups                 F A close      [B, S, G, O]
        {layer}.attn.out                      F M close      [B, S, D]
    """)
    add("compressor", "token", """
        {layer}.attn.compressor.score         F A close      [B, S, K] gates before the softmax
    """)
    add("compressor", "group", """
        {layer}.attn.compressor.latent        F M close      [B, N, K] before rotary
        {layer}.attn.compressor.kv            F M close      [B, N, K] after rotary and fake quantization
    """)
    add("compressor", "call", """
        {layer}.attn.compressor.tail          F A close      [B, 2, open tokens, K] projections of the unfinished group
    """)
    add("indexer", "group", """
        {layer}.attn.indexer.k                F M close      [B, N, X]
    """)
    add("indexer", "token", """
        {layer}.attn.indexer.q                F M close      [B, S, J, X]
        {layer}.attn.indexer.scores           F M close      [B, S, N] invisible groups at -inf
        {layer}.attn.indexer.candidates       D M mask       [B, S, N]
        {layer}.attn.indexer.topk             D M selection  [B, S, k] -1 none
        {layer}.attn.indexer.margin           F M info       [B, S] last kept minus first dropped score
    """)
    add("experts", "token", """
        {layer}.ffn.in                        F M close      [B, S, D]
        {layer}.ffn.gate_scores               F M close      [B, S, E] unbiased
        {layer}.ffn.expert_ids                D M set        [B, S, A]
        {layer}.ffn.margin                    F M info       [B, S] last kept minus first dropped biased score
        {layer}.ffn.expert_weights            F M close      [B, S, A] in the order of expert_ids
        {layer}.ffn.shared                    F A close      [B, S, D]
        {layer}.ffn.out                       F M close      [B, S, D]
    """)
    add("head", "token", """
        head.pre                              F M close      [B, S, C]
        head.collapsed                        F L close      [B, S, D]
        norm                                  F L close      [B, S, D]
        logits                                F L close      [B, S, V]
        argmax                                D L choice     [B, S]
    """)
    add("draft", "token", """
        mtp.main_hidden                       F M close      [B, S, targets D]
        mtp.main_x                            F M close      [B, S, D]
        {layer}.attn.context_kv_pre_rope      F A close      [B, S, K]
        {layer}.attn.context_kv_pre_quant     F M close      [B, S, K]
        {layer}.attn.context_kv               F M close      [B, S, K]
    """)
    add("draft", "draft", """
        mtp.block_ids                         D M exact      [B, G] anchor, then noise
        mtp.head.collapsed                    F M close      [B, G, D]
        mtp.base_logits                       F M close      [B, G, V]
        mtp.markov_bias                       F M close      [B, G, V]
        mtp.logits                            F M close      [B, G, V]
        mtp.confidence                        F M close      [B, G]
        mtp.draft_ids                         D L choice     [B, 1 + G]
        mtp.accepted                          D L exact      [B] leading drafts that the input goes on with
    """)
    add("cache", "call", """
        cache.position                        D L exact      [B]
        cache.{layer}.window                  D A own        [B, 4] digest
        cache.{layer}.tail                    D A own        [B, 4] digest
        cache.{layer}.compressed              D A own        [B, 4] digest
        cache.{layer}.index_keys              D A own        [B, 4] digest
        cache.engram_history                  D A own        [B, 4] digest
    """)
    return tuple(points)


POINTS = _table()
_BY_PATH = {point.path: point for point in POINTS}
_FULL = re.compile(r"step(\d+)\.(.+)")
_LAYER = re.compile(r"(?:^|\.)((?:layers|mtp)\.\d+)\.")


@cache
def lookup(path: str) -> Point | None:
    """The point that a path names, or None if it names none. Paths inside a draft stage count drafts, not tokens."""
    path = path.partition("#")[0]
    if path.startswith("weights."):
        return _BY_PATH["weights"]
    general = re.sub(r"^(cache\.)?(layers|mtp)\.\d+\.", r"\1{layer}.", path)
    point = _BY_PATH.get(re.sub(r"\.\d+\.", ".{n}.", general))
    if point is not None and path.startswith("mtp.") and point.rows == "token" and point.concept != "draft":
        return Point(point.path, point.kind, point.level, "draft", "draft", point.how, point.shape)
    return point


def split_name(name: str) -> tuple[int | None, str]:
    """"step3.layers.0.in" -> (3, "layers.0.in"); a name without a step belongs to none."""
    match = _FULL.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def layer_of(path: str) -> str | None:
    """"layers.4.attn.q" -> "layers.4"; None for points of no layer."""
    match = _LAYER.search(path)
    return match[1] if match else None


def layer_number(path: str) -> int | None:
    """Backbone layer of a path; None for points of no backbone layer."""
    name = layer_of(path)
    return int(name.partition(".")[2]) if name and name.startswith("layers.") else None
