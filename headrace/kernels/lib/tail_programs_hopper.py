"""The parts that Hopper kernels over tails share (Gluon)."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.lib.hopper import LAYOUT, SPAN, async_load, tma_load, tma_store, wait_for_warps

NUM_WARPS = gl.constexpr(2)
KEPT = gl.constexpr(16)
"""Entries of a tail that a program has room for."""
MOST_ROWS = 8
"""Rows of a sequence in a step: a token and its drafts."""
LEAST_LOG2 = gl.constexpr(-192.0)
"""log2 of the decay of an entry whose own is less: 2 to this is zero, and sums of these keep what comes behind them."""


@gluon.constexpr_function
def over_rows(width):
    """The layout in which the warps of a program copy rows of `width` 16-bit elements, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [NUM_WARPS.value, 1], [1, 0])


@gluon.jit
def fetch_state(states_desc, src, row, slot_rows, first_row, first_column, SPANS: gl.constexpr, ROWS: gl.constexpr):
    """Starts copying ROWS rows and SPANS spans of the state in slot `src`; without one, zeros.

    Returns shared memory [SPANS, ROWS, SPAN], and the barrier to wait on.
    """
    states = gl.allocate_shared_memory(states_desc.dtype, [SPANS, ROWS, SPAN], LAYOUT)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()  # makes the barrier visible to the copy engine
    # What lies outside of the pool is zero: of a row of -1 all is.
    first_row = gl.where((src >= 0) & (row >= 0), src * slot_rows + first_row, -ROWS)
    mbarrier.expect(arrived, SPANS * ROWS * SPAN * 2)
    for c in gl.static_range(SPANS):
        tma_load(states_desc, [first_row, first_column + c * SPAN], arrived, states.index(c))
    return states, arrived


@gluon.jit
def store_state(states_desc, states, first_row, first_column):
    """Writes shared memory [SPANS, ROWS, SPAN], as all warps have left it, to these rows and columns of the pool."""
    SPANS: gl.constexpr = states.shape[0]
    fence_async_shared()
    wait_for_warps()
    for c in gl.static_range(SPANS):
        tma_store(states_desc, [first_row, first_column + c * SPAN], states.index(c))
    tma.store_wait(0)


@gluon.jit
def load_rows(rows, pointer, places, stride, end):
    """Starts copying rows [R, width] from the places [R] of rows that are `stride` elements apart; those of `end` and
    on are zeros."""
    over: gl.constexpr = over_rows(rows.shape[1])
    r = gl.arange(0, rows.shape[0], gl.SliceLayout(1, over))
    within = gl.arange(0, rows.shape[1], gl.SliceLayout(0, over))
    async_load(rows, pointer + ((places * stride)[:, None] + within[None, :]), mask=(r < end)[:, None])


@gluon.jit
def store_rows(rows, pointer, places, stride, end):
    """Writes the rows [R, width] before `end` to the places [R] of rows that are `stride` elements apart."""
    over: gl.constexpr = over_rows(rows.shape[1])
    r = gl.arange(0, rows.shape[0], gl.SliceLayout(1, over))
    within = gl.arange(0, rows.shape[1], gl.SliceLayout(0, over))
    gl.store(pointer + ((places * stride)[:, None] + within[None, :]), rows.load(over), mask=(r < end)[:, None])


@gluon.jit
def place_of(token, PLACES: gl.constexpr):
    """The place in a ring of a token, counted from the ring's first. Unsigned: that remainder is one instruction."""
    return (token.to(gl.uint32) % PLACES).to(gl.int32)


@gluon.jit
def split(x, dtype: gl.constexpr):
    """Two numbers of a 16-bit dtype whose sum is x, as exact as float32 to some 2**-17."""
    high = x.to(dtype)
    return high, (x - high.to(gl.float32)).to(dtype)


@gluon.jit
def exp2(x):
    """2**x in one instruction: 0 below the normal numbers, infinite above them."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b


def states_of(state_pool: Tensor, num_rows: int) -> TensorDescriptor:
    """A pool [S, H, rows, width] as one matrix of all states' rows, of which the copy engine takes `num_rows` at once.

    A slot's rows begin at its number times `state_pool.stride(0) // width`.
    """
    (S, H, rows, width), stride = state_pool.shape, state_pool.stride(0)
    return TensorDescriptor(
        state_pool, [(S - 1) * (stride // width) + H * rows, width], [width, 1], [num_rows, SPAN.value], LAYOUT.value
    )
