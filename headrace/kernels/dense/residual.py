"""Residual addition and the next norm: s = x + alpha * branch, and rms_norm(s).

Shapes    x [T, D]; branch [T, D], or the product that computes it; weight [D] float32; returns s, rms_norm(s), in FP8
          for what reads `fmt`
Contract  x may hold s afterwards: do not use it again. A `Product` is computed here
Numerics  s is rounded to x's dtype before the norm; a branch is rounded before it is added, unless its product
          adds it in float32
"""

from typing import NamedTuple

from torch import Tensor

from headrace.kernels.dense.fp8_rows import Fp8Format, Fp8Rows, Rows
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.rms_norm import add_rms_norm_rows, rms_norm_rows


class Product(NamedTuple):
    """x W^T [T, D], not computed yet: for many rows the product itself adds to the stream, few rows, and more of a deep
    matrix, come in parts."""

    x: Rows
    matrix: LinearWeight

    def of_rows(self, rows: Tensor) -> "Product":
        x = self.x.select(rows) if isinstance(self.x, Fp8Rows) else self.x.index_select(0, rows)
        return Product(x, self.matrix)


def whole(branch: Tensor | Product) -> Tensor:
    """The branch itself: [T, D]."""
    return branch.matrix(branch.x) if isinstance(branch, Product) else branch


def add_branch(
    x: Tensor, branch: Tensor | Product, alpha: float, weight: Tensor, eps: float, fmt: Fp8Format | None = None
) -> tuple[Tensor, Rows]:
    if isinstance(branch, Product):
        if branch.matrix.add_to(x, branch.x, alpha):
            return x, rms_norm_rows(x, weight, eps, fmt)
        branch = branch.matrix.parts(branch.x)
    return add_rms_norm_rows(x, branch, alpha, weight, eps, fmt)
