"""Rotary position embedding, in place, on the leading part of each head (rotate-half pairing).

    (a, b) -> (a cos - b sin, b cos + a sin)    with a = x[..., :R], b = x[..., R:2R]; the rest of the head
    stays. cos and sin may carry a factor (YaRN's attention factor)

Shapes    x [T, H, D]; cos, sin [T, 1, R], 2R <= D; `rotary_angles` makes them from positions [T]
Contract  x is overwritten; one call serves adjacent queries and keys
Numerics  angles and products in float32, the result in x's dtype
Source    Su et al. 2021, "RoFormer", with the pairing of GPT-NeoX
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.sizes import cdiv


def rotary_angles(positions_T: Tensor, inverse_frequency_R: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R], times `factor`: computed once a step, shared by all layers."""
    angles_of = rotary_angles_triton if runs_triton(positions_T) else rotary_angles_torch
    return angles_of(positions_T, inverse_frequency_R, factor)


def rotary_angles_torch(positions_T: Tensor, inverse_frequency_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    angles = positions_T.float()[:, None, None] * inverse_frequency_R
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos().mul_(factor), angles.sin().mul_(factor)


@triton.jit
def _angles_kernel(
    position_ptr, frequency_ptr, cos_ptr, sin_ptr, num_angles,
    FACTOR: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = place < num_angles
    position = tl.load(position_ptr + place // R, mask=is_here, other=0).to(tl.float32)
    angle = position * tl.load(frequency_ptr + place % R, mask=is_here, other=0.0)
    tl.store(cos_ptr + place, tl.cos(angle) * FACTOR, mask=is_here)
    tl.store(sin_ptr + place, tl.sin(angle) * FACTOR, mask=is_here)


def rotary_angles_triton(positions_T: Tensor, inverse_frequency_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    T, R = len(positions_T), len(inverse_frequency_R)
    cos, sin = torch.empty((2, T, 1, R), dtype=torch.float32, device=positions_T.device)
    if T:
        _angles_kernel[(cdiv(T * R, 128),)](
            positions_T, inverse_frequency_R, cos, sin, T * R, FACTOR=factor, R=R, BLOCK=128, num_warps=4
        )
    return cos, sin


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
