"""Gated delta rule over packed sequences, chunk by chunk, reading and writing state slots.

    S_t = e^{g_t} S_{t-1};   S_t += k_t outer beta_t (v_t - S_t^T k_t);   o_t = S_t^T q_t

with q and k L2-normalised and q divided by sqrt(Dk) here.

Shapes    q, k [T, Hk, Dk]; v [T, Hv, Dv]; a, b [T, Hv]; heads: the parameters of g; state_pool [S, Hv,
          Dk, Dv] float32 or bfloat16, any stride over slots; returns o [T, Hv, Dv] in v's dtype. Hk divides Hv;
          value head h reads key head h // (Hv / Hk)
Contract  a and b are as projected (headrace/kernels/gdn/heads.py); rows are packed as in `segments`; a slot that is
          written may be its own sequence's source and no other's; no other slot changes; T = 0 is a no-op
Numerics  torch: all arithmetic in float32; the unit lower triangular system of a chunk is solved, not inverted.
          Triton: sums, decays, norms and states in float32, factors of matrix products in v's dtype; the system
          is inverted by blocks, in float16 where v is not float32 (the inverse's entries are below
          beta_scale: a product of contractions relates any two rows)
Source    Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks", section 3.3 (WY form). Row i of the solved
          values V' depends on rows up to i only, so the state after any row of a chunk is a partial sum
          over V'

Legend    C chunks, Q rows a chunk, H = Hv, R = Hv / Hk, K = Dk, V = Dv, W state writes
"""

import torch
from torch import Tensor

from headrace.kernels.dense.rms_norm import L2_NORM_EPS, l2_normalize
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.scan import gdn_prefill_triton
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.segments import PrefillSegments, rows_up_to


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    T, Hv, Dv = v.shape
    Hk, Dk = k.shape[1:]
    if q.shape != k.shape or Hv % Hk or a.shape != (T, Hv) or b.shape != (T, Hv):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, a {tuple(a.shape)} disagree")
    if state_pool.shape[1:] != (Hv, Dk, Dv) or state_pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype}, not [S, {Hv}, {Dk}, {Dv}]")
    if sum(segments.lengths) != T:
        raise ValueError(f"segments describe {sum(segments.lengths)} rows, v has {T}")
    if T == 0:
        return torch.empty_like(v)
    implementation = gdn_prefill_triton if runs_triton(v) else gdn_prefill_torch
    return implementation(q, k, v, a, b, heads, state_pool, segments)


