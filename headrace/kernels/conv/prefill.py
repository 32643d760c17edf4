"""Depthwise causal convolution over packed sequences, reading and writing conv windows.

    y_t = silu(sum_j w_j * u_{t-K+1+j} + b)          window after row t = inputs u_{t-K+2} .. u_t
                                             `silu` False: the sum itself

Shapes    u [T, C], any row stride; weight [C, K]; bias [C] or None; window_pool [S, C, K-1 or more], any
          stride over slots; returns y [T, C] in u's dtype. T packed rows, C channels, K taps
Contract  rows are packed as in `segments`; windows hold inputs from before the convolution, zeros before
          a sequence's first token;
          a slot to write may be its own sequence's source and no other's; every source slot is read before
          any slot is written; T = 0 is a no-op
Numerics  in u's dtype times weight's, in Triton float32 until y; windows are bit-exact copies of inputs
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.exponentials import LOG2_E
from headrace.kernels.lib.segments import PrefillSegments, first_inputs
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

AT_ONCE = tl.constexpr(4)  # rows whose loads are in flight together; divides the rows of a tile


def causal_conv1d(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    segments: PrefillSegments,
    silu: bool = True,
) -> Tensor:
    T = u.shape[0]
    C, K = weight.shape
    channels, window = window_pool.shape[1:]
    if u.shape[1] != C or channels != C or window < K - 1 or window_pool.dtype != u.dtype:
        raise ValueError(
            f"u {tuple(u.shape)} {u.dtype}, weight {tuple(weight.shape)}, "
            f"windows {tuple(window_pool.shape)} {window_pool.dtype} disagree"
        )
    if sum(segments.lengths) != T:
        raise ValueError(f"segments describe {sum(segments.lengths)} rows, u has {T}")
    if T == 0:
        return torch.empty_like(u)
    implementation = causal_conv1d_triton if runs_triton(u) else causal_conv1d_torch
    return implementation(u, weight, bias, window_pool, segments, silu)


def causal_conv1d_torch(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    segments: PrefillSegments,
    silu: bool = True,
) -> Tensor:
    K = weight.shape[1]
    tap_KC = weight.t().contiguous()
    histories = segments.source.read(first_inputs(window_pool, K - 1)).transpose(1, 2)
    extended = [torch.cat((history, rows)) for history, rows in zip(histories, u.split(segments.lengths), strict=True)]
    for write in segments.writes:
        window = extended[write.sequence][write.num_rows : write.num_rows + K - 1]
        window_pool[write.slot, :, : K - 1] = window.t()
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    for rows, out in zip(extended, y.split(segments.lengths), strict=True):
        torch.mul(rows[K - 1 :], tap_KC[K - 1], out=out)
        for tap in range(K - 1):
            out.addcmul_(rows[tap : tap + len(out)], tap_KC[tap])
    if bias is not None:
        y += bias
    return F.silu(y, inplace=True) if silu else y


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["sequences_ptr", "tiles_ptr", "writes_ptr"],
)
def _causal_conv1d_kernel(
    u_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    pool_ptr,
    y_ptr,
    sequences_ptr,
    tiles_ptr,
    writes_ptr,
    num_sequences,
    u_stride,  # over rows
    slot_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    TAPS: tl.constexpr,  # K, up to a power of two
    W: tl.constexpr,
    SILU: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """TILE_C channels of a tile of rows, or of one sequence's first rows and windows. Those programs go first: one
    sequence may have many windows to write."""
    channel = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    place = tl.program_id(1)
    if place < num_sequences:
        _begin_sequence(
            u_ptr,
            weight_ptr,
            bias_ptr,
            pool_ptr,
            y_ptr,
            sequences_ptr,
            writes_ptr,
            place,
            channel,
            u_stride,
            slot_stride,
            C,
            K,
            W,
            SILU,
        )
    else:
        tile_ptr = tiles_ptr + (place - num_sequences) * 2
        _convolve_tile(u_ptr, weight_ptr, bias_ptr, y_ptr, tile_ptr, channel, u_stride, C, K, TAPS, SILU, TILE_T)


@triton.jit
def _silu(x):
    """x / (1 + e^-x) of finite x. rsqrt squared replaces the division, which would test for its range."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return x * root * root


