"""Equal shares of all contexts of a decode, in Triton: which steps a program computes, and which program a step.

The contexts of all tiles (the rows of one sequence that are computed together, decode.py) are laid end to end, in steps
of KEYS keys: of each tile first all steps of its first KV head, then all of its second one, and so on. Each of W
programs takes an equal share of them, to within a step, and at least `least_steps`, so that with little work some
programs have none. An item is a tile's context for one KV head; of item i program w computes piece i + w, if anything.

Contract  computed anew by each program, from the context lengths alone: captured graphs replay with other contexts
Source    Osama et al. 2023, "Stream-K"; Sanovar et al. 2024, "LeanAttention"
"""

import triton
import triton.language as tl

from headrace.kernels.lib.sizes import cdiv

TILES_AT_ONCE = tl.constexpr(256)  # whose contexts are added up at once


MOST_PIECES = 64  # of an item, if all are equally long: merging more takes longer than computing them


def num_programs(at_a_time: int, num_items: int, table_tokens: int, least_keys: int) -> int:
    """Programs W, from shapes alone: as many as run at a time, or fewer for little work.

    least_keys    of a share
    """
    return min(at_a_time, num_items * min(MOST_PIECES, cdiv(table_tokens, least_keys)))


@triton.jit
def longest_context(lens_ptr, tile, num_tiles, T: tl.constexpr, TOKENS: tl.constexpr):
    """Tokens of a tile's longest context, or of several tiles' [n]; none past the last tile."""
    first = tile % tl.cdiv(T, TOKENS) * TOKENS
    lens_ptr += tile // tl.cdiv(T, TOKENS) * T + first
    length = tl.load(lens_ptr, mask=tile < num_tiles, other=0)
    for i in tl.static_range(1, TOKENS):
        length = tl.maximum(length, tl.load(lens_ptr + i, mask=(tile < num_tiles) & (first + i < T), other=0))
    return length


@triton.jit
def steps_before(
    lens_ptr, tile, num_tiles,
    HKV: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The steps of the tiles before this one, and of all tiles, for all KV heads."""
    before, total = 0, 0
    for first in range(0, num_tiles, TILES_AT_ONCE):
        each = first + tl.arange(0, TILES_AT_ONCE)
        steps = tl.cdiv(longest_context(lens_ptr, each, num_tiles, T, TOKENS), KEYS)
        total += tl.sum(steps)
        before += tl.sum(tl.where(each < tile, steps, 0))
    return before * HKV, total * HKV


@triton.jit
def shares(total, programs, least_steps):
    """How `total` steps are shared: the first programs, as many as the second number says, have a step more than the
    first number, the next ones as many as that. Programs that are left over have none."""
    busy = tl.maximum(tl.minimum(programs, total // least_steps), 1)
    return total // busy, total % busy


@triton.jit
def program_of(step, share, num_larger):
    """The program whose share has this step."""
    in_larger = num_larger * (share + 1)
    return tl.where(step < in_larger, step // (share + 1), num_larger + (step - in_larger) // tl.maximum(share, 1))


@triton.jit
def _add_and_bound(number, start, end, other_number, other_start, other_end):
    return number + other_number, tl.maximum(start, other_start), tl.minimum(end, other_end)


@triton.jit
def share_of(
    lens_ptr, program, programs, least_steps, num_tiles,
    HKV: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Positions among all steps: where a program's share begins and ends, its first tile, and where that one's steps
    begin and end."""
    _, total = steps_before(lens_ptr, 0, num_tiles, HKV, T, TOKENS, KEYS)
    share, num_larger = shares(total, programs, least_steps)
    begin = program * share + tl.minimum(program, num_larger)
    end = tl.minimum(begin + share + (program < num_larger).to(tl.int32), total)
    tile, tile_begin, tile_end, base = 0, 0, total, 0
    for first in range(0, num_tiles, TILES_AT_ONCE):
        steps = tl.cdiv(longest_context(lens_ptr, first + tl.arange(0, TILES_AT_ONCE), num_tiles, T, TOKENS), KEYS)
        ends = base + tl.cumsum(steps, 0) * HKV
        is_before = ends <= begin
        number, last_end, next_end = tl.reduce(
            (is_before.to(tl.int32), tl.where(is_before, ends, 0), tl.where(is_before, total, ends)), 0, _add_and_bound
        )
        tile += number
        tile_begin = tl.maximum(tile_begin, last_end)
        tile_end = tl.minimum(tile_end, next_end)
        if first + TILES_AT_ONCE < num_tiles:
            base += tl.sum(steps) * HKV
    return begin, end, tile, tile_begin, tile_end


@triton.jit
def next_item(
    lens_ptr, tile, kv_head, steps, goes_on, num_tiles,
    HKV: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The tile, the KV head and the steps of the item behind one that has `steps`, if a share goes on with it."""
    kv_head += 1
    if kv_head == HKV:
        kv_head = 0
        tile += 1
        steps = tl.cdiv(longest_context(lens_ptr, tile, num_tiles, T, TOKENS), KEYS)
        while (steps == 0) & goes_on:  # padding
            tile += 1
            steps = tl.cdiv(longest_context(lens_ptr, tile, num_tiles, T, TOKENS), KEYS)
    return tile, kv_head, steps
