"""Mamba1 scan in Triton: shapes, contract, numerics and source are those of headrace/kernels/mamba1/prefill.py.

One kernel: a program walks a sequence row by row with the states of a few channels in registers. Each of these needs an
exponential at each row, which the chip's units for them give no faster however rows are divided; a scan by chunks
would compute all of them twice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.exponentials import LOG2_E, softplus
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.sizes import cdiv, next_power_of_2
from headrace.kernels.mamba1.channels import Mamba1Channels, check_contiguous_rows

WHOLE = 1 << 30  # rows a chunk at most: sequences are cut where states are written, and nowhere else


@triton.jit
def _mamba1_scan_kernel(
    x_ptr,
    dt_ptr,
    B_ptr,
    C_ptr,
    gate_ptr,
    A_ptr,
    D_ptr,
    bias_ptr,
    y_ptr,
    pool_ptr,
    chunks_ptr,
    sequences_ptr,
    x_stride,  # the strides are those of rows, and of slots
    dt_stride,
    B_stride,
    C_stride,
    gate_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PADDED_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """BLOCK_I channels of one sequence, ROWS rows at a time, whose loads are in flight together."""
    i, n = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, PADDED_N)
    sequence = tl.program_id(1)
    in_i, in_n = i < WIDTH, n < N
    in_state = in_i[:, None] & in_n[None, :]
    place = i[:, None] * N + n[None, :]
    A = tl.load(A_ptr + place, mask=in_state, other=0.0) * LOG2_E
    D = tl.load(D_ptr + i, mask=in_i, other=0.0)
    bias = tl.load(bias_ptr + i, mask=in_i, other=0.0)
    first_chunk = tl.load(sequences_ptr + sequence * 4)
    end_chunk = tl.load(sequences_ptr + sequence * 4 + 1)
    src = tl.load(sequences_ptr + sequence * 4 + 2).to(tl.int64)
    found = (i < tl.where(src >= 0, WIDTH, 0))[:, None] & in_n[None, :]
    state = tl.load(pool_ptr + src * slot_stride + place, mask=found, other=0.0).to(tl.float32)
    for chunk in range(first_chunk, end_chunk):
        first_row = tl.load(chunks_ptr + chunk * 4).to(tl.int64)
        num_rows = tl.load(chunks_ptr + chunk * 4 + 1)
        dst = tl.load(chunks_ptr + chunk * 4 + 2).to(tl.int64)
        for start in range(0, num_rows, ROWS):
            xs, raws, gates = (), (), ()  # type: tuple, tuple, tuple
            Bs, Cs = (), ()  # type: tuple, tuple
            for t in tl.static_range(ROWS):
                row = first_row + start + t
                here = i < tl.where(start + t < num_rows, WIDTH, 0)
                shared = n < tl.where(start + t < num_rows, N, 0)
                raws += (tl.load(dt_ptr + row * dt_stride + i, mask=here, other=0.0),)
                xs += (tl.load(x_ptr + row * x_stride + i, mask=here, other=0.0),)
                gates += (tl.load(gate_ptr + row * gate_stride + i, mask=here, other=0.0),)
                Bs += (tl.load(B_ptr + row * B_stride + n, mask=shared, other=0.0),)
                Cs += (tl.load(C_ptr + row * C_stride + n, mask=shared, other=0.0),)
            for t in tl.static_range(ROWS):
                here = i < tl.where(start + t < num_rows, WIDTH, 0)
                x, gate = xs[t].to(tl.float32), gates[t].to(tl.float32)
                B, C = Bs[t].to(tl.float32), Cs[t].to(tl.float32)
                # Past the chunk's end a time step of 0 leaves the state as it is.
                dt = tl.where(here, softplus(raws[t].to(tl.float32) + bias), 0.0)
                state = state * tl.exp2(dt[:, None] * A) + (dt * x)[:, None] * B[None, :]
                y = (tl.sum(state * C[None, :], axis=1) + D * x) * gate * tl.sigmoid(gate)
                tl.store(y_ptr + (first_row + start + t) * WIDTH + i, y.to(y_ptr.dtype.element_ty), mask=here)
        if dst >= 0:
            tl.store(pool_ptr + dst * slot_stride + place, state.to(pool_ptr.dtype.element_ty), mask=in_state)


class Mamba1Tile(NamedTuple):
    """A program's channels, the rows that it reads at a time, and its warps."""

    channels: int
    rows: int
    num_warps: int


def mamba1_tile(state_size: int) -> Mamba1Tile:
    """One warp, four states a lane: a thousand programs for 8,192 channels of 16 states, and no barriers."""
    return Mamba1Tile(max(1, 128 // next_power_of_2(state_size)), rows=8, num_warps=1)


def mamba1_prefill_triton(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    gate: Tensor,
    channels: Mamba1Channels,
    state_pool: Tensor,
    segments: PrefillSegments,
    tile: Mamba1Tile | None = None,
) -> Tensor:
    check_contiguous_rows(x=x, dt=dt, B=B, C=C, gate=gate, state_pool=state_pool)
    T, width = x.shape
    N = B.shape[1]
    y = torch.empty((T, width), dtype=x.dtype, device=x.device)
    if T == 0:
        return y
    tile, table = tile or mamba1_tile(N), segments.chunk_table(WHOLE)
    _mamba1_scan_kernel[(cdiv(width, tile.channels), len(table.sequences_N4))](
        x,
        dt,
        B,
        C,
        gate,
        channels.A,
        channels.D,
        channels.dt_bias,
        y,
        state_pool,
        table.chunks_C4,
        table.sequences_N4,
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        C.stride(0),
        gate.stride(0),
        state_pool.stride(0),
        WIDTH=width,
        N=N,
        BLOCK_I=tile.channels,
        PADDED_N=next_power_of_2(N),
        ROWS=tile.rows,
        num_warps=tile.num_warps,
    )
    return y
