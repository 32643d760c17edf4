"""Attention of one query row a sequence, or a few, over the paged KV pool, in Triton: `paged_decode` on a GPU.

    out_r = softmax(scale * q_r K^T) V [* sigmoid(gate_r)]        K, V: the first lens_R[r] tokens of row r's sequence,
                                                                  with `skip_first` without the first of all

All contexts are laid end to end, once for each KV head, in steps of a few keys. Each of W programs takes an equal share
of the steps, wherever contexts begin and end in it: one long context beside many short ones keeps all multiprocessors
busy. What a program computes of one context is a piece; decode_merge.py merges the pieces of each row.

Shapes    q and, if there is one, gate [R, H, D], any stride over rows; k_pool, v_pool [P, bs, Hkv, D], of
          the same strides; returns [R, H, D]
Contract  D is at most 256; a context of no tokens (a padding row) gives zeros; with `skip_first` a
          context has no token or at least two. The number of programs
          follows from R, N, Hkv and the table's width alone, never from the contexts: captured graphs replay
          with other contexts. Contexts and table are read early: an overlapped kernel (headrace/kernels/lib/pdl.py)
          must not have written them just before
Numerics  as in prefill.py; the pieces are merged in float32. Where a context is cut depends on the others
Source    Dao et al. 2023, "Flash-Decoding": contexts are cut among programs, a second kernel merges them; Osama et al.
          2023, "Stream-K", and Sanovar et al. 2024, "LeanAttention": equal shares of all steps. The
          query heads of one KV head, of each of the sequence's rows, are the rows of one product, padded to the 16 that
          `tl.dot` needs: a context is read once for all of them

Legend    N sequences, R rows, T = R / N of each sequence, side by side, M blocks of the longest, W programs. A tile:
          the rows of one sequence that are computed together, all T or a part (`tokens_at_once`)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.decode_merge import Cut, merge_pieces
from headrace.kernels.attention.decode_shares import longest_context, next_item, num_programs, share_of
from headrace.kernels.attention.head_dims import inside, padded
from headrace.kernels.attention.prefill import check_paged, padded_table
from headrace.kernels.lib.dispatch import UPCAST_DOT
from headrace.kernels.lib.dot import dot_block
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv
from headrace.kernels.lib.upload import upload_lists


@dataclass(frozen=True)
class PagedContexts:
    """Context length of each row and blocks of each sequence: int32, on the device."""

    lens_R: Tensor  # tokens of context, the row's own included; none: the row sees nothing
    table_NM: Tensor  # entries past a sequence's last block are not read

    @classmethod
    def build(
        cls, context_lens: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int, device: torch.device
    ) -> "PagedContexts":
        """Contexts of sequences of one row."""
        width, table = padded_table(context_lens, block_ids, block_size)
        lens_R, flat = upload_lists([context_lens, table], device, torch.int32)
        return cls(lens_R, flat.view(len(context_lens), width))

    @property
    def rows_each(self) -> int:
        """T."""
        R, N = len(self.lens_R), len(self.table_NM)
        if R % max(1, N):
            raise ValueError(f"{R} rows are not as many for each of {N} sequences")
        return R // max(1, N)


class DecodeTile(NamedTuple):
    """A program's tile: `keys` keys a step, and at least `least_steps` steps where the contexts have as many."""

    keys: int
    least_steps: int
    num_warps: int
    num_stages: int


MOST_ROWS = 64  # query heads of a KV head times rows of a sequence, in one program


