"""Mixture of experts: each token's row through its chosen experts, times the router's weights.

    y[t, j] = weight[t, j] * down_e(hidden_e(x_t))            e = expert[t, j]
    hidden_e(x) = silu(gate_e x) * up_e x      SwiGLU, or, of experts without a gate, max(up_e x, 0)^2

Shapes    x [T, D]; expert, weight [T, k]; up [E, 2I, D] (gate rows first), without a gate [E, I, D]; down
          [E, D, I]; returns what `sum_outputs` takes: y [T, k, D], or [T, 1, D] summed over j, or `Placed`
Contract  experts are numbers from 0 to E - 1, those of one token distinct; an expert that no token chose is not
          read. Triton: D and I are multiples of 16, the grids follow from shapes alone, and no step waits for the
          host; up and down may be FP8 (`Fp8Experts`), where their scales' blocks, if any, do not cut a step of the
          kernel
Numerics  in x's dtype, torch's sum over experts too; Triton rounds once after each product. Beside experts in FP8 the
          inputs of both products are quantised, too, as those of fp8_linear.py
Source    Shazeer et al. 2017, "Outrageously Large Neural Networks"; tokens grouped by expert as in MegaBlocks. Many
          rows on Hopper go to experts_hopper.py

Legend    n = T k entries, one for each token and choice; sorted, entries of one expert are adjacent
"""

import math
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dense.fp8 import BLOCK, Fp8Matrix, Matrix, quantise
from headrace.kernels.dense.fp8_linear import runs_fp8
from headrace.kernels.dense.relu_squared import relu_squared_torch
from headrace.kernels.dense.small_linear import NO_GROUPS, scale_groups
from headrace.kernels.dense.swiglu import swiglu_torch
from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.dot import dot
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.moe.experts_hopper import is_faster_on_hopper, moe_experts_hopper
from headrace.kernels.moe.grouped_linear_hopper import Operand
from headrace.kernels.moe.outputs import Outputs


class Fp8Experts(NamedTuple):
    """Matrices [E, R, C] in FP8: `matrix` has the rows of all of them, expert by expert."""

    matrix: Fp8Matrix
    num_experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, columns = self.matrix.shape
        return self.num_experts, rows // self.num_experts, columns


FP8_DEPTH = 32  # columns of a product in e4m3, at least
Experts: TypeAlias = Tensor | Fp8Experts


def experts_of(stacked: Matrix, num_experts: int) -> Experts:
    """The experts whose rows `stacked` has, expert by expert; in FP8 where FP8 runs."""
    if isinstance(stacked, Fp8Matrix):
        if runs_fp8(stacked) and stacked.shape[1] % FP8_DEPTH == 0:
            return Fp8Experts(stacked, num_experts)
        stacked = stacked.dequantised()
    return stacked.view(num_experts, -1, stacked.shape[1])


def rows_of(experts: Experts) -> Operand:
    """Matrices [E, R, C], and in FP8 the scales of their rows or blocks."""
    if isinstance(experts, Tensor):
        return Operand(experts)
    return Operand(experts.matrix.values.view(experts.shape), experts.matrix.scales)


def moe_experts(x: Tensor, expert: Tensor, weight: Tensor, up: Experts, down: Experts) -> Outputs:
    E, up_rows, D = up.shape
    inner = down.shape[2]
    if x.shape[1] != D or down.shape[:2] != (E, D) or up_rows not in (inner, 2 * inner) or expert.shape != weight.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)}, "
            f"expert {tuple(expert.shape)}, weight {tuple(weight.shape)} disagree"
        )
    matrices = rows_of(up), rows_of(down)
    if is_faster_on_hopper(x, expert, *matrices):
        return moe_experts_hopper(x, expert, weight, *matrices)
    if runs_triton(x):
        return moe_experts_triton(x, expert, weight, up, down)
    assert isinstance(up, Tensor) and isinstance(down, Tensor)
    return moe_experts_torch(x, expert, weight, up, down)[:, None]


