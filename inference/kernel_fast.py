"""Sparse attention for Hopper GPUs in TileLang: the fast form of `kernel.py`, for rows of 512 channels.

What it computes
    The formula of `kernel.py`, for BF16 queries and rows, float32 accumulation. One work item is one query row and a block
    of 64 heads (missing heads are zero on the way in and dropped on the way out).
How
    One thread block per multiprocessor walks over work items. Four groups of 128 threads have one role each:

        loader   fetches tiles of 64 selected rows into a ring of three slots, three tiles ahead of their use
        scorer   logits = q . tile (q stays in registers, the last 128 channels in shared memory), online softmax,
                 probabilities in BF16 to shared memory
        values   two groups, 256 channels each: out = out * rescale + probabilities . tile

    So the matrix unit works on the values of tile t while the softmax of tile t + 1 runs, and the ring never waits for a work item
    to end: the next query enters through the ring like a tile, and the finished output leaves through the slot of its last tile.
Few queries (decode)
    A cluster of 2, 4 or 8 thread blocks shares one work item: each takes a part of the index list, then they exchange maxima
    and sums, and every block adds up its share of the channels of all partial outputs through its neighbors' shared memory.
    The order of that addition is fixed, so the result is the same bits in every run.
Differences from the official order of operations (rounding only)
    ours: base-2 exponential with log2(e) folded into the scale; the running maximum starts at -2**30 of those units;
    with a cluster, the blocks' partial outputs are rounded to BF16 before they are added.
Inputs and outputs
    `sparse_attn_fast(q, kv, sink, indices, scale)`: as `kernel.sparse_attn`. An index outside [0, N) counts as absent here.
Leaves out
    Widths other than 512 (the simple form in `kernel.py` takes them) and GPUs other than compute capability 9.0.
Tests
    tests/test_kernel_tilelang.py; measured by `python -m reference.benchmark kernel`.

No `from __future__ import annotations` here: TileLang reads the annotations of a kernel as values.
"""

import functools

import torch
from torch import Tensor

WIDTH = 512  # channels of a row: registers and shared memory are divided up for exactly this width
HEADS = 64  # rows of one matrix instruction of a thread group
TILE = 64  # official: indices per step of the online softmax
SLOTS = 3  # tiles in the ring: 3 x 64 KiB of the 227 KiB of shared memory
IN_REGISTERS = 384  # channels of q that the scorer keeps in registers; the other 128 are in shared memory
# Registers per thread: loader, scorer, values. 32 + 3 * 160 = 512 = 65536 registers / 128; a larger sum never starts.
REGISTERS = (32, 160, 160)
LOG2_E = 1.4426950408889634
START_MAX = -2.0**30  # ours: finite, so that a tile of absent rows gives exp2(-inf) = 0 and no NaN
PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True}  # we bound every index ourselves
MAX_SPLIT = 8  # thread blocks in a cluster that every Hopper GPU can place


