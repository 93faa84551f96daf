"""Sparse attention: every query attends to its own list of rows; one row is key and value of all heads.

What it computes, for query row i and head h
    logit[t] = scale * q . kv[index[t]]          index -1 contributes nothing
    out      = sum_t exp(logit[t]) kv[index[t]] / (sum_t exp(logit[t]) + exp(sink[h]))
    A row without any valid index gives exact zeros. An index that occurs twice counts twice.
Order of operations (matters for bits only)
    official: indices in blocks of 64; the running maximum starts at -1e30; natural exponential; with BF16 inputs the
    probabilities are rounded to BF16 relative to the running maximum before the value product, while the denominator
    sums them unrounded; products accumulate in float32; the sink joins the denominator once, at the end.
    The torch form does exactly that. The TileLang forms keep the blocks of 64 and the roundings, and differ in the
    exponential (base 2, log2(e) folded into the scale), the start of the maximum, how closely it follows, and the order
    of sums inside a product: relative L2 difference about 3e-3 with BF16, the size of the rounding itself.
Two forms
    torch      any device, any dtype; the reference
    tilelang   NVIDIA Hopper, BF16: `kernel_fast.py` for rows of 512 channels, else `simple_kernel` below, the one to
               read first
    `sparse_attn(..., backend=)` or the environment variable KERNEL names one; the default picks by device.
Mirrors
    official: `sparse_attn` of the official kernel file.
Tests
    tests/test_kernel.py, tests/test_golden_ops.py; TileLang: tests/test_kernel_tilelang.py

No `from __future__ import annotations` here: TileLang reads the annotations of a kernel as values.
"""

import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor

from inference.context import DEFAULT_MEMORY_BUDGET, row_slices
from inference.kernel_fast import LOG2_E, WIDTH as FAST_WIDTH, sparse_attn_fast

BLOCK = 64  # official: indices per step of the online softmax
START_MAX = -1e30  # official: finite, so that a block of -1 entries gives exp(-inf) = 0 and no NaN
# ours: `simple_kernel` bounds its indices itself.
PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True}
BACKENDS = ("auto", "torch", "tilelang", "tilelang-simple")


def sparse_attn(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float,
                memory_budget: int = DEFAULT_MEMORY_BUDGET, backend: str | None = None) -> Tensor:
    """q [B, S, H, K]; kv [B, N, K], same dtype; sink [H] float32; indices [B, S, k] int64 (or int32), -1 = none.

    Returns [B, S, H, K], dtype of q; zeros for a row without any index. The torch form processes query rows in slices of at most `memory_budget` bytes.

    backend: "torch", "tilelang", "tilelang-simple" or "auto". None reads the environment variable KERNEL (same values,
    default auto), once per call. auto = tilelang on a Hopper GPU with BF16 and TileLang installed, else torch. Raises
    ValueError for an unknown name, and for a forced TileLang form that cannot run on these tensors.
    """
    assert (q.shape[0] == kv.shape[0] == indices.shape[0] and q.shape[-1] == kv.shape[-1]
            and q.shape[1] == indices.shape[1]), (
        f"q {tuple(q.shape)}, kv {tuple(kv.shape)}, indices {tuple(indices.shape)}")
    backend = backend or os.environ.get("KERNEL") or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"Choosing the sparse attention kernel: wanted one of {', '.join(BACKENDS)}, got {backend!r}. "
                         "Correct the argument backend= or the environment variable KERNEL.")
    if 0 in (q.numel(), kv.numel(), indices.numel()):
        return torch.zeros_like(q)  # nothing to launch, or nothing to point at
    backend = _choose(q, kv, sink, indices, backend)
    if backend == "tilelang" and q.shape[-1] == FAST_WIDTH:
        return sparse_attn_fast(q, kv, sink, indices, scale)
    if backend != "torch":
        return _sparse_attn_simple(q, kv, sink, indices, scale)
    batch, _, heads, width = q.shape
    row_bytes = 4 * batch * (2 * BLOCK * width + heads * (BLOCK * 3 + width * 2))
    parts = [_sparse_attn_rows(q[:, rows], kv, sink, indices[:, rows], scale)
             for rows in row_slices(q.shape[1], row_bytes, memory_budget)]
    return torch.cat(parts, dim=1)


