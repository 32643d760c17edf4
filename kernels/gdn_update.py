"""One step of the gated delta rule for each sequence of a decode batch, from source slots to destination
slots.

    S = e^g S;   S += k outer beta (v - S^T k);   o = S^T q

with q and k L2-normalised and q divided by sqrt(Dk) here.

Shapes    q, k [B, Hk, Dk]; v [B, Hv, Dv]; g, beta [B, Hv]; state_pool [S, Hv, Dk, Dv] float32, any stride
          over slots; dst_slots [B] int64; returns o [B, Hv, Dv] in v's dtype. Value head h reads key head h
          // (Hv / Hk)
Contract  dst_slots unique; a destination may be its own sequence's source and no other's; every source is
          read before any slot is written; B = 0 is a no-op
Numerics  all arithmetic in float32
Source    Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", equation 10
"""

import torch
from torch import Tensor

from kernels.gdn_prefill import L2_NORM_EPS
from kernels.rms_norm import l2_normalize
from kernels.segments import StateSource


def gdn_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    Hv, Dv = v.shape[1:]
    Hk, Dk = k.shape[1:]
    if q.shape != k.shape or Hv % Hk:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} disagree")
    if state_pool.shape[1:] != (Hv, Dk, Dv) or state_pool.dtype != torch.float32:
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold float32 states")
    return gdn_update_torch(q, k, v, g, beta, state_pool, source, dst_slots)


def gdn_update_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    batch, Hv, Dv = v.shape
    Hk, Dk = k.shape[1:]
    k_BHK = l2_normalize(k.float(), L2_NORM_EPS)
    q_BHK = l2_normalize(q.float(), L2_NORM_EPS) * Dk**-0.5
    if Hv != Hk:
        k_BHK, q_BHK = k_BHK.repeat_interleave(Hv // Hk, dim=1), q_BHK.repeat_interleave(Hv // Hk, dim=1)
    key_row, query_row = k_BHK.reshape(-1, 1, Dk), q_BHK.reshape(-1, 1, Dk)
    state = source.read(state_pool)
    state.mul_(torch.exp(g.float())[..., None, None])
    flat = state.view(batch * Hv, Dk, Dv)
    delta = (v.float().reshape(-1, 1, Dv) - torch.bmm(key_row, flat)) * beta.float().reshape(-1, 1, 1)
    flat.baddbmm_(key_row.transpose(1, 2), delta)
    o = torch.bmm(query_row, flat)
    state_pool.index_copy_(0, dst_slots, state)
    return o.view(batch, Hv, Dv).to(v.dtype)
