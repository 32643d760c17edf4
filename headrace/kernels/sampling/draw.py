"""Random draw of one token a row from softmax(logits / temperature), cut by top-k, top-p and min-p.

The inverse CDF, over tokens in order of logit and ties by id, at the row's own uniform number.

Shapes    logits [N, V] float32; settings_N4 [N, 4] float64: temperature, top_k (0: all), top_p, min_p; uniform_N [N]
          float64 in [0, 1); returns ids int64 [N]
Contract  temperature above zero; a logit may be -inf, not all of one row. A row with a NaN or +inf, of which the
          softmax is NaN, has NO_TOKEN. The host waits for nothing
Numerics  torch: float64. Triton: weights in float32, so that it draws another token with a chance of about 1e-6 a
          draw, the same one wherever it runs
Source    Triton does not sort. The tokens that the cuts keep are a prefix of the order, and so are those before the
          drawn one: each prefix is found by bisection over logits, one pass over the row a step. The bounds snap to
          logits that occur: the many equal logits of a bf16 head make it few steps
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import next_power_of_2
from headrace.kernels.sampling.argmax import NO_TOKEN


def draw(logits: Tensor, settings_N4: Tensor, uniform_N: Tensor) -> Tensor:
    N = len(logits)
    if logits.dtype != torch.float32 or settings_N4.shape != (N, 4) or uniform_N.shape != (N,):
        raise ValueError(
            f"logits {tuple(logits.shape)} {logits.dtype}, settings {tuple(settings_N4.shape)}, "
            f"uniform {tuple(uniform_N.shape)} disagree"
        )
    return (draw_triton if runs_triton(logits) else draw_torch)(logits, settings_N4, uniform_N)


def draw_torch(logits: Tensor, settings_N4: Tensor, uniform_N: Tensor) -> Tensor:
    temperature, top_k, top_p, min_p = settings_N4.split(1, dim=1)
    # Sorted by logit, ties by id: the order, and so the draw, is the same on every device.
    values_NV, ids_NV = torch.sort(logits.double() / temperature, dim=-1, descending=True, stable=True)
    probs_NV = torch.softmax(values_NV, dim=-1)
    ranks = torch.arange(probs_NV.shape[1], device=logits.device)
    probs_NV = probs_NV * ((ranks < top_k) | (top_k == 0))
    probs_NV = probs_NV / probs_NV.sum(dim=-1, keepdim=True)
    # A token stays while the mass before it is below top_p: the first always does.
    keep = probs_NV.cumsum(dim=-1) - probs_NV < top_p
    keep &= probs_NV >= min_p * probs_NV[:, :1]
    keep[:, 0] = True
    cumulative = (probs_NV * keep).cumsum(dim=-1)
    rank = torch.searchsorted(cumulative, uniform_N.unsqueeze(1) * cumulative[:, -1:], right=True)
    ids = ids_NV.gather(1, rank.clamp_(max=probs_NV.shape[1] - 1)).squeeze(1)
    return ids.masked_fill_(~(values_NV[:, 0] < torch.inf), NO_TOKEN)  # NaN is sorted before all numbers


@triton.jit
def _above(row_ptr, V, bar, best, scale, BLOCK: tl.constexpr):
    """Count of the logits above `bar`, the sum of their weights (the best logit weighs one), the lowest of them, and
    the highest of the others."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    over = tl.full([BLOCK], float("inf"), tl.float32)
    under = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + at, mask=at < V, other=float("-inf"))
        is_above = logit > bar
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp2((logit - best) * scale), 0.0)
        over = tl.minimum(over, tl.where(is_above, logit, float("inf")))
        under = tl.maximum(under, tl.where(is_above, float("-inf"), logit))
    return tl.sum(count, 0), tl.sum(mass, 0).to(tl.float64), tl.min(over, 0), tl.max(under, 0)


