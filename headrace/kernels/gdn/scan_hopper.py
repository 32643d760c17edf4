"""States of the gated delta rule's scan on Hopper (Gluon): the states kernel of headrace/kernels/gdn/scan.py.

The state stays in registers from chunk to chunk. It is held transposed, so that it is the left operand of w S, and V'
that of k^T V': sums of one product become a factor of the next without passing through shared memory. The states before
chunks and V' are stored while the matrix units work. No fence stands between asynchronous copies and the products that
read them, as in headrace/kernels/ssd/scan_hopper.py.

Shapes    as _gdn_states_kernel's; a program holds COLUMNS of V and all of K
Contract  16-bit keys and values of the sizes that `fits_hopper` names
Source    NVIDIA, PTX ISA, wgmma: accumulators have the left operand's register layout
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headrace.kernels.lib.chunks import ChunkTable
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.hopper import async_load

COLUMNS, NUM_WARPS = 64, 4
STAGES = gl.constexpr(4)  # chunks in shared memory: one in use, the others being copied


@gluon.jit
def _start_loads(
    chunk, first_row, num_rows, head, k_ptr, u_ptr, w_ptr, w_tiles, k_tiles, u_tiles, first_value, k_stride,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, Q: gl.constexpr, COLUMNS: gl.constexpr,
    rows: gl.constexpr, columns: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk's w, k and u to its slot."""
    slot = chunk % STAGES
    tile = (chunk * H + head).to(gl.int64)
    row = gl.arange(0, Q, gl.SliceLayout(1, rows))
    key = gl.arange(0, K, gl.SliceLayout(0, rows))
    async_load(w_tiles.index(slot), w_ptr + tile * (Q * K) + ((row * K)[:, None] + key[None, :]))
    k_rows = k_ptr + first_row.to(gl.int64) * k_stride + ((row * k_stride)[:, None] + key[None, :])
    async_load(k_tiles.index(slot), k_rows, mask=(row < num_rows)[:, None])
    value = first_value + gl.arange(0, COLUMNS, gl.SliceLayout(1, columns))
    q = gl.arange(0, Q, gl.SliceLayout(0, columns))
    async_load(u_tiles.index(slot), u_ptr + tile * (Q * V) + ((value * Q)[:, None] + q[None, :]))


