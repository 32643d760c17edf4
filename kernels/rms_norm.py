"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight.

Shapes    x [..., D]; weight [D] or anything that broadcasts to x from the right ([H, D]: one weight a head)
Contract  models whose weight is stored as an offset from one (Qwen) add the one at load time
Numerics  float32 inside, the result in x's dtype
Source    Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"
"""

import functools

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in the last dimension")
    return rms_norm_torch(x, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return torch.mul(wide, inverse_rms(wide, eps)).mul_(weight).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept as one: three small operations, not six."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps, x.device), norm, norm).rsqrt_()


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)
