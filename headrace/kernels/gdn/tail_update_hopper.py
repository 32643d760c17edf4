"""Gated delta rule decode steps over tails on Hopper (Gluon): the kernel of headrace/kernels/gdn/tail_update.py.

A program takes SPAN columns of V of one head of a sequence. Its part of the state and the tail's entries are copied to
shared memory before anything is waited for. What the step's rows, keys and queries, find in the state and in the kept
entries are products of matrices; only what rows give each other is computed row by row.

    read^T [V, rows] = (S^T rows^T) * decays + delta^T W        W [kept, rows] = (k rows^T) * decays

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from headrace.kernels.dense.rms_norm import L2_NORM_EPS
from headrace.kernels.gdn.heads import GdnHeads, log_decay
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.hopper import LAYOUT, SPAN, async_load, tma_load, tma_store, wait_for_warps
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2
from headrace.kernels.lib.tail_programs import load_tail_fields
from headrace.kernels.lib.tails import Tails, most_kept
from headrace.kernels.ssd.tail_update_hopper import split, states_of

NUM_WARPS = 2
KEPT = gl.constexpr(16)  # entries of a tail
MOST_ROWS = 8


@gluon.jit(do_not_specialize_on_alignment=["fields_ptr"])
def _gdn_tail_hopper_kernel(
    states_desc, q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, A_ptr, bias_ptr, o_ptr, k_tail_ptr, delta_tail_ptr,
    g_tail_ptr, fields_ptr, q_eighths, k_eighths, v_stride, a_stride, b_stride, slot_rows,
    T: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS_A_KEY: gl.constexpr,
    PLACES: gl.constexpr, PADDED_T: gl.constexpr, NUM_ROWS: gl.constexpr,
    WARPS: gl.constexpr, EPS: gl.constexpr, BETA_SCALE: gl.constexpr,
):  # fmt: skip
    """NUM_ROWS rows, of which the first PADDED_T are keys and the others queries, lie behind the kept keys."""
    let_next_start()
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, products, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, products, 2)
    over_k: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
    over_v: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SPAN, SPAN // 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = k_tail_ptr.dtype.element_ty
    HK: gl.constexpr = H // HEADS_A_KEY

    head, sequence = gl.program_id(0) // (V // SPAN), gl.program_id(1)
    first_column = gl.program_id(0) % (V // SPAN) * SPAN
    key_head = head // HEADS_A_KEY
    src, dst, row, start, kept, written = load_tail_fields(fields_ptr, sequence)
    kept = gl.where(row >= 0, kept, 0)
    first = row.to(gl.int64) * PLACES

    states = gl.allocate_shared_memory(dtype, [K, SPAN], LAYOUT)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()  # makes the barrier visible to the copy engine
    # What lies outside of the pool is zero: of a row of -1 all is.
    first_row = gl.where((src >= 0) & (row >= 0), src * slot_rows + head * K, -K)
    mbarrier.expect(arrived, K * SPAN * 2)
    tma_load(states_desc, [first_row, first_column], arrived, states)
    keys = gl.allocate_shared_memory(dtype, [2 * KEPT, K], shared)
    deltas = gl.allocate_shared_memory(dtype, [KEPT, SPAN], shared)
    token_k = gl.arange(0, KEPT, gl.SliceLayout(1, over_k))
    key = gl.arange(0, K, gl.SliceLayout(0, over_k))
    token_v = gl.arange(0, KEPT, gl.SliceLayout(1, over_v))
    column = first_column + gl.arange(0, SPAN, gl.SliceLayout(0, over_v))
    k_place = (first + (start + token_k) % PLACES) * (HK * K) + key_head * K
    async_load(keys.slice(0, KEPT), k_tail_ptr + (k_place[:, None] + key[None, :]), mask=(token_k < kept)[:, None])
    delta_place = (first + (start + token_v) % PLACES) * (H * V) + head * V
    async_load(deltas, delta_tail_ptr + (delta_place[:, None] + column[None, :]), mask=(token_v < kept)[:, None])
    async_copy.commit_group()

    A, bias = gl.load(A_ptr + head), gl.load(bias_ptr + head)
    e = gl.arange(0, KEPT, gl.SliceLayout(1, products))
    j = gl.arange(0, KEPT, gl.SliceLayout(0, products))
    g_j = gl.load(g_tail_ptr + (first + (start + j) % PLACES) * H + head, mask=j < kept, other=0.0)
    is_later = j[None, :] > e[:, None]
    wait_for_previous()

    if T > 0:
        r_k = gl.arange(0, NUM_ROWS, gl.SliceLayout(1, over_k))
        t_k = r_k % PADDED_T
        of_row = sequence * T + t_k
        key_rows = k_ptr + ((of_row * (k_eighths * 8) + key_head * K)[:, None] + key[None, :])
        query_rows = q_ptr + ((of_row * (q_eighths * 8) + key_head * K)[:, None] + key[None, :])
        pointers = gl.where((r_k < PADDED_T)[:, None], key_rows, query_rows)
        async_load(keys.slice(KEPT, NUM_ROWS), pointers, mask=(t_k < T)[:, None])
    async_copy.commit_group()
    v_own, beta_own, g_own, upto_own, deltas_own = (), (), (), (), ()  # type: tuple, tuple, tuple, tuple, tuple
    in_v = head * V + first_column + gl.arange(0, SPAN, gl.SliceLayout(1, products))
    for i in gl.static_range(T):
        v_own += (gl.load(v_ptr + (sequence * T + i) * v_stride + in_v),)
        beta_own += (gl.load(b_ptr + (sequence * T + i) * b_stride + head).to(gl.float32),)
        g_own += (log_decay(gl.load(a_ptr + (sequence * T + i) * a_stride + head), bias, A),)
    if T > 0:
        r = gl.arange(0, NUM_ROWS, gl.SliceLayout(0, products))
        t = r % PADDED_T
        upto = 0.0
        own_decay = gl.zeros([NUM_ROWS], gl.float32, gl.SliceLayout(0, products))
        for i in gl.static_range(T):
            upto += g_own[i]
            upto_own += (upto,)
            own_decay = gl.where(t == i, upto, own_decay)
        kept_weights = gl.exp(gl.sum(gl.where(is_later, g_j[None, :], 0.0), 1))
        of_state = gl.exp(gl.sum(g_j, 0))
        async_copy.wait_group(0)
        rows = keys.slice(KEPT, NUM_ROWS).permute((1, 0)).load(right)
        zeros = gl.zeros([KEPT, NUM_ROWS], gl.float32, products)
        high, low = split(mma_v2(keys.slice(0, KEPT).load(left), rows, zeros) * kept_weights[:, None], dtype)
        own_scores = mma_v2(keys.slice(KEPT, KEPT).load(left), rows, zeros)  # those behind NUM_ROWS are never read
        over = gl.sum(gl.where(e[:, None] == r[None, :], own_scores, 0.0), 0)
        over = 1.0 / gl.sqrt(over + EPS)
        mbarrier.wait(arrived, 0)
        read = mma_v2(states.permute((1, 0)).load(left), rows, gl.zeros([SPAN, NUM_ROWS], gl.float32, products))
        read *= of_state
        delta = deltas.permute((1, 0)).load(left)
        read = mma_v2(delta, gl.convert_layout(high, right), read)
        read = mma_v2(delta, gl.convert_layout(low, right), read) * gl.exp(own_decay)[None, :]

        for i in gl.static_range(T):
            beta = BETA_SCALE / (1.0 + gl.exp(-beta_own[i]))
            over_i = gl.sum(gl.where(r == i, over, 0.0), 0)
            known = gl.sum(gl.where((r == i)[None, :], read, 0.0), 1)
            own = ((v_own[i].to(gl.float32) - known * over_i) * (beta * over_i)).to(dtype)
            # Later rows and its own query; its own key has been read.
            of_own = gl.sum(gl.where((e == i)[:, None], own_scores, 0.0), 0)
            of_own = gl.where(t >= i, of_own * gl.exp(own_decay - upto_own[i]), 0.0)
            read += own.to(gl.float32)[:, None] * of_own[None, :]
            place = (first + (start + kept + i) % PLACES) * (H * V)
            gl.store(delta_tail_ptr + (place + in_v), own, mask=in_v < gl.where(row >= 0, H * V, 0))
            deltas_own += (own,)
        o = read * (over * K**-0.5)[None, :]
        o_place = ((sequence * T + t) * (H * V))[None, :] + in_v[:, None]
        gl.store(o_ptr + o_place, o.to(o_ptr.dtype.element_ty), mask=((t < T) & (r >= PADDED_T))[None, :])

        if (row >= 0) & (first_column == 0):
            for i in gl.static_range(T):
                gl.store(g_tail_ptr + (first + (start + kept + i) % PLACES) * H + head, g_own[i])
            if head % HEADS_A_KEY == 0:
                own_keys = keys.slice(KEPT, NUM_ROWS).load(over_k)
                own_place = (first + (start + kept + r_k) % PLACES) * (HK * K) + key_head * K
                gl.store(k_tail_ptr + (own_place[:, None] + key[None, :]), own_keys, mask=(r_k < T)[:, None])
    else:
        async_copy.wait_group(0)
        mbarrier.wait(arrived, 0)

    if (dst >= 0) & (row >= 0):
        # Of the kept entries the first `written`, of the step's own those up to there.
        g_end = gl.sum(gl.where(j < written, g_j, 0.0), 0)
        between = gl.sum(gl.where(is_later & (j < written)[None, :], g_j[None, :], 0.0), 1)
        end_own = g_end * 0.0
        for i in gl.static_range(T):
            end_own = gl.where(i < written - kept, upto_own[i], end_own)
        weight = gl.convert_layout(gl.where(e < written, gl.exp(between + end_own), 0.0), gl.SliceLayout(0, left))
        kept_deltas = deltas.load(right)
        for c in gl.static_range(K // SPAN):
            k = keys.slice(0, KEPT).slice(c * SPAN, SPAN, 1).permute((1, 0)).load(left).to(gl.float32)
            added, rest = split(k * weight[None, :], dtype)
            after = states.slice(c * SPAN, SPAN).load(products).to(gl.float32) * gl.exp(g_end + end_own)
            after = mma_v2(rest, kept_deltas, mma_v2(added, kept_deltas, after))
            in_k = c * SPAN + gl.arange(0, SPAN, gl.SliceLayout(1, products))
            for i in gl.static_range(T):
                own_weight = gl.where(i < written - kept, gl.exp(end_own - upto_own[i]), 0.0)
                k_i = gl.load(k_ptr + (sequence * T + i) * (k_eighths * 8) + key_head * K + in_k).to(gl.float32)
                own_delta = gl.convert_layout(deltas_own[i], gl.SliceLayout(0, products)).to(gl.float32)
                after += (k_i * own_weight)[:, None] * own_delta[None, :]
            states.slice(c * SPAN, SPAN).store(after.to(dtype))
        fence_async_shared()
        wait_for_warps()
        tma_store(states_desc, [dst * slot_rows + head * K, first_column], states)
        tma.store_wait(0)


def gdn_tail_update_hopper(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, heads: GdnHeads, state_pool: Tensor,
    tail: tuple[Tensor, Tensor, Tensor], tails: Tails,
) -> Tensor:  # fmt: skip
    (R, Hv, Dv), (Hk, Dk), batch, T = v.shape, k.shape[1:], len(tails.fields), tails.rows_each
    o = torch.empty((R, Hv, Dv), dtype=v.dtype, device=v.device)
    if batch == 0:
        return o
    padded_t = max(4, next_power_of_2(max(1, T)))
    _gdn_tail_hopper_kernel[(Hv * (Dv // SPAN.value), batch)](
        states_of(state_pool, Dk), q, k, v, a, b, heads.A, heads.dt_bias, o, *tail, tails.fields,
        q.stride(0) // 8, k.stride(0) // 8, v.stride(0), a.stride(0), b.stride(0), state_pool.stride(0) // Dv,
        T=T, H=Hv, K=Dk, V=Dv, HEADS_A_KEY=Hv // Hk, PLACES=tail[0].shape[1], PADDED_T=padded_t,
        NUM_ROWS=2 * padded_t, WARPS=NUM_WARPS, EPS=L2_NORM_EPS, BETA_SCALE=heads.beta_scale,
        num_warps=NUM_WARPS,
        maxnreg=most_registers(T), **OVERLAPPED,
    )  # fmt: skip
    return o


def most_registers(rows_each: int) -> int | None:
    """Registers of a thread; None: as many as it needs. With one row a cap costs spills only where a state is written,
    and lets more programs run."""
    return 128 if rows_each == 1 else None


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
        and all(each.stride(0) % 8 == each.data_ptr() % 16 == 0 for each in (q, k))
    )
