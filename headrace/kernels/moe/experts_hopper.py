"""Experts of many rows on Hopper: tokens are grouped by expert and multiplied in tiles.

Shapes    as headrace/kernels/moe/experts.py; the outputs are `Placed`: sum_outputs finds them
Contract  see `fits_hopper`
Numerics  each product rounds once. In FP8 each token's row, and each entry's hidden row, is quantised with one scale
"""

from torch import Tensor

from headrace.kernels.dense.fp8 import quantise
from headrace.kernels.lib.dispatch import runs_hopper
from headrace.kernels.moe.grouped_linear_hopper import Form, Operand, grouped_linear_hopper
from headrace.kernels.moe.grouped_producers_hopper import SPAN_BYTES
from headrace.kernels.moe.grouping import UNIT, group
from headrace.kernels.moe.outputs import Placed
from headrace.kernels.moe.quantise_grouped import quantise_grouped


def moe_experts_hopper(x: Tensor, expert: Tensor, weight: Tensor, up: Operand, down: Operand) -> Placed:
    """up, down: matrices [E, O, I], in FP8 with a scale for each of their rows."""
    groups = group(expert, len(up.values))
    rows = Operand(x) if up.scales is None else Operand(*quantise(x, False))
    form: Form = "swiglu" if up.values.shape[1] == 2 * down.values.shape[2] else "relu_squared"
    hidden = grouped_linear_hopper(rows, up, groups, form, x.dtype, gathered=True)
    inner = Operand(hidden) if down.scales is None else Operand(*quantise_grouped(hidden, groups))
    outputs = grouped_linear_hopper(inner, down, groups, "none", x.dtype)
    return Placed(outputs, groups.place, weight.contiguous())


def fits_hopper(x: Tensor, up: Operand, down: Operand) -> bool:
    """True if Hopper variants run here, and the copy engine takes such memory."""
    return (
        runs_hopper(x)
        and len(x) > 0
        and x.stride(1) == 1
        and x.stride(0) % 16 == x.data_ptr() % 16 == 0
        and len(x) * x.stride(0) < 2**31
        and up.values.shape[2] * up.values.element_size() % SPAN_BYTES.value == 0
        and down.values.shape[2] % 16 == 0
        and all(_fits(x, each) for each in (up, down))
    )


def _fits(x: Tensor, matrix: Operand) -> bool:
    values, scales = matrix
    num_rows = values.shape[0] * values.shape[1]
    has_type = x.dtype == values.dtype if scales is None else scales.shape == (num_rows, 1)
    return has_type and values.is_contiguous() and values.data_ptr() % 16 == 0


def is_faster_on_hopper(x: Tensor, expert: Tensor, up: Operand, down: Operand) -> bool:
    """True if it fits, and experts have rows enough: with fewer, what takes time is to read their weights."""
    return fits_hopper(x, up, down) and expert.numel() > UNIT * len(up.values)
