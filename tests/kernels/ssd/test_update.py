"""Mamba2 decode steps against token-by-token float64: the torch reference, the Triton kernel."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.ssd import update as ssd_update
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.update import ssd_update_torch, ssd_update_triton
from tests.kernels.naive import naive_ssd
from tests.kernels.recurrences import Case, UpdateTests
from tests.kernels.updates import (
    DEVICE,
    RealUpdateTests,
    SmallUpdateTests,
    check_bytes_in_flight,
    needs_gpu,
    randn,
    raw_columns,
)
from tests.support.kernels.compiled import Launch

CASES = [Case("ssd", (4, 8, 6), 5e-5), Case("ssd_groups", (4, 8, 6), 5e-5)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestReference(UpdateTests):
    """The torch reference."""


@dataclass(frozen=True)
class Ssd:
    """Inputs as the engine passes them: x, B and C are slices of the convolution's output."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.state_size

    def inputs(self, R: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inner, shared = self.heads * self.head_dim, self.groups * self.state_size
        x, B, C = randn(R, inner + 2 * shared, dtype=dtype).split((inner, shared, shared), dim=-1)
        dt = raw_columns(R, self.heads, dtype)
        return (
            x.view(R, self.heads, self.head_dim),
            dt,
            B.view(R, self.groups, self.state_size),
            C.view(R, self.groups, self.state_size),
        )

    def constants(self) -> SsdHeads:
        place = torch.arange(self.heads, device=DEVICE)
        return SsdHeads(-0.1 - place % 7, 1 - place * 0.1, place % 5 - 3.0, *self.dt_limits)

    def triton(self, inputs, *rest) -> Tensor:
        return ssd_update_triton(*inputs, self.constants(), *rest)

    def torch(self, inputs, *rest) -> Tensor:
        return ssd_update_torch(*inputs, self.constants(), *rest)

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, raw, B, C = inputs
        heads = self.constants()
        dt = softplus(raw.double() + heads.dt_bias).clamp(*self.dt_limits)
        return naive_ssd(x, dt, heads.A, B, C, heads.D, state)


SMALL = [Ssd(4, 8, 1, 16), Ssd(2, 20, 2, 6, (0.05, 0.9))]
REAL = [Ssd(64, 64, 1, 128), Ssd(32, 64, 8, 256)]


@pytest.mark.parametrize("case", SMALL, ids=str)
class TestTriton(SmallUpdateTests):
    """The Triton kernel."""


@needs_gpu
@pytest.mark.parametrize("case", REAL, ids=str)
class TestTritonOnTheGpu(RealUpdateTests):
    """The Triton kernel at real sizes."""


def ssd_launch(pool: str, batch: int, T: int) -> Launch:
    tile_p, num_warps = ssd_update.launch_shape(64)
    types = {name: "*bf16:16" for name in ("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "y_ptr")}
    types |= {name: "*fp32:16" for name in ("A_ptr", "D_ptr", "bias_ptr")}
    types |= {"pool_ptr": f"*{pool}:16", "src_ptr": "*i64", "dst_ptr": "*i64"}
    types |= {f"{name}_stride": "i32:16" for name in ("x", "dt", "B", "C", "slot")}
    sizes = {"T": T, "H": 64, "P": 64, "N": 128, "HEADS_A_GROUP": 64, "TILE_P": tile_p, "PADDED_N": 128}
    sizes |= {"DT_MIN": 0.0, "DT_MAX": float("inf")}
    return Launch("headrace.kernels.ssd.update:_ssd_update_kernel", types, sizes, num_warps=num_warps)


def test_it_keeps_enough_bytes_in_flight():
    check_bytes_in_flight(ssd_launch)
