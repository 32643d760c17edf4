"""Attention of queries over latents in a paged pool, in Triton: decodes, and chunks of prompts behind their context.

    out_t,h = softmax(scale * q_t,h L^T) L[:, :R]        L: latents of the sequence's tokens up to row t's own

Decodes share their contexts among programs equally, as decode.py does. A prompt's contexts are cut into as many splits.

Shapes    q [T, H, R + S], each row's heads side by side; pool [P, bs, 1, R + S], any stride over blocks; returns
          [T, H, R]
Contract  R and S are powers of two, at least 16; a row without context (padding) gives zeros. Of each sequence of a
          decode there are as many rows, side by side. Grids and split counts follow from T, N and the table's width
          alone, never from the contexts: captured graphs replay with other contexts. Contexts and table are read early:
          an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written them just before
Numerics  online softmax in float32; products of bf16 operands accumulate in float32; splits are merged in float32
Source    Dao et al. 2023, "Flash-Decoding". All heads are rows of one tile, so that a latent is read once, for the
          scores and for the sum

Legend    N sequences, M blocks of the longest, G splits
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.decode import PagedContexts
from headrace.kernels.attention.decode_merge import Cut, merge_pieces
from headrace.kernels.attention.decode_shares import longest_context, next_item, num_programs, share_of
from headrace.kernels.attention.prefill import PagedChunks
from headrace.kernels.lib.dot import dot, dot_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv, next_power_of_2

TARGET_PROGRAMS = 2 * MULTIPROCESSORS
MOST_SPLITS = 64
MERGED_AT_ONCE = tl.constexpr(8)
MOST_HEADS = 32  # of a program


class LatentTile(NamedTuple):
    """A program's tile: `keys` latents at a time, and at least `least_steps` times where the context has as many."""

    keys: int
    least_steps: int
    num_warps: int
    num_stages: int


def most_rows(dtype: torch.dtype) -> int:
    """Query rows of a program, tokens times heads, at most."""
    return 32 if dtype == torch.float32 else 64


def latent_tile(dtype: torch.dtype, rows: int) -> LatentTile:
    """The tile of a program of so many query rows: few leave room for twice the keys."""
    if dtype == torch.float32:  # full-precision products run outside the tensor cores: small tiles, for tests
        return LatentTile(16, 4, 8, 1)
    return LatentTile(64, 2, 8, 2) if rows <= 32 else LatentTile(32, 8, 8, 3)


