"""Starts of the drafts behind a check whose tokens are on the device alone: one row for each checked sequence.

A draft is accepted if it is the token that was drawn in its place, and all drafts before it are accepted. Behind the
accepted ones stands the newest token, with which the layer's passes begin.

    begun     = START, and num_accepted[COUNTED_AT] more if COUNTED_AT >= 0
    accepted  = how many of the first NUM_DRAFTS drafts are accepted; num_accepted of the sequence's row becomes that
    token     = drawn[FIRST_DRAW + accepted]
    position  = begun + 1 + accepted
    end       = min(position + NUM_PASSES, NUM_COVERED)
    vector    = where the token before lies in the ring's row, behind all slots (`CacheMemory.ring_place`); -1: no row

    draft k   drafted[source_k] if source_k >= 0 else known_k

Shapes    fields [B, a `StartField` each, then known and source [K] each], `CheckSources` and the starts [B]: int64
Contract  fields, drafted and each of the starts have no gaps. Counts are read before any is written: sequences may
          have changed rows since the check before. B is at most the number of counts. An ordinary launch, the first
          of its graph
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import let_next_start
from headrace.kernels.lib.sizes import next_power_of_2
from headrace.kernels.sampling.checked_rows import CheckSources


class StartField(IntEnum):
    """The numbers of a sequence by which the start of its drafts is found."""

    FIRST_DRAW = 0
    START = 1  # or the least that it may be
    NUM_DRAFTS = 2
    NUM_COVERED = 3
    NUM_PASSES = 4
    COUNTED_AT = 5  # row of `num_accepted` with the drafts accepted before START; -1: it begins there
    RING_ROW = 6


class DraftStarts(NamedTuple):
    """Shapes as above."""

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    vectors: Tensor


def find_draft_starts(fields: Tensor, sources: CheckSources, ring: tuple[int, int], out: DraftStarts) -> None:
    """`ring`: the number of slots before it, and places of one of its rows."""
    B, num_fields = len(fields), len(StartField) + 2 * sources.drafted.shape[1]
    if fields.shape[1] != num_fields or any(each.shape != (B,) for each in out):
        raise ValueError(
            f"fields {tuple(fields.shape)} and starts {[tuple(each.shape) for each in out]} are not of as many "
            f"sequences, of {num_fields} numbers each"
        )
    (find_draft_starts_triton if runs_triton(fields) else find_draft_starts_torch)(fields, sources, ring, out)


def find_draft_starts_torch(fields: Tensor, sources: CheckSources, ring: tuple[int, int], out: DraftStarts) -> None:
    drawn, drafted, counted = sources
    num_slots, num_places = ring
    B, K = len(fields), drafted.shape[1]
    numbers, known_BK, source_BK = fields.split((len(StartField), K, K), dim=1)
    first, start, num_drafts, num_covered, num_passes, counted_at, ring_row = numbers.unbind(1)
    place_T = torch.arange(K + 1, device=fields.device)
    drawn_BT = drawn[(first[:, None] + place_T).clamp(max=len(drawn) - 1)]
    drafts_BK = torch.where(source_BK >= 0, drafted.view(-1)[source_BK.clamp(min=0)], known_BK)
    is_drawn = (drawn_BT[:, :-1] == drafts_BK) & (place_T[:-1] < num_drafts[:, None])
    num_accepted = is_drawn.long().cumprod(dim=1).sum(dim=1)
    begun = start + torch.where(counted_at >= 0, counted[counted_at.clamp(min=0)], 0)
    counted[:B].copy_(num_accepted)
    positions = begun + 1 + num_accepted
    in_ring = num_slots + ring_row * num_places + (positions - 1) % num_places
    out.tokens.copy_(drawn_BT.gather(1, num_accepted[:, None])[:, 0])
    out.positions.copy_(positions)
    out.ends.copy_(torch.minimum(positions + num_passes, num_covered))
    out.vectors.copy_(torch.where(ring_row >= 0, in_ring, -1))


@triton.jit
def _load_fields(ptr, mask):
    """Sequences' numbers in the order of `StartField`."""
    return (
        tl.load(ptr, mask, 0), tl.load(ptr + 1, mask, 0), tl.load(ptr + 2, mask, 0), tl.load(ptr + 3, mask, 0),
        tl.load(ptr + 4, mask, 0), tl.load(ptr + 5, mask, -1), tl.load(ptr + 6, mask, -1),
    )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def _draft_starts_kernel(
    fields_ptr, drawn_ptr, drafted_ptr, num_accepted_ptr, token_ptr, position_ptr, end_ptr, vector_ptr, B, num_slots,
    K: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, PLACES: tl.constexpr, NUM_FIELDS: tl.constexpr,
):  # fmt: skip
    """One program for all sequences: the count that one reads, another may write."""
    let_next_start()  # read_last_vectors, which waits for this kernel
    b, t = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_T)[None, :]
    is_row = b < B
    fields_ptr += b * (NUM_FIELDS + 2 * K)
    first, start, num_drafts, num_covered, num_passes, behind, ring_row = _load_fields(fields_ptr, is_row)
    before = tl.load(num_accepted_ptr + tl.maximum(behind, 0), mask=behind >= 0, other=0)
    is_draft = t < num_drafts[:, None]
    known_ptr = fields_ptr[:, None] + NUM_FIELDS + t
    source = tl.load(known_ptr + K, mask=is_draft, other=-1)
    known = tl.load(known_ptr, mask=is_draft, other=0)
    made = tl.load(drafted_ptr + tl.maximum(source, 0), mask=source >= 0, other=0)
    drawn = tl.load(drawn_ptr + first[:, None] + t, mask=is_row[:, None] & (t <= num_drafts[:, None]), other=0)
    is_drawn = is_draft & (drawn == tl.where(source >= 0, made, known))
    accepted = tl.min(tl.where(is_drawn, BLOCK_T, t), 1)  # the first that is none: there is one more place than drafts
    token = tl.sum(tl.where(t == accepted[:, None], drawn, 0), 1)
    position = start + before + 1 + accepted
    in_ring = num_slots + ring_row * PLACES + (position - 1) % PLACES
    tl.debug_barrier()
    tl.store(num_accepted_ptr + b, accepted.to(tl.int64), mask=is_row)
    tl.store(token_ptr + b, token, mask=is_row)
    tl.store(position_ptr + b, position, mask=is_row)
    tl.store(end_ptr + b, tl.minimum(position + num_passes, num_covered), mask=is_row)
    tl.store(vector_ptr + b, tl.where(ring_row >= 0, in_ring, -1), mask=is_row)


def find_draft_starts_triton(fields: Tensor, sources: CheckSources, ring: tuple[int, int], out: DraftStarts) -> None:
    num_slots, num_places = ring
    B, K = len(fields), sources.drafted.shape[1]
    _draft_starts_kernel[(1,)](
        fields,
        *sources,
        *out,
        B,
        num_slots,
        K=K,
        BLOCK_B=next_power_of_2(len(sources.num_accepted)),  # one compiled kernel for any number of sequences
        BLOCK_T=next_power_of_2(K + 1),
        PLACES=num_places,
        NUM_FIELDS=len(StartField),
        num_warps=8,
    )
