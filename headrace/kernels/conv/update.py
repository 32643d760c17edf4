"""Steps of the depthwise causal convolution for each sequence of a decode batch.

    y_t = silu(sum_j w_j * u_{t-K+1+j} + b)          window after row t = inputs u_{t-K+2} .. u_t
                                             `silu` False: the sum itself

Shapes    u [R, C], any row stride; weight [C, K]; bias [C] or None; window_pool [S, C, K-1 or more], any stride
          over slots; dst_slots [B, T] int64, or [B] when T = 1; returns y [R, C] in u's dtype. B sequences of T
          rows (a token and its drafts) make R = B * T rows, a sequence's rows one after the other; the window
          after row t goes to dst_slots[:, t]
Contract  Destinations are unique; one may be its own sequence's source and no other's; every source is read
          before any slot is written; B = 0 is a no-op. In the Triton kernel a destination of -1, that of a
          captured graph's padding row, is written nowhere; slots are read early: an overlapped kernel
          (headrace/kernels/lib/pdl.py) must not have written them just before
Numerics  in u's dtype times weight's, in Triton float32 until y; windows are bit-exact copies of inputs
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.segments import StateSource, first_inputs, steps_of_each
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def causal_conv1d_update(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
    silu: bool = True,
) -> Tensor:
    C, K = weight.shape
    channels, window = window_pool.shape[1:]
    if u.shape[1] != C or channels != C or window < K - 1 or window_pool.dtype != u.dtype:
        raise ValueError(
            f"u {tuple(u.shape)} {u.dtype}, weight {tuple(weight.shape)}, "
            f"windows {tuple(window_pool.shape)} {window_pool.dtype} disagree"
        )
    implementation = causal_conv1d_update_triton if runs_triton(u) else causal_conv1d_update_torch
    return implementation(u, weight, bias, window_pool, source, dst_slots, silu)


def causal_conv1d_update_torch(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
    silu: bool = True,
) -> Tensor:
    (C, K), batch, T = weight.shape, len(dst_slots), steps_of_each(dst_slots, len(u))
    if batch == 0:
        return torch.empty_like(u)
    windows = first_inputs(window_pool, K - 1)
    history = source.read(windows)
    if T == 1:
        inputs_BCI = torch.cat((history, u[:, :, None]), dim=-1)
        y = (inputs_BCI * weight).sum(-1)
    else:
        inputs_BCI = torch.cat((history, u.unflatten(0, (batch, T)).transpose(1, 2)), dim=-1)
        y = (inputs_BCI.unfold(2, K, 1) * weight[:, None]).sum(-1).transpose(1, 2).reshape(batch * T, C)
    if bias is not None:
        y += bias
    for t, dst in enumerate(dst_slots.view(batch, T).unbind(1)):
        windows.index_copy_(0, dst, inputs_BCI[:, :, t + 1 : t + K])
    return F.silu(y, inplace=True) if silu else y


@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _causal_conv1d_update_kernel(
    u_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    pool_ptr,
    y_ptr,
    src_ptr,
    dst_ptr,
    u_stride,  # over rows
    slot_stride,
    T: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """A program steps TILE_C channels of one sequence, with all inputs in registers."""
    let_next_start()
    channel = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    sequence = tl.program_id(1)
    in_c = channel < C
    src = tl.load(src_ptr + sequence)
    destinations = ()  # type: tuple
    for t in tl.static_range(T):
        destinations += (tl.load(dst_ptr + sequence * T + t),)
    weights = ()  # type: tuple
    for j in tl.static_range(K):
        weights += (tl.load(weight_ptr + channel * K + j, mask=in_c, other=0.0).to(tl.float32),)
    bias = tl.zeros([TILE_C], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=in_c, other=0.0).to(tl.float32)
    found = channel < tl.where(src >= 0, C, 0)
    history_ptr = pool_ptr + src * slot_stride + channel * W
    wait_for_previous()

    inputs = ()  # type: tuple
    for i in tl.static_range(K - 1):
        inputs += (tl.load(history_ptr + i, mask=found, other=0.0),)
    for t in tl.static_range(T):
        row = sequence * T + t
        inputs += (tl.load(u_ptr + row * u_stride + channel, mask=in_c, other=0.0),)

    # Loads and stores may map channels to threads differently, and source and destination may be one slot.
    tl.debug_barrier()
    for t in tl.static_range(T):
        dst = destinations[t]
        kept = channel < tl.where(dst >= 0, C, 0)
        for i in tl.static_range(K - 1):
            tl.store(pool_ptr + dst * slot_stride + channel * W + i, inputs[t + 1 + i], mask=kept)
    for t in tl.static_range(T):
        total = bias
        for j in tl.static_range(K):
            total += weights[j] * inputs[t + j].to(tl.float32)
        y = total * tl.sigmoid(total) if SILU else total
        tl.store(y_ptr + (sequence * T + t) * C + channel, y.to(y_ptr.dtype.element_ty), mask=in_c)


def causal_conv1d_update_triton(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
    silu: bool = True,
) -> Tensor:
    (C, K), batch, T = weight.shape, len(dst_slots), steps_of_each(dst_slots, len(u))
    if u.stride(1) != 1 or not weight.is_contiguous() or window_pool.stride()[1:] != (window_pool.shape[2], 1):
        raise ValueError(f"u {u.stride()}, weight {weight.stride()}, windows {window_pool.stride()}: not contiguous")
    y = torch.empty((len(u), C), dtype=u.dtype, device=u.device)
    if batch == 0:
        return y
    tile_c, num_warps = launch_shape(C)
    _causal_conv1d_update_kernel[(cdiv(C, tile_c), batch)](
        u,
        weight,
        bias,
        window_pool,
        y,
        source.slots_N,
        dst_slots,
        u.stride(0),
        window_pool.stride(0),
        T=T,
        C=C,
        K=K,
        W=window_pool.shape[2],
        SILU=silu,
        TILE_C=tile_c,
        num_warps=num_warps,
        **OVERLAPPED,
    )
    return y


def launch_shape(num_channels: int) -> tuple[int, int]:
    """Channels a program steps, and its warps: two channels a thread, as windows are read two bytes at a time."""
    return min(256, next_power_of_2(num_channels)), 4