@triton.jit
def keys_of_split(length, splits, least_steps, KEYS: tl.constexpr):
    """Keys a split: so many steps, and more if splits are fewer; the last splits may have none."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, KEYS), splits), least_steps) * KEYS


@triton.jit
def _attend(
    q_ptr, pool_ptr, blocks_ptr, first_key, last_key, limit, is_row, stride_block, stride_token, scale_log2,
    HAS_LIMITS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Sum of weighted latents [rows, R], the largest score, base 2, and the sum of weights, of query rows at q_ptr
    [rows] over some keys of one sequence; with HAS_LIMITS of each row's first `limit` alone."""
    c, s = tl.arange(0, R), tl.arange(0, S)
    q_c = tl.load(q_ptr[:, None] + c[None, :], mask=is_row[:, None], other=0.0)
    q_s = tl.load(q_ptr[:, None] + R + s[None, :], mask=is_row[:, None], other=0.0)
    ROWS: tl.constexpr = q_ptr.shape[0]
    acc = tl.zeros([ROWS, R], tl.float32)
    row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see none of the keys
    row_sum = tl.zeros([ROWS], tl.float32)
    for first in range(first_key, last_key, KEYS):
        key = first + tl.arange(0, KEYS)
        is_key = key < last_key
        block = tl.load(blocks_ptr + key // BLOCK_SIZE, mask=is_key, other=0)
        place = pool_ptr + (block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_token)[:, None]
        latent_c = tl.load(place + c[None, :], mask=is_key[:, None], other=0.0)
        latent_s = tl.load(place + R + s[None, :], mask=is_key[:, None], other=0.0)
        score = dot(q_s, tl.trans(latent_s), dot(q_c, tl.trans(latent_c))) * scale_log2
        sees = is_key[None, :]
        if HAS_LIMITS:
            sees &= key[None, :] < limit[:, None]
        score = tl.where(sees, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        row_max = new_max
        acc = dot(weight.to(latent_c.dtype), latent_c, acc * shrink[:, None])
    return acc, row_max, row_sum


@triton.jit(  # one compiled kernel for any number of contexts, and tables of any width and address
    do_not_specialize=["stride_table", "num_tiles", "least_steps"],
    do_not_specialize_on_alignment=["lens_ptr", "table_ptr"],
)
def _latent_decode_kernel(
    q_ptr, pool_ptr, part_ptr, log_sum_ptr, lens_ptr, table_ptr,
    num_tiles, least_steps, stride_q, stride_block, stride_token, stride_table, scale_log2,
    T: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A program's share of all steps, as in decode.py: HEADS heads take the place of a KV head's."""
    let_next_start()
    GROUPS: tl.constexpr = (H + HEADS - 1) // HEADS  # `tl.cdiv` is no constant to Triton 3.6
    position, share_end, tile, tile_begin, tile_end = share_of(
        lens_ptr, tl.program_id(0), tl.num_programs(0), least_steps, num_tiles, GROUPS, T, TOKENS, KEYS
    )
    steps = (tile_end - tile_begin) // GROUPS  # of each group of heads
    group = (position - tile_begin) // tl.maximum(steps, 1)
    step = (position - tile_begin) % tl.maximum(steps, 1)
    row = tl.arange(0, TOKENS * HEADS)
    while position < share_end:
        sequence, first_token = tile // tl.cdiv(T, TOKENS), tile % tl.cdiv(T, TOKENS) * TOKENS
        token, head = first_token + row // HEADS, group * HEADS + row % HEADS
        is_row = (token < T) & (head < H)
        row_in_q = sequence.to(tl.int64) * T + token
        length = longest_context(lens_ptr, tile, num_tiles, T, TOKENS)
        limit = length
        if T > 1:
            limit = tl.load(lens_ptr + row_in_q, mask=is_row, other=0)
        num_here = tl.minimum(steps - step, share_end - position)
        first_key = step * KEYS
        last_key = tl.minimum(first_key + num_here * KEYS, length)
        wait_for_previous()  # does nothing the next time
        acc, row_max, row_sum = _attend(
            q_ptr + row_in_q * stride_q + head * (R + S), pool_ptr, table_ptr + sequence.to(tl.int64) * stride_table,
            first_key, last_key, limit, is_row, stride_block, stride_token, scale_log2, T > 1, R, S, BLOCK_SIZE, KEYS,
        )  # fmt: skip
        piece = tile * GROUPS + group + tl.program_id(0)
        piece_row = piece.to(tl.int64) * (TOKENS * HEADS) + tl.arange(0, TOKENS * HEADS)
        total = tl.where(row_sum > 0, row_sum, 1.0)
        c = tl.arange(0, R)
        tl.store(part_ptr + piece_row[:, None] * R + c[None, :], acc / total[:, None], mask=is_row[:, None])
        tl.store(log_sum_ptr + piece_row, row_max + tl.log2(total), mask=is_row)
        position += num_here
        step = 0
        tile, group, steps = next_item(
            lens_ptr, tile, group, steps, position < share_end, num_tiles, GROUPS, T, TOKENS, KEYS
        )
    wait_for_previous()  # of programs without a step, too


@triton.jit(  # one compiled kernel for any number of sequences, and any width and address of the tables
    do_not_specialize=["num_sequences", "stride_table"],
    do_not_specialize_on_alignment=["first_row_ptr", "start_ptr", "table_ptr"],
)
def _latent_prompts_kernel(
    q_ptr, pool_ptr, part_ptr, log_sum_ptr, first_row_ptr, start_ptr, table_ptr,
    num_sequences, stride_q, stride_block, stride_token, stride_table, scale_log2,
    H: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, LEAST_STEPS: tl.constexpr,
):  # fmt: skip
    """One split of the context of TOKENS tokens of one sequence for HEADS heads. part [T, H, G, R] and log_sum
    [T, H, G], base 2, are float32; a row that sees nothing of the split has a log_sum of -inf and no part."""
    let_next_start()
    tile, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row = tl.arange(0, TOKENS * HEADS)
    head = tl.program_id(1) * HEADS + row % HEADS
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
    token = first_token + row // HEADS
    start = tl.load(start_ptr + sequence)
    end = tl.where(first_token < length, start + tl.minimum(first_token + TOKENS, length), 0)
    wait_for_previous()
    is_row = (token < length) & (head < H)
    split_keys = keys_of_split(end, splits, LEAST_STEPS, KEYS)
    first_key = split * split_keys
    last_key = tl.minimum(first_key + split_keys, end)
    row_in_q = (first_row + token).to(tl.int64)
    acc, row_max, row_sum = _attend(
        q_ptr + row_in_q * stride_q + head * (R + S), pool_ptr, table_ptr + sequence * stride_table,
        first_key, last_key, start + token + 1, is_row, stride_block, stride_token, scale_log2,
        True, R, S, BLOCK_SIZE, KEYS,
    )  # fmt: skip
    out = (row_in_q * H + head) * splits + split
    sees = row_sum > 0
    total = tl.where(sees, row_sum, 1.0)
    c = tl.arange(0, R)
    tl.store(part_ptr + out[:, None] * R + c[None, :], acc / total[:, None], mask=(is_row & sees)[:, None])
    tl.store(log_sum_ptr + out, tl.where(sees, row_max + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit(do_not_specialize=["splits"])
def _merge_latents_kernel(part_ptr, log_sum_ptr, out_ptr, splits, R: tl.constexpr):
    """out[row] = sum over splits of 2^log_sum * part / sum of 2^log_sum; zeros if all of these are -inf."""
    let_next_start()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, R)
    acc = tl.zeros([R], tl.float32)
    total, best = 0.0, -1e30
    wait_for_previous()
    for first in range(0, splits, MERGED_AT_ONCE):
        split = first + tl.arange(0, MERGED_AT_ONCE)
        log_sum = tl.load(log_sum_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
        is_there = log_sum > float("-inf")
        part = tl.load(part_ptr + (row * splits + split)[:, None] * R + c[None, :], mask=is_there[:, None], other=0.0)
        new_best = tl.maximum(best, tl.max(log_sum, 0))
        weight, shrink = tl.exp2(log_sum - new_best), tl.exp2(best - new_best)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        best = new_best
    tl.store(out_ptr + row * R + c, (acc / tl.where(total > 0, total, 1.0)).to(out_ptr.dtype.element_ty))


def attend_latents_triton(
    q: Tensor, pool: Tensor, size: int, scale: float, rows: PagedContexts | PagedChunks, programs: int | None = None
) -> Tensor:
    """`size` is R. Decodes come with contexts, chunks of prompts with chunks. `programs`: of decodes, or splits."""
    T, H, D = q.shape
    S = D - size
    if any(part < 16 or part & (part - 1) for part in (size, S)):
        raise ValueError(f"latents of {size} and {S} values: a GPU takes powers of two, at least 16")
    if q.stride()[1:] != (D, 1) or pool.shape[2:] != (1, D) or pool.stride(3) != 1:
        raise ValueError(f"q {q.stride()} and pool {tuple(pool.shape)}, {pool.stride()} do not fit")
    out = torch.empty((T, H, size), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    if isinstance(rows, PagedContexts):
        _attend_decodes(q, pool, scale, rows, programs, out)
    else:
        _attend_prompts(q, pool, scale, rows, programs, out)
    return out


def _attend_decodes(
    q: Tensor, pool: Tensor, scale: float, rows: PagedContexts, programs: int | None, out: Tensor
) -> None:
    (rows_in_all, H, D), size = q.shape, out.shape[2]
    T, heads = rows.rows_each, min(dot_block(H), MOST_HEADS)
    tokens = min(next_power_of_2(T), max(1, most_rows(q.dtype) // heads))
    tile, num_tiles = latent_tile(q.dtype, tokens * heads), rows_in_all // T * cdiv(T, tokens)
    num_items, table_tokens = num_tiles * cdiv(H, heads), rows.table_NM.shape[1] * pool.shape[1]
    W = programs or num_programs(TARGET_PROGRAMS, num_items, table_tokens, tile.keys * tile.least_steps)
    part = torch.empty((num_items + W, tokens * heads, size), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((num_items + W, tokens * heads), dtype=torch.float32, device=q.device)
    _latent_decode_kernel[(W,)](
        q, pool, part, log_sum, rows.lens_R, rows.table_NM, num_tiles, tile.least_steps,
        q.stride(0), pool.stride(0), pool.stride(1), rows.table_NM.stride(0), scale * LOG2_E.value,
        T=T, H=H, HEADS=heads, R=size, S=D - size, BLOCK_SIZE=pool.shape[1], TOKENS=tokens, KEYS=tile.keys,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
    )  # fmt: skip
    merge_pieces(part, log_sum, out, Cut(rows.lens_R, T, tokens, heads, W, tile.keys, tile.least_steps))


def _attend_prompts(
    q: Tensor, pool: Tensor, scale: float, chunks: PagedChunks, splits: int | None, out: Tensor
) -> None:
    (T, H, D), size = q.shape, out.shape[2]
    heads = min(dot_block(H), MOST_HEADS)
    tokens, N = max(1, most_rows(q.dtype) // heads), len(chunks.start_N)
    tile, num_tiles, groups = latent_tile(q.dtype, tokens * heads), T // tokens + N, cdiv(H, heads)
    table_tokens = chunks.table_NM.shape[1] * pool.shape[1]
    G = splits or _num_splits(num_tiles * groups, table_tokens, tile.keys * tile.least_steps)
    part = torch.empty((T, H, G, size), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((T, H, G), dtype=torch.float32, device=q.device)
    _latent_prompts_kernel[(num_tiles, groups, G)](
        q, pool, part, log_sum, chunks.first_row_N1, chunks.start_N, chunks.table_NM, N,
        q.stride(0), pool.stride(0), pool.stride(1), chunks.table_NM.stride(0), scale * LOG2_E.value,
        H=H, HEADS=heads, R=size, S=D - size, BLOCK_SIZE=pool.shape[1],
        TOKENS=tokens, KEYS=tile.keys, LEAST_STEPS=tile.least_steps,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
    )  # fmt: skip
    _merge_latents_kernel[(T * H,)](part, log_sum, out, G, R=size, num_warps=4, **OVERLAPPED)


def _num_splits(num_programs: int, table_tokens: int, least_keys: int) -> int:
    """Splits of each context, a power of two, from shapes alone."""
    most = max(1, min(cdiv(TARGET_PROGRAMS, num_programs), cdiv(table_tokens, least_keys), MOST_SPLITS))
    return next_power_of_2(most)