def gdn_prefill_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    heads: GdnHeads,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    Hk, Dk = k.shape[1:]
    Hv = v.shape[1]
    g, beta = heads.gates(a, b)
    q_CHQK = heads_first(segments.to_chunks(l2_normalize(q.float(), L2_NORM_EPS) * Dk**-0.5))
    k_CHQK = heads_first(segments.to_chunks(l2_normalize(k.float(), L2_NORM_EPS)))
    v_CHQV = heads_first(segments.to_chunks(v.float()))
    beta_CHQ1 = heads_first(segments.to_chunks(beta[..., None]))
    decay_CHQ1 = heads_first(segments.to_chunks(g[..., None])).cumsum(2)  # log decay since the chunk's start
    decay_CHQQ = (decay_CHQ1 - decay_CHQ1.transpose(2, 3)).clamp_(max=0).exp_()  # only the lower triangle is used

    key_score = torch.matmul(k_CHQK, k_CHQK.transpose(2, 3))  # per key head: value heads share it
    query_score = torch.matmul(q_CHQK, k_CHQK.transpose(2, 3)).tril_()
    if Hv != Hk:
        q_CHQK, k_CHQK, key_score, query_score = (
            x.repeat_interleave(Hv // Hk, dim=1) for x in (q_CHQK, k_CHQK, key_score, query_score)
        )
    from_start_CHQ1 = decay_CHQ1.exp()
    u_CHQV, w_CHQK = solve_chunks(
        key_score.mul_(decay_CHQQ).mul_(beta_CHQ1), v_CHQV, beta_CHQ1, k_CHQK, from_start_CHQ1 * beta_CHQ1
    )
    k_CHKQ = (k_CHQK * (decay_CHQ1[:, :, -1:] - decay_CHQ1).exp()).transpose(2, 3)
    start_CHKV = chunk_start_states(u_CHQV, w_CHQK, k_CHKQ, from_start_CHQ1[:, :, -1:], state_pool, segments)
    values_CHQV = u_CHQV - torch.matmul(w_CHQK, start_CHKV)
    o_CHQV = torch.matmul(query_score.mul_(decay_CHQQ), values_CHQV)
    o_CHQV += torch.matmul(q_CHQK * from_start_CHQ1, start_CHKV)
    if segments.writes:
        states = _states_at_writes(k_CHQK, values_CHQV, decay_CHQ1, start_CHKV, segments)
        state_pool.index_copy_(0, segments.write_slots_W, states.to(state_pool.dtype))
    return segments.from_chunks(o_CHQV.transpose(1, 2)).to(v.dtype)


def heads_first(x_CQH: Tensor) -> Tensor:
    return x_CQH.transpose(1, 2).contiguous()


def solve_chunks(
    system_CHQQ: Tensor, v_CHQV: Tensor, v_scale: Tensor, k_CHQK: Tensor, k_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """U and W of (I + tril(system, -1)) [U, W] = [v_scale V, k_scale K]; scales broadcast."""
    V, K = v_CHQV.shape[3], k_CHQK.shape[3]
    both = v_CHQV.new_empty(*v_CHQV.shape[:3], V + K)
    torch.mul(v_CHQV, v_scale, out=both[..., :V])
    torch.mul(k_CHQK, k_scale, out=both[..., V:])
    torch.linalg.solve_triangular(system_CHQQ, both, upper=False, unitriangular=True, out=both)
    return both[..., :V], both[..., V:]


def chunk_start_states(
    u_CHQV: Tensor,
    w_CHQK: Tensor,
    k_CHKQ: Tensor,
    decay_CHK1: Tensor,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    """[C, H, K, V], the state before each chunk: the only loop over time.

    decay_CHK1   of a whole chunk, each key channel's own or [C, H, 1, 1]

    A chunk maps the state by S <- e^c S + k^T (U - W S) = (e^c I - k^T W) S + k^T U: both factors are computed for all
    chunks at once, which leaves the loop a single product.
    """
    num_chunks, H, K = k_CHKQ.shape[:3]
    transition_CHKK = torch.matmul(k_CHKQ, w_CHQK).neg_()
    transition_CHKK.diagonal(dim1=2, dim2=3).add_(decay_CHK1[..., 0])
    states = u_CHQV.new_empty(num_chunks + 1, H, K, u_CHQV.shape[3])
    torch.matmul(k_CHKQ, u_CHQV, out=states[1:])
    before, transitions = states.unbind(), transition_CHKK.unbind()
    first = 0
    for initial, count in zip(segments.source.read(state_pool), segments.chunk_counts, strict=True):
        before[first].copy_(initial)
        for c in range(first, first + count - 1):
            before[c + 1].baddbmm_(transitions[c], before[c])
        first += count
    return states[:-1]


def _states_at_writes(
    k_CHQK: Tensor, values_CHQV: Tensor, decay_CHQ1: Tensor, start_CHKV: Tensor, segments: PrefillSegments
) -> Tensor:
    """[W, H, K, V]: each write's chunk start state, decayed to its row, plus the rows up to it."""
    chunk_W, row_W = segments.write_chunk_W, segments.write_row_W
    decay_WHQ1 = decay_CHQ1[chunk_W]
    at_row_WH11 = decay_WHQ1[torch.arange(len(segments.writes), device=row_W.device), :, row_W][:, :, None]
    weight_WHQ1 = (at_row_WH11 - decay_WHQ1).clamp_(max=0).exp_() * rows_up_to(row_W)[:, None, :, None]
    states = torch.matmul((k_CHQK[chunk_W] * weight_WHQ1).transpose(2, 3), values_CHQV[chunk_W])
    return states.addcmul_(start_CHKV[chunk_W], at_row_WH11.exp())