def sparse_attn_fast(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float, split: int | None = None) -> Tensor:
    """q [B, S, H, 512] BF16; kv [B, N, 512] BF16; sink [H] float32; indices [B, S, k] int32 or int64, all on one CUDA device.

    Returns [B, S, H, 512] BF16. `split` forces the number of thread blocks that share a query (1, 2, 4 or 8).
    """
    batch, queries, heads, width = q.shape
    items = batch * queries * -(-heads // HEADS)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    if split is None:
        split = choose_split(items, indices.shape[-1], processors)
    kernel = compiled(split, str(indices.dtype).removeprefix("torch."))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    with torch.cuda.device(q.device):
        kernel(q.contiguous().view(-1, heads, width), kv.contiguous().view(-1, width), sink.contiguous(),
               indices.contiguous().view(batch * queries, -1), out.view(-1, heads, width), scale * LOG2_E, queries, kv.shape[1],
               items if split > 1 else min(items, processors))
    return out


def choose_split(items: int, count: int, processors: int) -> int:
    """Thread blocks per work item: as many as still run at once and have at least 32 of the `count` indices each."""
    split = 1
    while split < MAX_SPLIT and 2 * split * items <= processors and 2 * split * 32 <= count:
        split *= 2
    return split


@functools.cache
def compiled(split: int, index_type: str):
    """The kernel for this many thread blocks per work item; compiled at first use (seconds), kept on disk by TileLang."""
    import tilelang

    return tilelang.compile(build(split, index_type), target="cuda", pass_configs=PASS_CONFIGS)


def build(split: int, index_type: str):
    """The TileLang program. Every size but the width is dynamic. index_type: "int32" or "int64"."""
    import tilelang.language as T
    from tvm import tirx

    queries, heads, rows, count = T.dynamic("queries, heads, rows, count")
    half, quarter, share = WIDTH // 2, WIDTH // 4, WIDTH // split
    block_bytes = HEADS * 64 * 2  # 64 channels of a slot lie in one piece (the layout that the matrix unit reads)

    def store_remote(array, index, value, peer):
        """array[index] = value in the shared memory of thread block `peer` of the cluster."""
        return tirx.call_intrin("handle", tirx.op.Op.get("tl.ptx_cluster_store"), array.access_ptr("w"), value, peer, index)

    def send_block(source, target, peer, barrier):
        """Copy `block_bytes` to `peer` without waiting; its barrier learns of the bytes and of their arrival."""
        return tirx.call_intrin("handle", tirx.op.Op.get("tl.tma_store_cluster"), T.access_ptr(target, "w", block_bytes // 2),
                                T.access_ptr(source, "r", block_bytes // 2), peer, tirx.const(block_bytes, "uint32"), barrier)

    @T.macro
    def accumulate_values(side, first_item, items, stride, tiles, rank, heads_here, ring, probabilities, rescale, inverse,
                          maxima, sums, sink, out, slot_free, scored, scores_read, landed):
        """Role of the two value groups; `side` 0 has channels 0..255, side 1 has 256..511, both in two accumulators."""
        low, middle, high = side * half, side * half + quarter, side * half + half
        left = T.alloc_fragment((HEADS, quarter), "float32")
        right = T.alloc_fragment((HEADS, quarter), "float32")
        slot = T.alloc_var("int32", init=0)
        step = T.alloc_var("int32", init=0)
        query = T.alloc_var("int32")
        head0 = T.alloc_var("int32")
        thread = T.get_thread_binding()
        for item in T.serial(items):
            query = T.truncdiv(first_item + item * stride, T.ceildiv(heads_here, HEADS))
            head0 = (first_item + item * stride - query * T.ceildiv(heads_here, HEADS)) * HEADS
            slot = T.if_then_else(slot == SLOTS - 1, 0, slot + 1)  # the slot that q came through
            T.clear(left)
            T.clear(right)
            for tile in T.serial(tiles):
                T.barrier_wait(scored, step & 1)
                for i, c in T.Parallel(HEADS, quarter):
                    left[i, c] *= rescale[i]
                for i, c in T.Parallel(HEADS, quarter):
                    right[i, c] *= rescale[i]
                T.wgmma_gemm(probabilities, ring[slot, :, low:middle], left)
                T.wgmma_gemm(probabilities, ring[slot, :, middle:high], right)
                T.wait_wgmma(0)
                if split == 1:
                    if tile == tiles - 1:
                        for i, c in T.Parallel(HEADS, quarter):
                            left[i, c] *= inverse[i]
                        for i, c in T.Parallel(HEADS, quarter):
                            right[i, c] *= inverse[i]
                        T.copy(left, ring[slot, :, low:middle])
                        T.copy(right, ring[slot, :, middle:high])
                        T.fence_proxy_async()
                        T.sync_threads(10 + side, 128)
                        T.tma_copy(ring[slot, :, low:high], out[query, head0:head0 + HEADS, low:high])
                        T.tma_store_wait()
                        T.sync_threads(10 + side, 128)
                if thread % 32 == 0:
                    T.barrier_arrive(scores_read)
                    T.barrier_arrive(slot_free[slot])
                step += 1
                slot = T.if_then_else(slot == SLOTS - 1, 0, slot + 1)
        if split > 1:
            top = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_fragment((HEADS,), "float32")
            weight = T.alloc_fragment((HEADS,), "float32")
            added = T.alloc_fragment((HEADS, share // 2), "float32")
            T.cluster_wait()
            T.cluster_arrive()
            T.cluster_wait()  # every block has sent its maxima and sums and no longer reads its ring
            for i in T.Parallel(HEADS):
                top[i] = maxima[0, i]
            for peer in T.unroll(1, split):
                for i in T.Parallel(HEADS):
                    top[i] = T.max(top[i], maxima[peer, i])
            for i in T.Parallel(HEADS):
                head_sink = T.if_then_else(head0 + i < heads_here, sink[head0 + i], 0.0)
                total[i] = T.exp2(head_sink * LOG2_E - top[i])
            for peer in T.unroll(split):
                for i in T.Parallel(HEADS):
                    total[i] += sums[peer, i] * T.exp2(maxima[peer, i] - top[i])
            for i in T.Parallel(HEADS):
                weight[i] = T.if_then_else(total[i] == 0.0, 0.0, T.exp2(maxima[rank, i] - top[i]) / total[i])
            for i, c in T.Parallel(HEADS, quarter):
                left[i, c] *= weight[i]
            for i, c in T.Parallel(HEADS, quarter):
                right[i, c] *= weight[i]
            # Slot 0 holds what this block sends, slot 1 what it receives: from peer p at channels p * share.
            T.copy(left, ring[0, :, low:middle])
            T.copy(right, ring[0, :, middle:high])
            T.fence_proxy_async()
            T.sync_threads(10 + side, 128)
            if thread % 128 == 0:
                for piece in T.unroll(half // 64):
                    first = low + piece * 64
                    T.evaluate(send_block(ring[0, 0, first], ring[1, 0, rank * share + first % share], first // share, landed[0]))
            T.barrier_wait(landed, 0)
            T.clear(added)
            for peer in T.unroll(split):
                for i, c in T.Parallel(HEADS, share // 2):
                    added[i, c] += ring[1, i, peer * share + side * (share // 2) + c]
            for i, c in T.Parallel(HEADS, share // 2):
                if head0 + i < heads_here:
                    out[query, head0 + i, rank * share + side * (share // 2) + c] = added[i, c]

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((queries, heads, WIDTH), "bfloat16"),
        kv: T.Tensor((rows, WIDTH), "bfloat16"),  # all batch rows one after the other
        sink: T.Tensor((heads,), "float32"),
        indices: T.Tensor((queries, count), index_type),
        out: T.Tensor((queries, heads, WIDTH), "bfloat16"),
        scale: T.float32,  # times log2(e)
        queries_per_batch: T.int32,
        rows_per_batch: T.int32,
        groups: T.int32,  # clusters of `split` thread blocks; with split > 1 exactly one per work item
    ):
        with T.Kernel(groups * split, threads=512, cluster_dims=split) as block:
            ring = T.alloc_shared((SLOTS, TILE, WIDTH), "bfloat16")
            q_rest = T.alloc_shared((HEADS, WIDTH - IN_REGISTERS), "bfloat16")
            probabilities = T.alloc_shared((HEADS, TILE), "bfloat16")
            mask = T.alloc_shared((SLOTS, TILE), "float32")  # 0, or -inf for an absent row
            rescale = T.alloc_shared((HEADS,), "float32")
            inverse = T.alloc_shared((HEADS,), "float32")  # 1 / denominator, valid with the last tile of a work item
            maxima = T.alloc_shared((split, HEADS), "float32")
            sums = T.alloc_shared((split, HEADS), "float32")
            # Barriers complete when this many arrivals are in. cp.async arrives once per thread, on top of the thread itself.
            slot_full = T.alloc_barrier([256] * SLOTS)
            slot_free = T.alloc_barrier([8] * SLOTS)  # one per warp of both value groups
            scored = T.alloc_barrier(128)
            scores_read = T.alloc_barrier(8)
            landed = T.alloc_barrier(WIDTH // 64)

            thread = T.get_thread_binding()
            rank = T.alloc_var("int32", init=0)
            begin = T.alloc_var("int32", init=0)
            end = T.alloc_var("int32")
            tiles = T.alloc_var("int32")
            items = T.alloc_var("int32", init=1)
            slot = T.alloc_var("int32", init=0)
            lap = T.alloc_var("int32", init=0)  # times around the ring; its parity is the barriers' phase
            query = T.alloc_var("int32")
            head0 = T.alloc_var("int32")
            first_item = T.alloc_var("int32")
            end = count
            first_item = block // split
            if split == 1:
                items = T.truncdiv(queries * T.ceildiv(heads, HEADS) - block + groups - 1, groups)
            else:
                T.cluster_arrive_relaxed()  # waited for before the first access to a neighbor
                rank = block % split
                begin = rank * T.ceildiv(count, split)
                end = T.min(begin + T.ceildiv(count, split), count)
            tiles = T.max(T.truncdiv(end - begin + TILE - 1, TILE), 1)

            if thread < 128:  # loader: each warp fetches 16 rows of a tile; lane l knows the index of row l % 16
                T.set_max_nreg(REGISTERS[0], 0)
                warp = thread // 32
                lane = thread % 32
                first_row = T.alloc_var("int64")
                place = T.alloc_var("int32")
                ahead = T.alloc_var("int32")
                index = T.alloc_var("int32")
                row = T.alloc_var("int32")
                for item in T.serial(items):
                    query = T.truncdiv(first_item + item * groups, T.ceildiv(heads, HEADS))
                    head0 = (first_item + item * groups - query * T.ceildiv(heads, HEADS)) * HEADS
                    first_row = T.cast(T.truncdiv(query, queries_per_batch), "int64") * rows_per_batch
                    place = begin + warp * 16 + lane % 16
                    ahead = -1
                    if place < end:
                        ahead = T.cast(indices[query, place], "int32")
                    T.barrier_wait(slot_free[slot], (lap & 1) ^ 1)
                    T.tma_copy(q[query, head0:head0 + HEADS, :], ring[slot, :, :], barrier=slot_full[slot])
                    T.barrier_arrive(slot_full[slot])
                    T.barrier_arrive(slot_full[slot])  # twice, as for a tile
                    slot += 1
                    if slot == SLOTS:
                        slot = 0
                        lap += 1
                    for tile in T.serial(tiles):
                        index = T.if_then_else(T.cast(ahead, "uint32") < T.cast(rows_per_batch, "uint32"), ahead, -1)
                        place += TILE
                        ahead = -1
                        if place < end:
                            ahead = T.cast(indices[query, place], "int32")
                        T.barrier_wait(slot_free[slot], (lap & 1) ^ 1)
                        if lane < 16:
                            mask[slot, warp * 16 + lane] = T.if_then_else(index >= 0, 0.0, -T.infinity("float32"))
                        for r in T.unroll(16):
                            row = T.shfl_sync(index, r)
                            for c in T.unroll(WIDTH // 256):  # 16 bytes per lane; zeros where the row is absent
                                T.ptx_cp_async(T.access_ptr(ring[slot, warp * 16 + r, c * 256 + lane * 8], "w", 8),
                                               T.access_ptr(kv[first_row + row, c * 256 + lane * 8], "r", 8), 8, row >= 0)
                        T.cp_async_barrier_noinc(slot_full[slot])
                        T.barrier_arrive(slot_full[slot])
                        slot += 1
                        if slot == SLOTS:
                            slot = 0
                            lap += 1
                if split > 1:
                    T.cluster_wait()
                    T.cluster_arrive()
                    T.cluster_wait()
            elif thread < 256:  # scorer
                T.set_max_nreg(REGISTERS[1], 1)
                q_fragment = T.alloc_fragment((HEADS, IN_REGISTERS), "bfloat16")
                logits = T.alloc_fragment((HEADS, TILE), "float32")
                rounded = T.alloc_fragment((HEADS, TILE), "bfloat16")
                maximum = T.alloc_fragment((HEADS,), "float32")
                previous = T.alloc_fragment((HEADS,), "float32")
                shrink = T.alloc_fragment((HEADS,), "float32")
                total = T.alloc_fragment((HEADS,), "float32")
                tile_sum = T.alloc_fragment((HEADS,), "float32")
                step = T.alloc_var("int32", init=0)
                for item in T.serial(items):
                    query = T.truncdiv(first_item + item * groups, T.ceildiv(heads, HEADS))
                    head0 = (first_item + item * groups - query * T.ceildiv(heads, HEADS)) * HEADS
                    T.barrier_wait(slot_full[slot], lap & 1)
                    T.copy(ring[slot, :, 0:IN_REGISTERS], q_fragment)
                    T.copy(ring[slot, :, IN_REGISTERS:WIDTH], q_rest)
                    T.fence_proxy_async()
                    T.sync_threads(9, 128)
                    if thread % 32 < 2:
                        T.barrier_arrive(slot_free[slot])  # 4 warps x 2 lanes = the 8 arrivals of a tile
                    slot += 1
                    if slot == SLOTS:
                        slot = 0
                        lap += 1
                    T.fill(maximum, START_MAX)
                    T.fill(total, 0.0)
                    for tile in T.serial(tiles):
                        T.barrier_wait(slot_full[slot], lap & 1)
                        T.fence_proxy_async()
                        T.wgmma_gemm(q_fragment, ring[slot, :, 0:IN_REGISTERS], logits, transpose_B=True, clear_accum=True)
                        T.wgmma_gemm(q_rest, ring[slot, :, IN_REGISTERS:WIDTH], logits, transpose_B=True)
                        T.wait_wgmma(0)
                        for i, j in T.Parallel(HEADS, TILE):
                            logits[i, j] = logits[i, j] * scale + mask[slot, j]
                        T.copy(maximum, previous)
                        T.reduce_max(logits, maximum, dim=1, clear=False)
                        for i in T.Parallel(HEADS):
                            shrink[i] = T.exp2(previous[i] - maximum[i])
                        for i, j in T.Parallel(HEADS, TILE):
                            logits[i, j] = T.exp2(logits[i, j] - maximum[i])
                        T.reduce_sum(logits, tile_sum, dim=1)
                        for i in T.Parallel(HEADS):
                            total[i] = total[i] * shrink[i] + tile_sum[i]
                        T.copy(logits, rounded)
                        T.barrier_wait(scores_read, (step & 1) ^ 1)
                        T.copy(rounded, probabilities)
                        T.copy(shrink, rescale)
                        if split == 1:
                            if tile == tiles - 1:
                                for i in T.Parallel(HEADS):
                                    head_sink = T.if_then_else(head0 + i < heads, sink[head0 + i], 0.0)
                                    total[i] += T.exp2(head_sink * LOG2_E - maximum[i])
                                    inverse[i] = T.if_then_else(total[i] == 0.0, 0.0, 1.0 / total[i])
                        T.fence_proxy_async()
                        T.barrier_arrive(scored)
                        step += 1
                        slot += 1
                        if slot == SLOTS:
                            slot = 0
                            lap += 1
                if split > 1:
                    T.cluster_wait()
                    for peer in T.unroll(split):
                        for i in T.Parallel(HEADS):
                            T.evaluate(store_remote(maxima, rank * HEADS + i, maximum[i], peer))
                            T.evaluate(store_remote(sums, rank * HEADS + i, total[i], peer))
                    T.cluster_arrive()
                    T.cluster_wait()
            elif thread < 384:
                T.set_max_nreg(REGISTERS[2], 1)
                accumulate_values(0, first_item, items, groups, tiles, rank, heads, ring, probabilities, rescale, inverse,
                                  maxima, sums, sink, out, slot_free, scored, scores_read, landed)
            else:
                T.set_max_nreg(REGISTERS[2], 1)
                accumulate_values(1, first_item, items, groups, tiles, rank, heads, ring, probabilities, rescale, inverse,
                                  maxima, sums, sink, out, slot_free, scored, scores_read, landed)
            if split > 1:
                T.cluster_sync()  # no block leaves while a neighbor may still read its shared memory

    return sparse_attention
