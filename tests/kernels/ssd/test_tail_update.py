"""Mamba2 decode steps over tails against token-by-token float64: torch's form, the Triton kernel."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from headrace.kernels.lib.hopper import LAYOUT, SPAN
from headrace.kernels.lib.tail_programs_hopper import NUM_WARPS
from headrace.kernels.lib.tails import Tails
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.tail_update import (
    SsdTail,
    launch_shape,
    ssd_tail_update,
    ssd_tail_update_torch,
    ssd_tail_update_triton,
)
from headrace.kernels.ssd.tail_update_hopper import MOST_REGISTERS, ROWS, ssd_tail_update_hopper
from tests.kernels.naive import naive_ssd
from tests.kernels.tails import (
    HopperTailTests,
    RealTailTests,
    TailTests,
    check_bytes_in_flight,
    check_hopper_bytes_in_flight,
)
from tests.kernels.updates import DEVICE, needs_gpu, needs_hopper, randn, raw_columns
from tests.support.kernels.compiled import Launch


@dataclass(frozen=True)
class SsdOverTail:
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

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, raw, B, C = inputs
        heads = self.constants()
        dt = softplus(raw.double() + heads.dt_bias).clamp(*self.dt_limits)
        return naive_ssd(x, dt, heads.A, B, C, heads.D, state)

    def new_tail(self, num_rows: int, num_places: int, dtype: torch.dtype) -> SsdTail:
        def ring(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(num_rows, num_places, *shape, dtype=dtype, device=DEVICE)

        x, B = ring(self.heads, self.head_dim), ring(self.groups, self.state_size)
        return SsdTail(x, B, ring(self.heads, dtype=torch.float32))

    def over_tail(self, implementation: str, inputs, pool: Tensor, tail: SsdTail, tails: Tails) -> Tensor:
        run = {"triton": ssd_tail_update_triton, "torch": ssd_tail_update_torch, "hopper": ssd_tail_update_hopper}[
            implementation
        ]
        return run(*inputs, self.constants(), pool, tail, tails)


@pytest.mark.parametrize("case", [SsdOverTail(4, 8, 1, 16), SsdOverTail(2, 20, 2, 6, (0.05, 0.9))], ids=str)
class TestSmall(TailTests):
    """Both forms at small sizes."""


@needs_gpu
@pytest.mark.parametrize("case", [SsdOverTail(48, 64, 1, 128), SsdOverTail(32, 64, 8, 256)], ids=str)
class TestOnTheGpu(RealTailTests):
    """The Triton kernel at real sizes."""


@needs_hopper
@pytest.mark.parametrize("case", [SsdOverTail(48, 64, 1, 128), SsdOverTail(8, 128, 2, 256)], ids=str)
class TestOnHopper(HopperTailTests):
    """The Hopper variant at real sizes."""


def test_inputs_that_do_not_fit_are_refused():
    case = SsdOverTail(4, 8, 1, 16)
    inputs, pool, tail = case.inputs(2, torch.float32), torch.zeros(3, 4, 8, 16), case.new_tail(2, 8, torch.float32)
    one = Tails(torch.zeros(1, 6, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="1 rows disagree"):
        ssd_tail_update(*inputs, case.constants(), pool, tail, one)
    two = Tails(torch.zeros(1, 6, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="does not hold these states"):
        ssd_tail_update(*inputs, case.constants(), pool[:, :2], tail, two)
    with pytest.raises(ValueError, match="do not hold these inputs"):
        ssd_tail_update(*inputs, case.constants(), pool, tail._replace(x=tail.B), two)


def ssd_launch(pool: str, batch: int, T: int) -> Launch:
    tile_p, num_warps = launch_shape(64, T)
    types = {f"{name}_ptr": "*bf16:16" for name in ("x", "dt", "B", "C", "y", "x_tail", "B_tail")}
    types |= {f"{name}_ptr": "*fp32:16" for name in ("A", "D", "bias", "dt_tail")}
    types |= {"pool_ptr": f"*{pool}:16", "fields_ptr": "*i32:16"}
    types |= {f"{name}_stride": "i32:16" for name in ("x", "dt", "B", "C", "slot")}
    sizes = {"T": T, "H": 48, "P": 64, "N": 128, "HEADS_A_GROUP": 48, "TILE_P": tile_p, "PADDED_N": 128, "PADDED_T": T}
    sizes |= {"DT_MIN": 0.0, "DT_MAX": float("inf"), "PLACES": 32, "KEPT": 16}
    return Launch("headrace.kernels.ssd.tail_update:_ssd_tail_update_kernel", types, sizes, num_warps=num_warps)


def test_it_keeps_enough_bytes_in_flight():
    check_bytes_in_flight(ssd_launch)


def hopper_launch(T: int) -> Launch:
    types = {f"{name}_ptr": "*bf16:16" for name in ("x", "dt", "B", "C", "y", "x_tail", "B_tail")}
    types |= {f"{name}_ptr": "*fp32:16" for name in ("A", "D", "bias", "dt_tail")} | {"fields_ptr": "*i32"}
    types |= {"states_desc": f"tensordesc<bf16[{ROWS},{SPAN.value}],{LAYOUT.value!r}>"}
    types |= {f"{name}_stride": "i32:16" for name in ("x", "dt", "B", "C")} | {"slot_rows": "i32:16"}
    sizes = {"T": T, "H": 64, "P": 64, "N": 128, "HEADS_A_GROUP": 64, "PLACES": 32, "ROWS": ROWS}
    sizes |= {"DT_MIN": 0.0, "DT_MAX": float("inf")}
    kernel, registers = "tail_update_hopper:_ssd_tail_hopper_kernel", MOST_REGISTERS
    if T > 1:
        kernel, registers = "tail_check_hopper:_ssd_tail_check_kernel", None
    return Launch(f"headrace.kernels.ssd.{kernel}", types, sizes, num_warps=NUM_WARPS.value, registers=registers)


def test_the_hopper_variants_keep_enough_bytes_in_flight():
    check_hopper_bytes_in_flight(hopper_launch, ROWS * 128 * 2)
