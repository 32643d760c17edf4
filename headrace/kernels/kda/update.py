"""Kimi delta attention's decode steps of each sequence of a batch, from source slots to destination slots.

    S = diag(e^g) S;   S += k outer beta (v - S^T k);   o = S^T q

with q and k L2-normalised and q divided by sqrt(K) here.

Shapes    q, k, f [R, H, K]; v [R, H, V]; b [R, H]; heads: the parameters of g and beta; state_pool [S, H, K, V] float32
          or bfloat16, any stride over slots; dst_slots [B, T] int64, or [B] when T = 1; returns o [R, H, V] in v's
          dtype. B sequences of T rows (a token and its drafts) make R = B * T rows, a sequence's rows one after the
          other; row t's state goes to dst_slots[:, t]
Contract  f and b are as projected (headrace/kernels/kda/heads.py); destinations are unique; one may be its own
          sequence's source and no other's; every source is read before any slot is written; B = 0 is a no-op
Numerics  all arithmetic in float32; T rows at once equal T steps of one row, a bfloat16 pool's rounding after each row
          included
Source    Kimi Team 2025, "Kimi Linear", equation 1
"""

import torch
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS, l2_normalize
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.lib.segments import StateSource, steps_of_each


def kda_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    R, H, K = k.shape
    if not q.shape == k.shape == f.shape or v.shape[:2] != (R, H) or b.shape != (R, H):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, f {tuple(f.shape)}, b "
                         f"{tuple(b.shape)} disagree")  # fmt: skip
    if state_pool.shape[1:] != (H, K, v.shape[2]) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold these states")
    return kda_update_torch(q, k, v, f, b, heads, state_pool, source, dst_slots)


def kda_update_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    T = steps_of_each(dst_slots, len(v))
    state = source.read(state_pool).float()
    g, beta = heads.gates(f, b)
    outputs = []
    for t, dst in enumerate(dst_slots.view(-1, T).unbind(1)):
        outputs.append(_step(q[t::T], k[t::T], v[t::T], g[t::T], beta[t::T], state))
        rounded = state.to(state_pool.dtype)
        state_pool.index_copy_(0, dst, rounded)
        state = rounded.float()
    return outputs[0] if T == 1 else torch.stack(outputs, dim=1).flatten(0, 1)


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One row of each sequence: returns o, changes `state` [B, H, K, V]."""
    (batch, H, V), K = v.shape, k.shape[2]
    key_row = l2_normalize(k.float(), L2_NORM_EPS).reshape(-1, 1, K)
    query_row = l2_normalize(q.float(), L2_NORM_EPS).mul_(K**-0.5).reshape(-1, 1, K)
    state.mul_(torch.exp(g)[..., None])
    flat = state.view(batch * H, K, V)
    delta = (v.float().reshape(-1, 1, V) - torch.bmm(key_row, flat)) * beta.reshape(-1, 1, 1)
    flat.baddbmm_(key_row.transpose(1, 2), delta)
    return torch.bmm(query_row, flat).view(batch, H, V).to(v.dtype)
