"""Mixture-of-experts routing by sigmoid scores: each token's k best experts and their weights.

    score = tl.sigmoid(logit);  choice = score + bias           the bias decides who is chosen, not the weights
    group                                                    the best `chosen_groups` of `num_groups` groups of
                                                             neighbours, by the sum of their two best choices
    weight = score * scale, after the chosen ones were divided by their sum (`renormalize`)

Shapes    logits [T, E] float32; bias [E] float32 or None; returns weight [T, k] float32 and expert [T, k]
Contract  groups divide E into two experts or more each, and those chosen hold k. Of equal choices Triton takes the
          lowest expert, torch any
Numerics  float32
Source    DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2

TINY = 1e-20


@dataclass(frozen=True)
class SigmoidRouting:
    """How experts are chosen: k of them, from the best groups, and what their weights are multiplied by."""

    k: int
    renormalize: bool
    num_groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    smallest: float = TINY  # added to a sum before it divides: scores may all have underflowed


def moe_route_sigmoid(logits: Tensor, bias: Tensor | None, routing: SigmoidRouting) -> tuple[Tensor, Tensor]:
    E, k, groups = logits.shape[-1], routing.k, routing.num_groups
    if logits.dim() != 2 or logits.dtype != torch.float32 or (bias is not None and bias.shape != (E,)):
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} do not fit a bias for each expert")
    if E % groups or not 0 < k <= E // groups * routing.chosen_groups or (groups > 1 and E // groups < 2):
        raise ValueError(f"{k} of {E} experts in {groups} groups cannot be chosen from {routing.chosen_groups}")
    return (moe_route_sigmoid_triton if runs_triton(logits) else moe_route_sigmoid_torch)(logits, bias, routing)


def moe_route_sigmoid_torch(logits: Tensor, bias: Tensor | None, routing: SigmoidRouting) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    score = logits.sigmoid()
    choice = score if bias is None else score + bias
    if routing.chosen_groups < routing.num_groups:
        by_group = choice.view(T, routing.num_groups, -1)
        chosen = by_group.topk(2).values.sum(-1).topk(routing.chosen_groups).indices
        is_chosen = torch.zeros(T, routing.num_groups, dtype=torch.bool, device=logits.device).scatter_(1, chosen, True)
        choice = by_group.masked_fill(~is_chosen[..., None], float("-inf")).view(T, E)
    expert = choice.topk(routing.k).indices
    weight = score.gather(1, expert)
    if routing.renormalize:
        weight /= weight.sum(-1, keepdim=True) + routing.smallest
    return weight * routing.scale, expert


@triton.jit
def _route_sigmoid_kernel(
    logits_ptr, bias_ptr, weight_ptr, expert_ptr, stride_logits, scale,
    E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    let_next_start()
    e, place = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0) if HAS_BIAS else 0.0
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    score = tl.sigmoid(tl.load(logits_ptr + row * stride_logits + e, mask=e < E, other=0.0))
    choice = tl.where(e < E, score + bias, float("-inf"))
    if CHOSEN_GROUPS < GROUPS:
        group = e // (E // GROUPS)
        worth = tl.full([PADDED_E], float("-inf"), tl.float32)  # of each expert's group
        for g in tl.static_range(GROUPS):
            members = tl.where(group == g, choice, float("-inf"))
            best, best_at = tl.max(members, 0, return_indices=True)
            second = tl.max(tl.where(e == best_at, float("-inf"), members), 0)
            worth = tl.where(group == g, best + second, worth)
        left = tl.where(e < E, worth, float("-inf"))
        for _ in tl.static_range(CHOSEN_GROUPS):
            _, at = tl.max(left, 0, return_indices=True)
            left = tl.where(group == at // (E // GROUPS), float("-inf"), left)
        choice = tl.where(left == float("-inf"), choice, float("-inf"))
    weight = tl.zeros([PADDED_K], tl.float32)
    expert = tl.zeros([PADDED_K], tl.int32)
    for j in tl.static_range(K):
        _, at = tl.max(choice, 0, return_indices=True)
        weight = tl.where(place == j, tl.sum(tl.where(e == at, score, 0.0), 0), weight)
        expert = tl.where(place == j, at, expert)
        choice = tl.where(e == at, float("-inf"), choice)
    if RENORMALIZE:
        weight /= tl.sum(weight, 0) + SMALLEST
    tl.store(weight_ptr + row * K + place, weight * scale, mask=place < K)
    expert = tl.minimum(expert, E - 1)  # no other of NaNs
    tl.store(expert_ptr + row * K + place, expert, mask=place < K)


def moe_route_sigmoid_triton(logits: Tensor, bias: Tensor | None, routing: SigmoidRouting) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    if logits.stride(1) != 1 or (bias is not None and not bias.is_contiguous()):
        raise ValueError(f"logits have strides {logits.stride()}: those of one row must be contiguous, and the bias")
    weight = torch.empty((T, routing.k), dtype=torch.float32, device=logits.device)
    expert = torch.empty((T, routing.k), dtype=torch.int32, device=logits.device)
    if T:
        _route_sigmoid_kernel[(T,)](
            logits, bias, weight, expert, logits.stride(0), routing.scale, E=E, PADDED_E=next_power_of_2(E),
            K=routing.k, PADDED_K=next_power_of_2(routing.k), HAS_BIAS=bias is not None,
            GROUPS=routing.num_groups, CHOSEN_GROUPS=routing.chosen_groups, RENORMALIZE=routing.renormalize,
            SMALLEST=routing.smallest, num_warps=1, **OVERLAPPED,
        )  # fmt: skip
    return weight, expert
