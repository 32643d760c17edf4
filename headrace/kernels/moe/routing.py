"""Mixture-of-experts routing: each token's k best experts and their weights.

    renormalize    softmax over the chosen logits: the weights of one token sum to one
    otherwise      softmax over all logits, kept for the chosen

Softmax, then top k, then renormalize (Qwen) is the same as top k, then softmax (Granite).

Shapes    logits [T, E]; returns weight [T, k] float32 and expert [T, k], best first
Contract  of equal logits Triton takes the lowest expert, torch any
Numerics  float32
Source    Shazeer et al. 2017, "Outrageously Large Neural Networks"
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2


def moe_route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2 or not 0 < k <= logits.shape[1]:
        raise ValueError(f"{k} experts cannot be chosen from logits {tuple(logits.shape)}")
    return (moe_route_triton if runs_triton(logits) else moe_route_torch)(logits, k, renormalize)


def moe_route_torch(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    if renormalize:
        chosen, expert = logits.float().topk(k, dim=-1)
        return chosen.softmax(-1), expert
    weight, expert = logits.float().softmax(-1).topk(k, dim=-1)
    return weight, expert


@triton.jit
def _route_kernel(
    logits_ptr, weight_ptr, expert_ptr, stride_logits,
    E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    e, choice = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    logits = tl.load(logits_ptr + row * stride_logits + e, mask=e < E, other=float("-inf")).to(tl.float32)
    best = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - best), 0)
    weight = tl.zeros([PADDED_K], tl.float32)
    expert = tl.zeros([PADDED_K], tl.int32)
    left = tl.where(e < E, logits, float("-inf"))
    for j in tl.static_range(K):
        highest, place = tl.max(left, 0, return_indices=True)
        weight = tl.where(choice == j, tl.exp(highest - best), weight)
        expert = tl.where(choice == j, place, expert)
        left = tl.where(e == place, float("-inf"), left)
    weight /= tl.sum(weight, 0) if RENORMALIZE else total
    tl.store(weight_ptr + row * K + choice, weight, mask=choice < K)
    expert = tl.minimum(expert, E - 1)  # no other of NaNs
    tl.store(expert_ptr + row * K + choice, expert, mask=choice < K)


def moe_route_triton(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}: those of one row must be contiguous")
    weight = torch.empty((T, k), dtype=torch.float32, device=logits.device)
    expert = torch.empty((T, k), dtype=torch.int32, device=logits.device)
    if T:
        _route_kernel[(T,)](
            logits, weight, expert, logits.stride(0), E=E, PADDED_E=next_power_of_2(E),
            K=k, PADDED_K=next_power_of_2(k), RENORMALIZE=renormalize, num_warps=1, **OVERLAPPED,
        )  # fmt: skip
    return weight, expert
