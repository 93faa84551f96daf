"""The model: one layer, then all of them, in one forward for any number of tokens at any position.

What it computes
    embed -> C equal streams -> per layer [Engram] -> attention sub-layer -> FFN sub-layer -> collapse -> norm -> head
    A sub-layer: mixes of the streams; collapse with the pre vector of the PREVIOUS sub-layer; norm; attention or MoE;
    expand with its own post and comb (hyper_connections.py).
Interface
    model = inference.load(path)          see checkpoint.py
    cache = model.new_cache(batch_size)
    out = model(input_ids, cache)         out.logits [B, S, V] float32; the cache advances by S
    The loop around it (prefill in chunks, sampling, drafts and their verification) is in decoding.py.
Names
    Parameters and submodules are called as in the checkpoint: model.layers[2].attn.indexer.wq_b.weight.
Mirrors
    official: classes `Block` and `Transformer`; tech report: architecture overview.
Tests
    tests/test_model.py, tests/test_decode.py, tests/test_verify.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inference import dspark
from inference.attention import Attention
from inference.cache import Cache, Pending
from inference.compressor import Groups
from inference.config import Config, LayerPlan, TextConfig, layer_plan
from inference.context import DEFAULT_MEMORY_BUDGET, Context, Shared
from inference.engram import Engram, NgramHash
from inference.hyper_connections import Mixes, collapse, compute_mixes, expand, first_pre
from inference.image_processor import TEXT, ImageInput, span_embeddings, validate_token_types
from inference.layers import Embedding, Linear, RMSNorm, empty_parameter
from inference.moe import MoE
from inference.numerics import Numerics, full_precision
from inference.vision import Aligner, VisionTower

Observer = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Output:
    logits: Tensor  # [B, S, V] float32 ([B, 1, V] with last_only: the last real token of every row)
    main_hidden: Tensor | None  # [B, S, targets * D], draft conditioning; None without draft stages
    pending: Pending  # what the call adds to the cache; already committed unless commit=False


class Layer(nn.Module):
    """One backbone layer or draft stage."""

    def __init__(self, config: TextConfig, plan: LayerPlan) -> None:
        super().__init__()
        self.config, self.plan = config, plan
        copies, width, eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
        self.engram = Engram(config, plan) if plan.engram_slot is not None else None
        self.attn_norm = RMSNorm(width, eps)
        self.attn = Attention(config, plan)
        self.ffn_norm = RMSNorm(width, eps)
        self.ffn = MoE(config, plan)
        for kind in ("attn", "ffn"):
            self.register_parameter(f"hc_{kind}_fn", empty_parameter(copies * (2 + copies), copies * width,
                                                                     dtype=torch.float32))
            self.register_parameter(f"hc_{kind}_base", empty_parameter(copies * (2 + copies), dtype=torch.float32))
            self.register_parameter(f"hc_{kind}_scale", empty_parameter(3, dtype=torch.float32))
        if plan.is_draft:
            dspark.add_stage_parts(self, config, plan)

    def sublayers(self, streams: Tensor, pre: Tensor, attention: Callable[[Tensor], Tensor], context: Context,
                  ) -> tuple[Tensor, Tensor]:
        """Attention and FFN with their hyper-connections.

        streams [B, S, C, D], pre [B, S, C] from the sub-layer before -> new streams, pre for the sub-layer after.
        """
        name = self.plan.name
        mixes = self._recorded_mixes("attn", streams, pre, context)
        y = attention(self.attn_norm(collapse(streams, pre)))
        streams = expand(streams, y, mixes)
        context.record(f"{name}.mid", streams)
        pre = mixes.pre_next
        mixes = self._recorded_mixes("ffn", streams, pre, context)
        y = self._feed_forward(self.ffn_norm(collapse(streams, pre)), context)
        streams = expand(streams, y, mixes)
        context.record(f"{name}.out", streams)
        return streams, mixes.pre_next

    def _feed_forward(self, x: Tensor, context: Context) -> Tensor:
        """x [B, S, D] -> [B, S, D]. Padding goes through no expert: one that only padding chose would be read for nothing."""
        if not context.is_padded:
            return self.ffn(x, context)
        real = context.real_tokens
        y = self.ffn(x.flatten(0, 1)[real].unsqueeze(0), context.without_padding())
        return torch.zeros_like(x).flatten(0, 1).index_put((real,), y.squeeze(0)).view_as(x)

    def mixes(self, kind: str, streams: Tensor) -> Mixes:
        """Coefficients of the "attn" or "ffn" sub-layer from the streams that enter it, [B, S, C, D]."""
        fn, base, scale = (getattr(self, f"hc_{kind}_{part}") for part in ("fn", "base", "scale"))
        return compute_mixes(streams, fn, base, scale, self.config)

    def _recorded_mixes(self, kind: str, streams: Tensor, pre: Tensor, context: Context) -> Mixes:
        mixes = self.mixes(kind, streams)
        for point, value in (("pre_used", pre), ("pre_next", mixes.pre_next), ("post", mixes.post),
                             ("comb", mixes.comb)):
            context.record(f"{self.plan.name}.hc_{kind}.{point}", value)
        return mixes


class Model(nn.Module):
    """The text backbone, the draft stages and the vision tower of one checkpoint.

    Built empty; `checkpoint.load` assigns the weights. folded_ids [V] int64 is needed when the configuration has Engram layers.
    """

    def __init__(self, config: Config, numerics: Numerics, folded_ids: Tensor | None = None) -> None:
        super().__init__()
        text = config.text_config
        self.config, self.numerics = config, numerics
        self.plan = layer_plan(text)
        self.as_published_index_keys = False
        self.memory_budget = DEFAULT_MEMORY_BUDGET
        self.engram_hash = None
        if text.engram_layer_ids:
            if folded_ids is None:
                raise ValueError("Building the model: the configuration has Engram layers, which need the folded ids of the "
                                 "tokenizer. Pass folded_ids, or load with a tokenizer beside the checkpoint.")
            self.engram_hash = NgramHash(text, folded_ids)
        self.embed = Embedding(text.vocab_size, text.hidden_size)
        backbone = self.plan[:text.num_hidden_layers]
        self.layers = nn.ModuleList(Layer(text, plan) for plan in backbone)
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.head = Linear(text.hidden_size, text.vocab_size, float32=True)
        self.mtp = nn.ModuleList(Layer(text, plan) for plan in self.plan[text.num_hidden_layers:])
        if config.vision_config is not None:
            self.vision = VisionTower(config.vision_config)
            self.aligner = Aligner(config.vision_config, text.hidden_size)
            for name in ("image_start", "image_end", "image_newline"):
                self.register_parameter(name, empty_parameter(text.hidden_size))

    def new_cache(self, batch_size: int = 1, kind: str | None = None) -> Cache:
        """Memory for `batch_size` sequences, on the device of the model, at position 0.

        kind: "packed" (codes and scales) or "bf16" (plain values), with the same results bit for bit; by default packed
        where the rows are fake-quantized. Raises ValueError for "packed" without fake quantization.
        """
        if kind == "packed" and not self.numerics.fake_quant:
            raise ValueError("Making a cache: kind 'packed' stores codes and scales, but this model was loaded with "
                             "fake_quant=False, so its rows have none. Use kind='bf16', or load with fake_quant=True.")
        kind = kind or ("packed" if self.numerics.fake_quant else "bf16")
        return Cache(self.config, self.plan, batch_size, self.numerics.dtype, self.norm.weight.device, kind)

    @full_precision()
    def forward(self, input_ids: Tensor, cache: Cache, *, token_types: Tensor | None = None,
                images: Sequence[Sequence[ImageInput]] | None = None, image_rows: Sequence[Tensor | None] | None = None,
                lengths: Sequence[int] | None = None, first_positions: Mapping[int, Sequence[int]] | None = None,
                last_only: bool = False, text_only: bool = False, commit: bool = True,
                observe: Observer | None = None) -> Output:
        """Run up to S more tokens of every sequence and advance the cache.

        input_ids [B, S] int64; B is the cache's batch size. Every row starts at its own position; S is any number from 1 on.
        lengths: per row how many of its S ids are tokens (all by default, 0 allowed); the rest is padding on the right,
        which changes nothing: outputs there are meaningless.
        token_types [B, S] int64 and images: see image_processor.py; needed when the call has image spans. A call that has
        only part of a span gets image_rows instead: per row the embeddings [n, D] of its n span positions in this call
        (slices of `self.image_rows`), or None.
        first_positions: layer id -> per row the first position that this layer and those after it run (the prefill skip
        of config.prefill_rows); from the border layer on. Logits are those of the last layer's tokens.
        last_only: logits of each row's last token alone. text_only: the ids are what the model has written, so even the
        image id, should it write one, is a text token (official: images can only be in the prompt).
        commit=False leaves the cache for `cache.commit(out.pending, counts)`.
        Raises ValueError for ids outside the vocabulary, a wrong batch, or more tokens than max_position_embeddings.
        """
        counts = self._check(input_ids, cache, lengths)
        batch, tokens = input_ids.shape
        text = self.config.text_config
        starts = cache.lengths_on_device()
        context = Context(
            self.numerics, positions=starts[:, None] + torch.arange(tokens, device=input_ids.device),
            starts=cache.lengths, counts=counts, observe=observe,
            as_published_index_keys=self.as_published_index_keys, memory_budget=self.memory_budget)
        if context.is_padded:
            input_ids = input_ids.masked_fill(~context.valid, 0)
            token_types = None if token_types is None else token_types.masked_fill(~context.valid, TEXT)
        if text_only and any(given is not None for given in (token_types, images, image_rows)):
            raise ValueError("Running the model: text_only says that there are no images, but some were given.")
        image_mask = None if text_only else self._image_mask(input_ids, counts, token_types, images, image_rows)
        context = dataclasses.replace(context, image_mask=image_mask)
        skip = self._check_skip(first_positions, batch)
        context.record("ids", input_ids)
        if image_mask is not None:
            context.record("image_mask", image_mask)

        embedded = self._embed(input_ids, images, image_rows, context)
        context.record("embed", embedded)
        folded, hash_ids = None, {}
        if self.engram_hash is not None:
            folded = self.engram_hash.fold(input_ids, image_mask)
            history = cache.engram_look_back()
            hash_ids = {plan.layer_id: self.engram_hash.hash_ids(folded, history, plan.engram_slot)
                        for plan in self.plan if plan.engram_slot is not None}

        streams = embedded.unsqueeze(2).expand(-1, -1, text.hc_mult, -1)
        streams, pre, last, target, pending = self._run_layers(streams, hash_ids, context, cache, skip)
        context.record("head.pre", pre)
        if last_only:
            final = last.later([end - 1 for end in last.ends])
            streams, pre = final.pick(streams, last), final.pick(pre, last)
        hidden = collapse(streams, pre)
        context.record("head.collapsed", hidden)
        hidden = self.norm(hidden)
        context.record("norm", hidden)
        logits = self.head(hidden, self.numerics)
        context.record("logits", logits)
        main_hidden, windows = None, {**pending.windows}
        if target is not None:
            main_hidden, rows_of = target
            windows.update(dspark.context_rows(self.mtp, main_hidden, rows_of))
        pending = dataclasses.replace(pending, windows=windows, folded_ids=folded)
        if commit:
            cache.commit(pending)
        return Output(logits, main_hidden, pending)

    def _run_layers(self, streams: Tensor, hash_ids: Mapping[int, Tensor], context: Context, cache: Cache,
                    skip: Mapping[int, Sequence[int]],
                    ) -> tuple[Tensor, Tensor, Context, tuple[Tensor, Context] | None, Pending]:
        """All backbone layers. streams [B, S, C, D]; hash_ids by Engram layer; skip: first positions by layer.

        Returns what leaves the last layer (streams, pre vector, their context), the draft conditioning with its context, and
        what is to be committed. Contexts differ from the call's only where layers skipped tokens.
        """
        whole, windows, tails, skipped, targets = context, {}, {}, {}, []
        pre, shared = first_pre(streams), Shared(published=cache.published)
        held = self._held_windows(context, cache)

        def keep(groups: Groups | None, source: int) -> None:
            if groups is not None and groups.tail is not None:
                tails[source] = groups.tail

        for layer in self.layers:
            layer_id = layer.plan.layer_id
            if layer_id in skip:
                if layer.attn.compressor is not None:
                    # The border: every token gives its compressed row and index key, only the later ones run the layer.
                    groups, shared = layer.attn.compress(layer.attn_norm(collapse(streams, pre)), context, cache, shared)
                    keep(groups, layer_id)
                later = context.later(skip[layer_id])
                streams, pre, shared = later.pick(streams, context), later.pick(pre, context), shared.pick(context, later)
                context = later
                skipped[layer_id] = tuple(start - first for start, first in zip(context.starts, whole.starts))
            window_starts = held.get(layer_id)
            if any(skipped.get(layer_id, ())):
                # A row of the batch that skipped tokens has window rows from its first token in this layer on, no older ones.
                window_starts = torch.tensor([
                    start if count else kept for count, start, kept in
                    zip(skipped[layer_id], context.starts, cache.window_starts(layer_id))], device=streams.device)
            if window_starts is not context.window_starts:
                context = dataclasses.replace(context, window_starts=window_starts)
            if layer.plan.is_draft_target and self.mtp:
                targets.append((dspark.conditioning(streams), context))
            if not any(context.counts):
                continue
            context.record(f"{layer.plan.name}.in", streams)
            if layer.engram is not None:
                streams = layer.engram(streams, context.pick(hash_ids[layer_id], whole), context)

            def attention(x: Tensor) -> Tensor:
                nonlocal shared
                y, shared, windows[layer_id], groups = layer.attn(x, context, cache, shared)
                keep(groups, layer_id)
                return y

            streams, pre = layer.sublayers(streams, pre, attention, context)

        target = None
        if targets:
            last = targets[-1][1]  # of all targets the one that skipped most
            target = torch.cat([last.pick(part, own) for part, own in targets], dim=-1), last
            if skip:
                gone = tuple(start - first for start, first in zip(last.starts, whole.starts))
                skipped.update({stage.plan.layer_id: gone for stage in self.mtp})
        return streams, pre, context, target, Pending(whole.starts, whole.counts, windows, tails, None, shared.published,
                                                      skipped)

    def _held_windows(self, context: Context, cache: Cache) -> Mapping[int, Tensor]:
        """Layer id -> [B] int64, the first position that has a window row, where that cuts a window of this call."""
        window = self.config.text_config.sliding_window
        starts = {layer.plan.layer_id: cache.window_starts(layer.plan.layer_id) for layer in self.layers}
        cut = {i: held for i, held in starts.items()
               if any(first > start - window + 1 for first, start in zip(held, context.starts) if first)}
        table = torch.tensor(list(cut.values()), device=context.positions.device) if cut else ()
        return dict(zip(cut, table))

    @full_precision()
    def draft(self, anchor: Tensor, cache: Cache, choose: dspark.Choose | None = None,
              observe: Observer | None = None) -> dspark.Draft:
        """Propose dspark_block_size tokens after `anchor` [B] int64, the token that the next call would start with.

        choose: logits [B, V] -> ids [B]; argmax by default. The cache is not changed.
        """
        if not self.mtp:
            raise ValueError("Drafting: this checkpoint has no draft stages (num_nextn_predict_layers is 0).")
        if anchor.shape != (cache.batch_size,):
            raise ValueError(f"Drafting: wanted one anchor for each of the {cache.batch_size} sequences, got "
                             f"{list(anchor.shape)}.")
        self._check_cache(cache)
        self._check_ids(anchor)
        context = Context(self.numerics, positions=anchor.unsqueeze(1), starts=cache.lengths, counts=(1,) * len(anchor),
                          observe=observe, memory_budget=self.memory_budget)
        return dspark.draft(self.mtp, self.embed, self.head, anchor, cache, context, self.config.text_config,
                            choose or (lambda logits: logits.argmax(-1)))

    def _check(self, input_ids: Tensor, cache: Cache, lengths: Sequence[int] | None) -> tuple[int, ...]:
        """Tokens per row. Raises ValueError for a call that cannot run."""
        text = self.config.text_config
        if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or input_ids.shape[1] == 0:
            raise ValueError(f"Running the model: input_ids must be [B, S] int64 with S >= 1, got "
                             f"{list(input_ids.shape)} {input_ids.dtype}.")
        self._check_cache(cache)
        batch, tokens = input_ids.shape
        if batch != cache.batch_size:
            raise ValueError(f"Running the model: {batch} rows of ids for a cache of {cache.batch_size} "
                             "sequences. Make the cache with model.new_cache(batch_size).")
        counts = (tokens,) * batch if lengths is None else tuple(int(length) for length in lengths)
        if len(counts) != batch or not all(0 <= count <= tokens for count in counts) or not any(counts):
            raise ValueError(f"Running the model: lengths must be {batch} numbers from 0 to {tokens}, not all 0, got "
                             f"{list(counts)}.")
        real = input_ids if lengths is None else torch.cat([row[:count] for row, count in zip(input_ids, counts)])
        self._check_ids(real)
        end = max(length + count for length, count in zip(cache.lengths, counts))
        if end > text.max_position_embeddings:
            raise ValueError(f"Running the model: {end} tokens, but max_position_embeddings is "
                             f"{text.max_position_embeddings}. Shorten the prompt or the completion.")
        return counts

    def _check_ids(self, ids: Tensor) -> None:
        low, high, vocabulary = int(ids.min()), int(ids.max()), self.config.text_config.vocab_size
        if low < 0 or high >= vocabulary:
            raise ValueError(f"Running the model: token id {low if low < 0 else high} is outside the vocabulary "
                             f"0..{vocabulary - 1}. Use the tokenizer of this checkpoint.")

    def _check_cache(self, cache: Cache) -> None:
        if cache.plan != self.plan or cache.dtype != self.numerics.dtype:
            raise ValueError("Running the model: the cache was made for another configuration or other numerics. Make it with "
                             "new_cache of this model.")

    def _check_skip(self, first_positions: Mapping[int, Sequence[int]] | None, batch: int) -> Mapping[int, Sequence[int]]:
        """first_positions with every layer from the first one on. Raises ValueError where a layer would lack its input."""
        if not first_positions:
            return {}
        border = self.config.text_config.kv_source_layer_ids[-1:]
        ids = sorted(first_positions)
        if not border or ids != list(range(border[0], len(self.layers))):
            raise ValueError(f"Running the model: first_positions must name the layers from the last KV source "
                             f"({border[0] if border else 'there is none'}) to the end, got {ids}. Use config.prefill_rows.")
        previous = [0] * batch
        for layer_id in ids:
            firsts = list(first_positions[layer_id])
            if len(firsts) != batch or any(first < before for first, before in zip(firsts, previous)):
                raise ValueError(f"Running the model: first_positions of layer {layer_id} must be {batch} positions, none "
                                 f"before that of the layer above it, got {firsts}.")
            previous = firsts
        return first_positions

    def _image_mask(self, input_ids: Tensor, counts: Sequence[int], token_types: Tensor | None,
                    images: Sequence[Sequence[ImageInput]] | None, image_rows: Sequence[Tensor | None] | None,
                    ) -> Tensor | None:
        """[B, S] bool of span positions, or None for text. Raises ValueError when ids, types and images disagree."""
        if self.config.vision_config is None:
            if token_types is not None or images is not None or image_rows is not None:
                raise ValueError("Running the model: images were given, but the configuration has no vision_config.")
            return None
        batch = input_ids.shape[0]
        if images is not None and image_rows is not None:
            raise ValueError("Running the model: give images or image_rows, not both.")
        for name, given in (("images", images), ("image_rows", image_rows)):
            if given is not None and len(given) != batch:
                raise ValueError(f"Running the model: {name} for {len(given)} sequences, ids for {batch}. Give one entry "
                                 "per sequence, empty where there is none.")
        if token_types is not None and token_types.shape != input_ids.shape:
            raise ValueError(f"Running the model: token_types {list(token_types.shape)} for input_ids "
                             f"{list(input_ids.shape)}; they must have one shape.")
        for row, count in enumerate(counts):
            ids = input_ids[row, :count].tolist()
            types = None if token_types is None else token_types[row, :count].tolist()
            if image_rows is None:
                validate_token_types(ids, types, [] if images is None else images[row], self.config.image_token_id)
                continue
            rows = 0 if image_rows[row] is None else len(image_rows[row])
            spans = [False] * count if types is None else [kind != TEXT for kind in types]
            if sum(spans) != rows or spans != [token == self.config.image_token_id for token in ids]:
                raise ValueError(f"Running the model: sequence {row} has {sum(spans)} positions of image types, "
                                 f"{ids.count(self.config.image_token_id)} image ids and {rows} image_rows; the three must "
                                 "agree. Cut ids, types and rows at the same places.")
        return None if token_types is None or bool((token_types == TEXT).all()) else token_types != TEXT

    def _embed(self, input_ids: Tensor, images: Sequence[Sequence[ImageInput]] | None,
               image_rows: Sequence[Tensor | None] | None, context: Context) -> Tensor:
        """[B, S, D]: table rows, with the rows of every image span in place of its placeholders."""
        embedded = self.embed(input_ids, self.numerics)
        if context.image_mask is None:
            return embedded
        if image_rows is None:
            spans = [self.image_rows(image, context.observe) for row in images for image in row]
        else:
            spans = [rows.to(embedded.dtype) for rows in image_rows if rows is not None]
        return embedded.masked_scatter(context.image_mask.unsqueeze(-1), torch.cat(spans))

    def image_rows(self, image: ImageInput, observe: Observer | None = None) -> Tensor:
        """Embeddings of one image span, delimiters included: [llm_rows * (llm_cols + 1) + 2, D]."""
        patches = image.patches.to(self.norm.weight.device)
        features = self.vision(patches, image.patch_rows, image.patch_cols, self.numerics, observe)
        return self.span_rows(self.aligner(features, image.patch_rows, image.patch_cols, self.numerics, observe), image)

    def span_rows(self, cells: Tensor, image: ImageInput) -> Tensor:
        """Aligner output [llm_rows * llm_cols, D] with the delimiters of the span around and between its rows."""
        delimiters = (part.to(cells.dtype) for part in (self.image_start, self.image_newline, self.image_end))
        return span_embeddings(cells, image.llm_rows, image.llm_cols, *delimiters)
