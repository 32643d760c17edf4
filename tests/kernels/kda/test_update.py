"""Kimi delta attention's decode steps against token-by-token float64: the torch reference, the Triton kernel."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.gdn.tiles import launch_shape
from headrace.kernels.kda.heads import KdaHeads
from headrace.kernels.kda.update import kda_update_torch, kda_update_triton
from tests.kernels.naive import naive_gdn
from tests.kernels.recurrences import Case, UpdateTests
from tests.kernels.updates import (
    DEVICE,
    POOLS,
    RealUpdateTests,
    SmallUpdateTests,
    check_bytes_in_flight,
    needs_gpu,
    randn,
    raw_columns,
)
from tests.support.kernels.compiled import Launch


@pytest.mark.parametrize("case", [Case("kda", (4, 8, 6), 5e-5)], ids=lambda case: case.name)
class TestReference(UpdateTests):
    """The torch reference."""


@dataclass(frozen=True)
class Kda:
    """Inputs as the engine passes them: q, k and v are slices of the convolution's output."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim

    def inputs(self, R: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        q, k, v = randn(R, 2 * keys + values, dtype=dtype).split((keys, keys, values), dim=-1)
        q, k, f = (each.unflatten(1, (self.num_heads, self.key_dim)) for each in (q, k, randn(R, keys, dtype=dtype)))
        return q, k, v.unflatten(1, (self.num_heads, self.value_dim)), f, raw_columns(R, self.num_heads, dtype)

    def constants(self) -> KdaHeads:
        place = torch.arange(self.num_heads * self.key_dim, device=DEVICE)
        return KdaHeads(-0.1 - place[: self.num_heads] % 7, (place % 5 - 3.0).view(self.num_heads, self.key_dim))

    def triton(self, inputs, *rest) -> Tensor:
        return kda_update_triton(*inputs, self.constants(), *rest)

    def torch(self, inputs, *rest) -> Tensor:
        return kda_update_torch(*inputs, self.constants(), *rest)

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        *qkv, f, b = inputs
        heads = self.constants()
        g = softplus(f.double() + heads.dt_bias) * heads.A[:, None]
        return naive_gdn(*qkv, g, b.double().sigmoid(), state)


@pytest.mark.parametrize("case", [Kda(3, 12, 24)], ids=str)
class TestTriton(SmallUpdateTests):
    """The Triton kernel."""


@needs_gpu
@pytest.mark.parametrize("case", [Kda(32, 128, 128)], ids=str)
class TestTritonOnTheGpu(RealUpdateTests):
    """The Triton kernel at real sizes."""


def kda_launch(pool: str, batch: int, T: int) -> Launch:
    tile = launch_shape(batch * 32, POOLS[pool])
    types = {f"{name}_ptr": "*bf16:16" for name in ("q", "k", "v", "f", "b", "o")}
    types |= {"A_ptr": "*fp32:16", "bias_ptr": "*fp32:16", "pool_ptr": f"*{pool}:16"}
    types |= {"src_ptr": "*i64", "dst_ptr": "*i64"}
    types |= {f"{name}_stride": "i32:16" for name in ("q", "k", "v", "f", "b", "slot")}
    sizes = {"T": T, "H": 32, "DK": 128, "DV": 128, "PADDED_K": 128}
    sizes |= {"TILE_V": tile.columns, "ACCESS": tile.access_bytes, "EPS": 1e-6}
    registers = tile.registers if T == 1 else None
    return Launch(
        "headrace.kernels.kda.update:_kda_update_kernel", types, sizes, num_warps=tile.num_warps, registers=registers
    )


@pytest.mark.slow
def test_it_keeps_enough_bytes_in_flight():
    check_bytes_in_flight(kda_launch)
