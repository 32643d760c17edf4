"""Pieces of a packed buffer, in pinned memory, copied to where captured graphs read them, all in one launch.

    packed = (a, b, c), each row behind the other; out_a[r, i] = a[r, i], and so on

Shapes    packed [sum of the pieces' sizes], no gaps; one to three destinations [rows, width], any stride over rows;
          int32 or int64, each of its own kind
Contract  fewer than 2^31 numbers. Any numbers of rows and widths, none included, take one compiled kernel. An
          ordinary launch (pdl.py): kernels of a graph behind it read what it writes before they wait
Source    torch takes a copy to the device, of 8 us, and a kernel of 2 to 3 us for each piece, one after the other
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.launch import launch
from headrace.kernels.lib.sizes import cdiv

MOST_PIECES = 3
TILE = 1024


def unpack(packed: Tensor, *destinations: Tensor) -> None:
    """Copies the pieces, in the order in which they lie, to the destinations, whose shapes are theirs."""
    sizes = [each.numel() for each in destinations]
    if (
        not 1 <= len(destinations) <= MOST_PIECES
        or packed.shape != (sum(sizes),)
        or not packed.is_contiguous()
        or any(each.dim() != 2 or each.stride(1) != 1 for each in destinations)
        or not {packed.dtype, *(each.dtype for each in destinations)} <= {torch.int32, torch.int64}
    ):
        raise ValueError(
            f"packed {tuple(packed.shape)} {packed.dtype} is not one to {MOST_PIECES} pieces for "
            f"{[(tuple(each.shape), each.stride(), each.dtype) for each in destinations]}"
        )
    (unpack_triton if runs_triton(destinations[0]) else unpack_torch)(packed, *destinations)


def unpack_torch(packed: Tensor, *destinations: Tensor) -> None:
    pieces = packed.split([each.numel() for each in destinations])
    for piece, destination in zip(pieces, destinations, strict=True):
        destination.copy_(piece.view(destination.shape))


@triton.jit
def _store_piece(ptr, value, place, begin, end, width, stride):
    row, column = (place - begin) // width, (place - begin) % width
    is_here = (place >= begin) & (place < end)
    tl.store(ptr + row.to(tl.int64) * stride + column, value.to(ptr.dtype.element_ty), mask=is_here)


@triton.jit(
    do_not_specialize=["end_a", "end_b", "end_c", "width_a", "width_b", "width_c", "stride_a", "stride_b", "stride_c"],
    do_not_specialize_on_alignment=["a_ptr", "b_ptr", "c_ptr", "packed_ptr"],
)
def _unpack_kernel(
    a_ptr, b_ptr, c_ptr, packed_ptr,
    end_a, end_b, end_c, width_a, width_b, width_c, stride_a, stride_b, stride_c, TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(packed_ptr + place, mask=place < end_c, other=0)
    _store_piece(a_ptr, value, place, 0, end_a, width_a, stride_a)
    _store_piece(b_ptr, value, place, end_a, end_b, width_b, stride_b)
    _store_piece(c_ptr, value, place, end_b, end_c, width_c, stride_c)


def unpack_triton(packed: Tensor, *destinations: Tensor) -> None:
    missing = MOST_PIECES - len(destinations)
    pieces = (*destinations, *[destinations[-1][:0]] * missing)  # of missing ones nothing is copied
    ends, end = [], 0
    for piece in pieces:
        end += piece.numel()
        ends.append(end)
    widths = [max(1, piece.shape[1]) for piece in pieces]  # a width is divided by
    strides = [piece.stride(0) for piece in pieces]
    if end:
        launch(_unpack_kernel, cdiv(end, TILE), (*pieces, packed), (*ends, *widths, *strides), (TILE,), num_warps=4)
