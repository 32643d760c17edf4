"""Rows of recurrent states in one byte an element, each row with a scale of its own, and back.

    values[r, d] = round(x[r, d] / scales[r])          out[r, d] = values[r, d] * scales[r]

Shapes    x, out [R, D], float32 or a narrower float; values [R, D] int8 or float8_e4m3fn; scales [R] float32; all
          contiguous
Contract  x is finite; R = 0 or D = 0 is a no-op
Numerics  a scale is the row's largest magnitude over the dtype's largest number (127 or 448). What came out of
          `dequantise_rows` gives the same values and the same scales, but for the scales' last bit: a state that is
          packed again and again without being advanced does not drift
"""

from functools import cache
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.launch import launch
from headrace.kernels.lib.sizes import cdiv, next_power_of_2

LARGEST = MappingProxyType({torch.int8: 127, torch.float8_e4m3fn: 448})
TINIEST = 1e-30  # the largest magnitude of a row of zeros counts as this
TINIEST_MAGNITUDE = tl.constexpr(TINIEST)
TILE_ELEMENTS = 2048


def quantise_rows(x: Tensor, values: Tensor, scales: Tensor) -> None:
    _check(x, values, scales)
    (quantise_rows_triton if _runs_triton(values) else quantise_rows_torch)(x, values, scales)


def dequantise_rows(values: Tensor, scales: Tensor, out: Tensor) -> None:
    _check(out, values, scales)
    (dequantise_rows_triton if _runs_triton(values) else dequantise_rows_torch)(values, scales, out)


def _runs_triton(values: Tensor) -> bool:
    return runs_triton(values) and (values.dtype is torch.int8 or _compiles_fp8(values.device))


@cache
def _compiles_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)  # before Ada, Triton has no e4m3


def _check(wide: Tensor, values: Tensor, scales: Tensor) -> None:
    if values.dtype not in LARGEST or values.shape != wide.shape or scales.shape != wide.shape[:1]:
        raise ValueError(
            f"rows {tuple(wide.shape)} with {tuple(values.shape)} {values.dtype} and scales {tuple(scales.shape)}: "
            "give values of int8 or float8_e4m3fn, as many, and a scale for each row"
        )
    if not (wide.is_contiguous() and values.is_contiguous() and scales.is_contiguous()):
        raise ValueError("rows, values and scales must be contiguous")


def quantise_rows_torch(x: Tensor, values: Tensor, scales: Tensor) -> None:
    if not x.numel():
        return
    wide, largest = x.float(), LARGEST[values.dtype]
    magnitudes = wide.abs().amax(1, keepdim=True).clamp_min(TINIEST)
    scaled = wide * (largest / magnitudes)
    values.copy_((scaled + 0.5).floor() if values.dtype is torch.int8 else scaled)
    scales.copy_(magnitudes[:, 0] / largest)


def dequantise_rows_torch(values: Tensor, scales: Tensor, out: Tensor) -> None:
    out.copy_(values.float() * scales[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    LARGEST_NUMBER: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    magnitude = tl.maximum(tl.max(tl.abs(x), 1), TINIEST_MAGNITUDE)
    scaled = x * (LARGEST_NUMBER / magnitude)[:, None]
    if values_ptr.dtype.element_ty == tl.int8:
        scaled = tl.floor(scaled + 0.5)
    tl.store(values_ptr + at, scaled.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row, magnitude / LARGEST_NUMBER, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _dequantise_rows_kernel(
    values_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    mask = (row < num_rows)[:, None] & (d < D)[None, :]
    values = tl.load(values_ptr + at, mask=mask).to(tl.float32)
    scales = tl.load(scales_ptr + row, mask=row < num_rows)
    tl.store(out_ptr + at, (values * scales[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def quantise_rows_triton(x: Tensor, values: Tensor, scales: Tensor) -> None:
    if x.numel():
        constants = (LARGEST[values.dtype], *tile_for(x.shape[1]))
        _launch(_quantise_rows_kernel, (x, values, scales), len(x), constants)


def dequantise_rows_triton(values: Tensor, scales: Tensor, out: Tensor) -> None:
    if out.numel():
        _launch(_dequantise_rows_kernel, (values, scales, out), len(out), tile_for(out.shape[1]))


def tile_for(num_columns: int) -> tuple[int, int, int]:
    """Columns, the same as a power of two, and rows of a program."""
    width = next_power_of_2(num_columns)
    return num_columns, width, max(1, TILE_ELEMENTS // width)


def _launch(kernel: object, tensors: tuple[Tensor, ...], num_rows: int, constants: tuple[int, ...]) -> None:
    launch(kernel, cdiv(num_rows, constants[-1]), tensors, (num_rows,), constants, num_warps=4)
