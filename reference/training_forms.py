"""What training runs in another form than inference, with the same values: changed from outside, in one place.

    with training_forms(model, compiled=False): ...

Forms
    sparse attention   `masked_attn`: all rows with a mask, through torch's fused attention. Differentiating a gather needs
                       a scatter, which is slow; contexts here are short, so looking at all rows is cheap.
    experts            `grouped_routed`: tokens sorted by expert and three grouped products, with gradients
    pictures           `picture_rows`: all pictures of one size in one call, by `torch.vmap` over the vision tower
    tables             `table_rows`: rows of embeddings, with a gradient that needs no sorting
    checks of input    left out: they read every id back from the device
    many small ops     with compiled=True, hyper-connections, norms and fake quantization go through torch.compile
Test
    tests/test_train.py: every form against the plain one
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import inference.attention
import inference.dspark
import inference.layers
import inference.model
import inference.quant
from inference.compiled import per_token
from inference.context import Context
from inference.image_processor import TEXT, span_embeddings
from inference.model import Model
from inference.moe import MoE
from inference.quant import fake_quant_fp8

_ALIGN = 8  # the fused operation wants widths and numbers of rows that are multiples of 8


def masked_attn(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float, memory_budget: int = 0) -> Tensor:
    """As `kernel.sparse_attn`: q [B, S, H, K], kv [B, N, K], sink [H], indices [B, S, k] -> [B, S, H, K].

    The sink is one more row: its key meets an extra channel of q that holds sink / scale, its value is zero.
    An index that occurs twice counts once. memory_budget is not used.
    """
    batch, queries, heads, width = q.shape
    rows = kv.shape[1]
    padded = -(-(rows + 1) // _ALIGN) * _ALIGN
    seen = torch.zeros(batch, queries, padded + 1, dtype=torch.bool, device=q.device)
    seen = seen.scatter(-1, torch.where(indices < 0, padded, indices), True)[..., :padded]
    seen[..., rows] = True  # the sink, seen by all
    bias = torch.where(seen, 0.0, float("-inf")).to(q.dtype).unsqueeze(1).expand(-1, heads, -1, -1)
    channel = (sink.to(q.dtype) / scale).view(1, 1, heads, 1).expand(batch, queries, -1, 1)
    wide_q = F.pad(torch.cat((q, channel), dim=-1), (0, _ALIGN - 1)).transpose(1, 2)
    keys = F.pad(kv, (0, _ALIGN, 0, padded - rows))
    at_sink = torch.zeros(padded, width + _ALIGN, dtype=kv.dtype, device=kv.device)
    at_sink[rows, width] = 1.0
    keys = (keys + at_sink).unsqueeze(1).expand(-1, heads, -1, -1)
    values = F.pad(kv, (0, 0, 0, padded - rows)).unsqueeze(1).expand(-1, heads, -1, -1)
    return F.scaled_dot_product_attention(wide_q, keys, values, attn_mask=bias, scale=scale).transpose(1, 2)


def grouped_routed(moe: MoE, tokens: Tensor, ids: Tensor, weights: Tensor, context: Context) -> Tensor:
    """As `MoE.routed`: tokens [n, D], ids and weights [n, A] -> float32 sum of the routed experts [n, D]."""
    numerics, count, active = context.numerics, len(moe.experts), ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = (flat.unsqueeze(1) == torch.arange(count, device=flat.device)).sum(0).cumsum(0).to(torch.int32)
    w1, w2, w3 = (torch.stack([getattr(expert, name).weight for expert in moe.experts]).to(numerics.dtype)
                  for name in ("w1", "w2", "w3"))
    x = fake_quant_fp8(tokens) if numerics.quantize_inputs else tokens
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    sorted_x = _Permute.apply(x.unsqueeze(1).expand(-1, active, -1).flatten(0, 1), order, back)
    both = _grouped_product(sorted_x, torch.cat((w1, w3), dim=1), ends).to(torch.float32)
    gate, up = both.chunk(2, dim=-1)
    limit = moe.experts[0].limit
    weight = _Permute.apply(weights.flatten(), order, back).unsqueeze(-1)
    hidden = (F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit) * weight).to(tokens.dtype)
    y = _grouped_product(fake_quant_fp8(hidden) if numerics.quantize_inputs else hidden, w2, ends)
    return _Permute.apply(y, back, order).unflatten(0, (-1, active)).sum(1, dtype=torch.float32)


class _Permute(torch.autograd.Function):
    """x[order], whose gradient is gathered with the inverse order; torch would sort and add up, as if indices could repeat."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [n, in] sorted by group, weights [E, out, in], ends [E] int32: where each group ends -> [n, out]."""
    if x.is_cuda:
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
    parts = x.tensor_split(ends[:-1].to(torch.int64).cpu())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights)])


