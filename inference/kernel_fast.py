"""Sparse attention for Hopper GPUs in TileLang: the fast form of `kernel.py`, for rows of 512 channels.

What it computes
    The formula of `kernel.py`, for BF16 queries and rows, accumulated in float32. One work item is one query row and a
    block of 64 heads (missing heads are zero on the way in and dropped on the way out).
How
    One thread block per multiprocessor walks over work items. Its four groups of 128 threads have three roles:

        loader   fetches tiles of 64 selected rows into a ring of three slots, as soon as a slot is free
        scorer   logits = q . tile (q in registers, its last 128 channels in shared memory), online softmax,
                 probabilities in BF16 to shared memory
        values   two groups, half of the channels each: out = out * rescale + probabilities . tile

    The products take turns at the matrix unit: the values of tile t run during the softmax of tile t + 1, because the
    scorer lets them GO only when its logits of tile t + 1 are done. The ring does not wait for a work item to end: the
    next query enters through it like a tile, and the output leaves through the slot of its last tile.
Few queries (decode)
    A cluster of up to ten thread blocks shares one work item. Each takes a part of the index list; then they exchange
    maxima and sums, and each adds up its share of the channels of all partial outputs, sent from shared memory to
    shared memory. The order of that addition is fixed, so every run gives the same bits.
Differences from the official order of operations (rounding only)
    ours: base-2 exponential with log2(e) folded into the scale; the running maximum starts at -2**30 and may stay up to
    SLACK powers of two behind the true one; the blocks of a cluster round their partial outputs to BF16 before the sum.
Inputs and outputs
    `sparse_attn_fast(q, kv, sink, indices, scale)`: as `kernel.sparse_attn`. An index outside [0, N) counts as absent.
Leaves out
    Other widths (the simple form in `kernel.py` takes them) and GPUs other than compute capability 9.0.
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
BUFFERS = 2  # for probabilities: the scorer may be this many tiles ahead of the values
# Registers per thread: loader, scorer, values. 32 + 3 * 160 = 512 = 65536 registers / 128; a larger sum never starts.
REGISTERS = (32, 160, 160)
LOG2_E = 1.4426950408889634
START_MAX = -2.0**30  # ours: finite, so that a tile of absent rows gives exp2(-inf) = 0 and no NaN
# ours: the running maximum moves only when it is this many powers of two behind: the values are seldom rescaled.
# Probabilities stay below 2**8 then; the rounding to BF16 is relative and does not change.
SLACK = 8.0
# Named barriers of the hardware (the compiler takes the low numbers); the last three have one per buffer.
SCORER, VALUES, SCORED, SCORES_READ, GO = 8, 9, 10, 12, 14
# Clusters of 2, 4, .. blocks that run at once on the 132 multiprocessors of an H200, which sit in groups that a cluster
# cannot leave (measured). Ten blocks have one tile each of the released 640 indices; sixteen were slower.
CLUSTERS = {2: 66, 4: 30, 8: 15, 10: 7}
# ours: indices are bounded and threads synchronized by hand; the compiler need not add checks and barriers.
PASS_CONFIGS = {"tl.enable_fast_math": True, "tl.disable_safe_memory_legalize": True,
                "tl.disable_thread_storage_sync": True}
# Eight lanes start the copy of one row, 16 bytes each, 128 bytes after 128 bytes: in a tile, 64 channels of all rows
# lie together (8 KiB). Zeros instead of an absent row (-1). CUDA: TileLang spends three times the instructions on it.
FETCH_ROW = """
__device__ __forceinline__ void fetch_row(void* target, const void* first_row, int row) {
  const char* source = static_cast<const char*>(first_row) + static_cast<long long>(row) * 1024;
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(target));
#pragma unroll
  for (int piece = 0; piece < 8; ++piece)
    asm volatile("{ .reg .pred absent; setp.lt.s32 absent, %2, 0;"
                 " cp.async.cg.shared.global [%0], [%1], 16, absent; }" ::"r"(place + piece * 8192),
                 "l"(source + piece * 128), "r"(row));
}
"""


def sparse_attn_fast(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float,
                     split: int | None = None) -> Tensor:
    """q [B, S, H, 512] BF16; kv [B, N, 512] BF16; sink [H]; indices [B, S, k] int32 or int64; all on one CUDA device.

    Returns [B, S, H, 512] BF16. `split` forces the number of thread blocks that share a query (1, 2, 4, 8 or 10).
    """
    batch, queries, heads, width = q.shape
    items = batch * queries * -(-heads // HEADS)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    if split is None:
        split = choose_split(items, indices.shape[-1], processors)
    kernel = compiled(split, str(indices.dtype).removeprefix("torch."))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    with torch.cuda.device(q.device):
        kernel(q.detach().contiguous().view(-1, heads, width), kv.detach().contiguous().view(-1, width),
               sink.detach().to(torch.float32).contiguous(), indices.contiguous().view(batch * queries, -1),
               out.view(-1, heads, width), scale * LOG2_E, queries, kv.shape[1],
               items if split > 1 else min(items, processors))
    return out


def choose_split(items: int, count: int, processors: int) -> int:
    """Thread blocks per work item: the most that run at once and have at least 32 of the `count` indices each."""
    fitting = [split for split, clusters in CLUSTERS.items()
               if items <= clusters * processors // 132 and 32 * split <= count]
    if 10 in fitting and count <= 8 * TILE:
        fitting.remove(10)  # eight blocks have one tile each already
    return max(fitting, default=1)


@functools.cache
def compiled(split: int, index_type: str):
    """The kernel for this many thread blocks per work item; compiled at first use, and kept on disk by TileLang."""
    import tilelang

    return tilelang.compile(build(split, index_type), target="cuda", pass_configs=PASS_CONFIGS)


def build(split: int, index_type: str):
    """The TileLang program; `split` thread blocks share a work item. Sizes are dynamic. index_type: "int32" or "int64".

    One long function: the roles are branches of one kernel and share its buffers and barriers. Every role walks over
    the same work items and tiles and counts slots (ring) and steps (tiles so far) for itself.
    """
    import tilelang.language as T
    from tvm import tirx

    queries, heads, rows, count = T.dynamic("queries, heads, rows, count")
    half = WIDTH // 2
    owners = min(split, WIDTH // 64)  # blocks that add up and write: `share` channels each
    share = WIDTH // owners
    buffers = BUFFERS if split == 1 else 1  # for probabilities; a cluster needs the space for its exchange
    block_bytes = HEADS * 64 * 2  # 64 channels of a slot lie in one piece (the layout that the matrix unit reads)

    def store_remote(array, index, value, peer):
        """array[index] = value in the shared memory of thread block `peer` of the cluster."""
        operation = tirx.op.Op.get("tl.ptx_cluster_store")
        return tirx.call_intrin("handle", operation, array.access_ptr("w"), value, peer, index)

    def send_block(source, target, peer, barrier):
        """Copy `block_bytes` to `peer` without waiting; its barrier learns of the bytes and of their arrival."""
        operation = tirx.op.Op.get("tl.tma_store_cluster")
        return tirx.call_intrin("handle", operation, T.access_ptr(target, "w", block_bytes // 2),
                                T.access_ptr(source, "r", block_bytes // 2), peer, tirx.const(block_bytes, "uint32"),
                                barrier)

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
        with T.Kernel(groups * split, threads=512, cluster_dims=split, prelude=FETCH_ROW) as block:
            ring = T.alloc_shared((SLOTS, TILE, WIDTH), "bfloat16")
            q_rest = T.alloc_shared((HEADS, WIDTH - IN_REGISTERS), "bfloat16")
            even = T.alloc_shared((HEADS, TILE), "bfloat16")  # probabilities of steps 0, 2, .. and 1, 3, ..
            odd = even
            if buffers == 2:
                odd = T.alloc_shared((HEADS, TILE), "bfloat16")
            mask = T.alloc_shared((SLOTS, TILE), "float32")  # 0, or -inf for an absent row
            rescale = T.alloc_shared((buffers, HEADS), "float32")
            inverse = T.alloc_shared((buffers, HEADS), "float32")  # 1 / denominator, with the last tile of an item
            maxima = T.alloc_shared((split, HEADS), "float32")
            sums = T.alloc_shared((split, HEADS), "float32")
            # Barriers with their number of arrivals. cp.async arrives once per thread, on top of the thread itself.
            rest_there = T.alloc_barrier(128)
            slot_full = T.alloc_barrier([256] * SLOTS)
            slot_free = T.alloc_barrier([8] * SLOTS)  # one per warp of both value groups
            landed = T.alloc_barrier(max(1, (split - 1) * share // 64))  # what the neighbors send

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
            # The kernel before this one may still run up to here: nothing above touches its results.
            T.pdl_trigger()
            T.pdl_sync()

            if thread < 128:  # --- loader: a warp fetches 16 rows of a tile, four at a time, eight lanes per row
                T.set_max_nreg(REGISTERS[0], 0)
                lane = thread % 32
                row0 = thread // 32 * 16 + lane // 8
                first_row = T.alloc_var("int64")
                place = T.alloc_var("int32")
                ahead = T.alloc_local((4,), "int32")
                index = T.alloc_local((4,), "int32")
                for item in T.serial(items):
                    query = T.truncdiv(first_item + item * groups, T.ceildiv(heads, HEADS))
                    head0 = (first_item + item * groups - query * T.ceildiv(heads, HEADS)) * HEADS
                    first_row = T.cast(T.truncdiv(query, queries_per_batch), "int64") * rows_per_batch
                    place = begin + row0
                    for p in T.unroll(4):
                        ahead[p] = -1
                        if place + p * 4 < end:
                            ahead[p] = T.cast(indices[query, place + p * 4], "int32")
                    T.barrier_wait(slot_free[slot], (lap & 1) ^ 1)
                    T.tma_copy(q[query, head0:head0 + HEADS, 0:IN_REGISTERS], ring[slot, :, 0:IN_REGISTERS],
                               barrier=slot_full[slot], eviction_policy="evict_first")
                    T.barrier_arrive(slot_full[slot])
                    T.barrier_arrive(slot_full[slot])  # twice, as for a tile
                    slot += 1
                    if slot == SLOTS:
                        slot = 0
                        lap += 1
                    for tile in T.serial(tiles):
                        place += TILE
                        for p in T.unroll(4):  # the next tile's indices are on their way while this one is fetched
                            index[p] = T.if_then_else(
                                T.cast(ahead[p], "uint32") < T.cast(rows_per_batch, "uint32"), ahead[p], -1)
                            ahead[p] = -1
                            if place + p * 4 < end:
                                ahead[p] = T.cast(indices[query, place + p * 4], "int32")
                        T.barrier_wait(slot_free[slot], (lap & 1) ^ 1)
                        for p in T.unroll(4):
                            T.call_extern("void", "fetch_row",
                                          T.access_ptr(ring[slot, row0 + p * 4, lane % 8 * 8], "w", 8),
                                          T.access_ptr(kv[first_row, lane % 8 * 8], "r", 8), index[p])
                        if lane % 8 == 0:
                            for p in T.unroll(4):
                                mask[slot, row0 + p * 4] = T.if_then_else(index[p] >= 0, 0.0, -T.infinity("float32"))
                        T.cp_async_barrier_noinc(slot_full[slot])
                        T.barrier_arrive(slot_full[slot])
                        slot += 1
                        if slot == SLOTS:
                            slot = 0
                            lap += 1
                if split > 1:
                    T.cluster_wait()
                    T.cluster_arrive_relaxed()
                    T.cluster_wait()
            elif thread < 256:  # --- scorer
                T.set_max_nreg(REGISTERS[1], 1)
                q_fragment = T.alloc_fragment((HEADS, IN_REGISTERS), "bfloat16")
                logits = T.alloc_fragment((HEADS, TILE), "float32")
                absent = T.alloc_fragment((TILE,), "float32")
                rounded = T.alloc_fragment((HEADS, TILE), "bfloat16")
                maximum = T.alloc_fragment((HEADS,), "float32")
                previous = T.alloc_fragment((HEADS,), "float32")
                shrink = T.alloc_fragment((HEADS,), "float32")
                total = T.alloc_fragment((HEADS,), "float32")
                tile_sum = T.alloc_fragment((HEADS,), "float32")
                step = T.alloc_var("int32", init=0)
                query = T.truncdiv(first_item, T.ceildiv(heads, HEADS))
                head0 = (first_item - query * T.ceildiv(heads, HEADS)) * HEADS
                T.tma_copy(q[query, head0:head0 + HEADS, IN_REGISTERS:WIDTH], q_rest, barrier=rest_there,
                           eviction_policy="evict_first")
                T.barrier_arrive(rest_there)
                for item in T.serial(items):
                    query = T.truncdiv(first_item + item * groups, T.ceildiv(heads, HEADS))
                    head0 = (first_item + item * groups - query * T.ceildiv(heads, HEADS)) * HEADS
                    T.barrier_wait(slot_full[slot], lap & 1)
                    T.copy(ring[slot, :, 0:IN_REGISTERS], q_fragment)
                    T.barrier_wait(rest_there, item & 1)
                    T.sync_warp()
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
                        T.wgmma_gemm(q_fragment, ring[slot, :, 0:IN_REGISTERS], logits, transpose_B=True,
                                     clear_accum=True)
                        T.wgmma_gemm(q_rest, ring[slot, :, IN_REGISTERS:WIDTH], logits, transpose_B=True)
                        T.copy(mask[slot, :], absent)
                        T.wait_wgmma(0)
                        if tile > 0:
                            T.named_barrier_arrive(GO + (step + 1) % buffers, 384)  # to the values of the tile before
                        if split > 1:
                            if tile == tiles - 1:
                                T.cluster_wait()  # all blocks of the cluster have started
                        else:
                            if tile == tiles - 1:
                                if item < items - 1:  # q_rest is free when all four warps are done with it
                                    next_query = T.truncdiv(first_item + (item + 1) * groups, T.ceildiv(heads, HEADS))
                                    next_head0 = (first_item + (item + 1) * groups
                                                  - next_query * T.ceildiv(heads, HEADS)) * HEADS
                                    T.sync_threads(SCORER, 128)
                                    T.tma_copy(q[next_query, next_head0:next_head0 + HEADS, IN_REGISTERS:WIDTH], q_rest,
                                               barrier=rest_there, eviction_policy="evict_first")
                                    T.barrier_arrive(rest_there)
                        for i, j in T.Parallel(HEADS, TILE):
                            logits[i, j] = logits[i, j] * scale + absent[j]
                        T.copy(maximum, previous)
                        T.reduce_max(logits, maximum, dim=1, clear=False)
                        for i in T.Parallel(HEADS):
                            maximum[i] = T.if_then_else(maximum[i] - previous[i] > SLACK, maximum[i], previous[i])
                            shrink[i] = T.if_then_else(tile == 0, 1.0, T.exp2(previous[i] - maximum[i]))
                        for i, j in T.Parallel(HEADS, TILE):
                            logits[i, j] = T.exp2(logits[i, j] - maximum[i])
                        T.reduce_sum(logits, tile_sum, dim=1)
                        for i in T.Parallel(HEADS):
                            total[i] = total[i] * shrink[i] + tile_sum[i]
                        T.copy(logits, rounded)
                        T.sync_threads(SCORES_READ + step % buffers, 384)
                        if buffers == 1:
                            T.copy(rounded, even)
                        else:
                            if step % 2 == 0:
                                T.copy(rounded, even)
                            else:
                                T.copy(rounded, odd)
                        T.copy(shrink, rescale[step % buffers, :])
                        if split == 1:
                            if tile == tiles - 1:
                                for i in T.Parallel(HEADS):
                                    head_sink = T.if_then_else(head0 + i < heads, sink[head0 + i], 0.0)
                                    total[i] += T.exp2(head_sink * LOG2_E - maximum[i])
                                    inverse[step % buffers, i] = T.if_then_else(total[i] == 0.0, 0.0, 1.0 / total[i])
                        T.fence_proxy_async()
                        T.named_barrier_arrive(SCORED + step % buffers, 384)
                        if tile == tiles - 1:
                            T.named_barrier_arrive(GO + step % buffers, 384)
                        step += 1
                        slot += 1
                        if slot == SLOTS:
                            slot = 0
                            lap += 1
                if split > 1:
                    for peer in T.unroll(split):
                        for i in T.Parallel(HEADS):
                            T.evaluate(store_remote(maxima, rank * HEADS + i, maximum[i], peer))
                            T.evaluate(store_remote(sums, rank * HEADS + i, total[i], peer))
                    T.cluster_arrive()
                    T.cluster_wait()
            else:  # --- values: 256 threads; each half of them has 128 channels of `left` and 128 of `right`
                T.set_max_nreg(REGISTERS[2], 1)
                left = T.alloc_fragment((HEADS, half), "float32")
                right = T.alloc_fragment((HEADS, half), "float32")
                row = thread % 128 // 32 * 16 + thread % 32 // 4  # a thread holds parts of rows `row` and `row + 8`
                step = T.alloc_var("int32", init=0)
                for buffer in T.unroll(buffers):  # empty buffers count as read
                    T.named_barrier_arrive(SCORES_READ + buffer, 384)
                for item in T.serial(items):
                    query = T.truncdiv(first_item + item * groups, T.ceildiv(heads, HEADS))
                    head0 = (first_item + item * groups - query * T.ceildiv(heads, HEADS)) * HEADS
                    slot = T.if_then_else(slot == SLOTS - 1, 0, slot + 1)  # the slot that q came through
                    T.clear(left)
                    T.clear(right)
                    for tile in T.serial(tiles):
                        T.sync_threads(SCORED + step % buffers, 384)
                        if T.any_sync(T.Or(rescale[step % buffers, row] != 1.0,
                                           rescale[step % buffers, row + 8] != 1.0)):
                            for i, c in T.Parallel(HEADS, half):
                                left[i, c] *= rescale[step % buffers, i]
                            for i, c in T.Parallel(HEADS, half):
                                right[i, c] *= rescale[step % buffers, i]
                        T.sync_threads(GO + step % buffers, 384)
                        if buffers == 1:
                            T.wgmma_gemm(even, ring[slot, :, 0:half], left, policy=T.GemmWarpPolicy.FullCol)
                            T.wgmma_gemm(even, ring[slot, :, half:WIDTH], right, policy=T.GemmWarpPolicy.FullCol)
                        else:
                            if step % 2 == 0:
                                T.wgmma_gemm(even, ring[slot, :, 0:half], left, policy=T.GemmWarpPolicy.FullCol)
                                T.wgmma_gemm(even, ring[slot, :, half:WIDTH], right, policy=T.GemmWarpPolicy.FullCol)
                            else:
                                T.wgmma_gemm(odd, ring[slot, :, 0:half], left, policy=T.GemmWarpPolicy.FullCol)
                                T.wgmma_gemm(odd, ring[slot, :, half:WIDTH], right, policy=T.GemmWarpPolicy.FullCol)
                        T.wait_wgmma(0)
                        if split == 1:
                            if tile == tiles - 1:
                                for i, c in T.Parallel(HEADS, half):
                                    left[i, c] *= inverse[step % buffers, i]
                                for i, c in T.Parallel(HEADS, half):
                                    right[i, c] *= inverse[step % buffers, i]
                                T.copy(left, ring[slot, :, 0:half])
                                T.copy(right, ring[slot, :, half:WIDTH])
                                T.fence_proxy_async()
                                T.sync_threads(VALUES, 256)
                                T.tma_copy(ring[slot, :, :], out[query, head0:head0 + HEADS, :],
                                           eviction_policy="evict_first")
                                T.tma_store_wait()
                                T.sync_threads(VALUES, 256)
                        T.named_barrier_arrive(SCORES_READ + step % buffers, 384)
                        if thread % 32 == 0:
                            T.barrier_arrive(slot_free[slot])
                        step += 1
                        slot = T.if_then_else(slot == SLOTS - 1, 0, slot + 1)
                if split > 1:
                    top = T.alloc_fragment((HEADS,), "float32")
                    total = T.alloc_fragment((HEADS,), "float32")
                    weight = T.alloc_fragment((HEADS,), "float32")
                    added = T.alloc_fragment((HEADS, share), "float32")
                    T.cluster_wait()
                    T.cluster_arrive_relaxed()
                    T.cluster_wait()  # every block has sent its maxima and sums and no longer reads its ring
                    for i in T.Parallel(HEADS):
                        top[i] = maxima[0, i]
                    for peer in T.unroll(1, split):
                        for i in T.Parallel(HEADS):
                            top[i] = T.max(top[i], maxima[peer, i])
                    for i in T.Parallel(HEADS):
                        head_sink = T.if_then_else(head0 + i < heads, sink[head0 + i], 0.0)
                        total[i] = T.exp2(head_sink * LOG2_E - top[i])
                    for peer in T.unroll(split):
                        for i in T.Parallel(HEADS):
                            total[i] += sums[peer, i] * T.exp2(maxima[peer, i] - top[i])
                    for i in T.Parallel(HEADS):
                        weight[i] = T.if_then_else(total[i] == 0.0, 0.0,
                                                   T.exp2(maxima[rank, i] - top[i]) / total[i])
                    for i, c in T.Parallel(HEADS, half):
                        left[i, c] *= weight[i]
                    for i, c in T.Parallel(HEADS, half):
                        right[i, c] *= weight[i]
                    # Slot 0 holds what this block sends, slots 1 and 2 what it receives: peer p at channels p * share.
                    # Its own share stays where it is: compute-sanitizer takes a block that sends to itself for a mistake.
                    T.copy(left, ring[0, :, 0:half])
                    T.copy(right, ring[0, :, half:WIDTH])
                    T.fence_proxy_async()
                    T.sync_threads(VALUES, 256)
                    if thread == 256:
                        for piece in T.unroll(WIDTH // 64):
                            if piece * 64 // share != rank:
                                T.evaluate(send_block(
                                    ring[0, 0, piece * 64],
                                    ring[1 + rank // owners, 0, rank % owners * share + piece * 64 % share],
                                    piece * 64 // share, landed[0]))
                    if rank < owners:
                        T.barrier_wait(landed, 0)
                        T.clear(added)
                        for peer in T.unroll(split):
                            if peer == rank:
                                for i, c in T.Parallel(HEADS, share):
                                    added[i, c] += ring[0, i, rank * share + c]
                            else:
                                for i, c in T.Parallel(HEADS, share):
                                    added[i, c] += ring[1 + peer // owners, i, peer % owners * share + c]
                        for i, c in T.Parallel(HEADS, share):
                            if head0 + i < heads:
                                out[query, head0 + i, rank * share + c] = added[i, c]
            if split > 1:
                T.cluster_arrive_relaxed()
                T.cluster_wait()  # no block leaves while a neighbor may still read its shared memory

    return sparse_attention
