"""Gated delta rule decode steps against token-by-token float64: the torch reference, the Triton kernel."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.gdn import update as gdn_update
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.update import GdnTile, gdn_update_torch, gdn_update_triton
from tests.kernels.naive import naive_gdn
from tests.kernels.recurrences import Case, UpdateTests
from tests.kernels.updates import (
    DEVICE,
    POOLS,
    RealUpdateTests,
    SmallUpdateTests,
    check_against_naive,
    check_bytes_in_flight,
    needs_gpu,
    randn,
    raw_columns,
)
from tests.support.kernels.compiled import Launch

CASES = [Case("gdn", (4, 8, 6), 5e-5), Case("gdn_repeat", (4, 8, 6), 5e-5)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestReference(UpdateTests):
    """The torch reference."""


@dataclass(frozen=True)
class Gdn:
    """Inputs as the engine passes them: q, k and v are slices of the convolution's output."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float = 1.0

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.value_heads, self.key_dim, self.value_dim

    def inputs(self, R: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        q, k, v = randn(R, 2 * keys + values, dtype=dtype).split((keys, keys, values), dim=-1)
        return (
            q.view(R, self.key_heads, self.key_dim),
            k.view(R, self.key_heads, self.key_dim),
            v.view(R, self.value_heads, self.value_dim),
            raw_columns(R, self.value_heads, dtype),
            raw_columns(R, self.value_heads, dtype),
        )

    def constants(self) -> GdnHeads:
        place = torch.arange(self.value_heads, device=DEVICE)
        return GdnHeads(-0.1 - place % 7, place % 5 - 3.0, self.beta_scale)

    def triton(self, inputs, *rest) -> Tensor:
        return gdn_update_triton(*inputs, self.constants(), *rest)

    def torch(self, inputs, *rest) -> Tensor:
        return gdn_update_torch(*inputs, self.constants(), *rest)

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v, a, b = inputs
        heads = self.constants()
        beta = b.double().sigmoid() * self.beta_scale
        return naive_gdn(q, k, v, softplus(a.double() + heads.dt_bias) * heads.A, beta, state)


SMALL = [Gdn(2, 4, 16, 8), Gdn(1, 1, 6, 40), Gdn(3, 3, 12, 24, beta_scale=2.0)]
REAL = [Gdn(16, 32, 128, 128)]


@pytest.mark.parametrize("case", SMALL, ids=str)
class TestTriton(SmallUpdateTests):
    """The Triton kernel."""


@needs_gpu
@pytest.mark.parametrize("case", REAL, ids=str)
class TestTritonOnTheGpu(RealUpdateTests):
    """The Triton kernel at real sizes."""


@pytest.mark.parametrize("tile", [GdnTile(4, 2, 4), GdnTile(8, 1, 8), GdnTile(4, 2, 2)], ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_cut_of_the_work_gives_the_recurrence(tile: GdnTile, pool_dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(gdn_update, "launch_shape", lambda *_: tile)
    check_against_naive(Gdn(2, 4, 16, 8), [7, None], [[7, 11], [20, 0]], pool_dtype, torch.float32)


def gdn_launch(pool: str, batch: int, T: int) -> Launch:
    tile = gdn_update.launch_shape(batch * 32, POOLS[pool])
    types = {f"{name}_ptr": "*bf16:16" for name in ("q", "k", "v", "a", "b", "o")}
    types |= {"A_ptr": "*fp32:16", "bias_ptr": "*fp32:16", "pool_ptr": f"*{pool}:16"}
    types |= {"src_ptr": "*i64", "dst_ptr": "*i64"}
    types |= {f"{name}_stride": "i32:16" for name in ("q", "k", "v", "a", "b", "slot")}
    sizes = {"T": T, "H": 32, "DK": 128, "DV": 128, "HEADS_A_KEY": 2, "PADDED_K": 128}
    sizes |= {"TILE_V": tile.columns, "ACCESS": tile.access_bytes, "EPS": 1e-6, "BETA_SCALE": 1.0}
    registers = tile.registers if T == 1 else None
    return Launch(
        "headrace.kernels.gdn.update:_gdn_update_kernel", types, sizes, num_warps=tile.num_warps, registers=registers
    )


def test_it_keeps_enough_bytes_in_flight():
    check_bytes_in_flight(gdn_launch)