def tokens_at_once(rows_each: int, group: int) -> int:
    """Rows of one sequence that a program takes: all, or about equal parts of at most MOST_ROWS query heads."""
    return cdiv(rows_each, cdiv(rows_each, max(1, MOST_ROWS // group)))


def decode_tile(head_dim: int, dtype: torch.dtype, rows: int = 16) -> DecodeTile:
    """64 to 96 KiB of keys and values in flight a program, a quarter of that for narrow heads.

    rows    of the product. More than 16 of wide heads take a thread 150 to 250 registers with four warps
    """
    if dtype == torch.float32:
        return DecodeTile(16, 8, 4, 1)
    keys, num_warps = 64 if head_dim <= 128 else 32, 4 if rows <= 16 or head_dim <= 64 else 8
    return DecodeTile(keys, 2, num_warps, 3 if head_dim <= 64 else 4)


@triton.jit(  # one compiled kernel for any number of contexts, and tables of any width and address
    do_not_specialize=["stride_table", "num_tiles", "least_steps"],
    do_not_specialize_on_alignment=["lens_ptr", "table_ptr"],
)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, log_sum_ptr, lens_ptr, table_ptr,
    stride_q, stride_block, stride_token, stride_table, num_tiles, least_steps, scale_log2,
    H: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SKIP_FIRST: tl.constexpr,
):  # fmt: skip
    """A program's share of all steps. Of item i, the GROUP query heads of one KV head of a tile's TOKENS rows, program
    w writes piece i + w: part [items + W, TOKENS * GROUP, D] and log_sum [items + W, TOKENS * GROUP], base 2, float32.
    """
    let_next_start()
    HKV: tl.constexpr = H // GROUP
    program = tl.program_id(0)
    position, share_end, tile, tile_begin, tile_end = share_of(
        lens_ptr, program, tl.num_programs(0), least_steps, num_tiles, HKV, T, TOKENS, KEYS
    )
    steps = (tile_end - tile_begin) // HKV  # of each KV head
    kv_head = (position - tile_begin) // tl.maximum(steps, 1)
    step = (position - tile_begin) % tl.maximum(steps, 1)
    row, d = tl.arange(0, ROWS), tl.arange(0, padded(D))
    while position < share_end:
        sequence, first_token = tile // tl.cdiv(T, TOKENS), tile % tl.cdiv(T, TOKENS) * TOKENS
        token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
        is_row = (row < TOKENS * GROUP) & (token < T)
        row_in_q = sequence.to(tl.int64) * T + token
        length = longest_context(lens_ptr, tile, num_tiles, T, TOKENS)
        limit = length
        if T > 1:
            limit = tl.load(lens_ptr + row_in_q, mask=is_row, other=0)
        num_here = tl.minimum(steps - step, share_end - position)
        first_key = step * KEYS
        last_key = tl.minimum(first_key + num_here * KEYS, length)
        key = first_key + tl.arange(0, KEYS)
        blocks_ptr = table_ptr + sequence.to(tl.int64) * stride_table
        block = tl.load(blocks_ptr + key // BLOCK_SIZE, mask=key < last_key, other=0)
        wait_for_previous()  # does nothing the next time
        q_place = row_in_q[:, None] * stride_q + (head * D)[:, None] + d[None, :]
        q = tl.load(q_ptr + q_place, mask=inside(is_row, d, D), other=0.0)
        if UPCAST_DOT:
            q = q.to(tl.float32)
        acc = tl.zeros([ROWS, padded(D)], tl.float32)
        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see no keys of the piece
        row_sum = tl.zeros([ROWS], tl.float32)
        for _ in range(first_key, last_key, KEYS):
            is_key = key < last_key
            if SKIP_FIRST:
                is_key &= key > 0
            place = block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * stride_token + kv_head * D
            k = tl.load(k_ptr + place[:, None] + d[None, :], mask=inside(is_key, d, D), other=0.0)
            v = tl.load(v_ptr + place[:, None] + d[None, :], mask=inside(is_key, d, D), other=0.0)
            if UPCAST_DOT:
                k = k.to(tl.float32)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            sees = is_key[None, :]
            if T > 1:
                sees &= key[None, :] < limit[:, None]
            score = tl.where(sees, score, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1))
            weight = tl.exp2(score - new_max[:, None])
            shrink = tl.exp2(row_max - new_max)
            row_sum = row_sum * shrink + tl.sum(weight, 1)
            row_max = new_max
            weight = weight.to(v.dtype)
            if UPCAST_DOT:
                weight, v = weight.to(tl.float32), v.to(tl.float32)
            acc = tl.dot(weight, v, acc * shrink[:, None], input_precision="ieee")
            # Loaded one step ahead, so that prefetching keys waits for no other load.
            key += KEYS
            block = tl.load(blocks_ptr + key // BLOCK_SIZE, mask=key < last_key, other=0)
        piece_row = (tile * HKV + kv_head + program).to(tl.int64) * (TOKENS * GROUP) + row
        is_kept = row < TOKENS * GROUP
        denominator = tl.where(row_sum > 0, row_sum, 1.0)
        tl.store(part_ptr + piece_row[:, None] * D + d[None, :], acc / denominator[:, None], mask=inside(is_kept, d, D))
        tl.store(log_sum_ptr + piece_row, row_max + tl.log2(denominator), mask=is_kept)

        position += num_here
        step = 0
        tile, kv_head, steps = next_item(
            lens_ptr, tile, kv_head, steps, position < share_end, num_tiles, HKV, T, TOKENS, KEYS
        )
    wait_for_previous()  # of programs without a step, too


def paged_decode_triton(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    scale: float,
    contexts: PagedContexts,
    gate: Tensor | None = None,
    tile: DecodeTile | None = None,
    programs: int | None = None,
    skip_first: bool = False,
) -> Tensor:
    R, H, D = q.shape
    num_kv, block_size = k_pool.shape[2], k_pool.shape[1]
    check_paged(q, k_pool, v_pool)
    if gate is not None and (gate.shape != q.shape or gate.stride()[1:] != (D, 1)):
        raise ValueError(f"gate {tuple(gate.shape)} of strides {gate.stride()} does not fit q {tuple(q.shape)}")
    if len(contexts.lens_R) != R:
        raise ValueError(f"contexts of {len(contexts.lens_R)} rows do not fit q {tuple(q.shape)}")
    out = torch.empty((R, H, D), dtype=q.dtype, device=q.device)
    if R == 0:
        return out
    group, T = H // num_kv, contexts.rows_each
    tokens = tokens_at_once(T, group)
    rows, num_tiles = dot_block(tokens * group), R // T * cdiv(T, tokens)
    tile, num_items = tile or decode_tile(D, q.dtype, rows), num_tiles * num_kv
    at_a_time = MULTIPROCESSORS * (2 if D > 64 else 4)
    W = programs or num_programs(
        at_a_time, num_items, contexts.table_NM.shape[1] * block_size, tile.keys * tile.least_steps
    )
    part = torch.empty((num_items + W, tokens * group, D), dtype=torch.float32, device=q.device)
    log_sum = torch.empty((num_items + W, tokens * group), dtype=torch.float32, device=q.device)
    _decode_kernel[(W,)](
        q, k_pool, v_pool, part, log_sum, contexts.lens_R, contexts.table_NM,
        q.stride(0), k_pool.stride(0), k_pool.stride(1), contexts.table_NM.stride(0), num_tiles, tile.least_steps,
        scale * LOG2_E.value,
        H=H, GROUP=group, T=T, TOKENS=tokens, ROWS=rows, D=D, BLOCK_SIZE=block_size,
        KEYS=tile.keys, SKIP_FIRST=skip_first,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **OVERLAPPED,
    )  # fmt: skip
    cut = Cut(contexts.lens_R, T, tokens, group, W, tile.keys, tile.least_steps)
    merge_pieces(part, log_sum, out, cut, gate)
    return out
