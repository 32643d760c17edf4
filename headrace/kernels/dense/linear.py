"""Dense projection: y = x W^T, with W packed once for the device's fastest product.

Shapes    x [..., I], any row stride; weight [O, I]; returns [..., O]; FP8, `out` and the other forms take x [M, I]
Contract  `LinearWeight(weight)` keeps the only copy that is read: drop the plain tensor afterwards
Numerics  as F.linear in the weight's dtype; float32 stays float32
Source    on CPU in float32 oneDNN's blocked layout (what torch.compile uses for frozen weights). Against
          F.linear on weights that are not in cache, two threads of an EPYC: 3.4x at 1 row, 4x at 8 rows,
          1.1x at 2,048 rows. On a GPU few rows go to small_linear.py, but on a Hopper one, in 16 bits, these and some
          more to one_round_hopper.py; many rows of a SwiGLU go to swiglu_linear_hopper.py, others to the library: some
          with a deep matrix in parts (`num_parts`).
          FP8 stays FP8 where fp8_linear.py runs, elsewhere it is dequantised
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.dense.fp8 import Fp8Matrix, Matrix, quantise_matrix, select_rows, stack_rows
from headrace.kernels.dense.fp8_linear import fp8_linear, has_product
from headrace.kernels.dense.fp8_rows import Fp8Format, Fp8Rows, Rows, plain_rows, quantise_rows
from headrace.kernels.dense.linear_pair import MOST_SIDE_ROWS, linear_pair_triton
from headrace.kernels.dense.one_round_hopper import Form, is_faster_in_one_round, one_round_hopper
from headrace.kernels.dense.relu_squared import relu_squared_rows
from headrace.kernels.dense.small_linear import MOST_ROWS, checked_out, small_linear_triton
from headrace.kernels.dense.swiglu import swiglu_rows
from headrace.kernels.dense.swiglu_linear_hopper import is_faster_on_hopper, swiglu_linear_hopper
from headrace.kernels.lib.dispatch import is_hopper, runs_triton
from headrace.kernels.lib.sizes import MULTIPROCESSORS, cdiv

QUANTISED_ROWS = 1 << 14  # at once
MOST_SPLIT_ROWS = 256
SPLIT_TILE = 128  # rows and columns of y that a multiprocessor takes


class LinearWeight:
    """A weight matrix [out_features, in_features], packed where that is faster."""

    def __init__(self, weight: Matrix):
        self.out_features, self.in_features = weight.shape
        self._is_packed = False
        self._weight: Matrix = weight
        self._fp8: Fp8Format | None = None
        if isinstance(weight, Fp8Matrix) and has_product(weight):
            self._fp8 = Fp8Format(weight.has_blocks)
            return
        plain = weight.dequantised() if isinstance(weight, Fp8Matrix) else weight.contiguous()
        self._is_packed = (
            plain.device.type == "cpu" and plain.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        )
        self._weight = torch.ops.mkldnn._reorder_linear_weight(plain) if self._is_packed else plain

    def in_fp8(self) -> LinearWeight:
        """A copy of a matrix of 16 bits in FP8, or the matrix itself where products in FP8 do not run."""
        plain = self._weight
        if not isinstance(plain, Tensor) or plain.dtype.itemsize != 2 or not is_hopper(plain.device):
            return self
        # In parts: rows of a large vocabulary take a gigabyte in float32 for each 100,000.
        quantised = stack_rows([quantise_matrix(part) for part in plain.split(QUANTISED_ROWS)])
        assert isinstance(quantised, Fp8Matrix)
        return LinearWeight(quantised) if has_product(quantised) else self

    @property
    def is_packed(self) -> bool:
        """True if its rows do not lie apart, as in float32 on a CPU."""
        return self._is_packed

    def rows(self, index: Tensor) -> Tensor:
        """A copy of rows [n, in_features] with these numbers, int64 on its device. Neither if packed nor in FP8."""
        assert isinstance(self._weight, Tensor) and not self._is_packed
        return self._weight.index_select(0, index)

    def replace_rows(self, index: Tensor, rows: Tensor) -> None:
        """Writes rows [n, in_features] in place of those with these numbers; captured products see them. Not if it is
        packed; a weight in FP8 has a scale for each row."""
        if isinstance(self._weight, Tensor):
            assert not self._is_packed
            self._weight.index_copy_(0, index, rows)
            return
        assert self._weight.row_group == 1 and not self._weight.has_blocks
        quantised = quantise_matrix(rows)
        self._weight.values.view(torch.uint8).index_copy_(0, index, quantised.values.view(torch.uint8))
        self._weight.scales.index_copy_(0, index, quantised.scales)

    def of_rows(self, first: int, end: int) -> LinearWeight:
        """The product with these rows of the matrix alone, which in 16 bits stays where it is."""
        if isinstance(self._weight, Fp8Matrix):
            return LinearWeight(select_rows(self._weight, torch.arange(first, end)))
        return LinearWeight((self._weight.to_dense() if self._is_packed else self._weight)[first:end])

    @property
    def device(self) -> torch.device:
        return (self._weight.values if isinstance(self._weight, Fp8Matrix) else self._weight).device

    @property
    def reads(self) -> Fp8Format | None:
        """The format of rows that this product does not have to quantise; None: it multiplies in 16 or 32 bits."""
        return self._fp8

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """y, written to `out` [M, O] without gaps, in the weight's dtype, if given."""
        x = self._readable(x)
        if out is not None:
            checked_out(out, (len(x), self.out_features), self._weight.dtype)
        if (y := self._in_one_round(x, "plain", out)) is not None:
            return y
        if self._has_few(x):
            return small_linear_triton(x, self._weight, out=out)
        if isinstance(x, Tensor) and isinstance(self._weight, Tensor) and not self._is_packed:
            return linear_torch(x, self._weight, out)
        y = self._packed_product(x)
        return y if out is None else out.copy_(y)

    def beside(self, x: Rows, side: LinearWeight) -> tuple[Tensor, Tensor]:
        """y, and the product of the same rows with a smaller matrix: in one launch where that costs less."""
        weight, small = self._weight, side._weight
        if (
            isinstance(x, Fp8Rows)
            and isinstance(weight, Fp8Matrix)
            and isinstance(small, Tensor)
            and (x.scales.shape[1] > 1) == weight.has_blocks
            and self._has_few(x)
            and len(small) <= MOST_SIDE_ROWS
        ):
            return linear_pair_triton(x, weight, small)
        return self(x), side(x)

    def parts(self, x: Rows) -> Tensor:
        """y [M, O], or parts [S, M, O] in float32 that sum to it: add_rms_norm and sum_outputs take either."""
        x = self._readable(x)
        if (y := self._in_one_round(x, "parts")) is not None:
            return y
        if self._has_few(x):
            return small_linear_triton(x, self._weight, "parts")
        if num_parts := self._num_parts(x):
            assert isinstance(x, Tensor) and isinstance(self._weight, Tensor)
            return split_linear(x, self._weight, num_parts)
        return self(x)

    def add_to(self, total: Tensor, x: Rows, alpha: float) -> bool:
        """total [M, O] += alpha * y, rounded once. False, with no change, where adding y later is cheaper."""
        if self._fp8 is not None or not runs_triton(total) or len(x) <= MOST_ROWS or self._num_parts(x):
            return False
        if self._takes_one_round(x, "parts"):
            return False
        assert isinstance(self._weight, Tensor)
        total.addmm_(plain_rows(x), self._weight.T, alpha=alpha)  # the library reads `total` under its arithmetic
        return True

    def swiglu(self, x: Rows, fmt: Fp8Format | None = None) -> Rows:
        """silu(gate) * up [M, O / 2] of a matrix whose first half of rows is the gate's, the second up's.

        In FP8 for what reads `fmt` if that costs no launch more."""
        x = self._readable(x)
        if (y := self._in_one_round(x, "gated")) is not None:
            return y
        if self._has_few(x):
            return small_linear_triton(x, self._weight, "gated")  # no program sees a whole row
        if isinstance(x, Tensor) and isinstance(self._weight, Tensor) and is_faster_on_hopper(x, self._weight):
            return swiglu_linear_hopper(x, self._weight)
        return swiglu_rows(self(x), fmt)

    def relu_squared(self, x: Rows, fmt: Fp8Format | None = None) -> Rows:
        """max(y, 0)^2 [M, O], in FP8 for what reads `fmt`."""
        return relu_squared_rows(self(x), fmt)

    def _readable(self, x: Rows) -> Rows:
        """The rows as this product reads them."""
        if self._fp8 is None:
            return plain_rows(x)
        if isinstance(x, Fp8Rows) and (x.scales.shape[1] > 1) == self._fp8.by_block:
            return x
        return quantise_rows(plain_rows(x), self._fp8)

    def _packed_product(self, x: Rows) -> Tensor:
        """The product of a weight in another form than a plain matrix."""
        if isinstance(x, Fp8Rows):
            assert isinstance(self._weight, Fp8Matrix)
            return fp8_linear(x, self._weight)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")

    def _num_parts(self, x: Rows) -> int:
        """Parts into which `parts` splits the library's product; 0: it does not."""
        if not isinstance(x, Tensor) or not runs_triton(x) or self._fp8 is not None or self._weight.dtype.itemsize != 2:
            return 0
        return num_parts(len(x), self.out_features, self.in_features) if len(x) > MOST_ROWS else 0

    def _in_one_round(self, x: Rows, form: Form, out: Tensor | None = None) -> Tensor | None:
        """y, written to `out` if given; None where another kernel takes less time."""
        if not self._takes_one_round(x, form) or (out is not None and out.data_ptr() % 16):
            return None
        assert isinstance(x, Tensor) and isinstance(self._weight, Tensor)
        return one_round_hopper(x, self._weight, form, out)

    def _takes_one_round(self, x: Rows, form: Form) -> bool:
        if not isinstance(x, Tensor) or not isinstance(self._weight, Tensor) or self._is_packed or x.dim() != 2:
            return False
        return is_faster_in_one_round(x, self._weight, form)

    def _has_few(self, x: Rows) -> bool:
        if isinstance(x, Fp8Rows):
            return runs_triton(x.values) and 0 < len(x) <= MOST_ROWS
        return (
            runs_triton(x)
            and self._weight.dtype.itemsize == 2
            and x.dim() == 2
            and 0 < len(x) <= MOST_ROWS
            and x.stride(1) == 1
        )


