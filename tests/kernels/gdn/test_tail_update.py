"""Gated delta rule decode steps over tails against token-by-token float64: torch's form, the Triton kernel."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.tail_check_hopper import MOST_REGISTERS
from headrace.kernels.gdn.tail_update import (
    GdnTail,
    gdn_tail_update,
    gdn_tail_update_torch,
    gdn_tail_update_triton,
)
from headrace.kernels.gdn.tail_update_hopper import gdn_tail_update_hopper
from headrace.kernels.gdn.tiles import launch_shape
from headrace.kernels.lib.hopper import LAYOUT, SPAN
from headrace.kernels.lib.tail_programs_hopper import NUM_WARPS
from headrace.kernels.lib.tails import Tails
from tests.kernels.naive import naive_gdn
from tests.kernels.tails import (
    HopperTailTests,
    RealTailTests,
    TailTests,
    check_bytes_in_flight,
    check_hopper_bytes_in_flight,
)
from tests.kernels.updates import DEVICE, POOLS, needs_gpu, needs_hopper, randn, raw_columns
from tests.support.kernels.compiled import Launch


@dataclass(frozen=True)
class GdnOverTail:
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

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v, a, b = inputs
        heads = self.constants()
        beta = b.double().sigmoid() * self.beta_scale
        return naive_gdn(q, k, v, softplus(a.double() + heads.dt_bias) * heads.A, beta, state)

    def new_tail(self, num_rows: int, num_places: int, dtype: torch.dtype) -> GdnTail:
        def ring(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(num_rows, num_places, *shape, dtype=dtype, device=DEVICE)

        k, delta = ring(self.key_heads, self.key_dim), ring(self.value_heads, self.value_dim)
        return GdnTail(k, delta, ring(self.value_heads, dtype=torch.float32))

    def over_tail(self, implementation: str, inputs, pool: Tensor, tail: GdnTail, tails: Tails) -> Tensor:
        run = {"triton": gdn_tail_update_triton, "torch": gdn_tail_update_torch, "hopper": gdn_tail_update_hopper}[
            implementation
        ]
        return run(*inputs, self.constants(), pool, tail, tails)


SMALL = [GdnOverTail(2, 4, 16, 8), GdnOverTail(1, 1, 6, 40), GdnOverTail(3, 3, 12, 12, beta_scale=2.0)]


@pytest.mark.parametrize("case", SMALL, ids=str)
class TestSmall(TailTests):
    """Both forms at small sizes."""


@needs_gpu
@pytest.mark.parametrize("case", [GdnOverTail(16, 32, 128, 128)], ids=str)
class TestOnTheGpu(RealTailTests):
    """The Triton kernel at real sizes."""


@needs_hopper
@pytest.mark.parametrize("case", [GdnOverTail(16, 32, 128, 128), GdnOverTail(2, 2, 64, 192, beta_scale=2.0)], ids=str)
class TestOnHopper(HopperTailTests):
    """The Hopper variant at real sizes."""


def test_inputs_that_do_not_fit_are_refused():
    case = GdnOverTail(2, 4, 16, 8)
    inputs, pool, tail = case.inputs(2, torch.float32), torch.zeros(3, 4, 16, 8), case.new_tail(2, 8, torch.float32)
    one = Tails(torch.zeros(1, 6, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="1 rows disagree"):
        gdn_tail_update(*inputs, case.constants(), pool, tail, one)
    two = Tails(torch.zeros(1, 6, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="does not hold these states"):
        gdn_tail_update(*inputs, case.constants(), pool[:, :2], tail, two)
    with pytest.raises(ValueError, match="do not hold these inputs"):
        gdn_tail_update(*inputs, case.constants(), pool, tail._replace(delta=tail.k), two)


def gdn_launch(pool: str, batch: int, T: int) -> Launch:
    tile = launch_shape(batch * 32, POOLS[pool])
    types = {f"{name}_ptr": "*bf16:16" for name in ("q", "k", "v", "a", "b", "o", "k_tail", "delta_tail")}
    types |= {f"{name}_ptr": "*fp32:16" for name in ("A", "bias", "g_tail")}
    types |= {"pool_ptr": f"*{pool}:16", "fields_ptr": "*i32:16"}
    types |= {f"{name}_stride": "i32:16" for name in ("q", "k", "v", "a", "b", "slot")}
    sizes = {"T": T, "H": 32, "DK": 128, "DV": 128, "HEADS_A_KEY": 2, "PADDED_K": 128, "PADDED_T": T, "PLACES": 32}
    sizes |= {"KEPT": 16, "TILE_V": tile.columns, "ACCESS": tile.access_bytes, "EPS": 1e-6, "BETA_SCALE": 1.0}
    return Launch("headrace.kernels.gdn.tail_update:_gdn_tail_update_kernel", types, sizes, num_warps=tile.num_warps)


def test_it_keeps_enough_bytes_in_flight():
    check_bytes_in_flight(gdn_launch)


def hopper_launch(T: int) -> Launch:
    types = {f"{name}_ptr": "*bf16:16" for name in ("q", "k", "v", "a", "b", "o", "k_tail", "delta_tail")}
    types |= {f"{name}_ptr": "*fp32:16" for name in ("A", "bias", "g_tail")} | {"fields_ptr": "*i32"}
    types |= {"states_desc": f"tensordesc<bf16[128,{SPAN.value}],{LAYOUT.value!r}>"}
    types |= {name: "i32:16" for name in ("q_eighths", "k_eighths", "a_stride", "b_stride", "slot_rows")}
    sizes = {"T": T, "H": 32, "K": 128, "V": 128, "HEADS_A_KEY": 2, "PLACES": 32}
    sizes |= {"EPS": 1e-6, "BETA_SCALE": 1.0}
    kernel = "tail_update_hopper:_gdn_tail_hopper_kernel"
    types["v_stride"] = "i32:16"
    if T > 1:
        kernel = "tail_check_hopper:_gdn_tail_check_kernel"
        types["v_eighths"] = types.pop("v_stride")
        sizes["KEYS"] = 8 if T > 4 else 4
    return Launch(f"headrace.kernels.gdn.{kernel}", types, sizes, num_warps=NUM_WARPS.value, registers=MOST_REGISTERS)


def test_the_hopper_variants_keep_enough_bytes_in_flight():
    check_hopper_bytes_in_flight(hopper_launch, 128 * SPAN.value * 2)
