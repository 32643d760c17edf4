"""Rows of a draft pass, one for each sequence: the place of its token, after which its position advances.

    position  = positions_b, which becomes one more: the place of the next pass's row
    context   = position + 1 where position < ends_b, else 0: behind its last draft a sequence sees nothing
    block     = table[b, position // block_size] where position < ends_b, else the scratch block
    offset    = position % block_size

Shapes    positions and ends [B] int64, table [B, M] int32, contiguous in its rows. Returned: positions, blocks and
          offsets [B] int64, contexts [B] int32
Contract  ends are within the table. An ordinary launch: all before it has ended, the pass before too
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv


class DraftRows(NamedTuple):
    """Shapes as above."""

    positions: Tensor
    contexts: Tensor
    blocks: Tensor
    offsets: Tensor


def next_draft_rows(positions: Tensor, ends: Tensor, table: Tensor, *, sizes: tuple[int, int]) -> DraftRows:
    """`sizes`: of a block, and the number of the scratch block."""
    if positions.shape != ends.shape or len(table) != len(ends) or {positions.dtype, ends.dtype} != {torch.int64}:
        raise ValueError(
            f"positions {tuple(positions.shape)} {positions.dtype}, ends {tuple(ends.shape)} {ends.dtype} and table "
            f"{tuple(table.shape)} are not of the same rows"
        )
    rows_of = next_draft_rows_triton if runs_triton(positions) else next_draft_rows_torch
    return rows_of(positions, ends, table, sizes)


def next_draft_rows_torch(positions: Tensor, ends: Tensor, table: Tensor, sizes: tuple[int, int]) -> DraftRows:
    block_size, scratch_block = sizes
    is_live = positions < ends
    places = (positions // block_size).clamp(max=table.shape[1] - 1)
    blocks = table.gather(1, places[:, None])[:, 0].long()
    rows = DraftRows(
        positions.clone(),
        torch.where(is_live, positions + 1, 0).int(),
        torch.where(is_live, blocks, scratch_block),
        positions % block_size,
    )
    positions += 1
    return rows


@triton.jit(do_not_specialize=["B"])
def _draft_rows_kernel(
    next_ptr, end_ptr, table_ptr, position_ptr, context_ptr, block_ptr, offset_ptr, B, stride_table, scratch_block,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = b < B
    position = tl.load(next_ptr + b, mask=is_row, other=0)
    is_live = position < tl.load(end_ptr + b, mask=is_row, other=0)
    block = tl.load(table_ptr + b.to(tl.int64) * stride_table + position // BLOCK_SIZE, mask=is_live, other=0)
    tl.store(position_ptr + b, position, mask=is_row)
    tl.store(context_ptr + b, tl.where(is_live, position + 1, 0).to(tl.int32), mask=is_row)
    tl.store(block_ptr + b, tl.where(is_live, block, scratch_block).to(tl.int64), mask=is_row)
    tl.store(offset_ptr + b, position % BLOCK_SIZE, mask=is_row)
    tl.store(next_ptr + b, position + 1, mask=is_row)


def next_draft_rows_triton(positions: Tensor, ends: Tensor, table: Tensor, sizes: tuple[int, int]) -> DraftRows:
    block_size, scratch_block = sizes
    B, new = len(positions), positions.new_empty
    rows = DraftRows(new(B), new(B, dtype=torch.int32), new(B), new(B))
    _draft_rows_kernel[(cdiv(B, 32),)](
        positions,
        ends,
        table,
        *rows,
        B,
        table.stride(0),
        scratch_block,
        BLOCK_SIZE=block_size,
        BLOCK=32,
        num_warps=1,
    )
    return rows
