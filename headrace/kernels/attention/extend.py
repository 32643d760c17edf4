"""Causal attention of few rows behind a long context, in Triton: prefill.py with each context split among programs.

Shapes    as in prefill.py
Contract  as in prefill.py. The grids follow from T, N, Hkv and the table's width alone
Numerics  as in prefill.py; the splits are merged in float32
Source    Dao et al. 2023, "Flash-Decoding", for tiles of several tokens. Without splits, a prompt with all but
          sixteen tokens cached would be one tile a KV head: eight programs, each over the whole context

Legend    N sequences, M blocks of the longest, G = H / Hkv query heads a KV head, padded to a power of two, S splits
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.head_dims import inside, inside_parts, padded
from headrace.kernels.attention.prefill import PagedChunks, _attend, check_paged
from headrace.kernels.lib.dispatch import UPCAST_DOT
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

PROGRAMS = 528  # four for each of 132 multiprocessors (H200)
MOST_SPLITS = 64
MERGED_ROWS, AT_ONCE = 2, 8  # heads of rows that a program merges, and the splits of each that it reads together


class ExtendTile(NamedTuple):
    """A program's tile: `rows` query rows (tokens times padded heads) against `keys` keys at a time, at least
    `split_keys` in all where the context has as many."""

    rows: int
    keys: int
    split_keys: int
    num_warps: int
    num_stages: int


def extend_tile(head_dim: int, dtype: torch.dtype) -> ExtendTile:
    """Smaller steps for heads of 256: larger ones spill (tests/kernels/attention/test_extend.py compiles for sm_90)."""
    if dtype == torch.float32:  # full-precision products run outside the tensor cores: small tiles, for tests
        return ExtendTile(16, 16, 128, 8, 1)
    return ExtendTile(64, 64, 256, 4, 4) if head_dim <= 128 else ExtendTile(64, 32, 256, 8, 3)


def extend_splits(q: Tensor, k_pool: Tensor, chunks: PagedChunks) -> int:
    """Splits of each context, a power of two, from shapes alone; 1 for many rows or few keys."""
    T, H, D = q.shape
    num_kv, tile = k_pool.shape[2], extend_tile(D, q.dtype)
    programs = (T // _tokens(tile, H // num_kv) + 1) * num_kv
    useful = cdiv(chunks.table_NM.shape[1] * k_pool.shape[1], tile.split_keys)
    most = max(1, min(PROGRAMS // programs, useful, MOST_SPLITS))
    return 1 << (most.bit_length() - 1)


def _tokens(tile: ExtendTile, group: int) -> int:
    return max(tile.rows // next_power_of_2(group), 1)


@triton.jit(
    do_not_specialize=["num_sequences", "stride_table"],
    do_not_specialize_on_alignment=["first_row_ptr", "start_ptr", "table_ptr"],
)
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, log_sum_ptr, first_row_ptr, start_ptr, table_ptr,
    num_sequences, stride_q, stride_block, stride_token, stride_table, scale_log2,
    H: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """One split of the context of TOKENS tokens of one sequence, for one KV head. part [T, H, S, D] and log_sum
    [T, H, S], base 2, are float32; a row that sees no keys of the split has a log_sum of -inf."""
    kv_head, tile, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    # Sequence i's tiles start at first_row[i] // TOKENS + i, which leaves each one a tile for its rest.
    sequence, behind = 0, num_sequences
    while behind - sequence > 1:
        middle = (sequence + behind) // 2
        is_before = tl.load(first_row_ptr + middle) // TOKENS + middle <= tile
        sequence = tl.where(is_before, middle, sequence)
        behind = tl.where(is_before, behind, middle)
    first_row = tl.load(first_row_ptr + sequence)
    length = tl.load(first_row_ptr + sequence + 1) - first_row
    first_token = (tile - first_row // TOKENS - sequence) * TOKENS
    if first_token >= length:
        return
    start = tl.load(start_ptr + sequence)
    end = start + tl.minimum(first_token + TOKENS, length)
    split_keys = tl.maximum(tl.cdiv(tl.cdiv(end, KEYS), splits) * KEYS, SPLIT_KEYS)
    first_key = split * split_keys
    last_key = tl.minimum(first_key + split_keys, end)

    row = tl.arange(0, TOKENS * PADDED_GROUP)
    token, member = first_token + row // PADDED_GROUP, row % PADDED_GROUP
    is_row = (token < length) & (member < GROUP)
    d = tl.arange(0, padded(D))
    head = kv_head * GROUP + member
    row_in_q = (first_row + token).to(tl.int64)
    out_row = (row_in_q * H + head) * splits + split
    row_max = tl.full([TOKENS * PADDED_GROUP], -1e30, tl.float32)  # finite: a row may see no keys of the split
    row_sum = tl.zeros([TOKENS * PADDED_GROUP], tl.float32)
    if first_key >= end:
        tl.store(log_sum_ptr + out_row, tl.full(row_max.shape, float("-inf"), tl.float32), mask=is_row)
        return
    q_place = row_in_q[:, None] * stride_q + (head * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_place, mask=inside(is_row, d, D), other=0.0)
    if UPCAST_DOT:
        q = q.to(tl.float32)
    acc = tl.zeros([TOKENS * PADDED_GROUP, padded(D)], tl.float32)
    k_ptr += kv_head * D
    v_ptr += kv_head * D
    table_ptr += sequence * stride_table
    # Every row of the tile sees the keys before this one.
    all_see = tl.minimum((start + first_token + 1) // KEYS * KEYS, last_key)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, start + token, end, first_key, all_see,
        stride_block, stride_token, scale_log2, D, BLOCK_SIZE, KEYS, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, start + token, end, tl.maximum(all_see, first_key), last_key,
        stride_block, stride_token, scale_log2, D, BLOCK_SIZE, KEYS, True,
    )  # fmt: skip
    total = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(part_ptr + out_row[:, None] * D + d[None, :], acc / total[:, None], mask=inside(is_row, d, D))
    log_sum = tl.where(row_sum > 0, row_max + tl.log2(total), float("-inf"))
    tl.store(log_sum_ptr + out_row, log_sum, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _merge_kernel(
    part_ptr, log_sum_ptr, out_ptr, num_rows, splits, D: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """out[row] = sum over splits of 2^log_sum * part / sum of 2^log_sum. Parts of a log_sum of -inf are not read."""
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, padded(D))
    acc = tl.zeros([ROWS, padded(D)], tl.float32)
    total, best = tl.zeros([ROWS], tl.float32), tl.full([ROWS], -1e30, tl.float32)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        place = row[:, None] * splits + split[None, :]
        is_split = (row < num_rows)[:, None] & (split < splits)[None, :]
        log_sum = tl.load(log_sum_ptr + place, mask=is_split, other=float("-inf"))
        is_there = inside_parts(log_sum > float("-inf"), d, D)
        part = tl.load(part_ptr + place[:, :, None] * D + d[None, None, :], mask=is_there, other=0.0)
        new_best = tl.maximum(best, tl.max(log_sum, 1))
        weight, shrink = tl.exp2(log_sum - new_best[:, None]), tl.exp2(best - new_best)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
    out = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * D + d[None, :], out, mask=inside(row < num_rows, d, D))


def paged_extend_triton(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    chunks: PagedChunks,
    splits: int | None = None,
    tile: ExtendTile | None = None,
) -> Tensor:
    T, H, D = q.shape
    num_sequences, num_kv = len(chunks.start_N), k_pool.shape[2]
    check_paged(q, k_pool, v_pool)
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    tile, S = tile or extend_tile(D, q.dtype), splits or extend_splits(q, k_pool, chunks)
    tokens = _tokens(tile, H // num_kv)
    part = torch.empty((T, H, S, D), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((T, H, S), dtype=torch.float32, device=q.device)
    _extend_kernel[(num_kv, T // tokens + num_sequences, S)](
        q, k_pool, v_pool, part, log_sum, chunks.first_row_N1, chunks.start_N, chunks.table_NM,
        num_sequences, q.stride(0), k_pool.stride(0), k_pool.stride(1), chunks.table_NM.stride(0), scale * LOG2_E.value,
        H=H, GROUP=H // num_kv, PADDED_GROUP=next_power_of_2(H // num_kv), D=D, BLOCK_SIZE=k_pool.shape[1],
        TOKENS=tokens, KEYS=tile.keys, SPLIT_KEYS=tile.split_keys,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    merge_splits(part, log_sum, out)
    return out


def merge_splits(part: Tensor, log_sum: Tensor, out: Tensor) -> None:
    """Writes to out [T, H, D] what S splits have found: part [T, H, S, D] and log_sum [T, H, S], as in the kernel."""
    T, H, S, D = part.shape
    _merge_kernel[(cdiv(T * H, MERGED_ROWS),)](
        part, log_sum, out, T * H, S, D=D, ROWS=MERGED_ROWS, AT_ONCE=AT_ONCE, num_warps=1 if D <= 64 else 4
    )