def moe_experts_torch(x: Tensor, expert: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    activation = swiglu_torch if up.shape[1] == 2 * down.shape[2] else relu_squared_torch
    chosen, order = expert.flatten().sort(stable=True)
    token = order // expert.shape[1]
    rows = x.index_select(0, token)
    counts = torch.bincount(chosen, minlength=len(up)).tolist()
    outputs = torch.empty_like(rows)
    first = 0
    for e, count in enumerate(counts):
        if count:
            here = slice(first, first + count)
            outputs[here] = F.linear(activation(F.linear(rows[here], up[e])), down[e])
            first += count
    outputs *= weight.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, token, outputs)


def _stored(experts: Experts) -> tuple[Tensor, Tensor | None, dict[str, int]]:
    """Values, scales and the kernels' constants for them."""
    if isinstance(experts, Tensor):
        return experts, None, NO_GROUPS
    return experts.matrix.values, experts.matrix.scales, scale_groups(experts.matrix)


def _input(x: Tensor, experts: Experts) -> tuple[Tensor, Tensor | None]:
    """x as a product with `experts` takes it, and its scales."""
    return (x, None) if isinstance(experts, Tensor) else quantise(x, experts.matrix.has_blocks)


class MoeTile(NamedTuple):
    """A program's tile: `rows` entries of one expert, `columns` of its output, `depth` values at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def moe_tile(entries_an_expert: float, dtype: torch.dtype, is_fp8: bool = False) -> MoeTile:
    """Few rows take narrow tiles, so that many multiprocessors read weights; many rows take tiles that fill wgmma."""
    if is_fp8:  # as many bytes of a weight's row, but no more than a block of it
        tile = moe_tile(entries_an_expert, dtype)
        return tile._replace(depth=min(2 * tile.depth, BLOCK))
    if dtype == torch.float32:
        return MoeTile(16, 32, 32, 4, 1)
    if entries_an_expert <= 16:
        return MoeTile(16, 32, 128, 4, 4)
    if entries_an_expert <= 64:
        return MoeTile(64, 64, 64, 4, 4)
    return MoeTile(128, 64, 64, 8, 4)


@triton.jit(do_not_specialize=["n"])
def _sort_kernel(
    expert_ptr, order_ptr, tiles_ptr, n,
    E: tl.constexpr, ROWS: tl.constexpr, IS_FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e lists expert e's entries, in order, after those of lower experts, and their tiles.

    A tile is (expert, first entry, end of the expert's entries). Each expert has places for tiles of its own, whatever
    the others have; an expert of -1 marks those that are left over. IS_FEW: as many places as entries."""
    let_next_start()
    wait_for_previous()
    e = tl.program_id(0)
    entry = tl.arange(0, BLOCK)
    first = 0
    count = 0
    for start in range(0, n, BLOCK):
        chosen = tl.load(expert_ptr + start + entry, mask=start + entry < n, other=E)
        first += tl.sum((chosen < e).to(tl.int32), 0)
        count += tl.sum((chosen == e).to(tl.int32), 0)
    behind = first + count
    place = first if IS_FEW else first // ROWS + e
    end = behind if IS_FEW else behind // ROWS + e + 1
    for i in range(end - place):
        tile = tiles_ptr + (place + i) * 3
        tl.store(tile, tl.where(i * ROWS < count, e, -1))
        tl.store(tile + 1, first + i * ROWS)
        tl.store(tile + 2, behind)
    if count == 0:
        return
    place = first
    for start in range(0, n, BLOCK):
        chosen = tl.load(expert_ptr + start + entry, mask=start + entry < n, other=E)
        is_mine = (chosen == e).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_mine, 0) - 1, start + entry, mask=chosen == e)
        place += tl.sum(is_mine, 0)


