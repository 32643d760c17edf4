"""Outputs of the SSD scan on Hopper (Gluon): the output kernel of headrace/kernels/ssd/scan.py for 16-bit inputs.

Triton's kernel loads the next head's x and state after it has used this head's, and waits for them. Here they are
copied while this head's are used, and the weights of pairs of rows are computed while the matrix units work. No fence
stands between asynchronous copies and the products that read them, as in CUTLASS's multistage kernels.

Shapes    as _ssd_output_kernel's; a program has one half of a chunk's rows, and HEADS heads of one group
Contract  the sizes that `fits_hopper` names
Source    CUTLASS, sm90_mma_multistage_gmma_ss (copies and products without the bulk copy engine)
Tests     on a Hopper GPU alone, as Gluon has no interpreter; elsewhere that it compiles
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from headrace.kernels.lib.chunks import ChunkTable
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.hopper import async_load

ROWS, NUM_WARPS = 64, 4


@gluon.jit
def _start_loads(
    x_tiles, start_tiles, decay_tiles, dt_tiles, x_ptr, start_ptr, decay_ptr, chunk_dt_ptr, i, num_rows, block,
    x_stride, chunk_head,
    P: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, narrow: gl.constexpr, wide: gl.constexpr, line: gl.constexpr,
):  # fmt: skip
    """Starts the copies for a program's i-th head: x of the rows up to the program's last, zero past the chunk's
    end, the state before the chunk, and decays and time steps of both halves."""
    row, p = gl.arange(0, ROWS, gl.SliceLayout(1, narrow)), gl.arange(0, P, gl.SliceLayout(0, narrow))
    x_place = (row * x_stride)[:, None] + p[None, :]
    async_load(x_tiles.index(i % 2 * 2), x_ptr + x_place, mask=(row < num_rows)[:, None])
    if block == 1:
        second = x_ptr + ROWS * x_stride
        async_load(x_tiles.index(i % 2 * 2 + 1), second + x_place, mask=(row + ROWS < num_rows)[:, None])
    p, n = gl.arange(0, P, gl.SliceLayout(1, wide)), gl.arange(0, N, gl.SliceLayout(0, wide))
    start_place = start_ptr + chunk_head.to(gl.int64) * (P * N)
    async_load(start_tiles.index(i % 3), start_place + ((p * N)[:, None] + n[None, :]))
    for half in gl.static_range(2):
        place = chunk_head * (2 * ROWS) + half * ROWS + gl.arange(0, ROWS, line)
        async_load(decay_tiles.index(i % 2 * 2 + half), decay_ptr + place)
        async_load(dt_tiles.index(i % 2 * 2 + half), chunk_dt_ptr + place)
    async_copy.commit_group()


@gluon.jit
def _start_rows(ptr, first, num_rows, stride, N: gl.constexpr, ROWS: gl.constexpr, wide: gl.constexpr, tile):
    """Starts the copy of rows of C or B from `first` on to a tile; zero past the chunk's end."""
    row, n = first + gl.arange(0, ROWS, gl.SliceLayout(1, wide)), gl.arange(0, N, gl.SliceLayout(0, wide))
    async_load(tile, ptr + ((row * stride)[:, None] + n[None, :]), mask=(row < num_rows)[:, None])


