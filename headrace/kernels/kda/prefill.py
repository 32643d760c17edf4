"""Kimi delta attention over packed sequences, chunk by chunk, reading and writing state slots.

    S_t = diag(e^{g_t}) S_{t-1};   S_t += k_t outer beta_t (v_t - S_t^T k_t);   o_t = S_t^T q_t

with q and k L2-normalised and q divided by sqrt(K) here.

Shapes    q, k, f [T, H, K]; v [T, H, V]; b [T, H]; heads: the parameters of g and beta; state_pool [S, H, K, V] float32
          or bfloat16, any stride over slots; returns o [T, H, V] in v's dtype
Contract  f and b are as projected (headrace/kernels/kda/heads.py); rows are packed as in `segments`; a slot that is
          written may be its own sequence's source and no other's; no other slot changes; T = 0 is a no-op
Numerics  torch: all arithmetic in float32. Triton: sums, decays, norms and states in float32, factors of matrix
          products in v's dtype, while inverting a chunk's system in float16 where v is not float32. In both no
          exponential is above 1, however fast a channel decays (`decayed_scores`)
Source    Kimi Team 2025, "Kimi Linear", section 3 (WY form of a chunk)

Legend    C chunks, Q rows a chunk, W state writes
"""

import torch
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS, l2_normalize
from headrace.kernels.gdn.prefill import chunk_start_states, heads_first, solve_chunks
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.kda.scan import kda_prefill_triton
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.segments import PrefillSegments, rows_up_to


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    T, H, K = k.shape
    if not q.shape == k.shape == f.shape or v.shape[:2] != (T, H) or b.shape != (T, H):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, f {tuple(f.shape)}, b "
                         f"{tuple(b.shape)} disagree")  # fmt: skip
    if state_pool.shape[1:] != (H, K, v.shape[2]) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype}, not [S, {H}, {K}, {v.shape[2]}]")
    if sum(segments.lengths) != T:
        raise ValueError(f"segments describe {sum(segments.lengths)} rows, v has {T}")
    if T == 0:
        return torch.empty_like(v)
    implementation = kda_prefill_triton if runs_triton(v) else kda_prefill_torch
    return implementation(q, k, v, f, b, heads, state_pool, segments)


def kda_prefill_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    heads: KdaHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    g, beta = heads.gates(f, b)
    q_CHQK = heads_first(segments.to_chunks(l2_normalize(q.float(), L2_NORM_EPS) * q.shape[2] ** -0.5))
    k_CHQK = heads_first(segments.to_chunks(l2_normalize(k.float(), L2_NORM_EPS)))
    v_CHQV = heads_first(segments.to_chunks(v.float()))
    beta_CHQ1 = heads_first(segments.to_chunks(beta[..., None]))
    decay_CHQK = heads_first(segments.to_chunks(g)).cumsum(2)  # log decay since the chunk's start

    key_score, query_score = decayed_scores(torch.stack((k_CHQK, q_CHQK)), k_CHQK, decay_CHQK)
    from_start_CHQK = decay_CHQK.exp()
    u_CHQV, w_CHQK = solve_chunks(key_score * beta_CHQ1, v_CHQV, beta_CHQ1, k_CHQK, from_start_CHQK * beta_CHQ1)
    k_CHKQ = (k_CHQK * (decay_CHQK[:, :, -1:] - decay_CHQK).exp()).transpose(2, 3)
    whole_CHK1 = from_start_CHQK[:, :, -1, :, None]
    start_CHKV = chunk_start_states(u_CHQV, w_CHQK, k_CHKQ, whole_CHK1, state_pool, segments)
    values_CHQV = u_CHQV - torch.matmul(w_CHQK, start_CHKV)
    o_CHQV = torch.matmul(query_score, values_CHQV)
    o_CHQV += torch.matmul(q_CHQK * from_start_CHQK, start_CHKV)
    if segments.writes:
        states = _states_at_writes(k_CHQK, values_CHQV, decay_CHQK, start_CHKV, segments)
        state_pool.index_copy_(0, segments.write_slots_W, states.to(state_pool.dtype))
    return segments.from_chunks(o_CHQV.transpose(1, 2)).to(v.dtype)


def decayed_scores(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """[..., C, H, Q, Q]: sum over channels of x_i k_j e^(decay_i - decay_j) where j <= i, 0 elsewhere.

    A factor of rows and one of columns must both be at most 1. So rows are halved again and again: between the halves,
    both decays are taken from the first half's last row. x is [..., C, H, Q, K], k and decay [C, H, Q, K].
    """
    *outer, Q, K = x.shape
    score = x.new_zeros(*outer, Q, Q)
    score.diagonal(dim1=-2, dim2=-1).copy_((x * k).sum(-1))
    half = Q // 2
    while half:
        pairs = Q // (2 * half), 2, half, K
        x_after = x.view(*outer, *pairs)[..., 1, :, :]
        k_before = k.view(*k.shape[:2], *pairs)[..., 0, :, :]
        decay_before, decay_after = decay.view(*k.shape[:2], *pairs).unbind(-3)
        middle = decay_before[..., -1:, :]
        rows = x_after * (decay_after - middle).exp()
        columns = k_before * (middle - decay_before).exp()
        blocks = torch.matmul(rows, columns.transpose(-1, -2))  # [..., pairs, half, half]
        of_pairs = score.view(*outer, Q // (2 * half), 2 * half, Q // (2 * half), 2 * half)
        below = of_pairs.diagonal(dim1=-4, dim2=-2)[..., half:, :half, :]
        below.copy_(blocks.movedim(-3, -1))
        half //= 2
    return score


def _states_at_writes(
    k_CHQK: Tensor, values_CHQV: Tensor, decay_CHQK: Tensor, start_CHKV: Tensor, segments: PrefillSegments
) -> Tensor:
    """[W, H, K, V]: each write's chunk start state, decayed to its row, plus the rows up to it."""
    chunk_W, row_W = segments.write_chunk_W, segments.write_row_W
    decay_WHQK = decay_CHQK[chunk_W]
    at_row_WHK = decay_WHQK[torch.arange(len(segments.writes), device=row_W.device), :, row_W]
    weight_WHQK = (at_row_WHK[:, :, None] - decay_WHQK).clamp_(max=0).exp_() * rows_up_to(row_W)[:, None, :, None]
    states = torch.matmul((k_CHQK[chunk_W] * weight_WHQK).transpose(2, 3), values_CHQV[chunk_W])
    return states.addcmul_(start_CHKV[chunk_W], at_row_WHK.exp()[..., None])