def read_by(first: LinearWeight, *others: LinearWeight | None) -> Fp8Format | None:
    """The format for rows that all of these read: FP8 as the first takes it, kept in 16 bits where another does not."""
    if first.reads is None:
        return None
    keeps_plain = any(other is not None and other.reads != first.reads for other in others)
    return first.reads._replace(keeps_plain=keeps_plain)


def linear_torch(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.matmul(x, weight.T, out=out)


def num_parts(num_rows: int, num_out: int, num_in: int) -> int:
    """Parts for `split_linear`: 4 or 2, with a tile for each multiprocessor at most; 0 where splitting does not pay.

    The library splits such products itself, and adds the parts up by a kernel of its own, which costs 5 us of 27. Up to
    256 rows, and where W is three times as deep as wide, the norm behind adds them up in less (docs/gpu-notes.md, 36).
    """
    if num_rows > MOST_SPLIT_ROWS or num_in < 3 * num_out or num_in % 64:
        return 0
    tiles = cdiv(num_rows, SPLIT_TILE) * cdiv(num_out, SPLIT_TILE)
    return next((parts for parts in (4, 2) if parts * tiles <= MULTIPROCESSORS), 0)


def split_linear(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Parts [parts, M, O] in float32 that sum to x W^T, each of as many columns of W; on a GPU alone."""
    shape = parts, weight.shape[1] // parts
    x_SMI, weight_SIO = x.unflatten(1, shape).transpose(0, 1), weight.unflatten(1, shape).permute(1, 2, 0)
    return torch.bmm(x_SMI, weight_SIO, out_dtype=torch.float32)
