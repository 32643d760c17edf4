"""Gated delta rule decode steps over tails on Hopper (Gluon): the kernel of headrace/kernels/gdn/tail_update.py.

A program takes SPAN columns of V of one head of a sequence. Its part of the state and the tail's entries are copied to
shared memory before anything is waited for. What the step's rows, a key and its query, find in the state and in the
kept entries are products of matrices; they are the first two of eight columns, the fewest that the matrix units take. A
step may also have no row, and only write states.

    read^T [V, rows] = (S^T rows^T) decays + delta^T W        W [kept, rows] = (k rows^T) decays

Shapes    as in headrace/kernels/gdn/tail_update.py
Contract  as there, but states at bases and kept entries, too, are read early: no kernel since the last ordinary launch
          may have written them. 16-bit inputs, rings and pool of one dtype, of sizes that `fits_hopper` names
Numerics  as there; W is multiplied as the sum of two 16-bit numbers, as exact as float32 to some 2**-17
Source    NVIDIA, PTX ISA, mma.m16n8k16 and cp.async
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headrace.kernels.dense.rms_norm import L2_NORM_EPS
from headrace.kernels.gdn.heads import GdnHeads, log_decay
from headrace.kernels.gdn.tail_check_hopper import MOST_REGISTERS, ROWS_AT_ONCE, gdn_tail_check_hopper
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import SPAN, async_load
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


@gluon.jit(do_not_specialize_on_alignment=["fields_ptr"])
def _gdn_tail_hopper_kernel(
    states_desc, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_ptr, bias_ptr, o_ptr, k_tail_ptr, delta_tail_ptr,
    g_tail_ptr, fields_ptr, q_eighths, k_eighths, v_stride, a_stride, b_stride, slot_rows,
    T: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS_A_KEY: gl.constexpr,
    PLACES: gl.constexpr, EPS: gl.constexpr, BETA_SCALE: gl.constexpr,
):  # fmt: skip
    let_next_start()
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, products, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, products, 2)
    over_k: gl.constexpr = gl.SliceLayout(1, over_rows(K))
    over_v: gl.constexpr = gl.SliceLayout(1, over_rows(SPAN))
    line: gl.constexpr = gl.BlockedLayout([K // 32], [32], [NUM_WARPS], [0])  # each warp has all of a key or query
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = k_tail_ptr.dtype.element_ty
    HK: gl.constexpr = H // HEADS_A_KEY
    TILES: gl.constexpr = V // SPAN  # of a head

    tile, sequence = gl.program_id(0), gl.program_id(1)
    head, first_column = tile // TILES, tile % TILES * SPAN
    key_head = head // HEADS_A_KEY
    src, dst, row, start, kept, written = load_tail_fields(fields_ptr, sequence)
    kept = gl.where(row >= 0, kept, 0)
    states, arrived = fetch_state(states_desc, src, row, slot_rows, head * K, first_column, 1, K)
    state = states.index(0)

    first_place = row.to(gl.int64) * PLACES
    k_tail_ptr += first_place * (HK * K) + key_head * K
    delta_tail_ptr += first_place * (H * V) + tile * SPAN
    g_tail_ptr += first_place * H + head
    k_kept = gl.allocate_shared_memory(dtype, [KEPT, K], shared)
    deltas = gl.allocate_shared_memory(dtype, [KEPT, SPAN], shared)
    e_k, e_v = gl.arange(0, KEPT, over_k), gl.arange(0, KEPT, over_v)
    load_rows(k_kept, k_tail_ptr, place_of(start + e_k, PLACES), HK * K, kept)
    load_rows(deltas, delta_tail_ptr, place_of(start + e_v, PLACES), H * V, kept)
    async_copy.commit_group()
    A, bias = gl.load(A_ptr + head), gl.load(bias_ptr + head)
    e = gl.arange(0, KEPT, gl.SliceLayout(1, products))
    j = gl.arange(0, KEPT, gl.SliceLayout(0, products))
    g_j = gl.load(g_tail_ptr + place_of(start + j, PLACES) * H, mask=j < kept, other=0.0) * LOG2_E
    is_later = j[None, :] > e[:, None]
    wait_for_previous()

    if T > 0:
        # The step's key and its query are the first two of eight columns.
        in_k, in_v = gl.arange(0, K, line), gl.arange(0, SPAN, gl.SliceLayout(1, products))
        r = gl.arange(0, 8, gl.SliceLayout(0, products))
        rows = gl.allocate_shared_memory(dtype, [8, K], shared)
        r_k, within = gl.arange(0, 8, over_k), gl.arange(0, K, gl.SliceLayout(0, over_rows(K)))
        k_ptr += sequence * (k_eighths * 8) + key_head * K
        q_ptr += sequence * (q_eighths * 8) + key_head * K
        in_row = (r_k * 0)[:, None] + within[None, :]
        async_load(rows, gl.where((r_k == 0)[:, None], k_ptr + in_row, q_ptr + in_row), mask=(r_k < 2)[:, None])
        async_copy.commit_group()
        k_own, q_own = gl.load(k_ptr + in_k), gl.load(q_ptr + in_k).to(gl.float32)
        v_own = gl.load(v_ptr + (sequence * v_stride + tile * SPAN) + in_v).to(gl.float32)
        beta = BETA_SCALE / (1.0 + exp2(gl.load(b_ptr + sequence * b_stride + head).to(gl.float32) * -LOG2_E))
        g_own = log_decay(gl.load(a_ptr + sequence * a_stride + head), bias, A)
        key = k_own.to(gl.float32)
        over_key = 1.0 / gl.sqrt(gl.sum(key * key, 0) + EPS)
        over_query = K**-0.5 / gl.sqrt(gl.sum(q_own * q_own, 0) + EPS)
        own_score = gl.sum(key * q_own, 0)
        kept_weights = exp2(gl.sum(gl.where(is_later, g_j[None, :], 0.0), 1))
        of_state = exp2(gl.sum(g_j, 0))
        async_copy.wait_group(0)
        of_rows = rows.permute((1, 0)).load(right)
        scores = mma_v2(k_kept.load(left), of_rows, gl.zeros([KEPT, 8], gl.float32, products))
        high, low = split(scores * kept_weights[:, None], dtype)
        mbarrier.wait(arrived, 0)
        read = mma_v2(state.permute((1, 0)).load(left), of_rows, gl.zeros([SPAN, 8], gl.float32, products))
        delta = deltas.permute((1, 0)).load(left)
        read = mma_v2(delta, gl.convert_layout(high, right), read * of_state)
        read = mma_v2(delta, gl.convert_layout(low, right), read) * exp2(g_own * LOG2_E)
        known = gl.sum(gl.where((r == 0)[None, :], read, 0.0), 1)
        own = ((v_own - known * over_key) * (beta * over_key)).to(dtype)
        o = (read + own.to(gl.float32)[:, None] * own_score) * over_query
        o_rows = o_ptr + (sequence * (H * V) + tile * SPAN) + (in_v[:, None] + r[None, :] - 1)
        gl.store(o_rows, o.to(o_ptr.dtype.element_ty), mask=(r == 1)[None, :])

        if row >= 0:
            place = place_of(start + kept, PLACES)
            gl.store(delta_tail_ptr + place * (H * V) + in_v, own)
            if first_column == 0:
                gl.store(g_tail_ptr + place * H, g_own)
                if head % HEADS_A_KEY == 0:
                    gl.store(k_tail_ptr + place * (HK * K) + in_k, k_own)
    else:
        async_copy.wait_group(0)
        mbarrier.wait(arrived, 0)

    if (dst >= 0) & (row >= 0):
        # Of the kept entries the first `written`, and then the step's own.
        of_base = exp2(gl.sum(gl.where(j < written, g_j, 0.0), 0))
        between = gl.sum(gl.where(is_later & (j < written)[None, :], g_j[None, :], 0.0), 1)
        weights = gl.where(e < written, exp2(between), 0.0)
        if T > 0:
            has_own = written > kept
            own_decay = exp2(gl.where(has_own, g_own * LOG2_E, 0.0))
            weights *= own_decay
            of_base *= own_decay
            added_v = gl.convert_layout(own, gl.SliceLayout(0, products)).to(gl.float32) * gl.where(has_own, 1.0, 0.0)
        weights = gl.convert_layout(weights, gl.SliceLayout(0, left))
        kept_deltas = deltas.load(right)
        for c in gl.static_range(K // ROWS_AT_ONCE):
            k = k_kept.slice(c * ROWS_AT_ONCE, ROWS_AT_ONCE, 1).permute((1, 0)).load(left).to(gl.float32)
            added, rest = split(k * weights[None, :], dtype)
            tile_rows = state.slice(c * ROWS_AT_ONCE, ROWS_AT_ONCE)
            after = tile_rows.load(products).to(gl.float32) * of_base
            after = mma_v2(rest, kept_deltas, mma_v2(added, kept_deltas, after))
            if T > 0:
                added_k = gl.load(k_ptr + (c * ROWS_AT_ONCE + gl.arange(0, ROWS_AT_ONCE, gl.SliceLayout(1, products))))
                after += added_k.to(gl.float32)[:, None] * added_v[None, :]
            tile_rows.store(after.to(dtype))
        store_state(states_desc, states, dst * slot_rows + head * K, first_column)


def gdn_tail_update_hopper(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: GdnHeads, state_pool: Tensor,
    tail: tuple[Tensor, Tensor, Tensor], tails: Tails,
) -> Tensor:  # fmt: skip
    """Steps of one row of each sequence, of none, or of several (headrace/kernels/gdn/tail_check_hopper.py)."""
    (R, Hv, Dv), (Hk, Dk), batch, T = v.shape, k.shape[1:], len(tails.fields), tails.rows_each
    if T > 1:
        return gdn_tail_check_hopper(q, k, v, a, b, heads, state_pool, tail, tails)
    o = torch.empty((R, Hv, Dv), dtype=v.dtype, device=v.device)
    if batch == 0:
        return o
    _gdn_tail_hopper_kernel[(Hv * (Dv // SPAN.value), batch)](
        states_of(state_pool, Dk), q, k, v, a, b, heads.A, heads.dt_bias, o, *tail, tails.fields,
        q.stride(0) // 8, k.stride(0) // 8, v.stride(0), a.stride(0), b.stride(0), state_pool.stride(0) // Dv,
        T=T, H=Hv, K=Dk, V=Dv, HEADS_A_KEY=Hv // Hk, PLACES=tail[0].shape[1],
        EPS=L2_NORM_EPS, BETA_SCALE=heads.beta_scale, num_warps=NUM_WARPS.value,
        maxnreg=MOST_REGISTERS, **OVERLAPPED,
    )  # fmt: skip
    return o


def fits_hopper(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, tail: tuple[Tensor, Tensor, Tensor], tails: Tails
) -> bool:
    """True if Hopper variants run here, and this one takes such tensors."""
    return (
        runs_hopper(v)
        and all(each.dtype == v.dtype for each in (q, k, state_pool, *tail[:2]))
        and k.shape[2] in (64, 128)
        and v.shape[2] % SPAN.value == 0
        and most_kept(tail[0].shape[1]) <= KEPT.value
        and tails.rows_each <= MOST_ROWS
        and state_pool.stride(0) % v.shape[2] == state_pool.data_ptr() % 16 == 0
        and all(each.stride(0) % 8 == each.data_ptr() % 16 == 0 for each in (q, k, v))  # cp.async takes 16 bytes
    )