@gluon.jit(do_not_specialize_on_alignment=["chunks_ptr", "sequences_ptr"])
def _gdn_hopper_states_kernel(
    k_ptr, u_ptr, w_ptr, decay_ptr, to_end_ptr, start_ptr, pool_ptr, chunks_ptr, sequences_ptr, k_eighths, slot_stride,
    H: gl.constexpr, R: gl.constexpr, K: gl.constexpr, V: gl.constexpr, Q: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """start [C, H, V, K], the state before each chunk; V' = u - w start, in place of u [C, H, V, Q]; and the states to
    write."""
    states: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])  # [COLUMNS, K]
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 16])  # [COLUMNS, Q]
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([1, 8], [256 // Q, Q // 8], [4, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = k_ptr.dtype.element_ty

    k_stride = k_eighths * 8  # tells the compiler that rows begin at multiples of 16 bytes
    first_value, head, sequence = gl.program_id(0) * COLUMNS, gl.program_id(1), gl.program_id(2)
    k_ptr += head // R * K
    first_chunk = gl.load(sequences_ptr + sequence * 4)
    end_chunk = gl.load(sequences_ptr + sequence * 4 + 1)
    if first_chunk == end_chunk:
        return
    src = gl.load(sequences_ptr + sequence * 4 + 2).to(gl.int64)

    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, Q, K], shared)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, Q, K], shared)
    u_tiles = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, Q], shared)
    for i in gl.static_range(STAGES - 1):
        if first_chunk + i < end_chunk:
            first_row = gl.load(chunks_ptr + (first_chunk + i) * 4)
            num_rows = gl.load(chunks_ptr + (first_chunk + i) * 4 + 1)
            _start_loads(
                first_chunk + i, first_row, num_rows, head, k_ptr, u_ptr, w_ptr, w_tiles, k_tiles, u_tiles, first_value,
                k_stride, H, K, V, Q, COLUMNS, rows, columns,
            )  # fmt: skip
        async_copy.commit_group()

    value = first_value + gl.arange(0, COLUMNS, gl.SliceLayout(1, states))
    key = gl.arange(0, K, gl.SliceLayout(0, states))
    in_pool = pool_ptr + head * (K * V) + (key * V)[None, :] + value[:, None]
    found = (value >= 0)[:, None] & (key < gl.where(src >= 0, K, 0))[None, :]
    state = gl.load(in_pool + src * slot_stride, mask=found, other=0.0).to(gl.float32)
    q = gl.arange(0, Q, gl.SliceLayout(0, values))
    start_place = (first_value + gl.arange(0, COLUMNS, gl.SliceLayout(1, rows)))[:, None] * K
    start_place += gl.arange(0, K, gl.SliceLayout(0, rows))[None, :]
    value_place = (first_value + gl.arange(0, COLUMNS, gl.SliceLayout(1, columns)))[:, None] * Q
    value_place += gl.arange(0, Q, gl.SliceLayout(0, columns))[None, :]

    # Each step loads the scalars that the next one begins with.
    last = end_chunk - 1
    decay = gl.load(decay_ptr + (first_chunk * H + head) * Q + Q - 1)
    dst = gl.load(chunks_ptr + first_chunk * 4 + 2)
    far = gl.minimum(first_chunk + STAGES - 1, last)
    first_row = gl.load(chunks_ptr + far * 4)
    num_rows = gl.load(chunks_ptr + far * 4 + 1)
    for chunk in range(first_chunk, end_chunk):
        tile = (chunk * H + head).to(gl.int64)
        slot = chunk % STAGES
        rounded = state.to(dtype)
        async_copy.wait_group(STAGES - 2)
        factor = gl.convert_layout(rounded, gl.DotOperandLayout(0, values, 2))
        nothing = gl.zeros([COLUMNS, Q], gl.float32, values)
        product = warpgroup_mma(factor, w_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        to_end = gl.load(to_end_ptr + (chunk * H + head) * Q + q)

        if chunk + STAGES - 1 < end_chunk:  # into the slot that the step before has read
            _start_loads(
                chunk + STAGES - 1, first_row, num_rows, head, k_ptr, u_ptr, w_ptr, w_tiles, k_tiles, u_tiles,
                first_value, k_stride, H, K, V, Q, COLUMNS, rows, columns,
            )  # fmt: skip
        async_copy.commit_group()
        gl.store(start_ptr + tile * (K * V) + start_place, gl.convert_layout(rounded, rows))
        state *= gl.exp2(decay)
        near, far = gl.minimum(chunk + 1, last), gl.minimum(chunk + STAGES, last)
        this_dst = dst.to(gl.int64)
        decay = gl.load(decay_ptr + (near * H + head) * Q + Q - 1)
        dst = gl.load(chunks_ptr + near * 4 + 2)
        first_row = gl.load(chunks_ptr + far * 4)
        num_rows = gl.load(chunks_ptr + far * 4 + 1)

        u = u_tiles.index(slot).load(values).to(gl.float32)
        product = warpgroup_mma_wait(0, [product])
        solved = u - product
        weighted = gl.convert_layout((solved * to_end[None, :]).to(dtype), gl.DotOperandLayout(0, states, 2))
        state = warpgroup_mma(weighted, k_tiles.index(slot), state, is_async=True)
        gl.store(u_ptr + tile * (Q * V) + value_place, gl.convert_layout(solved.to(dtype), columns))
        state = warpgroup_mma_wait(0, [state])
        if this_dst >= 0:
            gl.store(in_pool + this_dst * slot_stride, state.to(pool_ptr.dtype.element_ty))
    async_copy.wait_group(0)


def launch_states_hopper(
    k: Tensor, u: Tensor, w: Tensor, decay: Tensor, to_end: Tensor, start: Tensor, state_pool: Tensor, table: ChunkTable
) -> None:
    H, V, Q = u.shape[1:]
    Hk, K = k.shape[1:]
    _gdn_hopper_states_kernel[(V // COLUMNS, H, len(table.sequences_N4))](
        k, u, w, decay, to_end, start, state_pool, table.chunks_C4, table.sequences_N4, k.stride(0) // 8,
        state_pool.stride(0), H=H, R=H // Hk, K=K, V=V, Q=Q, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip


def fits_hopper(k: Tensor, V: int, chunk_size: int) -> bool:
    """True if Hopper variants run here, and this one takes such sizes."""
    return (
        runs_hopper(k)
        and k.shape[2] == 128
        and V % COLUMNS == 0
        and chunk_size == 64
        and k.stride(0) % 8 == k.data_ptr() % 16 == 0
    )
