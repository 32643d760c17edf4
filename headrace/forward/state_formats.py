"""One part of a state as bytes in any of the formats in which states travel and are kept (`STATE_FORMATS`)."""

from types import MappingProxyType

import torch
from torch import Tensor

from headrace.cache.layout import DTYPE_BYTES, SCALED_STATES
from headrace.kernels.transfer.state_rows import dequantise_rows, quantise_rows

_SCALED = dict(zip(SCALED_STATES, (torch.int8, torch.float8_e4m3fn), strict=True))
FORMAT_DTYPES = MappingProxyType({name: getattr(torch, name) for name in DTYPE_BYTES} | _SCALED)
"""The dtype of each format's elements."""


def write_part(values: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Copies `values`, contiguous, to the bytes `out` as `dtype`; the rows' scales, if it has some, behind them."""
    if dtype is values.dtype:
        out.copy_(_bytes(values), non_blocking=True)
    elif dtype in _SCALED.values():
        # Through tensors of their own, here and below: behind the conv windows bytes need not be aligned to a dtype.
        rows = values.view(-1, values.shape[-1])
        packed, scales = _empty_like(rows, dtype)
        quantise_rows(rows, packed, scales)
        out[: packed.nbytes].copy_(_bytes(packed))
        out[packed.nbytes :].copy_(_bytes(scales))
    else:
        out.copy_(_bytes(_cast(values, dtype)))


def read_part(src: Tensor, values: Tensor, dtype: torch.dtype) -> None:
    """Copies what `write_part` wrote to the bytes `src` back to `values`, contiguous."""
    if dtype is values.dtype:
        _bytes(values).copy_(src, non_blocking=True)
    elif dtype in _SCALED.values():
        rows = values.view(-1, values.shape[-1])
        packed, scales = _empty_like(rows, dtype)
        _bytes(packed).copy_(src[: packed.nbytes])
        _bytes(scales).copy_(src[packed.nbytes :])
        dequantise_rows(packed, scales, rows)
    else:
        arrived = torch.empty_like(values, dtype=dtype)
        _bytes(arrived).copy_(src)
        values.copy_(_cast(arrived, values.dtype))


def _empty_like(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of `dtype` and scales for these rows."""
    return torch.empty_like(rows, dtype=dtype), rows.new_empty(len(rows), dtype=torch.float32)


def _bytes(values: Tensor) -> Tensor:
    return values.view(-1).view(torch.uint8)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to the nearest; those beyond float16's range become its largest number, not an infinity."""
    if dtype is torch.float16:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)