@triton.jit
def _last_of_prefix(row_ptr, V, best, worst, scale, most, limit, BLOCK: tl.constexpr):
    """The last token, in order, with fewer than `most` tokens and less than `limit` mass before it; the first if none.

    Returns its logit, the mass of the logits above it, its weight, and its rank among the tokens of the same logit.
    """
    low, found = worst, best  # logits of the row; the token's logit is in [low, found]
    count_above, mass_above = most * 0, limit * 0.0
    while low < found:
        middle = tl.maximum(0.5 * low + 0.5 * found, low)
        middle = tl.where(middle < found, middle, low)
        count, mass, over, under = _above(row_ptr, V, middle, best, scale, BLOCK)
        fits = (count < most) & (mass < limit)
        low = tl.where(fits, low, over)
        found = tl.where(fits, under, found)
        count_above = tl.where(fits, count, count_above)
        mass_above = tl.where(fits, mass, mass_above)
    equals = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        equals += (tl.load(row_ptr + at, mask=at < V, other=float("-inf")) == found).to(tl.int32)
    weight = tl.exp2((found - best) * scale).to(tl.float64)
    by_count = tl.minimum(tl.sum(equals, 0), most - count_above).to(tl.float64)
    by_mass = tl.ceil((limit - mass_above) / tl.maximum(weight, 1e-300))
    rank = tl.maximum(tl.minimum(by_count, by_mass), 1.0).to(tl.int32) - 1
    return found, mass_above, weight, rank


@triton.jit
def _draw_kernel(
    logits_ptr, settings_ptr, uniform_ptr, id_ptr, V, stride_logits,
    NO_TOKEN: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(settings_ptr + row * 4)
    top_k = tl.load(settings_ptr + row * 4 + 1)
    top_p = tl.load(settings_ptr + row * 4 + 2)
    min_p = tl.load(settings_ptr + row * 4 + 3)
    row_ptr = logits_ptr + row * stride_logits
    # exp2 for exp. A plain number, as the interpreter makes a constexpr of a constexpr divided by a tensor.
    scale = (1.4426950408889634 / temperature).to(tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    num_wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + at, mask=at < V, other=float("-inf"))
        best = tl.maximum(best, logit)
        num_wrong += tl.where(logit < float("inf"), 0, 1)
    best = tl.minimum(tl.max(best, 0), LARGEST)  # between infinity and a number bisection would go logit by logit
    count, total, worst, _ = _above(row_ptr, V, float("-inf"), best, scale, BLOCK)
    most, kept = count, total
    if (top_k > 0) & (top_k < count):
        most = top_k.to(tl.int32)
        no_limit = total * 0 + 1e300
        _, mass, weight, rank = _last_of_prefix(row_ptr, V, best, worst, scale, most, no_limit, BLOCK)
        kept = mass + weight * (rank + 1)
    if top_p < 1:
        _, mass, weight, rank = _last_of_prefix(row_ptr, V, best, worst, scale, most, kept * top_p, BLOCK)
        kept = mass + weight * (rank + 1)
    if min_p > 0:
        bar = best + tl.log2(min_p.to(tl.float32)) / scale
        _, mass, _, _ = _above(row_ptr, V, bar, best, scale, BLOCK)
        kept = tl.minimum(kept, mass)
    limit = kept * tl.load(uniform_ptr + row)
    found, _, _, rank = _last_of_prefix(row_ptr, V, best, worst, scale, most, limit, BLOCK)

    equals_before = rank * 0
    drawn = rank * 0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        equals = (tl.load(row_ptr + at, mask=at < V, other=float("-inf")) == found).to(tl.int32)
        is_drawn = (equals > 0) & (equals_before + tl.cumsum(equals, 0) == rank + 1)
        drawn += tl.sum(tl.where(is_drawn, at, 0), 0)
        equals_before += tl.sum(equals, 0)
    tl.store(id_ptr + row, tl.where(tl.sum(num_wrong, 0) > 0, NO_TOKEN, drawn).to(tl.int64))


def draw_triton(logits: Tensor, settings_N4: Tensor, uniform_N: Tensor, block: int = 8192) -> Tensor:
    N, V = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}: those of one row must be contiguous")
    ids = torch.empty(N, dtype=torch.int64, device=logits.device)
    if N:
        block = min(block, next_power_of_2(V))
        _draw_kernel[(N,)](
            logits, settings_N4.contiguous(), uniform_N.contiguous(), ids, V, logits.stride(0),
            NO_TOKEN=NO_TOKEN, LARGEST=torch.finfo(torch.float32).max, BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **OVERLAPPED,
        )  # fmt: skip
    return ids
