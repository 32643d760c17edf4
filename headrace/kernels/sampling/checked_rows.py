"""Rows of a captured check: each sequence's newest token and its drafts, where they lie, and what its tail does.

A check may be launched before the host knows how many drafts of the one before were accepted. So its sequences come
with the least place where they may begin, and the place they have is found here, at the head of the pass.

    accepted  = num_accepted[COUNTED_AT] if COUNTED_AT >= 0 else 0
    start     = START + accepted
    position  = start + t of row t < LENGTH; its block and offset by the table
    base      = NEXT_BASE if COUNTED_AT >= 0 and 0 <= NEXT_BASE <= start else BASE; the slot of the state accordingly
    written   = the next multiple of the interval behind start if the rows reach it, where COUNTED_AT >= 0; else WRITTEN

    token of row 0         drawn[DRAW + accepted] if DRAW >= 0 else the known one
    token of another row   drafted[future] if future >= 0 else the known one

Shapes    fields [B, a `CheckField` each] int32, known and future [B * T] int64, drawn, drafted and num_accepted int64,
          table [B, M] int32, contiguous in its rows. Returned: tokens, positions, blocks and offsets [B * T] int64,
          contexts [B * T] int32, sources [B] int64, tails [B, 6] int32 (headrace/kernels/lib/tails.py)
Contract  B * T is a multiple of B. A row that is not its sequence's sees nothing and goes to the scratch block; a
          sequence of no rows, a captured pass's padding, has no tail and no state
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import next_power_of_2
from headrace.kernels.lib.tails import TailField


class CheckField(IntEnum):
    """The numbers that describe a sequence. States as in `TailField`, but places are counted from its first token."""

    LENGTH = 0  # rows that are its own
    START = 1  # place of its first row, or the least that it may have
    DRAW = 2  # index of the draw that is its newest token, or of the first that may be; -1: it is known
    COUNTED_AT = 3  # row of `num_accepted` with the drafts accepted before it; -1: it begins at START
    SRC = 4  # slot of the state at BASE; -1: a state of zeros
    BASE = 5  # tokens before that state
    NEXT_SRC = 6  # the state that the check before has written, and the tokens before it
    NEXT_BASE = 7  # -1: it has written none
    DST = 8  # slot of the state to write
    ROW = 9  # of the ring
    WRITTEN = 10  # tokens before the state to write; -1: none. Found here where COUNTED_AT is given


class CheckedRows(NamedTuple):
    """Shapes as above."""

    tokens: Tensor
    positions: Tensor
    contexts: Tensor
    blocks: Tensor
    offsets: Tensor
    sources: Tensor
    tails: Tensor


class CheckSources(NamedTuple):
    """Sources of the tokens and places of a check that the host does not know.

    drawn         int64 [draws]: the last launch's tokens
    drafted       int64 [rows, K]: the drafts that the layer made last
    num_accepted  int64 [rows]: how many drafts of the last check were accepted
    """

    drawn: Tensor
    drafted: Tensor
    num_accepted: Tensor


def place_checked_rows(
    fields: Tensor, known: Tensor, future: Tensor, table: Tensor, sources: CheckSources, *, sizes: tuple[int, int, int]
) -> CheckedRows:
    """`sizes`: of a block, the number of the scratch block, and places of a ring's row."""
    B = len(fields)
    if len(known) % B or future.shape != known.shape or {known.dtype, future.dtype} != {torch.int64}:
        raise ValueError(
            f"known {tuple(known.shape)} {known.dtype} and future {tuple(future.shape)} {future.dtype} are not rows of "
            f"{B} sequences"
        )
    place = place_checked_rows_triton if runs_triton(known) else place_checked_rows_torch
    return place(fields, known, future, table, sources, sizes)


def place_checked_rows_torch(
    fields: Tensor, known: Tensor, future: Tensor, table: Tensor, sources: CheckSources, sizes: tuple[int, int, int]
) -> CheckedRows:
    block_size, scratch_block, num_places = sizes
    column = fields.long().unbind(1)
    B, T = len(fields), len(known) // len(fields)
    is_behind = column[CheckField.COUNTED_AT] >= 0
    accepted = torch.where(is_behind, sources.num_accepted[column[CheckField.COUNTED_AT].clamp(min=0)], 0)
    start, length = column[CheckField.START] + accepted, column[CheckField.LENGTH]
    row_T = torch.arange(T, device=fields.device)
    is_own = row_T < length[:, None]
    positions = torch.where(is_own, start[:, None] + row_T, 0)
    blocks = table.gather(1, positions // block_size).long()
    drafts = sources.drafted.view(-1)[future.clamp(min=0)]
    tokens = torch.where(future >= 0, drafts, known).view(B, T).clone()
    draw = column[CheckField.DRAW]
    tokens[:, 0] = torch.where(draw >= 0, sources.drawn[(draw + accepted).clamp(min=0)], tokens[:, 0])

    next_base, interval = column[CheckField.NEXT_BASE], num_places // 2
    is_next = is_behind & (next_base >= 0) & (next_base <= start)
    base = torch.where(is_next, next_base, column[CheckField.BASE])
    source = torch.where(is_next, column[CheckField.NEXT_SRC], column[CheckField.SRC])
    boundary = start - start % interval + interval
    reached = torch.where(boundary <= start + length, boundary, -1)
    written = torch.where(is_behind, reached, column[CheckField.WRITTEN])
    tails = torch.empty(B, len(TailField), dtype=torch.int32, device=fields.device)
    tails[:, TailField.SRC] = source.int()
    tails[:, TailField.DST] = torch.where(written >= 0, column[CheckField.DST], -1).int()
    tails[:, TailField.ROW] = fields[:, CheckField.ROW]
    tails[:, TailField.START] = (base % num_places).int()
    tails[:, TailField.KEPT] = (start - base).int()
    tails[:, TailField.WRITTEN] = torch.where(written >= 0, written - base, 0).int()
    return CheckedRows(
        tokens.view(-1),
        positions.view(-1),
        torch.where(is_own, positions + 1, 0).int().view(-1),
        torch.where(is_own, blocks, scratch_block).view(-1),
        (positions % block_size).view(-1),
        source,
        tails,
    )


@triton.jit
def _load_fields(ptr):
    """A sequence's numbers in the order of `CheckField`."""
    return (
        tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3), tl.load(ptr + 4), tl.load(ptr + 5),
        tl.load(ptr + 6), tl.load(ptr + 7), tl.load(ptr + 8), tl.load(ptr + 9), tl.load(ptr + 10),
    )  # fmt: skip