@triton.jit
def _add_product(sums, x, weight, x_scales, scales, x_groups, start, COLUMN_GROUP: tl.constexpr):
    """sums + x weight^T of a step from column `start` on, which has one scale for each row of both.

    x_groups   scales of x from one group of columns to the next
    """
    if COLUMN_GROUP:
        group = start // COLUMN_GROUP
        x_scale = tl.load(x_scales + group * x_groups)
        return sums + dot(x, tl.trans(weight)) * (x_scale[:, None] * tl.load(scales + group)[None, :])
    else:
        return dot(x, tl.trans(weight), sums)


@triton.jit(do_not_specialize=["x_groups"])
def _up_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, order_ptr, tiles_ptr, hidden_ptr, stride_x, choices, x_groups,
    D: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_GATE: tl.constexpr,
    ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
):  # fmt: skip
    """hidden [n, I], sorted: silu(gate x) * up x of each entry's token, or max(up x, 0)^2."""
    let_next_start()
    wait_for_previous()
    tile, column = tl.program_id(0) // (INNER // COLUMNS), tl.program_id(0) % (INNER // COLUMNS) * COLUMNS
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    place = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = place < tl.load(tiles_ptr + tile * 3 + 2)
    token = tl.load(order_ptr + place, mask=is_row, other=0) // choices
    d, output = tl.arange(0, DEPTH), column + tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * stride_x + d[None, :]
    weights_an_expert: tl.constexpr = (2 if HAS_GATE else 1) * INNER * D
    gate_ptrs = weight_ptr + expert.to(tl.int64) * weights_an_expert + output[:, None] * D + d[None, :]
    up_ptrs = gate_ptrs + INNER * D if HAS_GATE else gate_ptrs
    gate_scales = weight_scale_ptr
    up_scales = weight_scale_ptr
    x_scales = x_scale_ptr
    if ROW_GROUP:
        x_scales += token
        GROUPS: tl.constexpr = (D + COLUMN_GROUP - 1) // COLUMN_GROUP if COLUMN_GROUP else 1
        gate_row = expert.to(tl.int64) * (weights_an_expert // D) + output
        up_row = gate_row + INNER if HAS_GATE else gate_row
        gate_scales += gate_row // ROW_GROUP * GROUPS
        up_scales += up_row // ROW_GROUP * GROUPS
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, DEPTH):
        x = tl.load(x_ptrs + start, mask=is_row[:, None], other=0.0)
        up_weight = tl.load(up_ptrs + start)
        if HAS_GATE:
            gate_weight = tl.load(gate_ptrs + start)
            gate = _add_product(gate, x, gate_weight, x_scales, gate_scales, x_groups, start, COLUMN_GROUP)
        up = _add_product(up, x, up_weight, x_scales, up_scales, x_groups, start, COLUMN_GROUP)
    if ROW_GROUP and not COLUMN_GROUP:
        x_scale = tl.load(x_scales)[:, None]
        gate *= x_scale * tl.load(gate_scales)[None, :]
        up *= x_scale * tl.load(up_scales)[None, :]
    if HAS_GATE:
        hidden = gate * tl.sigmoid(gate) * up
    else:
        up = tl.maximum(up, 0.0)
        hidden = up * up
    hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * INNER + output[None, :]
    tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=["hidden_groups"])