def _sparse_attn_rows(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float) -> Tensor:
    batch, rows, heads, width = q.shape
    wide_q = q.to(torch.float32)
    maximum = torch.full((batch, rows, heads, 1), START_MAX, dtype=torch.float32, device=q.device)
    denominator = torch.zeros_like(maximum)
    out = torch.zeros((batch, rows, heads, width), dtype=torch.float32, device=q.device)
    for block in indices.split(BLOCK, dim=-1):
        present = block >= 0  # [B, S, t]
        flat = block.clamp_min(0).flatten(1).unsqueeze(-1).expand(-1, -1, width)
        gathered = kv.gather(1, flat).unflatten(1, block.shape[1:]).to(torch.float32)  # [B, S, t, K]
        # An absent entry reads row 0; zero it, so that a NaN there cannot leak through 0 * NaN.
        gathered = gathered.masked_fill(~present.unsqueeze(-1), 0.0)
        logits = torch.einsum("bshk,bstk->bsht", wide_q, gathered) * scale
        logits = logits.masked_fill(~present.unsqueeze(2), float("-inf"))
        new_maximum = torch.maximum(maximum, logits.amax(-1, keepdim=True))
        rescale = torch.exp(maximum - new_maximum)
        probabilities = torch.exp(logits - new_maximum)
        denominator = denominator * rescale + probabilities.sum(-1, keepdim=True)
        values = probabilities.to(q.dtype).to(torch.float32)  # official: rounded to BF16 for the value product
        out = out * rescale + torch.einsum("bsht,bstk->bshk", values, gathered)
        maximum = new_maximum
    # A sink far above all logits takes their place as the maximum: its exponential would overflow, and give NaN gradients.
    sink = sink.to(torch.float32).clamp_max(torch.finfo(torch.float32).max).view(1, 1, heads, 1)
    top = torch.where(sink - maximum > 80.0, sink, maximum)  # ours: exp(80) is finite in float32
    rescale = torch.exp(maximum - top)
    denominator = denominator * rescale + torch.exp(sink - top)
    # Only a row without any valid index and a sink of -inf gets here with 0; official code gives NaN, ours zeros.
    return (out * rescale / denominator.masked_fill(denominator == 0, 1.0)).to(q.dtype)


# --- which form -------------------------------------------------------------------------------------------------


def _choose(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, backend: str) -> str:
    """A backend name other than "auto", checked against these tensors."""
    if backend == "torch":
        return backend
    obstacle = _obstacle(q, kv, sink, indices)
    if obstacle is None and not tilelang_installed():
        if backend == "auto":
            _warn_once()
        obstacle = "TileLang is not installed"
    if obstacle is None:
        return "tilelang" if backend == "auto" else backend
    if backend == "auto":
        return "torch"
    raise ValueError(f"Running the sparse attention kernel {backend!r}: wanted a CUDA device of compute capability 9.0 "
                     f"(Hopper), BF16 and the package tilelang, but {obstacle}. Use backend='auto', or KERNEL=torch.")


def _obstacle(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor) -> str | None:
    """Why the TileLang forms cannot take these tensors, or None."""
    if not q.is_cuda:
        return f"the tensors are on {q.device}"
    if torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad or sink.requires_grad):
        return "gradients are needed, which only the torch form has"
    if q.dtype != torch.bfloat16 or kv.dtype != torch.bfloat16:
        return f"q is {q.dtype} and kv {kv.dtype}"
    if indices.dtype not in (torch.int32, torch.int64):
        return f"the indices are {indices.dtype}"
    if q.shape[-1] % 32 or q.shape[-1] > FAST_WIDTH:
        return f"rows have {q.shape[-1]} channels, no multiple of 32 up to {FAST_WIDTH}"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"{torch.cuda.get_device_name(q.device)} has another one"
    return None


@functools.cache
def tilelang_installed() -> bool:
    """Whether `import tilelang` can work; looked up once."""
    return importlib.util.find_spec("tilelang") is not None


@functools.cache
def _warn_once() -> None:
    warnings.warn("TileLang is not installed: sparse attention on this GPU runs in its torch form, many times slower. "
                  "Install the package tilelang, or set KERNEL=torch to accept that.", RuntimeWarning, stacklevel=4)


# --- TileLang, the readable form ----------------------------------------------------------------------------------


def _sparse_attn_simple(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float) -> Tensor:
    """As `sparse_attn`, BF16, through `simple_kernel`."""
    batch, queries, heads, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kernel = _compiled_simple(width, str(indices.dtype).removeprefix("torch."))
    with torch.cuda.device(q.device):
        kernel(q.detach().contiguous().view(-1, heads, width), kv.detach().contiguous().view(-1, width),
               sink.detach().to(torch.float32).contiguous(), indices.contiguous().view(batch * queries, -1),
               out.view(-1, heads, width), scale * LOG2_E, queries, kv.shape[1])
    return out


