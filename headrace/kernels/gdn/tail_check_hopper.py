"""Gated delta rule steps of several rows a sequence over tails on Hopper (Gluon): a token and drafts, checked at once.

A program takes SPAN columns of V of one head of a sequence. What a step's rows, keys and queries, find in the state and
in the kept entries are products of matrices; what rows give each other is added row by row, by scores that were a
product of matrices, too.

    read^T [V, rows] = (S^T rows^T) decays + delta^T W        W [kept, rows] = (k rows^T) decays

Entries   the first KEPT are the tail's, zeros behind those that are there; the others are the step's rows: T keys,
          padded to KEYS, then as many queries
Shapes    as in headrace/kernels/gdn/tail_update.py, T from 2 to 8
Contract  as in headrace/kernels/gdn/tail_update_hopper.py
Numerics  as there: W is multiplied as the sum of two 16-bit numbers, as exact as float32 to some 2**-17; what rows give
          each other is added in float32. Decays come from sums over all entries up to a row, as in the Triton kernel
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

from headrace.kernels.dense.rms_norm import L2_NORM_EPS
from headrace.kernels.gdn.heads import GdnHeads, log_decay
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.hopper import SPAN, async_load
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.tail_programs import load_tail_fields
from headrace.kernels.lib.tail_programs_hopper import (
    KEPT,
    LEAST_LOG2,
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

MOST_REGISTERS = 128  # of a thread; left alone, ptxas takes fewer and serialises loads
ROWS_AT_ONCE = gl.constexpr(32)  # of a state, that a program writes, for want of registers


@gluon.jit(do_not_specialize_on_alignment=["fields_ptr"])
def _gdn_tail_check_kernel(
    states_desc, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_ptr, bias_ptr, o_ptr, k_tail_ptr, delta_tail_ptr,
    g_tail_ptr, fields_ptr, q_eighths, k_eighths, v_eighths, a_stride, b_stride, slot_rows,
    T: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS_A_KEY: gl.constexpr,
    PLACES: gl.constexpr, KEYS: gl.constexpr, EPS: gl.constexpr, BETA_SCALE: gl.constexpr,
):  # fmt: skip
    let_next_start()
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, products, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, products, 2)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])  # each warp has all entries, a lane one of them
    columns: gl.constexpr = gl.SliceLayout(0, products)
    over_k: gl.constexpr = gl.SliceLayout(1, over_rows(K))
    over_v: gl.constexpr = gl.SliceLayout(1, over_rows(SPAN))
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = k_tail_ptr.dtype.element_ty
    HK: gl.constexpr = H // HEADS_A_KEY
    TILES: gl.constexpr = V // SPAN  # of a head
    NUM_ROWS: gl.constexpr = 2 * KEYS

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
    keys = gl.allocate_shared_memory(dtype, [2 * KEPT, K], shared)  # the step's queries behind its keys
    deltas = gl.allocate_shared_memory(dtype, [2 * KEPT, SPAN], shared)  # the step's v until its deltas are known
    e_k, e_v, lane = gl.arange(0, KEPT, over_k), gl.arange(0, KEPT, over_v), gl.arange(0, 2 * KEPT, lanes)
    load_rows(keys.slice(0, KEPT), k_tail_ptr, place_of(start + e_k, PLACES), HK * K, kept)
    load_rows(deltas.slice(0, KEPT), delta_tail_ptr, place_of(start + e_v, PLACES), H * V, kept)
    async_copy.commit_group()
    g = gl.load(g_tail_ptr + place_of(start + lane, PLACES) * H, mask=lane < kept, other=0.0)
    A, bias = gl.load(A_ptr + head), gl.load(bias_ptr + head)
    wait_for_previous()

    first = sequence * T
    i_k, i_v = gl.arange(0, NUM_ROWS, over_k), gl.arange(0, NUM_ROWS, over_v)
    token_k, in_k = first + i_k % KEYS, gl.arange(0, K, gl.SliceLayout(0, over_rows(K)))
    key_rows = k_ptr + ((token_k * (k_eighths * 8) + key_head * K)[:, None] + in_k[None, :])
    query_rows = q_ptr + ((token_k * (q_eighths * 8) + key_head * K)[:, None] + in_k[None, :])
    pointers = gl.where((i_k < KEYS)[:, None], key_rows, query_rows)
    async_load(keys.slice(KEPT, NUM_ROWS), pointers, mask=(i_k % KEYS < T)[:, None])
    v_stride = v_eighths * 8
    load_rows(deltas.slice(KEPT, KEPT), v_ptr + (first * v_stride + tile * SPAN), e_v, v_stride, T)
    async_copy.commit_group()
    is_own = (lane >= KEPT) & (lane < KEPT + T)
    token = first + lane - KEPT
    raw = gl.load(a_ptr + token * a_stride + head, mask=is_own, other=0.0)
    g = gl.where(is_own, log_decay(raw, bias, A), g)
    beta = gl.load(b_ptr + token * b_stride + head, mask=is_own, other=0.0).to(gl.float32)
    upto = gl.associative_scan(gl.maximum(g * LOG2_E, LEAST_LOG2), 0, add)  # log2 of the decays from the base on
    # A query is as old as its key.
    upto = gl.gather(upto, gl.where(lane < KEPT, lane, KEPT + lane % KEYS), 0)
    upto_entries = gl.allocate_shared_memory(gl.float32, [2 * KEPT], line, upto)
    betas = gl.allocate_shared_memory(gl.float32, [2 * KEPT], line, BETA_SCALE / (1.0 + exp2(-beta * LOG2_E)))
    async_copy.wait_group(0)

    rows = keys.slice(KEPT, NUM_ROWS).permute((1, 0)).load(right)
    scores = gl.zeros([KEPT, 2 * KEPT], gl.float32, products)
    scores = mma_v2(keys.slice(KEPT, KEPT).load(left), keys.permute((1, 0)).load(right), scores)
    # Transposed, a thread's scores are where it multiplies them; those behind NUM_ROWS are nobody's.
    scores = gl.permute(scores, (1, 0))
    if NUM_ROWS < KEPT:
        scores, _ = gl.split(gl.permute(gl.reshape(scores, [2 * KEPT, 2, NUM_ROWS]), (0, 2, 1)))
    of_kept, of_own = gl.split(gl.permute(gl.reshape(scores, [2, KEPT, NUM_ROWS]), (1, 2, 0)))
    of_kept = gl.convert_layout(of_kept, right, assert_trivial=True)
    of_own = gl.convert_layout(of_own, right, assert_trivial=True)
    e = gl.arange(0, KEPT, gl.SliceLayout(1, right))
    r = gl.arange(0, NUM_ROWS, gl.SliceLayout(0, right))
    upto_r = upto_entries.slice(KEPT, NUM_ROWS).load(gl.SliceLayout(0, right))
    upto_kept = upto_entries.slice(0, KEPT).load(gl.SliceLayout(1, right))
    upto_own = upto_entries.slice(KEPT, KEPT).load(gl.SliceLayout(1, right))
    high, low = split(of_kept * exp2(upto_r[None, :] - upto_kept[:, None]), dtype)
    over = gl.sum(gl.where(e[:, None] == r[None, :], of_own, 0.0), 0)
    over = gl.convert_layout(1.0 / gl.sqrt(over + EPS), columns)
    of_own = gl.where(e[:, None] <= (r % KEYS)[None, :], of_own * exp2(upto_r[None, :] - upto_own[:, None]), 0.0)
    own_scores = gl.allocate_shared_memory(gl.float32, [KEPT, NUM_ROWS], plain, of_own)
    of_state = exp2(upto_entries.slice(KEPT, NUM_ROWS).load(columns))
    mbarrier.wait(arrived, 0)
    read = mma_v2(state.permute((1, 0)).load(left), rows, gl.zeros([SPAN, NUM_ROWS], gl.float32, products))
    delta = deltas.slice(0, KEPT).permute((1, 0)).load(left)
    read = mma_v2(delta, low, mma_v2(delta, high, read * of_state[None, :]))

    column = gl.arange(0, NUM_ROWS, columns)
    scale = betas.slice(KEPT, NUM_ROWS).load(columns) * over
    v = deltas.slice(KEPT, NUM_ROWS).permute((1, 0)).load(products).to(gl.float32)
    own = gl.zeros([SPAN, NUM_ROWS], dtype, products)
    for i in gl.static_range(T):
        # Of the row whose turn it is; later rows and its own query read what it adds, its own key has been read.
        found = (v - read * over[None, :]) * scale[None, :]
        delta_i = gl.sum(gl.where((column == i)[None, :], found, 0.0), 1).to(dtype)
        own = gl.where((column == i)[None, :], delta_i[:, None], own)
        read += delta_i.to(gl.float32)[:, None] * own_scores.slice(i, 1).load(products)
    o = read * (over * K**-0.5)[None, :]
    in_tile = gl.arange(0, SPAN, gl.SliceLayout(1, products))
    o_ptr += first * (H * V) + tile * SPAN
    o_rows = o_ptr + (((column - KEYS) * (H * V))[None, :] + in_tile[:, None])
    gl.store(o_rows, o.to(o_ptr.dtype.element_ty), mask=((column >= KEYS) & (column < KEYS + T))[None, :])

    deltas.slice(KEPT, NUM_ROWS).permute((1, 0)).store(own)
    end = start + kept
    num_own = gl.where(row >= 0, T, 0)
    store_rows(deltas.slice(KEPT, NUM_ROWS), delta_tail_ptr, place_of(end + i_v, PLACES), H * V, num_own)
    if first_column == 0:
        place = place_of(end + lane - KEPT, PLACES)
        gl.store(g_tail_ptr + place * H, g, mask=(lane >= KEPT) & (lane < KEPT + num_own))
        if head % HEADS_A_KEY == 0:
            store_rows(keys.slice(KEPT, NUM_ROWS), k_tail_ptr, place_of(end + i_k, PLACES), HK * K, num_own)

    if (dst >= 0) & (row >= 0):
        last = gl.where(written > kept, KEPT + written - kept, written) - 1
        upto_end = gl.sum(gl.where(lane == last, upto, 0.0), 0)
        entry = gl.arange(0, 2 * KEPT, gl.SliceLayout(0, left))
        weights = exp2(upto_end - upto_entries.load(gl.SliceLayout(0, left)))
        all_deltas = deltas.load(right)
        for c in gl.static_range(K // ROWS_AT_ONCE):
            k = keys.slice(c * ROWS_AT_ONCE, ROWS_AT_ONCE, 1).permute((1, 0)).load(left).to(gl.float32)
            added, rest = split(gl.where((entry <= last)[None, :], k * weights[None, :], 0.0), dtype)
            tile_rows = state.slice(c * ROWS_AT_ONCE, ROWS_AT_ONCE)
            after = tile_rows.load(products).to(gl.float32) * exp2(upto_end)
            tile_rows.store(mma_v2(rest, all_deltas, mma_v2(added, all_deltas, after)).to(dtype))
        store_state(states_desc, states, dst * slot_rows + head * K, first_column)


def gdn_tail_check_hopper(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: GdnHeads, state_pool: Tensor,
    tail: tuple[Tensor, Tensor, Tensor], tails: Tails,
) -> Tensor:  # fmt: skip
    (R, Hv, Dv), (Hk, Dk), batch, T = v.shape, k.shape[1:], len(tails.fields), tails.rows_each
    o = torch.empty((R, Hv, Dv), dtype=v.dtype, device=v.device)
    if batch == 0:
        return o
    _gdn_tail_check_kernel[(Hv * (Dv // SPAN.value), batch)](
        states_of(state_pool, Dk), q, k, v, a, b, heads.A, heads.dt_bias, o, *tail, tails.fields,
        q.stride(0) // 8, k.stride(0) // 8, v.stride(0) // 8, a.stride(0), b.stride(0), state_pool.stride(0) // Dv,
        T=T, H=Hv, K=Dk, V=Dv, HEADS_A_KEY=Hv // Hk, PLACES=tail[0].shape[1], KEYS=4 if T <= 4 else 8,
        EPS=L2_NORM_EPS, BETA_SCALE=heads.beta_scale, num_warps=NUM_WARPS.value,
        maxnreg=MOST_REGISTERS, **OVERLAPPED,
    )  # fmt: skip
    return o
