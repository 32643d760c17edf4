"""One step of the depthwise causal convolution with SiLU for each sequence of a decode batch.

    y = silu(sum_j w_j * window_j + b) over the K inputs ending with u; the last K-1 of them are the new
    window

Shapes    u [B, C], any row stride; weight [C, K]; bias [C] or None; window_pool [S, C, K-1], any stride
          over slots; dst_slots [B] int64; returns y [B, C] in u's dtype
Contract  dst_slots unique; a destination may be its own sequence's source and no other's; every source is
          read before any slot is written; B = 0 is a no-op
Numerics  in u's dtype times weight's; windows are bit-exact copies of inputs
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.segments import StateSource


def causal_conv1d_update(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    C, K = weight.shape
    if u.shape[1] != C or window_pool.shape[1:] != (C, K - 1) or window_pool.dtype != u.dtype:
        raise ValueError(
            f"u {tuple(u.shape)} {u.dtype}, weight {tuple(weight.shape)}, "
            f"windows {tuple(window_pool.shape)} {window_pool.dtype} disagree"
        )
    return causal_conv1d_update_torch(u, weight, bias, window_pool, source, dst_slots)


def causal_conv1d_update_torch(
    u: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    window_BCK = torch.cat((source.read(window_pool), u[:, :, None]), dim=-1)
    y = (window_BCK * weight).sum(-1)
    if bias is not None:
        y += bias
    window_pool.index_copy_(0, dst_slots, window_BCK[:, :, 1:])
    return F.silu(y, inplace=True)
