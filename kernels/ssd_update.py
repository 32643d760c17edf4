"""One Mamba2 (SSD) step for each sequence of a decode batch, from source slots to destination slots.

    S = exp(dt * A) * S + (dt * x) outer B          y = S C + D * x

Shapes    x [B, H, P]; dt [B, H]; A, D [H]; B, C [B, G, N]; state_pool [S, H, P, N] float32, any stride over
          slots; dst_slots [B] int64; returns y [B, H, P] in x's dtype
Contract  dt is already softplus(dt + bias), A is negative; dst_slots unique; a destination may be its own
          sequence's source and no other's; every source is read before any slot is written; B = 0 is a
          no-op
Numerics  all arithmetic in float32
Source    Dao & Gu 2024, "Transformers are SSMs" (recurrent form)
"""

import torch
from torch import Tensor

from kernels.segments import StateSource


def ssd_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    H, P = x.shape[1:]
    if H % B.shape[1] or B.shape != C.shape:
        raise ValueError(f"x {tuple(x.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)} disagree")
    if state_pool.shape[1:] != (H, P, B.shape[2]) or state_pool.dtype != torch.float32:
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold float32 states")
    return ssd_update_torch(x, dt, A, B, C, D, state_pool, source, dst_slots)


def ssd_update_torch(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state_pool: Tensor,
    source: StateSource,
    dst_slots: Tensor,
) -> Tensor:
    batch, H, P = x.shape
    G, N = B.shape[1:]
    x_BHP, dt_BH = x.float(), dt.float()
    state = source.read(state_pool)
    state.mul_(torch.exp(dt_BH * A)[..., None, None])
    # Heads of a group share B and C: one rank-1 update and one product a group instead of a head.
    grouped = state.view(batch * G, H // G * P, N)
    grouped.baddbmm_((x_BHP * dt_BH[..., None]).view(batch * G, H // G * P, 1), B.float().reshape(batch * G, 1, N))
    y = torch.bmm(grouped, C.float().reshape(batch * G, N, 1)).view(batch, H, P)
    state_pool.index_copy_(0, dst_slots, state)
    return y.addcmul_(x_BHP, D[:, None]).to(x.dtype)