@gluon.jit(do_not_specialize_on_alignment=["chunks_ptr"])
def _ssd_hopper_outputs_kernel(
    x_ptr, B_ptr, C_ptr, D_ptr, decay_ptr, chunk_dt_ptr, start_ptr, y_ptr, chunks_ptr, x_eighths, B_eighths, C_eighths,
    H: gl.constexpr, P: gl.constexpr, N: gl.constexpr, HEADS_A_GROUP: gl.constexpr, HEADS: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    outputs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, outputs, 2)
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // P, P // 8], [4, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = x_ptr.dtype.element_ty

    x_stride, B_stride, C_stride = x_eighths * 8, B_eighths * 8, C_eighths * 8
    block, first_head, chunk = gl.program_id(0), gl.program_id(1) * HEADS, gl.program_id(2)
    first_row = gl.load(chunks_ptr + chunk * 4).to(gl.int64)
    num_rows = gl.load(chunks_ptr + chunk * 4 + 1)
    if block * ROWS >= num_rows:
        return
    group = first_head // HEADS_A_GROUP * N
    x_ptr += first_row * x_stride + first_head * P
    B_ptr += first_row * B_stride + group
    C_ptr += first_row * C_stride + group

    C_tile = gl.allocate_shared_memory(dtype, [ROWS, N], shared)
    x_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, P], shared)  # both halves of two heads
    start_tiles = gl.allocate_shared_memory(dtype, [3, P, N], shared)  # at first two of them hold B
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decay_tiles = gl.allocate_shared_memory(gl.float32, [4, ROWS], flat)
    dt_tiles = gl.allocate_shared_memory(gl.float32, [4, ROWS], flat)
    _start_rows(C_ptr, block * ROWS, num_rows, C_stride, N, ROWS, wide, C_tile)
    _start_rows(B_ptr, block * ROWS, num_rows, B_stride, N, ROWS, wide, start_tiles.index(1))
    _start_rows(B_ptr, 0, num_rows, B_stride, N, ROWS, wide, start_tiles.index(2))
    async_copy.commit_group()
    _start_loads(
        x_tiles, start_tiles, decay_tiles, dt_tiles, x_ptr, start_ptr, decay_ptr, chunk_dt_ptr, 0, num_rows, block,
        x_stride, chunk * H + first_head, P, N, ROWS, narrow, wide, line,
    )  # fmt: skip
    async_copy.wait_group(1)
    nothing = gl.zeros([ROWS, ROWS], gl.float32, scores)
    score = warpgroup_mma(C_tile, start_tiles.index(1).permute((1, 0)), nothing, use_acc=False, is_async=True)
    earlier = warpgroup_mma(C_tile, start_tiles.index(2).permute((1, 0)), nothing, use_acc=False, is_async=True)
    score, earlier = warpgroup_mma_wait(0, [score, earlier])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    column = gl.arange(0, ROWS, gl.SliceLayout(0, scores))
    score = gl.where(row[:, None] >= column[None, :], score, 0.0)

    out_row = gl.arange(0, ROWS, gl.SliceLayout(1, narrow))
    out = y_ptr + (first_row + block * ROWS) * (H * P)
    out_place = (out_row * (H * P))[:, None] + gl.arange(0, P, gl.SliceLayout(0, narrow))[None, :]
    is_row = (out_row + block * ROWS < num_rows)[:, None]
    for i in range(HEADS):
        head = first_head + i
        D = gl.load(D_ptr + head)
        async_copy.wait_group(0)
        y = warpgroup_mma(
            C_tile, start_tiles.index(i % 3).permute((1, 0)), gl.zeros([ROWS, P], gl.float32, outputs), use_acc=False,
            is_async=True,
        )  # fmt: skip
        if i + 1 < HEADS:
            _start_loads(
                x_tiles, start_tiles, decay_tiles, dt_tiles, x_ptr + (i + 1) * P, start_ptr, decay_ptr, chunk_dt_ptr,
                i + 1, num_rows, block, x_stride, chunk * H + head + 1, P, N, ROWS, narrow, wide, line,
            )  # fmt: skip
        own_half = i % 2 * 2 + block
        decay_row = decay_tiles.index(own_half).load(gl.SliceLayout(1, scores))
        decay_column = decay_tiles.index(own_half).load(gl.SliceLayout(0, scores))
        # Above the diagonal the score is 0; the minimum keeps the factor finite there.
        weight = score * gl.exp2(gl.minimum(decay_row[:, None] - decay_column[None, :], 0.0))
        weight *= dt_tiles.index(own_half).load(gl.SliceLayout(0, scores))[None, :]
        near = gl.convert_layout(weight.to(dtype), weights)
        scale = gl.exp2(decay_tiles.index(own_half).load(gl.SliceLayout(1, outputs)))
        x = x_tiles.index(own_half)
        own = x.load(outputs).to(gl.float32) * D
        far = near
        if block == 1:  # all rows of the first half come before
            before = decay_tiles.index(i % 2 * 2).load(gl.SliceLayout(0, scores))
            weight = earlier * gl.exp2(decay_row[:, None] - before[None, :])
            weight *= dt_tiles.index(i % 2 * 2).load(gl.SliceLayout(0, scores))[None, :]
            far = gl.convert_layout(weight.to(dtype), weights)
        total = warpgroup_mma_wait(0, [y]) * scale[:, None] + own
        if block == 1:
            total = warpgroup_mma(far, x_tiles.index(i % 2 * 2), total)
        total = warpgroup_mma(near, x, total)
        gl.store(out + head * P + out_place, gl.convert_layout(total.to(dtype), narrow), mask=is_row)


def launch_outputs_hopper(
    x: Tensor, B: Tensor, C: Tensor, D: Tensor, decay: Tensor, chunk_dt: Tensor, start: Tensor, y: Tensor,
    table: ChunkTable, heads: int,
) -> None:  # fmt: skip
    """Takes what `fits_hopper`; a program computes `heads` heads of one group."""
    H, P = x.shape[1:]
    G, N = B.shape[1:]
    _ssd_hopper_outputs_kernel[(2, H // heads, len(table.chunks_C4))](
        x, B, C, D, decay, chunk_dt, start, y, table.chunks_C4, x.stride(0) // 8, B.stride(0) // 8, C.stride(0) // 8,
        H=H, P=P, N=N, HEADS_A_GROUP=H // G, HEADS=heads, ROWS=ROWS, num_warps=NUM_WARPS,
    )  # fmt: skip


def fits_hopper(x: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> bool:
    """True if Hopper variants run here, and this one takes such sizes."""
    return (
        runs_hopper(x)
        and (x.shape[2], B.shape[2], chunk_size) == (64, 128, 2 * ROWS)
        and all(rows.stride(0) % 8 == rows.data_ptr() % 16 == 0 for rows in (x, B, C))
    )
