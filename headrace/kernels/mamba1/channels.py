"""Parameters of a Mamba1 layer's channels, and the time steps that they make of the projected ones.

    dt = softplus(raw + dt_bias)

Shapes    A [I, N], D [I], dt_bias [I] float32, contiguous; raw [T, I], any stride over rows
Contract  A is negative; the kernels take raw time steps and compute dt where they read them
Numerics  float32
Source    Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Mamba1Channels:
    A: Tensor
    D: Tensor
    dt_bias: Tensor

    def time_steps(self, raw: Tensor) -> Tensor:
        """[T, I] float32."""
        return F.softplus(raw.float() + self.dt_bias)


def check_rows(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, gate: Tensor, state_pool: Tensor) -> None:
    """Raises ValueError unless the rows of a scan or an update agree with each other and with the pool."""
    if x.shape != dt.shape or x.shape != gate.shape or B.shape != C.shape or len(B) != len(x):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, dt, B, C, gate))
        raise ValueError(f"x, dt, B, C and gate {shapes} disagree")
    if state_pool.shape[1:] != (x.shape[1], B.shape[1]) or not state_pool.dtype.is_floating_point:
        raise ValueError(f"state pool {tuple(state_pool.shape)} {state_pool.dtype} does not hold these states")


def check_contiguous_rows(**tensors: Tensor) -> None:
    """Raises ValueError unless each row of an input, and each slot of a pool, is contiguous; rows may be apart."""
    for name, tensor in tensors.items():
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, make its rows contiguous")