@functools.cache
def _compiled_simple(width: int, index_type: str):
    import tilelang

    return tilelang.compile(simple_kernel(width, index_type), target="cuda", pass_configs=PASS_CONFIGS)


def simple_kernel(width: int, index_type: str):
    """The TileLang program: one thread block per query and 64 heads (missing heads are zero). Only the width is static.

    A tile of 64 selected rows at a time: gather, logits, online softmax, values. Fragments are spread over the
    registers of 256 threads; each half of them has 32 of the 64 logit columns and half of the channels.
    """
    import tilelang.language as T

    head_tile = 64
    queries, heads, rows, count = T.dynamic("queries, heads, rows, count")

    @T.prim_func
    def sparse_attention_simple(
        q: T.Tensor((queries, heads, width), "bfloat16"),
        kv: T.Tensor((rows, width), "bfloat16"),  # all batch rows one after the other
        sink: T.Tensor((heads,), "float32"),
        indices: T.Tensor((queries, count), index_type),
        out: T.Tensor((queries, heads, width), "bfloat16"),
        scale: T.float32,  # times log2(e)
        queries_per_batch: T.int32,
        rows_per_batch: T.int32,
    ):
        with T.Kernel(queries, T.ceildiv(heads, head_tile), threads=256) as (query, head_block):
            q_tile = T.alloc_shared((head_tile, width), "bfloat16")
            kv_tile = T.alloc_shared((BLOCK, width), "bfloat16")
            index = T.alloc_shared((BLOCK,), "int32")
            probabilities = T.alloc_shared((head_tile, BLOCK), "bfloat16")
            logits = T.alloc_fragment((head_tile, BLOCK), "float32")
            values = T.alloc_fragment((head_tile, width), "float32")
            maximum = T.alloc_fragment((head_tile,), "float32")
            previous = T.alloc_fragment((head_tile,), "float32")
            rescale = T.alloc_fragment((head_tile,), "float32")
            total = T.alloc_fragment((head_tile,), "float32")
            tile_sum = T.alloc_fragment((head_tile,), "float32")
            first_row = T.alloc_var("int64")
            first_row = T.cast(T.truncdiv(query, queries_per_batch), "int64") * rows_per_batch
            head0 = head_block * head_tile

            T.copy(q[query, head0:head0 + head_tile, :], q_tile)
            T.fill(values, 0.0)
            T.fill(total, 0.0)
            T.fill(maximum, -2.0**30)  # ours: finite, as START_MAX
            for tile in T.serial(T.ceildiv(count, BLOCK)):
                for j in T.Parallel(BLOCK):
                    index[j] = -1
                    if tile * BLOCK + j < count:
                        # Unsigned: -1 is large. An index beyond the rows counts as absent too.
                        if T.cast(indices[query, tile * BLOCK + j], "uint32") < T.cast(rows_per_batch, "uint32"):
                            index[j] = T.cast(indices[query, tile * BLOCK + j], "int32")
                for j, c in T.Parallel(BLOCK, width):
                    if index[j] >= 0:
                        kv_tile[j, c] = kv[first_row + index[j], c]
                    else:
                        kv_tile[j, c] = 0
                for i, j in T.Parallel(head_tile, BLOCK):
                    logits[i, j] = T.if_then_else(index[j] >= 0, 0.0, -T.infinity("float32"))
                T.gemm(q_tile, kv_tile, logits, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(maximum, previous)
                T.reduce_max(logits, maximum, dim=1, clear=False)
                for i in T.Parallel(head_tile):
                    rescale[i] = T.exp2((previous[i] - maximum[i]) * scale)
                for i, j in T.Parallel(head_tile, BLOCK):
                    logits[i, j] = T.exp2((logits[i, j] - maximum[i]) * scale)
                T.reduce_sum(logits, tile_sum, dim=1)
                for i in T.Parallel(head_tile):
                    total[i] = total[i] * rescale[i] + tile_sum[i]
                for i, c in T.Parallel(head_tile, width):
                    values[i, c] *= rescale[i]
                T.copy(logits, probabilities)
                T.gemm(probabilities, kv_tile, values, policy=T.GemmWarpPolicy.FullCol)
            for i in T.Parallel(head_tile):
                head_sink = T.if_then_else(head0 + i < heads, sink[head0 + i], 0.0)
                total[i] += T.exp2(head_sink * LOG2_E - maximum[i] * scale)
            for i, c in T.Parallel(head_tile, width):
                values[i, c] = T.if_then_else(total[i] == 0.0, 0.0, values[i, c] / total[i])
            T.copy(values, out[query, head0:head0 + head_tile, :])

    return sparse_attention_simple
