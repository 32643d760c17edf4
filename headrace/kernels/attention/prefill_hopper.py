"""Causal attention of prompt chunks over the paged KV pool, warp-specialised for Hopper (Gluon).

A block of threads has several warp groups. One warp, the producer, issues bulk copies (TMA) of keys and values, a block
of the pool each, as soon as a slot of the ring in shared memory is free. The consumers, warp groups of 64 query rows
each, compute scores, softmax and sums: under one consumer's softmax run the others' products and its own product of the
tile before. No barrier joins all warps. A program is persistent: while its last item ends, the next one's copies run.

Rows of few tokens are few items: each context is split among programs then, and the results are merged.

Shapes    those of headrace/kernels/attention/prefill.py, whose contract and numerics hold, too
Contract  16-bit heads of 64, 128 or 256 and the other conditions of `fits_hopper`. Grid and splits follow from T, N,
          Hkv and the table's width alone
Source    Shah et al. 2024, "FlashAttention-3", section 3; Dao et al. 2023, "Flash-Decoding", for the splits. The
          producer and what it shares with the consumers:
          prefill_hopper_warps.py; the consumers: prefill_hopper_consumers.py
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.attention.extend import MOST_SPLITS, merge_splits
from headrace.kernels.attention.prefill import PagedChunks, check_paged
from headrace.kernels.attention.prefill_hopper_consumers import Queries, consume
from headrace.kernels.attention.prefill_hopper_warps import LEAST_TILES, Items, Pool, Sizes, make_tile_ring, produce
from headrace.kernels.lib.dispatch import num_multiprocessors, runs_hopper
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import LAYOUT, SPAN, launch_registers, registers
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

SPLIT_COST = 0.03
"""Share of an item's time that each split of its context takes more: its part is written, and read to be merged."""


class HopperTile(NamedTuple):
    """A program's tile: `consumers` of 64 rows each against `keys` keys at a time, in a ring of `stages` tiles."""

    consumers: int
    keys: int
    stages: int


def hopper_tile(head_dim: int) -> HopperTile:
    """The fastest tile measured on an H200 (docs/gpu-notes.md). For heads of 256 it also fills memory and registers."""
    return {64: HopperTile(3, 64, 4), 128: HopperTile(3, 64, 3), 256: HopperTile(2, 64, 2)}[head_dim]


