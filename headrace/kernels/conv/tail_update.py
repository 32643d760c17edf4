"""Steps of the depthwise causal convolution for each sequence of a decode batch, over windows at bases and tails.

    y_t = silu(sum_j w_j * u_{t-K+1+j} + b)          `silu` False: the sum itself

The inputs before a row are the newest of the tail; where it has too few, they are those of the window at the base.

Shapes    u [R, C], any row stride; weight [C, K]; bias [C] or None; window_pool [S, C, K-1 or more], any stride over
          slots; tail [rows, places, C] in u's dtype, inputs; tails of T rows a sequence, R = B * T, a sequence's rows
          one after the other; returns y [R, C] in u's dtype
Contract  headrace/kernels/lib/tails.py; a state that is written is the window K-1 inputs long; B = 0 is a no-op. The
          Triton kernel reads fields early: an overlapped kernel (headrace/kernels/lib/pdl.py) must not have written
          them just before
Numerics  in u's dtype times weight's, in Triton float32 until y; windows and entries are bit-exact copies of inputs
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.conv.update import launch_shape
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.segments import first_inputs
from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.lib.tail_programs import load_tail_fields
from headrace.kernels.lib.tails import Tails


def causal_conv1d_tail_update(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    tail: Tensor,
    tails: Tails,
    silu: bool = True,
) -> Tensor:
    C, K = weight.shape
    channels, window = window_pool.shape[1:]
    if u.shape[1] != C or channels != C or window < K - 1 or window_pool.dtype != u.dtype:
        raise ValueError(
            f"u {tuple(u.shape)} {u.dtype}, weight {tuple(weight.shape)}, "
            f"windows {tuple(window_pool.shape)} {window_pool.dtype} disagree"
        )
    if tail.shape[2] != C or tail.dtype != u.dtype or len(u) != len(tails.fields) * tails.rows_each:
        raise ValueError(f"u {tuple(u.shape)} {u.dtype}, tail {tuple(tail.shape)} {tail.dtype} disagree")
    implementation = causal_conv1d_tail_update_triton if runs_triton(u) else causal_conv1d_tail_update_torch
    return implementation(u, weight, bias, window_pool, tail, tails, silu)


def causal_conv1d_tail_update_torch(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    tail: Tensor,
    tails: Tails,
    silu: bool = True,
) -> Tensor:
    K, T = weight.shape[1], tails.rows_each
    y = torch.empty_like(u)
    if not len(tails.fields):
        return y
    entries = tails.entries
    if T:
        entries.write(tail, u)
    windows = first_inputs(window_pool, K - 1)
    inputs_BIC = torch.cat((tails.source.read(windows).transpose(1, 2), entries.read(tail)), dim=1)
    if T:
        near_BTCK = entries.own(inputs_BIC.unfold(1, K, 1))  # the entry of a row is the last input of its K
        y = (near_BTCK * weight).sum(3).flatten(0, 1)
        if bias is not None:
            y += bias
        if silu:
            F.silu(y, inplace=True)
    if entries.written is not None:
        some = entries.written.sequences
        last = entries.written.last[:, None] + 1 + torch.arange(K - 1, device=u.device)
        entries.written.write(windows, inputs_BIC[some[:, None], last].transpose(1, 2))
    return y


@triton.jit
def _causal_conv1d_tail_update_kernel(
    u_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    pool_ptr,
    tail_ptr,
    fields_ptr,
    y_ptr,
    u_stride,  # over rows
    slot_stride,
    T: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    PLACES: tl.constexpr,
    SILU: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """A program steps TILE_C channels of one sequence, with all inputs in registers."""
    let_next_start()
    channel = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    sequence = tl.program_id(1)
    in_c = channel < C
    src, dst, ring_row, start, kept, written = load_tail_fields(fields_ptr, sequence)
    in_ring = tl.where(ring_row >= 0, C, 0)  # channels
    in_window = tl.where(src >= 0, in_ring, 0)
    window_ptr = pool_ptr + src.to(tl.int64) * slot_stride + channel * W
    tail_ptr += ring_row.to(tl.int64) * PLACES * C + channel
    weights = ()  # type: tuple
    for j in tl.static_range(K):
        weights += (tl.load(weight_ptr + channel * K + j, mask=in_c, other=0.0).to(tl.float32),)
    bias = tl.zeros([TILE_C], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=in_c, other=0.0).to(tl.float32)
    wait_for_previous()

    # Tokens are counted from the base: those before it are in its window.
    inputs = ()  # type: tuple
    for i in tl.static_range(K - 1):
        token = kept - (K - 1) + i
        before = tl.load(window_ptr + token + K - 1, mask=channel < tl.where(token < 0, in_window, 0), other=0.0)
        is_after = channel < tl.where(token < 0, 0, in_ring)
        after = tl.load(tail_ptr + (start + token) % PLACES * C, mask=is_after, other=0.0)
        inputs += (tl.where(token < 0, before, after),)
    for t in tl.static_range(T):
        inputs += (tl.load(u_ptr + (sequence * T + t) * u_stride + channel, mask=in_c, other=0.0),)
    if (dst >= 0) & (ring_row >= 0):
        last = ()  # type: tuple
        for i in tl.static_range(K - 1):
            token = written - (K - 1) + i
            before = tl.load(window_ptr + token + K - 1, mask=channel < tl.where(token < 0, in_window, 0), other=0.0)
            is_kept = channel < tl.where((token >= 0) & (token < kept), in_ring, 0)
            after = tl.load(tail_ptr + (start + token) % PLACES * C, mask=is_kept, other=0.0)
            value = tl.where(token < 0, before, after)
            if T > 0:
                row = sequence * T + token - kept
                new = tl.load(u_ptr + row * u_stride + channel, mask=channel < tl.where(token < kept, 0, C), other=0.0)
                value = tl.where(token >= kept, new, value)
            last += (value,)
        # Loads and stores may map channels to threads differently, and source and destination may be one slot.
        tl.debug_barrier()
        for i in tl.static_range(K - 1):
            tl.store(pool_ptr + dst.to(tl.int64) * slot_stride + channel * W + i, last[i], mask=in_c)
    for t in tl.static_range(T):
        tl.store(tail_ptr + (start + kept + t) % PLACES * C, inputs[K - 1 + t], mask=channel < in_ring)
        total = bias
        for j in tl.static_range(K):
            total += weights[j] * inputs[t + j].to(tl.float32)
        y = total * tl.sigmoid(total) if SILU else total
        tl.store(y_ptr + (sequence * T + t) * C + channel, y.to(y_ptr.dtype.element_ty), mask=in_c)


def causal_conv1d_tail_update_triton(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    tail: Tensor,
    tails: Tails,
    silu: bool = True,
) -> Tensor:
    (C, K), B = weight.shape, len(tails.fields)
    if u.stride(1) != 1 or not weight.is_contiguous() or window_pool.stride()[1:] != (window_pool.shape[2], 1):
        raise ValueError(f"u {u.stride()}, weight {weight.stride()}, windows {window_pool.stride()}: not contiguous")
    y = torch.empty((len(u), C), dtype=u.dtype, device=u.device)
    if B == 0:
        return y
    tile_c, num_warps = launch_shape(C)
    _causal_conv1d_tail_update_kernel[(cdiv(C, tile_c), B)](
        u,
        weight,
        bias,
        window_pool,
        tail,
        tails.fields,
        y,
        u.stride(0),
        window_pool.stride(0),
        T=tails.rows_each,
        C=C,
        K=K,
        W=window_pool.shape[2],
        PLACES=tail.shape[1],
        SILU=silu,
        TILE_C=tile_c,
        num_warps=num_warps,
        **OVERLAPPED,
    )
    return y
