"""Engram: n-gram memory. The last tokens are hashed to rows of a large table, and a gate adds what the rows say.

What it computes, for a position p
    c(p)       token id folded to its class (tokenizer.py), DEAD inside an image span
    look-back  s = 0 .. n-1 reads c(p - s); at the start of the sequence or at a DEAD position it stops: that slot and all
               older ones read the folded pad id, so an n-gram never crosses an image
    hash       acc_0 = c_0 mult_0, acc_s = acc_{s-1} XOR (c_s mult_s), int64; the (s+1)-gram uses acc_s mod each of its
               primes, plus the sum of all earlier primes of the layer
    rows       one row per column (orders 2 .. n, heads), concatenated; wkv makes C keys and one value of it
    gate[c]    sigmoid(signed sqrt of the dot product of the two normalized vectors, stream c and key c)
    update     X[c] += gate[c] * value; zero at image positions
Constants that are no weights
    Primes and multipliers follow from the configuration (`NgramHash`); they are checked against the table's row count.
Mirrors
    official: class `Engram` and its hash layout. The short convolution of the Engram paper is absent here.
Tests
    tests/test_engram.py
"""

from __future__ import annotations

import numpy as np
import sympy
import torch
from torch import Tensor, nn

from inference.cache import DEAD
from inference.config import LayerPlan, TextConfig
from inference.context import Context
from inference.layers import Embedding, Linear, empty_parameter

SEED = 10007  # official: the generator of layer l is seeded with 10007 * l
GATE_FLOOR = 1e-6  # official: lower bound of |dot| before the square root


def hash_primes(config: TextConfig) -> list[list[list[int]]]:
    """Primes by Engram layer, order (2 .. n) and head: the smallest unused ones from `engram_vocab_size` on (official)."""
    used: set[int] = set()
    layers = []
    for _ in config.engram_layer_ids:
        orders = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            primes, candidate = [], config.engram_vocab_size - 1
            while len(primes) < config.engram_n_heads:
                candidate = int(sympy.nextprime(candidate))
                if candidate not in used:
                    used.add(candidate)
                    primes.append(candidate)
            orders.append(primes)
        layers.append(orders)
    return layers


def hash_multipliers(config: TextConfig) -> list[list[int]]:
    """Odd int64 multipliers by Engram layer and look-back.

    official: drawn in one request from a PCG64 generator. The bound keeps class * multiplier inside int64.
    """
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    return [[2 * int(value) + 1 for value in np.random.default_rng(SEED * layer_id).integers(
        0, bound, size=config.engram_max_ngram_size, dtype=np.int64)] for layer_id in config.engram_layer_ids]


class NgramHash:
    """The constants of all Engram layers, and the hash.

    folded_ids: [V] int64, the class of every token id.
    """

    def __init__(self, config: TextConfig, folded_ids: Tensor) -> None:
        classes = int(folded_ids.max()) + 1
        if folded_ids.shape != (config.vocab_size,) or classes != config.engram_compressed_vocab_size:
            raise ValueError(f"Preparing Engram: the tokenizer folds {folded_ids.numel()} ids to {classes} classes, the "
                             f"configuration wants {config.vocab_size} ids and {config.engram_compressed_vocab_size} "
                             "classes. Every hash depends on it; use the tokenizer of this checkpoint.")
        self.folded_ids = folded_ids
        self.pad = int(folded_ids[config.engram_pad_token_id])
        self.multipliers = hash_multipliers(config)
        self.primes = hash_primes(config)
        for layer_id, rows, orders in zip(config.engram_layer_ids, config.engram_num_embeddings, self.primes):
            total = sum(sum(order) for order in orders)
            if total != rows:
                raise ValueError(f"Preparing Engram: engram_num_embeddings says {rows} rows for layer {layer_id}, but its "
                                 f"primes from engram_vocab_size {config.engram_vocab_size} on sum to {total}.")

    def fold(self, input_ids: Tensor, image_mask: Tensor | None) -> Tensor:
        """input_ids [B, S] -> classes [B, S] int64, DEAD at image positions."""
        if self.folded_ids.device != input_ids.device:
            self.folded_ids = self.folded_ids.to(input_ids.device)  # once: a model runs on one device
        folded = self.folded_ids[input_ids]
        return folded if image_mask is None else folded.masked_fill(image_mask, DEAD)

    def hash_ids(self, folded: Tensor, history: Tensor, slot: int) -> Tensor:
        """Row ids of the Engram layer in `slot`.

        folded [B, S] int64; history [B, h] int64, the folded ids before this call, h >= n - 1, DEAD before the sequence.
        Returns [B, S, columns] int64, columns ordered by order, then head.
        """
        tokens = folded.shape[1]
        joined = torch.cat((history, folded), dim=1)
        stopped = torch.zeros_like(folded, dtype=torch.bool)
        accumulated = torch.zeros_like(folded)
        columns, offset = [], 0
        for look_back, multiplier in enumerate(self.multipliers[slot]):
            end = joined.shape[1] - look_back
            seen = joined[:, end - tokens:end]
            stopped = stopped | (seen == DEAD)  # official: the look-back stops, it does not skip
            accumulated = accumulated ^ torch.where(stopped, self.pad, seen) * multiplier
            if look_back > 0:
                for prime in self.primes[slot][look_back - 1]:
                    columns.append(accumulated % prime + offset)
                    offset += prime
        return torch.stack(columns, dim=-1)


class Engram(nn.Module):
    def __init__(self, config: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config, self.slot, self.name = config, plan.engram_slot, f"{plan.name}.engram"
        width, copies = config.hidden_size, config.hc_mult
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.embed = Embedding(config.engram_num_embeddings[self.slot], config.engram_head_dim)
        self.wkv = Linear(columns * config.engram_head_dim, (copies + 1) * width, quantize_input=True)
        self.q_weight = empty_parameter(copies, width)
        self.k_weight = empty_parameter(copies, width)

    def forward(self, streams: Tensor, hash_ids: Tensor, context: Context) -> Tensor:
        """streams [B, S, C, D], hash_ids [B, S, columns] -> [B, S, C, D], dtype of the streams."""
        copies, width, eps = self.config.hc_mult, self.config.hidden_size, self.config.rms_norm_eps
        context.record(f"{self.name}.hash_ids", hash_ids)
        rows = self.embed(hash_ids, context.numerics)  # [B, S, columns, channels]
        context.record(f"{self.name}.rows", rows)
        keys, value = self.wkv(rows.flatten(-2), context.numerics).split((copies * width, width), dim=-1)
        # float32 from here to the final cast; statistics are per stream, unlike those of the mixes.
        keys = keys.unflatten(-1, (copies, width)).to(torch.float32)
        wide = streams.to(torch.float32)
        weight = self.q_weight.to(torch.float32) * self.k_weight.to(torch.float32)
        dot = (wide * weight * keys).sum(-1)
        dot = dot * torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps) * width**-0.5
        # copysign, not sign(): a dot product of +0 gives +sqrt(floor), as the official code does.
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(GATE_FLOOR).sqrt(), dot))
        if context.image_mask is not None:
            gate = gate.masked_fill(context.image_mask.unsqueeze(-1), 0.0)
        context.record(f"{self.name}.gate", gate)
        out = (wide + gate.unsqueeze(-1) * value.to(torch.float32).unsqueeze(-2)).to(streams.dtype)
        context.record(f"{self.name}.out", out)
        return out
