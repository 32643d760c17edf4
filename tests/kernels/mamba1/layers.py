"""A Mamba1 layer's inputs and constants, for the tests of its scan and its update."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.mamba1.channels import Mamba1Channels
from headrace.kernels.mamba1.prefill import mamba1_prefill_torch
from headrace.kernels.mamba1.scan import mamba1_prefill_triton
from headrace.kernels.mamba1.update import mamba1_update_torch, mamba1_update_triton
from tests.kernels.naive import naive_mamba1

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Mamba1:
    """I channels of N states; inputs as the engine passes them: gate and raw dt apart, B and C normed."""

    I: int  # noqa: E741
    N: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.I, self.N

    def inputs(self, T: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, dt, B, C = (torch.randn(T, size, device=DEVICE).to(dtype) for size in (self.I, self.I, self.N, self.N))
        gate = torch.randn(T, 2 * self.I, device=DEVICE).to(dtype)[:, self.I :]
        return x, dt, B, C, gate

    def constants(self) -> Mamba1Channels:
        place = torch.arange(self.I, device=DEVICE)
        A = -0.05 - (torch.arange(self.I * self.N, device=DEVICE) * 7 % 31).view(self.I, self.N) / 8
        return Mamba1Channels(A, 1 - place % 9 * 0.1, place % 5 - 4.0)

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, raw, B, C, gate = inputs
        constants = self.constants()
        dt = softplus(raw.double() + constants.dt_bias)
        return naive_mamba1(x, dt, constants.A, B, C, constants.D, gate, state)


class Update(Mamba1):
    def triton(self, inputs, *rest) -> Tensor:
        return mamba1_update_triton(*inputs, self.constants(), *rest)

    def torch(self, inputs, *rest) -> Tensor:
        return mamba1_update_torch(*inputs, self.constants(), *rest)


class Scan(Mamba1):
    def triton(self, inputs, *rest) -> Tensor:
        return mamba1_prefill_triton(*inputs, self.constants(), *rest)

    def torch(self, inputs, *rest) -> Tensor:
        return mamba1_prefill_torch(*(tensor.float() for tensor in inputs), self.constants(), *rest)
