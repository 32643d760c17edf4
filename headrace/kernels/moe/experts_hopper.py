"""Experts of many rows on Hopper: rows are copied to their experts, multiplied in tiles, and summed by token.

Shapes    as headrace/kernels/moe/experts.py, but y [T, D] is summed over a token's choices
Contract  see `fits_hopper`
Numerics  each product rounds once, and so does the sum over experts, which is taken in float32
"""

from torch import Tensor

from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.lib.hopper import SPAN
from headrace.kernels.moe.grouped_linear_hopper import grouped_linear_hopper
from headrace.kernels.moe.grouping import UNIT, gather_sum, group, spread


def moe_experts_hopper(x: Tensor, expert: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    groups = group(expert, len(up))
    rows = spread(x, groups)
    hidden = grouped_linear_hopper(rows, up, groups, "swiglu" if up.shape[1] == 2 * down.shape[2] else "relu_squared")
    return gather_sum(grouped_linear_hopper(hidden, down, groups, "none", rows), weight, groups)


def fits_hopper(x: Tensor, up: Tensor, down: Tensor) -> bool:
    """True if Hopper variants run here, and the copy engine takes such memory."""
    return (
        runs_hopper(x)
        and x.dtype == up.dtype == down.dtype
        and len(x) > 0
        and x.stride(1) == 1
        and up.shape[2] % SPAN.value == 0
        and down.shape[2] % SPAN.value == 0
        and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (up, down))
    )


def is_faster_on_hopper(x: Tensor, expert: Tensor, up: Tensor, down: Tensor) -> bool:
    """True if it fits, and experts have rows enough: with fewer, what takes time is to read their weights."""
    return fits_hopper(x, up, down) and expert.numel() > UNIT * len(up)