@triton.jit
def _checked_rows_kernel(
    fields_ptr, known_ptr, future_ptr, table_ptr, drawn_ptr, drafted_ptr, num_accepted_ptr,
    tokens_ptr, positions_ptr, contexts_ptr, blocks_ptr, offsets_ptr, sources_ptr, tails_ptr,
    stride_table, scratch_block,
    T: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr, PLACES: tl.constexpr,
    NUM_FIELDS: tl.constexpr, NUM_TAIL_FIELDS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    length, first, draw, behind, src, old_base, next_src, next_base, dst, row, known_written = _load_fields(
        fields_ptr + b * NUM_FIELDS
    )
    accepted = tl.load(num_accepted_ptr + tl.maximum(behind, 0), mask=behind >= 0, other=0).to(tl.int32)
    start = first + accepted

    t = tl.arange(0, BLOCK_T)
    is_row = t < T
    is_own = t < length
    position = tl.where(is_own, start + t, 0)
    block = tl.load(table_ptr + b.to(tl.int64) * stride_table + position // BLOCK_SIZE, mask=is_own, other=0)
    rows = b * T + t
    future = tl.load(future_ptr + rows, mask=is_row, other=-1)
    token = tl.load(known_ptr + rows, mask=is_row, other=0)
    draft = tl.load(drafted_ptr + tl.maximum(future, 0), mask=is_row & (future >= 0), other=0)
    newest = tl.load(drawn_ptr + tl.maximum(draw, 0) + accepted, mask=draw >= 0, other=0)
    token = tl.where(future >= 0, draft, token)
    token = tl.where((t == 0) & (draw >= 0), newest, token)
    tl.store(tokens_ptr + rows, token, mask=is_row)
    tl.store(positions_ptr + rows, position.to(tl.int64), mask=is_row)
    tl.store(contexts_ptr + rows, tl.where(is_own, position + 1, 0), mask=is_row)
    tl.store(blocks_ptr + rows, tl.where(is_own, block, scratch_block).to(tl.int64), mask=is_row)
    tl.store(offsets_ptr + rows, (position % BLOCK_SIZE).to(tl.int64), mask=is_row)

    is_next = (behind >= 0) & (next_base >= 0) & (next_base <= start)
    base = tl.where(is_next, next_base, old_base)
    source = tl.where(is_next, next_src, src)
    interval: tl.constexpr = PLACES // 2
    boundary = start - start % interval + interval
    reached = tl.where(boundary <= start + length, boundary, -1)
    written = tl.where(behind >= 0, reached, known_written)
    tails = tails_ptr + b * NUM_TAIL_FIELDS
    tl.store(sources_ptr + b, source.to(tl.int64))
    tl.store(tails, source)  # in the order of `TailField`
    tl.store(tails + 1, tl.where(written >= 0, dst, -1))
    tl.store(tails + 2, row)
    tl.store(tails + 3, base % PLACES)
    tl.store(tails + 4, start - base)
    tl.store(tails + 5, tl.where(written >= 0, written - base, 0))


def place_checked_rows_triton(
    fields: Tensor, known: Tensor, future: Tensor, table: Tensor, sources: CheckSources, sizes: tuple[int, int, int]
) -> CheckedRows:
    block_size, scratch_block, num_places = sizes
    B, R = len(fields), len(known)
    new = known.new_empty
    found = CheckedRows(
        new(R),
        new(R),
        new(R, dtype=torch.int32),
        new(R),
        new(R),
        new(B),
        new(B, len(TailField), dtype=torch.int32),
    )
    _checked_rows_kernel[(B,)](
        fields,
        known,
        future,
        table,
        *sources,
        *found,
        table.stride(0),
        scratch_block,
        T=R // B,
        BLOCK_T=next_power_of_2(R // B),
        BLOCK_SIZE=block_size,
        PLACES=num_places,
        NUM_FIELDS=len(CheckField),
        NUM_TAIL_FIELDS=len(TailField),
        num_warps=1,
    )
    return found