@triton.jit
def _convolve_tile(
    u_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    tile_ptr,
    channel,
    u_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    TILE_T: tl.constexpr,
):
    """A tile of rows whose K-1 predecessors are rows: each is read once, and kept in registers for its K outputs."""
    first_row, num_rows = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    in_c = channel < C
    tap = tl.arange(0, TAPS)[None, :]
    weight = tl.load(weight_ptr + channel[:, None] * K + tap, mask=in_c[:, None] & (tap < K), other=0.0)
    weights = ()  # type: tuple
    for j in tl.static_range(K):  # one load in order, then split by tap: a tap's weights alone would be strided
        weights += (tl.sum(tl.where(tap == j, weight.to(tl.float32), 0.0), 1),)
    bias = tl.zeros([channel.shape[0]], tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + channel, mask=in_c, other=0.0).to(tl.float32)

    rows_ptr = u_ptr + first_row.to(tl.int64) * u_stride + channel
    out_ptr = y_ptr + first_row.to(tl.int64) * C + channel
    inputs = ()  # type: tuple
    for i in tl.static_range(K - 1):
        inputs += (tl.load(rows_ptr + (i + 1 - K) * u_stride, mask=in_c, other=0.0).to(tl.float32),)
    for group in tl.static_range(0, TILE_T, AT_ONCE):
        for t in tl.static_range(group, group + AT_ONCE):  # all are issued before the first is used
            found = channel < tl.where(t < num_rows, C, 0)
            inputs += (tl.load(rows_ptr + t * u_stride, mask=found, other=0.0).to(tl.float32),)
        for t in tl.static_range(group, group + AT_ONCE):
            total = bias
            for j in tl.static_range(K):
                total += inputs[t + j] * weights[j]
            y = _silu(total) if SILU else total
            found = channel < tl.where(t < num_rows, C, 0)
            tl.store(out_ptr + t * C, y.to(y_ptr.dtype.element_ty), mask=found)


@triton.jit
def _begin_sequence(
    u_ptr,
    weight_ptr,
    bias_ptr,
    pool_ptr,
    y_ptr,
    sequences_ptr,
    writes_ptr,
    sequence,
    channel,
    u_stride,
    slot_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """A sequence's first K-1 rows, and all its windows. Input i is of the history for i < K-1, else row i-K+1."""
    entry_ptr = sequences_ptr + sequence * 5
    first_row, num_rows = tl.load(entry_ptr), tl.load(entry_ptr + 1)
    src = tl.load(entry_ptr + 2).to(tl.int64)
    write, end_write = tl.load(entry_ptr + 3), tl.load(entry_ptr + 4)
    in_c = channel < C
    rows_ptr = u_ptr + first_row.to(tl.int64) * u_stride + channel
    history_ptr = pool_ptr + src * slot_stride + channel * W

    inputs = ()  # type: tuple
    for i in tl.static_range(K - 1):
        found = channel < tl.where(src >= 0, C, 0)
        inputs += (tl.load(history_ptr + i, mask=found, other=0.0),)
    for t in tl.static_range(K - 1):
        found = channel < tl.where(t < num_rows, C, 0)
        inputs += (tl.load(rows_ptr + t * u_stride, mask=found, other=0.0),)
    # Loads and stores may map channels to threads differently, and source and destination may be one slot.
    tl.debug_barrier()

    for t in tl.static_range(K - 1):
        total = tl.zeros([channel.shape[0]], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channel, mask=in_c, other=0.0).to(tl.float32)
        for j in tl.static_range(K):
            weight = tl.load(weight_ptr + channel * K + j, mask=in_c, other=0.0).to(tl.float32)
            total += weight * inputs[t + j].to(tl.float32)
        y = _silu(total) if SILU else total
        at = y_ptr + (first_row.to(tl.int64) + t) * C + channel
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=channel < tl.where(t < num_rows, C, 0))

    while write < end_write:
        rows_before, slot = tl.load(writes_ptr + write * 2), tl.load(writes_ptr + write * 2 + 1).to(tl.int64)
        for i in tl.static_range(K - 1):
            row = rows_before + i - (K - 1)
            from_rows = channel < tl.where(row >= 0, C, 0)
            value = tl.load(rows_ptr + row.to(tl.int64) * u_stride, mask=from_rows, other=0.0)
            for h in tl.static_range(1, K - 1):
                value = tl.where(rows_before + i == h, inputs[h], value)
            tl.store(pool_ptr + slot * slot_stride + channel * W + i, value, mask=in_c)
        write += 1


def causal_conv1d_triton(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    segments: PrefillSegments,
    silu: bool = True,
) -> Tensor:
    (T, C), K = u.shape, weight.shape[1]
    if u.stride(1) != 1 or not weight.is_contiguous() or window_pool.stride()[1:] != (window_pool.shape[2], 1):
        raise ValueError(f"u {u.stride()}, weight {weight.stride()}, windows {window_pool.stride()}: not contiguous")
    y = torch.empty((T, C), dtype=u.dtype, device=u.device)
    if T == 0:
        return y
    tile_t, tile_c, num_warps = launch_shape(C)
    table = segments.conv_table(K, tile_t)
    num_programs = len(table.sequences_N5) + len(table.tiles_Z2)
    _causal_conv1d_kernel[(cdiv(C, tile_c), num_programs)](
        u,
        weight,
        bias,
        window_pool,
        y,
        table.sequences_N5,
        table.tiles_Z2,
        table.writes_W2,
        len(table.sequences_N5),
        u.stride(0),
        window_pool.stride(0),
        C=C,
        K=K,
        TAPS=next_power_of_2(K),
        W=window_pool.shape[2],
        SILU=silu,
        TILE_T=tile_t,
        TILE_C=tile_c,
        num_warps=num_warps,
    )
    return y


def launch_shape(num_channels: int) -> tuple[int, int, int]:
    """Rows and channels of a tile, and its warps: one warp, whose threads read 16 bytes of each row."""
    return 32, min(256, next_power_of_2(num_channels)), 1
