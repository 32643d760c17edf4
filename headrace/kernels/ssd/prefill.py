"""Mamba2 state-space scan (SSD) over packed sequences, chunk by chunk, reading and writing state slots.

    S_t = exp(dt_t * A) * S_{t-1} + (dt_t * x_t) outer B_t          y_t = S_t C_t + D * x_t

Shapes    x [T, H, P]; dt [T, H]; B, C [T, G, N]; heads: A, D and the parameters of dt; state_pool [S, H, P, N]
          float32 or bfloat16, any stride over slots; returns y [T, H, P] in x's dtype. T packed rows, H heads, P
          head dim, N state size, G groups (G divides H)
Contract  dt is raw, as projected (headrace/kernels/ssd/heads.py); rows are packed as in `segments`; a slot that is
          written may be its own sequence's source and no other's; no other slot changes; writes at many rows cost no
          second pass; T = 0 is a no-op
Numerics  torch: all arithmetic in float32. Triton: sums, decays and states in float32, factors of matrix
          products in x's dtype, chunk start states among them
Source    Dao & Gu 2024, "Transformers are SSMs", section 6 (chunked form)

Legend    C chunks, Q rows a chunk, K = H / G heads a group, W state writes
"""

import torch
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.segments import PrefillSegments, rows_up_to
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.scan import ssd_prefill_triton


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    T, H, P = x.shape
    G, N = B.shape[1:]
    if H % G or C.shape != B.shape or dt.shape != (T, H):
        raise ValueError(f"x {tuple(x.shape)}, dt {tuple(dt.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)} disagree")
    if state_pool.shape[1:] != (H, P, N) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype}, not [S, {H}, {P}, {N}]")
    if sum(segments.lengths) != T:
        raise ValueError(f"segments describe {sum(segments.lengths)} rows, x has {T}")
    if T == 0:
        return torch.empty_like(x)
    implementation = ssd_prefill_triton if runs_triton(x) else ssd_prefill_torch
    return implementation(x, dt, B, C, heads, state_pool, segments)


def ssd_prefill_torch(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    heads: SsdHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    H, P = x.shape[1:]
    G, N = B.shape[1:]
    num_chunks = segments.num_chunks
    x_THP, dt_TH = x.float(), heads.time_steps(dt)
    v_CQHP = segments.to_chunks(x_THP * dt_TH[..., None])
    b_CGQN = segments.to_chunks(B.float()).transpose(1, 2)
    c_CGQN = segments.to_chunks(C.float()).transpose(1, 2)
    decay_CQH = segments.to_chunks(dt_TH * heads.A).cumsum(1)  # log of the decay since the chunk's start

    to_end_CQH = (decay_CQH[:, -1:] - decay_CQH).exp()
    v_CGKPQ = (v_CQHP * to_end_CQH[..., None]).view(num_chunks, -1, G, H // G * P).permute(0, 2, 3, 1)
    gain_CHPN = torch.matmul(v_CGKPQ, b_CGQN).view(num_chunks, H, P, N)
    start_CHPN = _chunk_start_states(gain_CHPN, decay_CQH[:, -1].exp(), state_pool, segments)

    y_CQHP = _within_chunks(v_CQHP, b_CGQN, c_CGQN, decay_CQH)
    start_CGNV = start_CHPN.view(num_chunks, G, H // G * P, N).transpose(2, 3)
    carried_CQHP = torch.matmul(c_CGQN, start_CGNV).transpose(1, 2).reshape(num_chunks, -1, H, P)
    y_CQHP.addcmul_(carried_CQHP, decay_CQH.exp()[..., None])

    if segments.writes:
        states = _states_at_writes(v_CQHP, b_CGQN, decay_CQH, start_CHPN, segments)
        state_pool.index_copy_(0, segments.write_slots_W, states.to(state_pool.dtype))
    return segments.from_chunks(y_CQHP).addcmul_(x_THP, heads.D[:, None]).to(x.dtype)


def _chunk_start_states(gain_CHPN: Tensor, decay_CH: Tensor, state_pool: Tensor, segments: PrefillSegments) -> Tensor:
    """The state before each chunk: the only loop over time."""
    initial_NHPN = segments.source.read(state_pool)
    start_CHPN = torch.empty_like(gain_CHPN)
    first = 0
    for initial, count in zip(initial_NHPN, segments.chunk_counts, strict=True):
        start_CHPN[first] = initial
        for c in range(first, first + count - 1):
            torch.addcmul(gain_CHPN[c], start_CHPN[c], decay_CH[c, :, None, None], out=start_CHPN[c + 1])
        first += count
    return start_CHPN


def _within_chunks(v_CQHP: Tensor, b_CGQN: Tensor, c_CGQN: Tensor, decay_CQH: Tensor) -> Tensor:
    """Contribution to each row of a chunk from its earlier rows and itself."""
    num_chunks, Q, H, _ = v_CQHP.shape
    G = b_CGQN.shape[1]
    decay_CHQ = decay_CQH.transpose(1, 2)
    # tril_ below drops the upper triangle; clamping keeps its exp finite.
    weight_CHQQ = (decay_CHQ[..., :, None] - decay_CHQ[..., None, :]).clamp_(max=0).exp_()
    score_CGQQ = torch.matmul(c_CGQN, b_CGQN.transpose(2, 3)).tril_()
    weight_CHQQ.view(num_chunks, G, H // G, Q, Q).mul_(score_CGQQ[:, :, None])
    return torch.matmul(weight_CHQQ, v_CQHP.transpose(1, 2)).transpose(1, 2).contiguous()


def _states_at_writes(
    v_CQHP: Tensor, b_CGQN: Tensor, decay_CQH: Tensor, start_CHPN: Tensor, segments: PrefillSegments
) -> Tensor:
    """[W, H, P, N]: each write's chunk start state, decayed to its row, plus the rows up to it."""
    chunk_W, row_W = segments.write_chunk_W, segments.write_row_W
    num_writes, G = len(segments.writes), b_CGQN.shape[1]
    _, _, H, P = v_CQHP.shape
    decay_WQH = decay_CQH[chunk_W]
    at_row_WH = decay_WQH[torch.arange(num_writes, device=row_W.device), row_W]
    weight_WQH = (at_row_WH[:, None] - decay_WQH).clamp_(max=0).exp_() * rows_up_to(row_W)[..., None]
    v_WGKPQ = (v_CQHP[chunk_W] * weight_WQH[..., None]).view(num_writes, -1, G, H // G * P).permute(0, 2, 3, 1)
    gain_WHPN = torch.matmul(v_WGKPQ, b_CGQN[chunk_W]).view(num_writes, *start_CHPN.shape[1:])
    return gain_WHPN.addcmul_(start_CHPN[chunk_W], at_row_WH.exp()[..., None, None])