def hopper_splits(q: Tensor, k_pool: Tensor, chunks: PagedChunks, num_programs: int) -> int:
    """Splits of each context, from shapes alone; 1 where there are items for more than two rounds of `num_programs`.

    Items take as many rounds as the fullest program: of 64 items and 132 programs half would have nothing to do, and
    160 would take as long as 264.
    """
    T, H, D = q.shape
    num_kv, tile = k_pool.shape[2], hopper_tile(D)
    num_items = cdiv(T, _tokens(tile, H // num_kv)) * num_kv  # at least
    if num_items > 2 * num_programs:
        return 1
    # At least 2, though one is useless: which of the two kernels takes so many rows shall not depend on contexts, which
    # in a warm-up are short.
    useful = max(2, cdiv(chunks.table_NM.shape[1] * k_pool.shape[1], LEAST_TILES.value * tile.keys))
    most = min(useful, MOST_SPLITS, num_programs // num_items + 4)

    def rounds(splits: int) -> float:
        return cdiv(num_items * splits, num_programs) / splits * (1 + SPLIT_COST * (splits - 1))

    return min(range(1, most + 1), key=rounds)


def _tokens(tile: HopperTile, group: int) -> int:
    return 64 * tile.consumers // next_power_of_2(group)


@gluon.jit(do_not_specialize=["num_items", "num_sequences", "splits", "stride_table", "block_rows", "num_rows"])
def _hopper_prefill_kernel(
    q_ptr, k_desc, v_desc, v_ptr, out_ptr, log_sum_ptr, first_row_ptr, start_ptr, table_ptr,
    num_items, num_sequences, splits, stride_q, block_rows, num_rows, stride_table, scale_log2,
    H: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    IS_SPLIT: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; items of 64 rows a consumer, see prefill_hopper_warps.py."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    sizes = Sizes(H, HKV, GROUP, PADDED_GROUP, D, BLOCK_SIZE, KEYS, STAGES, 64 * CONSUMERS)
    # A constant: what an unsplit context does not need takes registers from its sums.
    splits = splits if IS_SPLIT else gl.to_tensor(1)
    items = Items(first_row_ptr, start_ptr, num_items, num_sequences, splits, sizes)
    pool = Pool(k_desc, v_desc, v_ptr, table_ptr, stride_table, block_rows, num_rows)
    keys = make_tile_ring(dtype, sizes, CONSUMERS)
    values = make_tile_ring(dtype, sizes, CONSUMERS)
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], LAYOUT)
    queries = Queries(q_ptr, out_ptr, log_sum_ptr, q_tiles, stride_q, scale_log2, IS_SPLIT)
    fence_async_shared()  # makes the barriers visible to the copy engine

    if CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, (items, queries, keys, values, 0)), (consume, (items, queries, keys, values, 1)),
             (produce, (items, pool, keys, values))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume, (items, queries, keys, values, 0)), (consume, (items, queries, keys, values, 1)),
             (consume, (items, queries, keys, values, 2)), (produce, (items, pool, keys, values))],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def paged_prefill_hopper(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    chunks: PagedChunks,
    tile: HopperTile | None = None,
    splits: int | None = None,
) -> Tensor:
    T, H, D = q.shape
    num_sequences, (block_size, num_kv) = len(chunks.start_N), k_pool.shape[1:3]
    check_paged(q, k_pool, v_pool)
    if not fits_hopper(q, k_pool):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype}, pool {tuple(k_pool.shape)}: use paged_prefill_triton")
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    num_programs = num_multiprocessors(q.device)
    tile, S = tile or hopper_tile(D), splits or hopper_splits(q, k_pool, chunks, num_programs)
    part = log_sum = out
    if S > 1:
        part = torch.empty((T, H, S, D), dtype=torch.float32, device=q.device)
        log_sum = torch.empty((T, H, S), dtype=torch.float32, device=q.device)
    consumer_registers, producer_registers = registers(tile.consumers)
    num_items = (T // _tokens(tile, H // num_kv) + num_sequences) * num_kv * S
    block_rows = k_pool.stride(0) // k_pool.stride(1)
    keys, values = _rows_of(k_pool), _rows_of(v_pool)
    _hopper_prefill_kernel[(min(num_items, num_programs),)](
        q, keys, values, v_pool, part, log_sum, chunks.first_row_N1, chunks.start_N, chunks.table_NM,
        num_items, num_sequences, S, q.stride(0), block_rows, keys.shape[0], chunks.table_NM.stride(0),
        scale * LOG2_E.value,
        H=H, HKV=num_kv, GROUP=H // num_kv, PADDED_GROUP=next_power_of_2(H // num_kv), D=D, BLOCK_SIZE=block_size,
        KEYS=tile.keys, STAGES=tile.stages, CONSUMERS=tile.consumers, IS_SPLIT=S > 1,
        REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        num_warps=4, maxnreg=launch_registers(tile.consumers),
    )  # fmt: skip
    if S > 1:
        merge_splits(part, log_sum, out)
    return out


def _rows_of(pool: Tensor) -> TensorDescriptor:
    """A pool [P, bs, Hkv, D] as rows of one token's heads; a copy brings one block's tokens, SPAN elements of each."""
    num_blocks, block_size, num_kv, D = pool.shape
    width = num_kv * D
    rows = (num_blocks - 1) * (pool.stride(0) // width) + block_size
    return TensorDescriptor(pool, [rows, width], [width, 1], [block_size, SPAN.value], LAYOUT.value)


def fits_hopper(q: Tensor, k_pool: Tensor) -> bool:
    """True if Hopper variants run here, and this one takes such heads and blocks."""
    H, D = q.shape[1:]
    _, block_size, num_kv, _ = k_pool.shape
    return (
        runs_hopper(q)
        and D in (64, 128, 256)  # those measured
        and H // num_kv <= 64
        and 64 % block_size == 0
        and block_size >= 8  # the copy engine's swizzle repeats every 8 rows
        and k_pool.stride(1) == num_kv * D
        and k_pool.stride(0) % k_pool.stride(1) == 0
    )
