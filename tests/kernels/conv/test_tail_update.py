"""Steps of the causal convolution over tails against token-by-token float64: torch's form, the Triton kernel."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.kernels.conv.tail_update import (
    causal_conv1d_tail_update,
    causal_conv1d_tail_update_torch,
    causal_conv1d_tail_update_triton,
)
from headrace.kernels.lib.tails import Tails
from tests.kernels.naive import naive_conv
from tests.kernels.tails import RealTailTests, TailTests
from tests.kernels.updates import DEVICE, needs_gpu, randn
from tests.support.kernels.compiled import Launch, compile_for_h200


class Inputs(NamedTuple):
    u: Tensor


@dataclass(frozen=True)
class Conv:
    """A layer's convolution: its inputs are a slice of a projection."""

    channels: int
    taps: int
    has_bias: bool = False
    silu: bool = True

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.channels, self.taps - 1

    def inputs(self, R: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (randn(R, self.channels + 8, dtype=dtype)[:, 8:],)

    @cache  # noqa: B019 - not made while a graph is captured
    def parameters(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        weight, bias = (
            torch.randn(shape, generator=generator) for shape in ((self.channels, self.taps), self.channels)
        )
        return weight.to(DEVICE, dtype), bias.to(DEVICE, dtype) if self.has_bias else None

    def new_tail(self, num_rows: int, num_places: int, dtype: torch.dtype) -> Inputs:
        return Inputs(torch.empty(num_rows, num_places, self.channels, dtype=dtype, device=DEVICE))

    def over_tail(self, implementation: str, inputs, pool: Tensor, tail: Inputs, tails: Tails) -> Tensor:
        run = {"triton": causal_conv1d_tail_update_triton, "torch": causal_conv1d_tail_update_torch}[implementation]
        weight, bias = self.parameters(inputs[0].dtype)
        return run(*inputs, weight, bias, pool, tail.u, tails, self.silu)

    def naive(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs, windows = naive_conv(inputs[0], *self.parameters(inputs[0].dtype), state, self.silu)
        return outputs, windows


SMALL = [Conv(24, 4, has_bias=True), Conv(10, 3), Conv(40, 2, silu=False)]


@pytest.mark.parametrize("case", SMALL, ids=str)
class TestSmall(TailTests):
    """Both forms at small sizes."""

    def test_a_bfloat16_pool_holds_rounded_states(self, case: Conv) -> None:  # type: ignore[override]
        """No pool of windows has another dtype than the inputs."""
        with pytest.raises(ValueError, match="disagree"):
            u, (weight, bias) = case.inputs(1, torch.float32)[0], case.parameters(torch.float32)
            pool, tail = torch.zeros(3, *case.state_shape, dtype=torch.bfloat16), case.new_tail(2, 8, torch.float32)
            one = Tails(torch.zeros(1, 6, dtype=torch.int32), 1)
            causal_conv1d_tail_update(u, weight, bias, pool, tail.u, one)


@pytest.mark.parametrize("rows_each", [0, 2])
def test_inputs_that_do_not_fit_are_refused(rows_each: int):
    case = Conv(24, 4)
    u, (weight, bias) = case.inputs(1, torch.float32)[0], case.parameters(torch.float32)
    pool, tail = torch.zeros(3, *case.state_shape), case.new_tail(2, 8, torch.float32)
    with pytest.raises(ValueError, match="disagree"):
        causal_conv1d_tail_update(u, weight, bias, pool, tail.u, Tails(torch.zeros(1, 6, dtype=torch.int32), rows_each))


@needs_gpu
@pytest.mark.parametrize("case", [Conv(3328, 4, has_bias=True), Conv(8192, 4)], ids=str)
class TestOnTheGpu(RealTailTests):
    """The Triton kernel at real sizes."""


@pytest.mark.parametrize("drafts", [0, 3])
def test_convolution_steps_stay_in_registers(drafts: int):
    types = {f"{name}_ptr": "*bf16:16" for name in ("u", "weight", "bias", "pool", "tail", "y")}
    types |= {"fields_ptr": "*i32:16", "u_stride": "i32:16", "slot_stride": "i32:16"}
    sizes = {"C": 4352, "K": 4, "SILU": True, "W": 3, "T": 1 + drafts, "PLACES": 32, "TILE_C": 256}
    kernel = "headrace.kernels.conv.tail_update:_causal_conv1d_tail_update_kernel"
    [report] = compile_for_h200([Launch(kernel, types, sizes, 4)])
    assert report.stack_bytes == 0
