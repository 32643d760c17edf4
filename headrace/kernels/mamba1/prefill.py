"""Mamba1 selective scan over packed sequences, reading and writing state slots.

    S_t = exp(dt_t * A) * S_{t-1} + (dt_t * x_t) outer B_t          y_t = (S_t C_t + D * x_t) * silu(gate_t)

Shapes    x, dt, gate [T, I]; B, C [T, N]; channels: A, D and the bias of dt; state_pool [S, I, N] float32 or bfloat16,
          any stride over slots; returns y [T, I] in x's dtype. T packed rows, I channels, N state size
Contract  dt is raw, as projected (headrace/kernels/mamba1/channels.py); rows are packed as in `segments`; a slot that
          is written may be its own sequence's source and no other's; no other slot changes; writes at many rows cost
          no second pass; T = 0 is a no-op
Numerics  all arithmetic in float32
Source    Gu & Dao 2023, "Mamba", algorithm 2. Each of a channel's N states decays at a rate of its own, so that chunks
          are no matrix products, as Mamba2's are

Legend    Z chunks, Q rows a chunk, W state writes
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.segments import CHUNK_SIZE, PrefillSegments
from headrace.kernels.mamba1.channels import Mamba1Channels, check_rows
from headrace.kernels.mamba1.scan import mamba1_prefill_triton


def mamba1_prefill(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    gate: Tensor,
    channels: Mamba1Channels,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    check_rows(x, dt, B, C, gate, state_pool)
    if sum(segments.lengths) != len(x):
        raise ValueError(f"segments describe {sum(segments.lengths)} rows, x has {len(x)}")
    if len(x) == 0:
        return torch.empty_like(x)
    implementation = mamba1_prefill_triton if runs_triton(x) else mamba1_prefill_torch
    return implementation(x, dt, B, C, gate, channels, state_pool, segments)


def mamba1_prefill_torch(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    gate: Tensor,
    channels: Mamba1Channels,
    state_pool: Tensor,
    segments: PrefillSegments,
) -> Tensor:
    """Steps run over all chunks at once: once for what each chunk adds, and once more from the states before them."""
    wide, dt_TI = x.float(), channels.time_steps(dt)
    # Padding rows have a dt of 0: they leave a state as it is.
    dt_ZQI, gain_ZQI = segments.to_chunks(dt_TI), segments.to_chunks(dt_TI * wide)
    B_ZQN, C_ZQN = segments.to_chunks(B.float()), segments.to_chunks(C.float())
    state = _chunk_start_states(dt_ZQI, gain_ZQI, B_ZQN, channels.A, state_pool, segments)
    y_ZQI = torch.empty_like(gain_ZQI)
    written = [torch.empty(0)] * len(segments.writes)
    writes_of: dict[int, list[tuple[int, int]]] = {}  # by row of a chunk: (write, chunk)
    places = zip(segments.write_row_W.tolist(), segments.write_chunk_W.tolist(), strict=True)
    for write, (row, chunk) in enumerate(places):
        writes_of.setdefault(row, []).append((write, chunk))
    for q in range(CHUNK_SIZE):
        _step(state, dt_ZQI[:, q], gain_ZQI[:, q], B_ZQN[:, q], channels.A)
        torch.bmm(state, C_ZQN[:, q, :, None], out=y_ZQI[:, q, :, None])
        for write, chunk in writes_of.get(q, ()):
            written[write] = state[chunk].clone()
    if written:
        state_pool.index_copy_(0, segments.write_slots_W, torch.stack(written).to(state_pool.dtype))
    y = segments.from_chunks(y_ZQI).addcmul(wide, channels.D)
    return y.mul_(F.silu(gate.float())).to(x.dtype)


def _step(state_ZIN: Tensor, dt_ZI: Tensor, gain_ZI: Tensor, B_ZN: Tensor, A_IN: Tensor) -> None:
    state_ZIN.mul_((dt_ZI[..., None] * A_IN).exp_()).addcmul_(gain_ZI[..., None], B_ZN[:, None])


def _chunk_start_states(
    dt_ZQI: Tensor, gain_ZQI: Tensor, B_ZQN: Tensor, A_IN: Tensor, state_pool: Tensor, segments: PrefillSegments
) -> Tensor:
    """[Z, I, N]: the state before each chunk."""
    start = dt_ZQI.new_zeros(len(dt_ZQI), *A_IN.shape)
    initial = segments.source.read(state_pool).float()
    if segments.num_chunks == len(initial):
        return start.copy_(initial)
    added = torch.zeros_like(start)
    for q in range(CHUNK_SIZE):
        _step(added, dt_ZQI[:, q], gain_ZQI[:, q], B_ZQN[:, q], A_IN)
    decay = (dt_ZQI.sum(1)[..., None] * A_IN).exp_()
    first = 0
    for state, count in zip(initial, segments.chunk_counts, strict=True):
        start[first] = state
        for chunk in range(first, first + count - 1):
            torch.addcmul(added[chunk], start[chunk], decay[chunk], out=start[chunk + 1])
        first += count
    return start