def picture_rows(model: Model, patches: Tensor, patch_rows: int, patch_cols: int) -> Tensor:
    """Span rows of pictures of one size, delimiters included: patches [n, P, 3, p, p] -> [n, span, D].

    As `model.image_rows`, for all of them at once.
    """
    factor = model.aligner.factor
    rows, cols = -(-patch_rows // factor), -(-patch_cols // factor)

    def one(own: Tensor) -> Tensor:
        features = model.vision(own, patch_rows, patch_cols, model.numerics)
        cells = model.aligner(features, patch_rows, patch_cols, model.numerics)
        delimiters = (part.to(cells.dtype) for part in (model.image_start, model.image_newline, model.image_end))
        return span_embeddings(cells, rows, cols, *delimiters)

    with sdpa_kernel(SDPBackend.MATH):  # the fused forms have no rule for vmap on every device
        return torch.vmap(one)(patches)


class _TakeRows(torch.autograd.Function):
    """table[index], whose gradient is added up without sorting the indices first."""

    @staticmethod
    def forward(ctx, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.table = table.shape, table.dtype
        return table.index_select(0, index.flatten()).unflatten(0, index.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        index, (shape, dtype) = ctx.saved_tensors[0], ctx.table
        total = torch.zeros(shape, dtype=torch.float32, device=gradient.device)
        return total.index_add_(0, index.flatten(), gradient.to(torch.float32).view(-1, shape[1])).to(dtype), None


def table_rows(weight: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """As `layers.weight_rows`."""
    return _TakeRows.apply(weight, index).to(dtype)


def _embed(model: Model, input_ids: Tensor, images, image_rows, context: Context) -> Tensor:
    """As `model._embed`, for `image_rows` of one entry: all rows of the batch, in the order of their positions.

    There may be more rows than positions. Unlike masked_scatter, nothing here asks the device how many there are.
    """
    embedded = model.embed(input_ids, model.numerics)
    if image_rows is None:
        return embedded
    rows = image_rows[0].to(embedded.dtype)
    mask = context.image_mask
    number = (mask.flatten().cumsum(0) - 1).clamp(0, len(rows) - 1).view(mask.shape)
    return torch.where(mask.unsqueeze(-1), _TakeRows.apply(rows, number), embedded)


def _image_mask(input_ids, counts, token_types, images, image_rows) -> Tensor | None:
    return None if token_types is None else token_types != TEXT


@contextlib.contextmanager
def training_forms(model: Model, compiled: bool = False) -> Iterator[None]:
    """Within the context `model` runs in the forms above."""
    with contextlib.ExitStack() as stack:
        def replace(owner: object, name: str, form: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, form))

        replace(inference.attention, "sparse_attn", masked_attn)
        replace(MoE, "routed", grouped_routed)
        replace(model, "_image_mask", _image_mask)
        replace(model, "_check_ids", lambda ids: None)
        replace(model, "_embed", functools.partial(_embed, model))
        replace(inference.layers, "weight_rows", table_rows)
        replace(inference.dspark, "weight_rows", table_rows)
        if compiled:
            one_per_shape = functools.partial(torch.compile, dynamic=False)
            for owner, name in ((inference.model, "compute_mixes"), (inference.model, "collapse"),
                                (inference.model, "expand"), (inference.layers.RMSNorm, "forward"),
                                (inference.quant, "_round_fp8"), (inference.quant, "_round_fp4_e8m0"),
                                (inference.quant, "_round_fp4_e4m3")):
                replace(owner, name, per_token(getattr(owner, name), one_per_shape, dynamic=False))
            replace(inference.dspark, "collapse", inference.model.collapse)
            replace(torch._dynamo.config, "recompile_limit", 64)  # one form for every width
        yield
