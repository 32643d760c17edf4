"""Rotary position embedding, in place, on the leading part of each head (rotate-half pairing).

    (a, b) -> (a cos - b sin, b cos + a sin)    with a = x[..., :R], b = x[..., R:2R]; the rest of the head
    stays

Shapes    x [T, H, D]; cos, sin [T, 1, R], 2R <= D; `rotary_angles` makes them from positions [T]
Contract  x is overwritten; one call serves queries and keys that lie side by side
Numerics  angles and products in float32, the result in x's dtype
Source    Su et al. 2021, "RoFormer", with the pairing of GPT-NeoX
"""

import torch
from torch import Tensor


def rotary_angles(positions_T: Tensor, inverse_frequency_R: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R]: computed once a step, shared by all layers."""
    angles = positions_T.float()[:, None, None] * inverse_frequency_R
    return angles.cos(), angles.sin()


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / (theta**exponents)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    R = cos.shape[-1]
    if cos.shape != sin.shape or len(cos) != len(x) or x.shape[-1] < 2 * R:
        raise ValueError(f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)} disagree")
    a, b = x[..., :R], x[..., R : 2 * R]
    rotated_a = a * cos - b * sin
    b.copy_(b * cos + a * sin)
    a.copy_(rotated_a)
