"""Mamba2 decode steps over tails on Hopper (Gluon): the kernel of headrace/kernels/ssd/tail_update.py.

A program takes ROWS rows of one head's state. They and the tail's entries are copied to shared memory before anything
is waited for. What the step's rows find in the state and in the kept entries are products of matrices; what rows give
each other is computed one by one:

    y^T [P, T] = ((S C^T) G + x^T W) * decays        W [kept, T] = (B C^T) * decays * dt

Shapes    as in headrace/kernels/ssd/tail_update.py
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.hopper import LAYOUT, SPAN, async_load, tma_load, tma_store, wait_for_warps
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2
from headrace.kernels.lib.tail_programs import load_tail_fields
from headrace.kernels.lib.tails import Tails, most_kept
from headrace.kernels.ssd.heads import SsdHeads, time_step

ROWS, NUM_WARPS = 64, 2
MOST_ROWS = 8  # of a sequence
KEPT = gl.constexpr(16)  # entries of a tail


@gluon.jit
def split(x, dtype: gl.constexpr):
    """Two numbers of a 16-bit dtype whose sum is x, as exact as float32 to some 2**-17."""
    high = x.to(dtype)
    return high, (x - high.to(gl.float32)).to(dtype)


@gluon.jit(do_not_specialize_on_alignment=["fields_ptr"])
def _ssd_tail_hopper_kernel(
    states_desc, x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, bias_ptr, y_ptr, x_tail_ptr, B_tail_ptr,
    dt_tail_ptr, fields_ptr, x_stride, dt_stride, B_stride, C_stride, slot_rows,
    DT_MIN: gl.constexpr, DT_MAX: gl.constexpr, T: gl.constexpr, H: gl.constexpr, P: gl.constexpr, N: gl.constexpr,
    HEADS_A_GROUP: gl.constexpr, PLACES: gl.constexpr, PADDED_T: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    let_next_start()
    products: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, products, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, products, 2)
    over_n: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [WARPS, 1], [1, 0])
    over_p: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([N // 32], [32], [WARPS], [0])  # each warp has all of a row of B or C
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = x_tail_ptr.dtype.element_ty
    G: gl.constexpr = H // HEADS_A_GROUP

    head, sequence = gl.program_id(0) // (P // ROWS), gl.program_id(1)
    first_p = gl.program_id(0) % (P // ROWS) * ROWS
    group = head // HEADS_A_GROUP
    src, dst, row, start, kept, written = load_tail_fields(fields_ptr, sequence)
    kept = gl.where(row >= 0, kept, 0)
    first = row.to(gl.int64) * PLACES

    states = gl.allocate_shared_memory(dtype, [N // SPAN, ROWS, SPAN], LAYOUT)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()  # makes the barrier visible to the copy engine
    # What lies outside of the pool is zero: of a row of -1 all is.
    first_row = gl.where((src >= 0) & (row >= 0), src * slot_rows + head * P + first_p, -ROWS)
    mbarrier.expect(arrived, ROWS * N * 2)
    for c in gl.static_range(N // SPAN):
        tma_load(states_desc, [first_row, c * SPAN], arrived, states.index(c))
    B_kept = gl.allocate_shared_memory(dtype, [KEPT, N], shared)
    x_kept = gl.allocate_shared_memory(dtype, [KEPT, ROWS], shared)
    C_rows = gl.allocate_shared_memory(dtype, [PADDED_T, N], shared)
    n = gl.arange(0, N, gl.SliceLayout(0, over_n))
    token_n = gl.arange(0, KEPT, gl.SliceLayout(1, over_n))
    token_p = gl.arange(0, KEPT, gl.SliceLayout(1, over_p))
    B_place = (first + (start + token_n) % PLACES) * (G * N) + group * N
    async_load(B_kept, B_tail_ptr + (B_place[:, None] + n[None, :]), mask=(token_n < kept)[:, None])
    x_place = (first + (start + token_p) % PLACES) * (H * P) + head * P + first_p
    p = gl.arange(0, ROWS, gl.SliceLayout(0, over_p))
    async_load(x_kept, x_tail_ptr + (x_place[:, None] + p[None, :]), mask=(token_p < kept)[:, None])
    async_copy.commit_group()

    A, D, bias = gl.load(A_ptr + head), gl.load(D_ptr + head), gl.load(bias_ptr + head)
    e = gl.arange(0, KEPT, gl.SliceLayout(1, products))
    j = gl.arange(0, KEPT, gl.SliceLayout(0, products))
    dt_e = gl.load(dt_tail_ptr + (first + (start + e) % PLACES) * H + head, mask=e < kept, other=0.0)
    dt_j = gl.load(dt_tail_ptr + (first + (start + j) % PLACES) * H + head, mask=j < kept, other=0.0)
    is_later = j[None, :] > e[:, None]
    wait_for_previous()

    if T > 0:
        t_n = gl.arange(0, PADDED_T, gl.SliceLayout(1, over_n))
        C_place = ((sequence * T + t_n) * C_stride + group * N)[:, None] + n[None, :]
        async_load(C_rows, C_ptr + C_place, mask=(t_n < T)[:, None])
    async_copy.commit_group()
    dt_own, log_own, x_own, B_own, C_own = (), (), (), (), ()  # type: tuple, tuple, tuple, tuple, tuple
    in_n = group * N + gl.arange(0, N, line)
    in_p = head * P + first_p + gl.arange(0, ROWS, gl.SliceLayout(1, products))
    for i in gl.static_range(T):
        r = sequence * T + i
        x_own += (gl.load(x_ptr + r * x_stride + in_p),)
        B_own += (gl.load(B_ptr + r * B_stride + in_n),)
        C_own += (gl.load(C_ptr + r * C_stride + in_n).to(gl.float32),)
        dt_own += (time_step(gl.load(dt_ptr + r * dt_stride + head), bias, DT_MIN, DT_MAX),)
    log_j = dt_j * A
    if T > 0:
        t = gl.arange(0, PADDED_T, gl.SliceLayout(0, products))
        kept_weights = dt_e * gl.exp(gl.sum(gl.where(is_later, log_j[None, :], 0.0), 1))
        log = 0.0
        own_decay = gl.zeros([PADDED_T], gl.float32, gl.SliceLayout(0, products))
        for i in gl.static_range(T):
            log += dt_own[i] * A
            log_own += (log,)
            own_decay = gl.where(t == i, log, own_decay)
        own_decay = gl.exp(own_decay)
        own_weights = ()  # type: tuple
        for i in gl.static_range(T):
            of_rows = gl.zeros([PADDED_T], gl.float32, gl.SliceLayout(0, products))
            for k in gl.static_range(i, T):
                score = gl.sum(B_own[i].to(gl.float32) * C_own[k], 0)
                given = score * dt_own[i] * gl.exp(log_own[k] - log_own[i])
                of_rows = gl.where(t == k, given + D if k == i else given, of_rows)
            own_weights += (of_rows,)
        of_state = gl.exp(gl.sum(log_j, 0))
        async_copy.wait_group(0)
        C_spans = ()  # type: tuple
        for c in gl.static_range(N // SPAN):
            C_spans += (C_rows.slice(c * SPAN, SPAN, 1).permute((1, 0)).load(right),)
        scores = gl.zeros([KEPT, PADDED_T], gl.float32, products)
        for c in gl.static_range(N // SPAN):
            scores = mma_v2(B_kept.slice(c * SPAN, SPAN, 1).load(left), C_spans[c], scores)
        high, low = split(scores * kept_weights[:, None], dtype)
        mbarrier.wait(arrived, 0)
        y = gl.zeros([ROWS, PADDED_T], gl.float32, products)
        for c in gl.static_range(N // SPAN):
            y = mma_v2(states.index(c).load(left), C_spans[c], y)
        y *= of_state
        x = x_kept.permute((1, 0)).load(left)
        y = mma_v2(x, gl.convert_layout(high, right), y)
        y = mma_v2(x, gl.convert_layout(low, right), y) * own_decay[None, :]
        for i in gl.static_range(T):
            y += x_own[i].to(gl.float32)[:, None] * own_weights[i][None, :]
        y_place = ((sequence * T + t) * (H * P))[None, :] + in_p[:, None]
        gl.store(y_ptr + y_place, y.to(y_ptr.dtype.element_ty), mask=(t < T)[None, :])

        for i in gl.static_range(T):
            place = first + (start + kept + i) % PLACES
            gl.store(x_tail_ptr + (place * (H * P) + in_p), x_own[i], mask=in_p < gl.where(row >= 0, H * P, 0))
            if (row >= 0) & (first_p == 0):
                gl.store(dt_tail_ptr + place * H + head, dt_own[i])
                if head % HEADS_A_GROUP == 0:
                    gl.store(B_tail_ptr + (place * (G * N) + in_n), B_own[i])
    else:
        async_copy.wait_group(0)
        mbarrier.wait(arrived, 0)

    if (dst >= 0) & (row >= 0):
        # Of the kept entries the first `written`, of the step's own those up to there.
        log_end = gl.sum(gl.where(j < written, log_j, 0.0), 0)
        between = gl.sum(gl.where(is_later & (j < written)[None, :], log_j[None, :], 0.0), 1)
        weight = gl.where(e < written, dt_e * gl.exp(between), 0.0)
        end_own = log_end * 0.0
        for i in gl.static_range(T):
            end_own = gl.where(i < written - kept, log_own[i], end_own)
        weight = gl.convert_layout(weight * gl.exp(end_own), gl.SliceLayout(0, left))
        added, rest = split(x_kept.permute((1, 0)).load(left).to(gl.float32) * weight[None, :], dtype)
        for c in gl.static_range(N // SPAN):
            B = B_kept.slice(c * SPAN, SPAN, 1).load(right)
            after = states.index(c).load(products).to(gl.float32) * gl.exp(log_end + end_own)
            after = mma_v2(rest, B, mma_v2(added, B, after))
            in_span = c * SPAN + gl.arange(0, SPAN, gl.SliceLayout(0, products))
            for i in gl.static_range(T):
                own = gl.where(i < written - kept, dt_own[i] * gl.exp(end_own - log_own[i]), 0.0)
                own_B = gl.load(B_ptr + (sequence * T + i) * B_stride + group * N + in_span).to(gl.float32)
                after += (x_own[i].to(gl.float32) * own)[:, None] * own_B[None, :]
            states.index(c).store(after.to(dtype))
        fence_async_shared()
        wait_for_warps()
        for c in gl.static_range(N // SPAN):
            tma_store(states_desc, [dst * slot_rows + head * P + first_p, c * SPAN], states.index(c))
        tma.store_wait(0)


def ssd_tail_update_hopper(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, heads: SsdHeads, state_pool: Tensor,
    tail: tuple[Tensor, Tensor, Tensor], tails: Tails,
) -> Tensor:  # fmt: skip
    (R, H, P), (G, N), batch, T = x.shape, B.shape[1:], len(tails.fields), tails.rows_each
    y = torch.empty((R, H, P), dtype=x.dtype, device=x.device)
    if batch == 0:
        return y
    _ssd_tail_hopper_kernel[(H * (P // ROWS), batch)](
        states_of(state_pool, ROWS), x, dt, B, C, heads.A, heads.D, heads.dt_bias, y, *tail, tails.fields,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), state_pool.stride(0) // N,
        DT_MIN=heads.dt_min, DT_MAX=heads.dt_max, T=T, H=H, P=P, N=N, HEADS_A_GROUP=H // G,
        PLACES=tail[0].shape[1], PADDED_T=max(8, next_power_of_2(max(1, T))), ROWS=ROWS, WARPS=NUM_WARPS,
        num_warps=NUM_WARPS, **OVERLAPPED,
    )  # fmt: skip
    return y


def states_of(state_pool: Tensor, num_rows: int) -> TensorDescriptor:
    """A pool [S, H, rows, N] as one matrix of all states' rows, of which the copy engine takes `num_rows` at once.

    A slot's rows begin at its number times `state_pool.stride(0) // N`.
    """
    (S, H, rows, N), stride = state_pool.shape, state_pool.stride(0)
    return TensorDescriptor(
        state_pool, [(S - 1) * (stride // N) + H * rows, N], [N, 1], [num_rows, SPAN.value], LAYOUT.value
    )


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
        and C.stride(0) % 16 == C.data_ptr() % 16 == 0  # cp.async takes no less than 16 bytes of a row
    )
