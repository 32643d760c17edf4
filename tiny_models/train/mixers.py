"""Batched chunk forms of the two state mixers, for training at speed; transformers' own forms are the reference.

Same function as GraniteMoeHybridMambaLayer and Qwen3_5GatedDeltaNet for a whole sequence from an empty state, with no
padding and no cache. All chunks of all rows go through the same few batched products; what is sequential is one small
step a chunk (gated delta net) or nothing (Mamba2).

Legend    B rows, T tokens, H heads, P value dim, N key/state dim, C chunks, Q = CHUNK tokens a chunk
Numerics  decays and states in float32 even under autocast: they are products of many factors
Source    Mamba2 (Dao and Gu 2024, listing 1); Gated DeltaNet (Yang et al. 2024, eq. 8-10)
"""

import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

CHUNK = 64


def use_chunked_mixers(model: PreTrainedModel) -> None:
    """Replace the forward of every state mixer of `model`; T must then be a multiple of CHUNK."""
    forwards = {"GraniteMoeHybridMambaLayer": mamba2_forward, "Qwen3_5GatedDeltaNet": gated_delta_net_forward}
    for module in model.modules():
        if forward := forwards.get(type(module).__name__):
            module.forward = types.MethodType(forward, module)


def mamba2_forward(layer: nn.Module, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    rows, tokens, _hidden = hidden_states.shape
    inner, groups = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
    gate, mixed, dt = layer.in_proj(hidden_states).split([inner, inner + 2 * groups, layer.num_heads], dim=-1)
    mixed = F.silu(causal_depthwise_conv(mixed, layer.conv1d))
    x, b, c = mixed.float().split([inner, groups, groups], dim=-1)
    x_BTHP = x.view(rows, tokens, layer.num_heads, layer.head_dim)
    with torch.autocast(hidden_states.device.type, enabled=False):
        dt_BTH = F.softplus(dt.float() + layer.dt_bias.float())
        log_decay_BTH = -dt_BTH * layer.A_log.float().exp()
        y_BTHP = chunked_ssd(x_BTHP * dt_BTH[..., None], log_decay_BTH, b, c)
        y_BTHP = y_BTHP + x_BTHP * layer.D.float()[:, None]
    return layer.out_proj(layer.norm(y_BTHP.flatten(2), gate))


def gated_delta_net_forward(layer: nn.Module, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    rows, tokens, _hidden = hidden_states.shape
    mixed = F.silu(causal_depthwise_conv(layer.in_proj_qkv(hidden_states), layer.conv1d))
    q, k, v = mixed.float().split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    z = layer.in_proj_z(hidden_states).view(-1, layer.head_v_dim)
    beta_BTH = layer.in_proj_b(hidden_states).float().sigmoid()
    a_BTH = layer.in_proj_a(hidden_states).float()
    with torch.autocast(hidden_states.device.type, enabled=False):
        log_decay_BTH = -layer.A_log.float().exp() * F.softplus(a_BTH + layer.dt_bias.float())
        q_BTHN, k_BTHN = (unit_length(p.view(rows, tokens, layer.num_k_heads, layer.head_k_dim)) for p in (q, k))
        repeats = layer.num_v_heads // layer.num_k_heads
        q_BTHN, k_BTHN = (p.repeat_interleave(repeats, dim=2) for p in (q_BTHN, k_BTHN))
        v_BTHP = v.view(rows, tokens, layer.num_v_heads, layer.head_v_dim)
        o_BTHP = chunked_gated_delta(q_BTHN * layer.head_k_dim**-0.5, k_BTHN, v_BTHP, log_decay_BTH, beta_BTH)
    return layer.out_proj(layer.norm(o_BTHP.reshape(-1, layer.head_v_dim), z).view(rows, tokens, -1))


def causal_depthwise_conv(x_BTD: Tensor, conv: nn.Conv1d) -> Tensor:
    """y[t] = bias + sum_j w[j] x[t - K + 1 + j]: K shifted products, which beat a depthwise conv1d in training."""
    width, tokens = conv.kernel_size[0], x_BTD.shape[1]
    padded = F.pad(x_BTD, (0, 0, width - 1, 0))
    weight_DK = conv.weight.squeeze(1).to(x_BTD.dtype)
    y_BTD = sum(padded[:, j : j + tokens] * weight_DK[:, j] for j in range(width))
    return y_BTD if conv.bias is None else y_BTD + conv.bias.to(x_BTD.dtype)


def unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def chunked_ssd(x_BTHP: Tensor, log_decay_BTH: Tensor, b_BTN: Tensor, c_BTN: Tensor) -> Tensor:
    """S[t] = e^g[t] S[t-1] + x[t] b[t]^T, y[t] = S[t] c[t], for one group of b and c shared by all heads."""
    x, b, c = into_chunks(x_BTHP), into_chunks(b_BTN), into_chunks(c_BTN)
    cum_BCHQ = into_chunks(log_decay_BTH).transpose(-1, -2).cumsum(-1)
    within_BCHQQ = decay_between(cum_BCHQ) * (c @ b.transpose(-1, -2)).unsqueeze(2)
    x_BCHQP = x.transpose(2, 3)
    to_end_BCHQ = (cum_BCHQ[..., -1:] - cum_BCHQ).exp()
    gained_BCHPN = (x_BCHQP * to_end_BCHQ[..., None]).transpose(-1, -2) @ b.unsqueeze(2)

    # The state before chunk i is the sum over j < i of what chunk j gained, decayed by the chunks between.
    total_BHC = F.pad(cum_BCHQ[..., -1].transpose(1, 2), (1, 0))
    carry_BHCC = decay_between(total_BHC.cumsum(-1))[..., :-1, 1:]
    gained_BHC = gained_BCHPN.transpose(1, 2)
    entering_BHCPN = (carry_BHCC @ gained_BHC.flatten(-2)).view_as(gained_BHC)
    carried_BCHQP = c.unsqueeze(2) @ entering_BHCPN.transpose(1, 2).transpose(-1, -2)

    y_BCHQP = within_BCHQQ @ x_BCHQP + carried_BCHQP * cum_BCHQ.exp()[..., None]
    return y_BCHQP.transpose(2, 3).flatten(1, 2)


def chunked_gated_delta(
    q_BTHN: Tensor, k_BTHN: Tensor, v_BTHP: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor
) -> Tensor:
    """S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q."""
    q, k, v = (into_chunks(p).transpose(2, 3) for p in (q_BTHN, k_BTHN, v_BTHP))
    cum_BCHQ = into_chunks(log_decay_BTH).transpose(-1, -2).cumsum(-1)
    beta_BCHQ = into_chunks(beta_BTH).transpose(-1, -2)[..., None]
    decay_BCHQQ = decay_between(cum_BCHQ)
    k_beta = k * beta_BCHQ

    # (I + A) [U, W] = [beta v, beta e^c k]: what each token writes, before and per unit of the entering state
    a_BCHQQ = (k_beta @ k.transpose(-1, -2) * decay_BCHQQ).tril(-1)
    right = torch.cat([v * beta_BCHQ, k_beta * cum_BCHQ.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(a_BCHQQ, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    k_to_end_t = (k * (cum_BCHQ[..., -1:] - cum_BCHQ).exp()[..., None]).transpose(-1, -2)
    chunk_decay_BCH11 = cum_BCHQ[..., -1].exp()[..., None, None]

    state = torch.zeros_like(k_to_end_t[:, 0] @ u[:, 0])
    entering, written = [], []
    for chunk in range(q.shape[1]):
        entering.append(state)
        written.append(u[:, chunk] - w[:, chunk] @ state)
        state = state * chunk_decay_BCH11[:, chunk] + k_to_end_t[:, chunk] @ written[-1]
    entering_BCHNP, written_BCHQP = torch.stack(entering, 1), torch.stack(written, 1)

    within = (q @ k.transpose(-1, -2) * decay_BCHQQ) @ written_BCHQP
    carried = (q * cum_BCHQ.exp()[..., None]) @ entering_BCHNP
    return (within + carried).transpose(2, 3).flatten(1, 2)


def into_chunks(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B, C, Q, ...]"""
    return x.unflatten(1, (-1, CHUNK))


def decay_between(cum: Tensor) -> Tensor:
    """L[i, j] = e^(cum[i] - cum[j]) for j <= i, else 0; the mask comes before the exponential, which may overflow."""
    size = cum.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool, device=cum.device).triu(1)
    return (cum[..., :, None] - cum[..., None, :]).masked_fill(future, float("-inf")).exp()