def _down_kernel(
    hidden_ptr, hidden_scale_ptr, weight_ptr, weight_scale_ptr, order_ptr, tiles_ptr, scale_ptr, out_ptr, hidden_groups,
    D: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ROW_GROUP: tl.constexpr, COLUMN_GROUP: tl.constexpr,
):  # fmt: skip
    """out [n, D], in the entries' own order: scale * down hidden."""
    let_next_start()
    wait_for_previous()
    tile, column = tl.program_id(0) // (D // COLUMNS), tl.program_id(0) % (D // COLUMNS) * COLUMNS
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    place = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = place < tl.load(tiles_ptr + tile * 3 + 2)
    i, output = tl.arange(0, DEPTH), column + tl.arange(0, COLUMNS)
    hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * INNER + i[None, :]
    weight_ptrs = weight_ptr + expert.to(tl.int64) * (INNER * D) + output[:, None] * INNER + i[None, :]
    scales = weight_scale_ptr
    hidden_scales = hidden_scale_ptr
    if ROW_GROUP:
        hidden_scales += tl.minimum(place, hidden_groups - 1)
        GROUPS: tl.constexpr = (INNER + COLUMN_GROUP - 1) // COLUMN_GROUP if COLUMN_GROUP else 1
        scales += (expert.to(tl.int64) * D + output) // ROW_GROUP * GROUPS
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INNER, DEPTH):
        hidden = tl.load(hidden_ptrs + start, mask=is_row[:, None], other=0.0)
        weight = tl.load(weight_ptrs + start)
        acc = _add_product(acc, hidden, weight, hidden_scales, scales, hidden_groups, start, COLUMN_GROUP)
    if ROW_GROUP and not COLUMN_GROUP:
        acc *= tl.load(hidden_scales)[:, None] * tl.load(scales)[None, :]
    entry = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)
    scale = tl.load(scale_ptr + entry, mask=is_row, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + entry[:, None] * D + output[None, :]
    tl.store(out_ptrs, (acc * scale[:, None]).to(out_ptr.dtype.element_ty), mask=is_row[:, None])


def moe_experts_triton(
    x: Tensor, expert: Tensor, weight: Tensor, up: Experts, down: Experts, tile: MoeTile | None = None
) -> Tensor:
    (T, k), (E, D, inner) = expert.shape, down.shape
    up_values, up_scales, up_groups = _stored(up)
    down_values, down_scales, down_groups = _stored(down)
    dense = up_values.is_contiguous() and down_values.is_contiguous()
    if math.gcd(D, inner) % 16 or x.stride(1) != 1 or not dense:
        raise ValueError(f"D {D} and I {inner} must be multiples of 16, rows of x dense, weights contiguous")
    n = T * k
    if n == 0:
        return x.new_empty(T, k, D)
    tile, down_tile = (tile or moe_tile(n / E, x.dtype, isinstance(each, Fp8Experts)) for each in (up, down))
    is_few = n <= E
    num_tiles = n if is_few else n // tile.rows + E  # the most there can be, however entries fall
    order = torch.empty(n, dtype=torch.int32, device=x.device)
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=x.device)
    _sort_kernel[(E,)](
        expert.contiguous(), order, tiles, n, E=E, ROWS=tile.rows, IS_FEW=is_few, BLOCK=1024, num_warps=4, **OVERLAPPED
    )
    hidden = torch.empty((n, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((n, D), dtype=x.dtype, device=x.device)
    # Widths that divide the matrices, so that only rows need a mask.
    up_columns, up_depth = math.gcd(inner, tile.columns), math.gcd(D, tile.depth)
    down_columns, down_depth = math.gcd(D, 2 * tile.columns), math.gcd(inner, down_tile.depth)
    sizes = {"D": D, "INNER": inner, "ROWS": tile.rows}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **OVERLAPPED}
    x, x_scales = _input(x, up)
    _up_kernel[(num_tiles * (inner // up_columns),)](
        x, x_scales, up_values, up_scales, order, tiles, hidden, x.stride(0), k, T, **sizes, COLUMNS=up_columns,
        DEPTH=up_depth, HAS_GATE=up.shape[1] == 2 * inner, **up_groups, **options
    )  # fmt: skip
    hidden, hidden_scales = _input(hidden, down)
    _down_kernel[(num_tiles * (D // down_columns),)](
        hidden, hidden_scales, down_values, down_scales, order, tiles, weight.contiguous(), out, n, **sizes,
        COLUMNS=down_columns, DEPTH=down_depth, **down_groups, **options
    )  # fmt: skip
    return out.view(T, k, D)
