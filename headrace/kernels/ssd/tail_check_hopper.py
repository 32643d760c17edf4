"""Mamba2 steps of several rows a sequence over tails on Hopper (Gluon): a token and drafts, checked at once.

A program takes ROWS rows of one head's state. What a step's rows find in the state and in all entries, the kept ones
and the step's own, are products of matrices:

    y^T [P, T] = (S C^T) decays + x^T W        W [entries, T] = (B C^T) decays dt, and D where a row is its own entry

Entries   the first KEPT are the tail's, zeros behind those that are there; the others are the step's own rows
Shapes    as in headrace/kernels/ssd/tail_update.py, T from 2 to 8
Contract  as in headrace/kernels/ssd/tail_update_hopper.py
Numerics  as there: W is multiplied as the sum of two 16-bit numbers, as exact as float32 to some 2**-17. Decays come
          from sums over all entries up to a row, as in the Triton kernel
Source    NVIDIA, PTX ISA, mma.m16n8k16 (a thread's part of a product of matrices is its part of the next one's right
          operand, transposed) and cp.async
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import SPAN
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.tail_programs import load_tail_fields
from headrace.kernels.lib.tail_programs_hopper import (
    KEPT,
    LEAST_LOG2,
    MOST_ROWS,
    NUM_WARPS,
    add,
    exp2,
    fetch_state,
    load_rows,
    over_rows,
    place_of,
    split,
    states_of,
    store_rows,
    store_state,
)
from headrace.kernels.lib.tails import Tails
from headrace.kernels.ssd.heads import SsdHeads, time_step

ROWS = 64
OWN = gl.constexpr(MOST_ROWS)
COLUMNS_AT_ONCE = gl.constexpr(SPAN.value // 2)  # of a state, that a program writes, for want of registers


@gluon.jit(do_not_specialize_on_alignment=["fields_ptr"])
def _ssd_tail_check_kernel(
    states_desc, x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, bias_ptr, y_ptr, x_tail_ptr, B_tail_ptr,
    dt_tail_ptr, fields_ptr, x_stride, dt_stride, B_stride, C_stride, slot_rows,
    DT_MIN: gl.constexpr, DT_MAX: gl.constexpr, T: gl.constexpr, H: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
    HEADS_A_GROUP: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    let_next_start()
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, products, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, products, 2)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])  # each warp has all entries, a lane one of them
    over_n: gl.constexpr = gl.SliceLayout(1, over_rows(N))
    over_p: gl.constexpr = gl.SliceLayout(1, over_rows(ROWS))
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = x_tail_ptr.dtype.element_ty
    G: gl.constexpr = H // HEADS_A_GROUP
    TILES: gl.constexpr = P // ROWS  # of a head

    tile, sequence = gl.program_id(0), gl.program_id(1)
    head, group = tile // TILES, tile // (TILES * HEADS_A_GROUP)
    src, dst, row, start, kept, written = load_tail_fields(fields_ptr, sequence)
    kept = gl.where(row >= 0, kept, 0)
    states, arrived = fetch_state(states_desc, src, row, slot_rows, tile * ROWS, 0, N // SPAN, ROWS)

    first_place = row.to(gl.int64) * PLACES
    x_tail_ptr += first_place * (H * P) + tile * ROWS
    B_tail_ptr += first_place * (G * N) + group * N
    dt_tail_ptr += first_place * H + head
    B_rows = gl.allocate_shared_memory(dtype, [2 * KEPT, N], shared)  # the step's C behind its own entries
    x_rows = gl.allocate_shared_memory(dtype, [2 * KEPT, ROWS], shared)
    e_n, e_p, lane = gl.arange(0, KEPT, over_n), gl.arange(0, KEPT, over_p), gl.arange(0, 2 * KEPT, lanes)
    load_rows(B_rows.slice(0, KEPT), B_tail_ptr, place_of(start + e_n, PLACES), G * N, kept)
    load_rows(x_rows.slice(0, KEPT), x_tail_ptr, place_of(start + e_p, PLACES), H * P, kept)
    async_copy.commit_group()
    dt = gl.load(dt_tail_ptr + place_of(start + lane, PLACES) * H, mask=lane < kept, other=0.0)
    A, D, bias = gl.load(A_ptr + head), gl.load(D_ptr + head), gl.load(bias_ptr + head)
    wait_for_previous()

    first = sequence * T
    i_n, i_p = gl.arange(0, OWN, over_n), gl.arange(0, OWN, over_p)
    load_rows(B_rows.slice(KEPT, OWN), B_ptr + (first * B_stride + group * N), i_n, B_stride, T)
    load_rows(B_rows.slice(KEPT + OWN, OWN), C_ptr + (first * C_stride + group * N), i_n, C_stride, T)
    load_rows(x_rows.slice(KEPT, KEPT), x_ptr + (first * x_stride + tile * ROWS), e_p, x_stride, T)
    async_copy.commit_group()
    is_own = (lane >= KEPT) & (lane < KEPT + T)
    raw = gl.load(dt_ptr + (first + lane - KEPT) * dt_stride + head, mask=is_own, other=0.0)
    dt = gl.where(is_own, time_step(raw, bias, DT_MIN, DT_MAX), dt)
    upto = gl.associative_scan(gl.maximum(dt * (A * LOG2_E), LEAST_LOG2), 0, add)  # log2 of the decays from the base on
    dt_entries = gl.allocate_shared_memory(gl.float32, [2 * KEPT], line, dt)
    upto_entries = gl.allocate_shared_memory(gl.float32, [2 * KEPT], line, upto)
    async_copy.wait_group(0)

    C_spans = ()  # type: tuple
    scores = gl.zeros([2 * OWN, 2 * KEPT], gl.float32, products)
    for c in gl.static_range(N // SPAN):
        span = B_rows.slice(c * SPAN, SPAN, 1)
        C_spans += (span.slice(KEPT + OWN, OWN).permute((1, 0)).load(right),)
        scores = mma_v2(span.slice(KEPT, 2 * OWN).load(left), span.permute((1, 0)).load(right), scores)
    # C is the second half of these rows. Transposed, a thread's scores are where it multiplies them.
    _, scores = gl.split(gl.permute(gl.reshape(scores, [2, OWN, 2 * KEPT]), (2, 1, 0)))
    scores = gl.convert_layout(scores, right, assert_trivial=True)
    own_row = gl.arange(0, 2 * KEPT, gl.SliceLayout(1, right))[:, None] - KEPT  # that an entry is; below 0: a kept one
    t = gl.arange(0, OWN, gl.SliceLayout(0, right))[None, :]
    dt_e = dt_entries.load(gl.SliceLayout(1, right))
    upto_e = upto_entries.load(gl.SliceLayout(1, right))
    upto_t = upto_entries.slice(KEPT, OWN).load(gl.SliceLayout(0, right))
    given = gl.where(own_row <= t, scores * (dt_e[:, None] * exp2(upto_t[None, :] - upto_e[:, None])), 0.0)
    high, low = split(given + gl.where(own_row == t, D, 0.0), dtype)
    of_state = exp2(upto_entries.slice(KEPT, OWN).load(gl.SliceLayout(0, products)))
    mbarrier.wait(arrived, 0)
    y = gl.zeros([ROWS, OWN], gl.float32, products)
    for c in gl.static_range(N // SPAN):
        y = mma_v2(states.index(c).load(left), C_spans[c], y)
    x = x_rows.permute((1, 0)).load(left)
    y = mma_v2(x, low, mma_v2(x, high, y * of_state[None, :]))
    in_tile = gl.arange(0, ROWS, gl.SliceLayout(1, products))
    t_y = gl.arange(0, OWN, gl.SliceLayout(0, products))
    y_ptr += first * (H * P) + tile * ROWS
    y_rows = y_ptr + ((t_y * (H * P))[None, :] + in_tile[:, None])
    gl.store(y_rows, y.to(y_ptr.dtype.element_ty), mask=(t_y < T)[None, :])

    end = start + kept
    num_own = gl.where(row >= 0, T, 0)
    store_rows(x_rows.slice(KEPT, OWN), x_tail_ptr, place_of(end + i_p, PLACES), H * P, num_own)
    if tile % TILES == 0:
        place = place_of(end + lane - KEPT, PLACES)
        gl.store(dt_tail_ptr + place * H, dt, mask=(lane >= KEPT) & (lane < KEPT + num_own))
        if head % HEADS_A_GROUP == 0:
            store_rows(B_rows.slice(KEPT, OWN), B_tail_ptr, place_of(end + i_n, PLACES), G * N, num_own)

    if (dst >= 0) & (row >= 0):
        last = gl.where(written > kept, KEPT + written - kept, written) - 1
        upto_end = gl.sum(gl.where(lane == last, upto, 0.0), 0)
        entry = gl.arange(0, 2 * KEPT, gl.SliceLayout(0, left))
        upto_entry = upto_entries.load(gl.SliceLayout(0, left))
        weights = dt_entries.load(gl.SliceLayout(0, left)) * exp2(upto_end - upto_entry)
        weights = gl.where(entry <= last, weights, 0.0)
        added, rest = split(x_rows.permute((1, 0)).load(left).to(gl.float32) * weights[None, :], dtype)
        for c in gl.static_range(N // COLUMNS_AT_ONCE):
            columns = states.index(c // 2).slice(c % 2 * COLUMNS_AT_ONCE, COLUMNS_AT_ONCE, 1)
            B = B_rows.slice(c * COLUMNS_AT_ONCE, COLUMNS_AT_ONCE, 1).load(right)
            after = columns.load(products).to(gl.float32) * exp2(upto_end)
            columns.store(mma_v2(rest, B, mma_v2(added, B, after)).to(dtype))
        store_state(states_desc, states, dst * slot_rows + tile * ROWS, 0)


def ssd_tail_check_hopper(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, heads: SsdHeads, state_pool: Tensor,
    tail: tuple[Tensor, Tensor, Tensor], tails: Tails,
) -> Tensor:  # fmt: skip
    (R, H, P), (G, N), batch = x.shape, B.shape[1:], len(tails.fields)
    y = torch.empty((R, H, P), dtype=x.dtype, device=x.device)
    if batch == 0:
        return y
    _ssd_tail_check_kernel[(H * (P // ROWS), batch)](
        states_of(state_pool, ROWS), x, dt, B, C, heads.A, heads.D, heads.dt_bias, y, *tail, tails.fields,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), state_pool.stride(0) // N,
        DT_MIN=heads.dt_min, DT_MAX=heads.dt_max, T=tails.rows_each, H=H, P=P, N=N, HEADS_A_GROUP=H // G,
        PLACES=tail[0].shape[1], ROWS=ROWS, num_warps=NUM_WARPS.value, **OVERLAPPED,
    )  # fmt: skip
    return y
