"""Convolutions over a pool of windows that is NaN but for the live slots, in torch and in Triton."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.conv.prefill import causal_conv1d_torch, causal_conv1d_triton
from headrace.kernels.conv.update import causal_conv1d_update_torch, causal_conv1d_update_triton
from tests.kernels.naive import NAN

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS = 24
C = 20
implementations = pytest.mark.parametrize("name", ["torch", "triton"])
PREFILL = {"torch": causal_conv1d_torch, "triton": causal_conv1d_triton}
UPDATE = {"torch": causal_conv1d_update_torch, "triton": causal_conv1d_update_triton}
Prefill = Callable[..., Tensor]


def slice_of_a_projection(rows: int, channels: int = C, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, channels + 24, device=DEVICE).to(dtype)[:, 16 : 16 + channels]


def parameters(taps: int, has_bias: bool, channels: int = C, dtype=torch.float32) -> tuple[Tensor, Tensor | None]:
    weight, bias = torch.randn(channels, taps, device=DEVICE), torch.randn(channels, device=DEVICE)
    return weight.to(dtype), bias.to(dtype) if has_bias else None


def poisoned_windows(window: int, live: list[int], channels: int = C, dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer's view of a pool of three layers: NaN but for the live slots."""
    pool = torch.full((NUM_SLOTS, 3, channels, window), NAN, dtype=dtype, device=DEVICE)[:, 1]
    for slot in live:
        pool[slot] = torch.randn(channels, window, device=DEVICE)
    return pool


def assert_only_changed(before: Tensor, after: Tensor, slots: list[int]) -> None:
    kept = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(before[kept].nan_to_num(12345.0), after[kept].nan_to_num(12345.0))


CONV_TYPES = {f"{name}_ptr": "*bf16:16" for name in ("u", "weight", "bias", "pool", "y")} | {
    "u_stride": "i32:16",
    "slot_stride": "i32:16",
}
CONV_SIZES = {"C": 4352, "K": 4, "SILU": True}
