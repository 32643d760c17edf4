"""Depthwise causal convolution with SiLU over packed sequences, reading and writing conv windows.

    y_t = silu(sum_j w_j * u_{t-K+1+j} + b)          window after row t = inputs u_{t-K+2} .. u_t

Shapes    u [T, C], any row stride; weight [C, K]; bias [C] or None; window_pool [S, C, K-1], any stride
          over slots; returns y [T, C] in u's dtype. T packed rows, C channels, K taps
Contract  rows are packed as `segments` says; windows hold inputs from before the convolution, zeros before
          a sequence's first token; every source slot is read before any slot is written; T = 0 is a no-op
Numerics  in u's dtype times weight's; windows are bit-exact copies of inputs
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.segments import PrefillSegments


def causal_conv1d(
    u: Tensor, weight: Tensor, bias: Tensor | None, window_pool: Tensor, segments: PrefillSegments
) -> Tensor:
    T = u.shape[0]
    C, K = weight.shape
    if u.shape[1] != C or window_pool.shape[1:] != (C, K - 1) or window_pool.dtype != u.dtype:
        raise ValueError(
            f"u {tuple(u.shape)} {u.dtype}, weight {tuple(weight.shape)}, "
            f"windows {tuple(window_pool.shape)} {window_pool.dtype} disagree"
        )
    if sum(segments.lengths) != T:
        raise ValueError(f"segments describe {sum(segments.lengths)} rows, u has {T}")
    if T == 0:
        return torch.empty_like(u)
    return causal_conv1d_torch(u, weight, bias, window_pool, segments)


def causal_conv1d_torch(
    u: Tensor, weight: Tensor, bias: Tensor | None, window_pool: Tensor, segments: PrefillSegments
) -> Tensor:
    K = weight.shape[1]
    tap_KC = weight.t().contiguous()
    histories = segments.source.read(window_pool).transpose(1, 2)
    extended = [torch.cat((history, rows)) for history, rows in zip(histories, u.split(segments.lengths), strict=True)]
    for write in segments.writes:
        window = extended[write.sequence][write.num_rows : write.num_rows + K - 1]
        window_pool[write.slot] = window.t()
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    for rows, out in zip(extended, y.split(segments.lengths), strict=True):
        torch.mul(rows[K - 1 :], tap_KC[K - 1], out=out)
        for tap in range(K - 1):
            out.addcmul_(rows[tap : tap + len(out)], tap_KC[tap])
    if bias is not None:
        y += bias
    return F.silu(y, inplace=True)
