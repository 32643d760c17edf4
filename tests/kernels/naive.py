"""The recurrences token by token in float64: what every chunked or batched form must equal."""

import torch
from torch import Tensor

NAN = float("nan")


def naive_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """y [T, H, P], and the state [H, P, N] after each token."""
    x, dt, A, B, C, D, state = (t.double() for t in (x, dt, A, B, C, D, state))
    H, G = x.shape[1], B.shape[1]
    outputs, states = [], []
    for t in range(len(x)):
        b, c = (m[t].repeat_interleave(H // G, dim=0) for m in (B, C))
        state = (dt[t] * A).exp()[:, None, None] * state + (dt[t, :, None] * x[t])[:, :, None] * b[:, None]
        outputs.append((state * c[:, None]).sum(-1) + D[:, None] * x[t])
        states.append(state)
    return torch.stack(outputs), states


def naive_mamba1(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, gate: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """y [T, I], and the state [I, N] after each token."""
    x, dt, A, B, C, D, gate, state = (t.double() for t in (x, dt, A, B, C, D, gate, state))
    outputs, states = [], []
    for t in range(len(x)):
        state = (dt[t, :, None] * A).exp() * state + (dt[t] * x[t])[:, None] * B[t]
        outputs.append(((state * C[t]).sum(-1) + D * x[t]) * gate[t] * gate[t].sigmoid())
        states.append(state)
    return torch.stack(outputs), states


def naive_gdn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """o [T, Hv, Dv], and the state [Hv, Dk, Dv] after each token. g [T, Hv], or [T, Hv, Dk]: each channel's own."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    repeat, scale = v.shape[1] // k.shape[1], k.shape[2] ** -0.5
    q, k = ((m * (m.square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for m in (q, k))
    outputs, states = [], []
    for t in range(len(v)):
        q_t, k_t = q[t].repeat_interleave(repeat, dim=0) * scale, k[t].repeat_interleave(repeat, dim=0)
        state = g[t].exp().view(len(state), -1, 1) * state
        remembered = (state * k_t[:, :, None]).sum(1)
        state = state + k_t[:, :, None] * (beta[t][:, None] * (v[t] - remembered))[:, None]
        outputs.append((state * q_t[:, :, None]).sum(1))
        states.append(state)
    return torch.stack(outputs), states


def naive_conv(
    u: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, silu: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """y [T, C], and the window [C, K-1] after each token."""
    outputs, windows = [], []
    for row in u.double():
        taps = torch.cat((window.double(), row[:, None]), dim=1)
        y = (taps * weight.double()).sum(-1) + (0 if bias is None else bias.double())
        outputs.append(y * torch.sigmoid(y) if silu else y)
        window = taps[:, 1:]
        windows.append(window)
    return torch.stack(outputs), windows


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, [T, H, D] queries at the end of [n, Hkv, D] keys and values."""
    q, k, v = q.double(), k.double(), v.double()
    rows = []
    for t in range(len(q)):
        end = len(k) - len(q) + t + 1
        keys, values = (m[:end].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for m in (k, v))
        weight = ((q[t] * keys).sum(-1) * scale).softmax(0)
        rows.append((weight[..., None] * values).sum(0))
    return torch.stack(rows)
