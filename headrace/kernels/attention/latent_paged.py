"""Attention of queries over latents in a paged pool, in Triton: decodes, and chunks of prompts behind their context.

    out_t,h = softmax(scale * q_t,h L^T) L[:, :R]        L: latents of the sequence's tokens up to row t's own

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
from headrace.kernels.attention.prefill import PagedChunks
from headrace.kernels.lib.dot import dot, dot_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

TARGET_PROGRAMS = 264  # two for each of 132 multiprocessors (H200)
MOST_SPLITS = 64
MERGED_AT_ONCE = tl.constexpr(8)


class LatentTile(NamedTuple):
    """A program's tile: `keys` latents at a time, at least `split_keys` in all where the context has as many."""

    keys: int
    split_keys: int
    num_warps: int
    num_stages: int


def most_rows(dtype: torch.dtype) -> int:
    """Query rows of a program, tokens times heads, at most."""
    return 32 if dtype == torch.float32 else 64


def latent_tile(dtype: torch.dtype, rows: int) -> LatentTile:
    """The tile of a program of so many query rows: few leave room for twice the keys."""
    if dtype == torch.float32:  # full-precision products run outside the tensor cores: small tiles, for tests
        return LatentTile(16, 64, 8, 1)
    return LatentTile(64, 256, 8, 2) if rows <= 32 else LatentTile(32, 256, 8, 3)


