"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight.

Shapes    x [..., D]; weight [D] or anything that broadcasts to x from the right ([H, D] for one weight a
          head)
Contract  models whose weight is stored as an offset from one (Qwen) add the one at load time
Numerics  float32 inside, the result in x's dtype
Source    Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in the last dimension")
    return rms_norm_torch(x, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    return normed.mul_(weight).to(x.dtype)
