"""Mamba2 decode steps over tails on Hopper (Gluon): the kernel of headrace/kernels/ssd/tail_update.py.

A program takes ROWS rows of one head's state. They and the tail's entries are copied to shared memory before anything
is waited for. What the step's row finds in the state and in the kept entries are products of matrices; it is the first
of eight columns, the fewest that the matrix units take. A step may also have no row, and only write states.

    y [P] = ((S C) g + x^T w) decay + x_own (B_own C dt_own + D)        w [kept] = (B C) decays dt

with g the decay of all kept entries, and the row's own decay behind them.

Shapes    as in headrace/kernels/ssd/tail_update.py
Contract  as there, but states at bases and kept entries, too, are read early: no kernel since the last ordinary launch
          may have written them. 16-bit inputs, rings and pool of one dtype, of sizes that `fits_hopper` names
Numerics  as there; w is multiplied as the sum of two 16-bit numbers, as exact as float32 to some 2**-17
Source    NVIDIA, PTX ISA, mma.m16n8k16 and cp.async
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import SPAN
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.tail_programs import load_tail_fields
from headrace.kernels.lib.tail_programs_hopper import (
    KEPT,
    MOST_ROWS,
    NUM_WARPS,
    exp2,
    fetch_state,
    load_rows,
    over_rows,
    place_of,
    split,
    states_of,
    store_state,
)
from headrace.kernels.lib.tails import Tails, most_kept
from headrace.kernels.ssd.heads import SsdHeads, time_step
from headrace.kernels.ssd.tail_check_hopper import COLUMNS_AT_ONCE, ROWS, ssd_tail_check_hopper

MOST_REGISTERS = 112  # of a thread, for nine programs a multiprocessor; left alone, ptxas takes 80 and serialises loads


@gluon.jit(do_not_specialize_on_alignment=["fields_ptr"])
def _ssd_tail_hopper_kernel(
    states_desc, x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, bias_ptr, y_ptr, x_tail_ptr, B_tail_ptr,
    dt_tail_ptr, fields_ptr, x_stride, dt_stride, B_stride, C_stride, slot_rows,
    DT_MIN: gl.constexpr, DT_MAX: gl.constexpr, T: gl.constexpr, H: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
    HEADS_A_GROUP: gl.constexpr, PLACES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    let_next_start()
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, products, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, products, 2)
    over_n: gl.constexpr = gl.SliceLayout(1, over_rows(N))
    over_p: gl.constexpr = gl.SliceLayout(1, over_rows(ROWS))
    line: gl.constexpr = gl.BlockedLayout([N // 32], [32], [NUM_WARPS], [0])  # each warp has all of a row of B or C
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
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
    B_kept = gl.allocate_shared_memory(dtype, [KEPT, N], shared)
    x_kept = gl.allocate_shared_memory(dtype, [KEPT, ROWS], shared)
    e_n, e_p = gl.arange(0, KEPT, over_n), gl.arange(0, KEPT, over_p)
    load_rows(B_kept, B_tail_ptr, place_of(start + e_n, PLACES), G * N, kept)
    load_rows(x_kept, x_tail_ptr, place_of(start + e_p, PLACES), H * P, kept)
    async_copy.commit_group()
    A, D, bias = gl.load(A_ptr + head), gl.load(D_ptr + head), gl.load(bias_ptr + head)
    e = gl.arange(0, KEPT, gl.SliceLayout(1, products))
    j = gl.arange(0, KEPT, gl.SliceLayout(0, products))
    dt_e = gl.load(dt_tail_ptr + place_of(start + e, PLACES) * H, mask=e < kept, other=0.0)
    dt_j = gl.load(dt_tail_ptr + place_of(start + j, PLACES) * H, mask=j < kept, other=0.0)
    log_j = dt_j * (A * LOG2_E)  # log2 of an entry's decay
    is_later = j[None, :] > e[:, None]
    wait_for_previous()

    if T > 0:
        in_n, in_p = gl.arange(0, N, line), gl.arange(0, ROWS, gl.SliceLayout(1, products))
        t = gl.arange(0, 8, gl.SliceLayout(0, products))  # the step's one row is the first of 8 columns
        C_rows = gl.allocate_shared_memory(dtype, [8, N], shared)
        load_rows(C_rows, C_ptr + (sequence * C_stride + group * N), gl.arange(0, 8, over_n), C_stride, T)
        async_copy.commit_group()
        x_own = gl.load(x_ptr + (sequence * x_stride + tile * ROWS) + in_p)
        B_own = gl.load(B_ptr + (sequence * B_stride + group * N) + in_n)
        C_own = gl.load(C_ptr + (sequence * C_stride + group * N) + in_n)
        dt_own = time_step(gl.load(dt_ptr + sequence * dt_stride + head), bias, DT_MIN, DT_MAX)
        log_own = dt_own * (A * LOG2_E)
        kept_weights = dt_e * exp2(gl.sum(gl.where(is_later, log_j[None, :], 0.0), 1))
        own_weight = gl.sum(B_own.to(gl.float32) * C_own.to(gl.float32), 0) * dt_own + D
        of_state = exp2(gl.sum(log_j, 0))
        async_copy.wait_group(0)
        C_spans = ()  # type: tuple
        for c in gl.static_range(N // SPAN):
            C_spans += (C_rows.slice(c * SPAN, SPAN, 1).permute((1, 0)).load(right),)
        scores = gl.zeros([KEPT, 8], gl.float32, products)
        for c in gl.static_range(N // SPAN):
            scores = mma_v2(B_kept.slice(c * SPAN, SPAN, 1).load(left), C_spans[c], scores)
        high, low = split(scores * kept_weights[:, None], dtype)
        mbarrier.wait(arrived, 0)
        y = gl.zeros([ROWS, 8], gl.float32, products)
        for c in gl.static_range(N // SPAN):
            y = mma_v2(states.index(c).load(left), C_spans[c], y)
        x = x_kept.permute((1, 0)).load(left)
        y = mma_v2(x, gl.convert_layout(high, right), y * of_state)
        y = mma_v2(x, gl.convert_layout(low, right), y) * exp2(log_own)
        y += (x_own.to(gl.float32) * own_weight)[:, None]
        y_rows = y_ptr + (sequence * (H * P) + tile * ROWS) + (in_p[:, None] + t[None, :])
        gl.store(y_rows, y.to(y_ptr.dtype.element_ty), mask=(t < T)[None, :])

        if row >= 0:
            place = place_of(start + kept, PLACES)
            gl.store(x_tail_ptr + place * (H * P) + in_p, x_own)
            if tile % TILES == 0:
                gl.store(dt_tail_ptr + place * H, dt_own)
                if head % HEADS_A_GROUP == 0:
                    gl.store(B_tail_ptr + place * (G * N) + in_n, B_own)
    else:
        async_copy.wait_group(0)
        mbarrier.wait(arrived, 0)

    if (dst >= 0) & (row >= 0):
        # Of the kept entries the first `written`, and then the step's own.
        log_end = gl.sum(gl.where(j < written, log_j, 0.0), 0)
        between = gl.sum(gl.where(is_later & (j < written)[None, :], log_j[None, :], 0.0), 1)
        weights = gl.where(e < written, dt_e * exp2(between), 0.0)
        if T > 0:
            has_own = written > kept
            own_decay = exp2(gl.where(has_own, log_own, 0.0))
            weights *= own_decay
            x_added = x_own.to(gl.float32) * gl.where(has_own, dt_own, 0.0)
            of_base = exp2(log_end) * own_decay
        else:
            of_base = exp2(log_end)
        weights = gl.convert_layout(weights, gl.SliceLayout(0, left))
        added, rest = split(x_kept.permute((1, 0)).load(left).to(gl.float32) * weights[None, :], dtype)
        for c in gl.static_range(N // COLUMNS_AT_ONCE):
            columns = states.index(c // 2).slice(c % 2 * COLUMNS_AT_ONCE, COLUMNS_AT_ONCE, 1)
            B = B_kept.slice(c * COLUMNS_AT_ONCE, COLUMNS_AT_ONCE, 1).load(right)
            after = columns.load(products).to(gl.float32) * of_base
            after = mma_v2(rest, B, mma_v2(added, B, after))
            if T > 0:
                in_span = c * COLUMNS_AT_ONCE + gl.arange(0, COLUMNS_AT_ONCE, gl.SliceLayout(0, products))
                B_added = gl.load(B_ptr + (sequence * B_stride + group * N) + in_span).to(gl.float32)
                after += x_added[:, None] * B_added[None, :]
            columns.store(after.to(dtype))
        store_state(states_desc, states, dst * slot_rows + tile * ROWS, 0)


def ssd_tail_update_hopper(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, heads: SsdHeads, state_pool: Tensor,
    tail: tuple[Tensor, Tensor, Tensor], tails: Tails,
) -> Tensor:  # fmt: skip
    """Steps of one row of each sequence, of none, or of several (headrace/kernels/ssd/tail_check_hopper.py)."""
    (R, H, P), (G, N), batch, T = x.shape, B.shape[1:], len(tails.fields), tails.rows_each
    if T > 1:
        return ssd_tail_check_hopper(x, dt, B, C, heads, state_pool, tail, tails)
    y = torch.empty((R, H, P), dtype=x.dtype, device=x.device)
    if batch == 0:
        return y
    _ssd_tail_hopper_kernel[(H * (P // ROWS), batch)](
        states_of(state_pool, ROWS), x, dt, B, C, heads.A, heads.D, heads.dt_bias, y, *tail, tails.fields,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), state_pool.stride(0) // N,
        DT_MIN=heads.dt_min, DT_MAX=heads.dt_max, T=T, H=H, P=P, N=N, HEADS_A_GROUP=H // G,
        PLACES=tail[0].shape[1], ROWS=ROWS, num_warps=NUM_WARPS.value, maxnreg=MOST_REGISTERS,
        **OVERLAPPED,
    )  # fmt: skip
    return y


def fits_hopper(
    x: Tensor, B: Tensor, C: Tensor, state_pool: Tensor, tail: tuple[Tensor, Tensor, Tensor], tails: Tails
) -> bool:
    """True if Hopper variants run here, and this one takes such tensors."""
    P, N = x.shape[2], B.shape[2]
    return (
        runs_hopper(x)
        and all(each.dtype == x.dtype for each in (B, C, state_pool, *tail[:2]))
        and P % ROWS == 0
        and N in (64, 128, 256)
        and most_kept(tail[0].shape[1]) <= KEPT.value
        and tails.rows_each <= MOST_ROWS
        and state_pool.stride(0) % N == state_pool.data_ptr() % 16 == 0
        # Copies of 16 bytes begin at multiples of them, and of a stride Triton knows whether 16 divides it.
        and all(each.stride(0) % 16 == each.data_ptr() % 16 == 0 for each in (x, B, C))
    )