@triton.jit
def keys_of_split(length, splits, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """Keys a split, a multiple of KEYS and at least LEAST, another one; the last splits may have none."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, KEYS), splits) * KEYS, LEAST)


@triton.jit
def _longest(lens_ptr, sequence, first, T: tl.constexpr, TOKENS: tl.constexpr):
    """The longest context of TOKENS rows of a sequence, or of as many as there are from `first` on."""
    lens_ptr += sequence * T + first
    length = tl.load(lens_ptr)
    for i in tl.static_range(1, TOKENS):
        length = tl.maximum(length, tl.load(lens_ptr + i, mask=first + i < T, other=0))
    return length


@triton.jit(  # one compiled kernel for any number of sequences, and any width and address of the tables
    do_not_specialize=["num_sequences", "stride_table"],
    do_not_specialize_on_alignment=["first_row_ptr", "before_ptr", "table_ptr"],
)
def _latent_kernel(
    q_ptr, pool_ptr, part_ptr, log_sum_ptr,
    first_row_ptr,  # None: decodes, EACH rows a sequence
    before_ptr,  # tokens of context before a sequence's first row; of decodes each row's, with its own
    table_ptr, num_sequences, stride_q, stride_block, stride_token, stride_table, scale_log2,
    EACH: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """One split of the context of TOKENS tokens of one sequence for HEADS heads. part [T, H, G, R] and log_sum
    [T, H, G], base 2, are float32; a row that sees nothing of the split has a log_sum of -inf and no part."""
    let_next_start()
    tile, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row = tl.arange(0, TOKENS * HEADS)
    head = tl.program_id(1) * HEADS + row % HEADS
    if first_row_ptr is None:
        sequence = tile // tl.cdiv(EACH, TOKENS)
        first_token = tile % tl.cdiv(EACH, TOKENS) * TOKENS
        first_row, token, length = sequence * EACH, first_token + row // HEADS, EACH
        end = _longest(before_ptr, sequence, first_token, EACH, TOKENS)
        limit = end
        if EACH > 1:
            limit = tl.load(before_ptr + first_row + token, mask=token < EACH, other=0)
    else:
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
        start = tl.load(before_ptr + sequence)
        end = tl.where(first_token < length, start + tl.minimum(first_token + TOKENS, length), 0)
        limit = start + token + 1
    wait_for_previous()
    is_row = (token < length) & (head < H)
    split_keys = keys_of_split(end, splits, KEYS, SPLIT_KEYS)
    first_key = split * split_keys
    last_key = tl.minimum(first_key + split_keys, end)

    c, s = tl.arange(0, R), tl.arange(0, S)
    row_in_q = (first_row + token).to(tl.int64)
    q_ptr += (row_in_q * stride_q + head * (R + S))[:, None]
    q_c = tl.load(q_ptr + c[None, :], mask=is_row[:, None], other=0.0)
    q_s = tl.load(q_ptr + R + s[None, :], mask=is_row[:, None], other=0.0)
    acc = tl.zeros([TOKENS * HEADS, R], tl.float32)
    row_max = tl.full([TOKENS * HEADS], -1e30, tl.float32)  # finite: a row may see none of the keys
    row_sum = tl.zeros([TOKENS * HEADS], tl.float32)
    table_ptr += sequence * stride_table
    for first in range(first_key, last_key, KEYS):
        key = first + tl.arange(0, KEYS)
        is_key = key < last_key
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=is_key, other=0)
        place = pool_ptr + (block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_token)[:, None]
        latent_c = tl.load(place + c[None, :], mask=is_key[:, None], other=0.0)
        latent_s = tl.load(place + R + s[None, :], mask=is_key[:, None], other=0.0)
        score = dot(q_s, tl.trans(latent_s), dot(q_c, tl.trans(latent_c))) * scale_log2
        sees = is_key[None, :]
        if EACH > 1 or first_row_ptr is not None:
            sees &= key[None, :] < limit[:, None]
        score = tl.where(sees, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        row_max = new_max
        acc = dot(weight.to(latent_c.dtype), latent_c, acc * shrink[:, None])
    out = (row_in_q * H + head) * splits + split
    sees = row_sum > 0
    total = tl.where(sees, row_sum, 1.0)
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
    q: Tensor, pool: Tensor, size: int, scale: float, rows: PagedContexts | PagedChunks, splits: int | None = None
) -> Tensor:
    """`size` is R. Decodes come with contexts, chunks of prompts with chunks."""
    T, H, D = q.shape
    S = D - size
    if any(part < 16 or part & (part - 1) for part in (size, S)):
        raise ValueError(f"latents of {size} and {S} values: a GPU takes powers of two, at least 16")
    if q.stride()[1:] != (D, 1) or pool.shape[2:] != (1, D) or pool.stride(3) != 1:
        raise ValueError(f"q {q.stride()} and pool {tuple(pool.shape)}, {pool.stride()} do not fit")
    out = torch.empty((T, H, size), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    heads = min(dot_block(H), 32)
    most_tokens = max(1, most_rows(q.dtype) // heads)
    if isinstance(rows, PagedContexts):
        each, N = rows.rows_each, len(rows.table_NM)
        tokens = min(next_power_of_2(each), most_tokens)
        num_tiles, first_rows, before = N * cdiv(each, tokens), None, rows.lens_R
    else:
        each, tokens, N = 1, most_tokens, len(rows.start_N)
        num_tiles, first_rows, before = T // tokens + N, rows.first_row_N1, rows.start_N
    groups, tile = cdiv(H, heads), latent_tile(q.dtype, tokens * heads)
    G = splits or _num_splits(num_tiles * groups, rows.table_NM.shape[1] * pool.shape[1], tile.split_keys)
    part = torch.empty((T, H, G, size), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((T, H, G), dtype=torch.float32, device=q.device)
    _latent_kernel[(num_tiles, groups, G)](
        q, pool, part, log_sum, first_rows, before, rows.table_NM, N,
        q.stride(0), pool.stride(0), pool.stride(1), rows.table_NM.stride(0), scale * LOG2_E.value,
        EACH=each, H=H, HEADS=heads, R=size, S=S, BLOCK_SIZE=pool.shape[1],
        TOKENS=tokens, KEYS=tile.keys, SPLIT_KEYS=tile.split_keys,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
    )  # fmt: skip
    _merge_latents_kernel[(T * H,)](part, log_sum, out, G, R=size, num_warps=4, **OVERLAPPED)
    return out


def _num_splits(num_programs: int, table_tokens: int, split_keys: int) -> int:
    """Splits of each context, a power of two, from shapes alone."""
    most = max(1, min(cdiv(TARGET_PROGRAMS, num_programs), cdiv(table_tokens, split_keys), MOST_SPLITS))
    return next_power_of_2(most)
