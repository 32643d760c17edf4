"""Results of a decode's rows, merged from the pieces that programs have computed of their contexts, in Triton.

    out_r = sum_i 2^l_i part_i / sum_i 2^l_i [* sigmoid(gate_r)]        i: the pieces of row r's context

Shapes    part [items + W, TOKENS * GROUP, D] and log_sum l [items + W, TOKENS * GROUP], base 2, float32: see
          decode_shares.py; out and gate [R, H, D]
Contract  H need not be a multiple of GROUP; a row without a context gives zeros
Source    Dao et al. 2023, "Flash-Decoding"
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.decode_shares import longest_context, program_of, shares, steps_before
from headrace.kernels.attention.head_dims import inside, inside_parts, load_heads, padded
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv

FEW_PIECES = tl.constexpr(4)
"""Pieces of an item, on average, up to which a program merges several heads, so many pieces of each at once."""
MANY_AT_ONCE = tl.constexpr(32)
"""Pieces of one head that a program merges at once: more would take other programs' registers."""


class Cut(NamedTuple):
    """How contexts were cut into pieces.

    lens_R       context of each row, int32
    rows_each    T, rows of a sequence, of which a tile has `tokens`
    group        query heads of a KV head
    programs     W
    keys         of a step; a share has `least_steps` or more
    """

    lens_R: Tensor
    rows_each: int
    tokens: int
    group: int
    programs: int
    keys: int
    least_steps: int


def merge_pieces(part: Tensor, log_sum: Tensor, out: Tensor, cut: Cut, gate: Tensor | None = None) -> None:
    """Writes `out`. A gate has out's shape, any stride over rows."""
    R, H, D = out.shape
    num_tiles = R // cut.rows_each * cdiv(cut.rows_each, cut.tokens)
    heads, few_in_all = math.gcd(H, 4), FEW_PIECES.value * num_tiles * cdiv(H, cut.group)
    _merge_kernel[(R * H // (heads if few_in_all >= cut.programs else 1),)](
        part, log_sum, gate, out, cut.lens_R, num_tiles, cut.programs, cut.least_steps,
        0 if gate is None else gate.stride(0),
        H=H, GROUP=cut.group, T=cut.rows_each, TOKENS=cut.tokens, D=D, KEYS=cut.keys, HEADS=heads,
        num_warps=4, **OVERLAPPED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_programs", "least_steps"], do_not_specialize_on_alignment=["lens_ptr"])
def _merge_kernel(
    part_ptr, log_sum_ptr, gate_ptr, out_ptr, lens_ptr, num_tiles, num_programs, least_steps, stride_gate,
    H: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over pieces of 2^log_sum * part / sum of 2^log_sum [* sigmoid(gate)]; zeros without a context.

    A program merges HEADS heads of one row; where items have more than FEW_PIECES pieces on average, one head.
    """
    let_next_start()
    HKV: tl.constexpr = (H + GROUP - 1) // GROUP  # `tl.cdiv` is no constant to Triton 3.6
    is_few = num_programs <= FEW_PIECES * num_tiles * HKV
    heads = tl.where(is_few, HEADS, 1)
    row, first_head = tl.program_id(0) // (H // heads), tl.program_id(0) % (H // heads) * heads
    tile = row // T * tl.cdiv(T, TOKENS) + row % T // TOKENS
    tile_begin, total = steps_before(lens_ptr, tile, num_tiles, HKV, T, TOKENS, KEYS)
    share, num_larger = shares(total, num_programs, least_steps)
    steps = tl.cdiv(longest_context(lens_ptr, tile, num_tiles, T, TOKENS), KEYS)
    steps = tl.where(tl.load(lens_ptr + row) > 0, steps, 0)
    # Both ways in one kernel: which it is follows from a step's rows, and with two kernels a request might wait for the
    # second one's compiler.
    if is_few:
        _merge_heads(part_ptr, log_sum_ptr, gate_ptr, out_ptr, row, first_head, tile, tile_begin, steps, share,
                     num_larger, stride_gate, H, GROUP, T, TOKENS, D, HEADS, FEW_PIECES)  # fmt: skip
    else:
        _merge_heads(part_ptr, log_sum_ptr, gate_ptr, out_ptr, row, first_head, tile, tile_begin, steps, share,
                     num_larger, stride_gate, H, GROUP, T, TOKENS, D, 1, MANY_AT_ONCE)  # fmt: skip


@triton.jit
def _merge_heads(
    part_ptr, log_sum_ptr, gate_ptr, out_ptr, row, first_head, tile, tile_begin, steps, share, num_larger,
    stride_gate,
    H: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes HEADS heads of a row: merged from their pieces, AT_ONCE at a time, and gated; zeros if there are none."""
    head, d = first_head + tl.arange(0, HEADS), tl.arange(0, padded(D))
    begin = tile_begin + head // GROUP * steps
    first_program = program_of(begin, share, num_larger)
    last_program = program_of(begin + steps - 1, share, num_larger)
    num_pieces = tl.where(steps > 0, last_program + 1 - first_program, 0)
    first_piece = tile * ((H + GROUP - 1) // GROUP) + head // GROUP + first_program
    row_in_piece = row % T % TOKENS * GROUP + head % GROUP
    wait_for_previous()
    acc = tl.zeros([HEADS, padded(D)], tl.float32)
    total, best = tl.zeros([HEADS], tl.float32), tl.full([HEADS], -1e30, tl.float32)
    for first in range(0, tl.max(num_pieces), AT_ONCE):
        number = first + tl.arange(0, AT_ONCE)
        piece = (first_piece[:, None] + number[None, :]).to(tl.int64)
        place = piece * (TOKENS * GROUP) + row_in_piece[:, None]
        is_there = number[None, :] < num_pieces[:, None]
        log_sum = tl.load(log_sum_ptr + place, mask=is_there, other=float("-inf"))
        part_place = place[:, :, None] * D + d[None, None, :]
        part = tl.load(part_ptr + part_place, mask=inside_parts(is_there, d, D), other=0.0)
        new_best = tl.maximum(best, tl.max(log_sum, 1))
        weight, shrink = tl.exp2(log_sum - new_best[:, None]), tl.exp2(best - new_best)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = row.to(tl.int64)
    if gate_ptr is not None:
        gate = load_heads(gate_ptr + row * stride_gate + head[:, None] * D + d[None, :], d, D)
        out *= tl.sigmoid(gate.to(tl.float32))
    out_place = (row * H + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=inside(head < H, d, D))
