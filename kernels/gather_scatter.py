"""Copy scattered pool rows (blocks, states) to and from one contiguous staging buffer of bytes.

    gather    staging[i * E : (i + 1) * E] = pool[rows[i]]          scatter    the other way

Shapes    pool [P, E] uint8, contiguous: P rows of E bytes; rows [N] int64; staging [N * E] uint8, contiguous
Contract  rows in range; for scatter also unique; staging and pool do not alias; N = 0 is a no-op
Numerics  bit-exact
"""

import torch
from torch import Tensor


def gather_rows(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    _check(pool, rows, staging)
    torch.index_select(pool, 0, rows, out=staging.view(len(rows), pool.shape[1]))


def scatter_rows(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    _check(pool, rows, staging)
    pool.index_copy_(0, rows, staging.view(len(rows), pool.shape[1]))


def _check(pool: Tensor, rows: Tensor, staging: Tensor) -> None:
    expected = len(rows) * pool.shape[1]
    if staging.dtype != torch.uint8 or staging.dim() != 1 or len(staging) != expected:
        raise ValueError(f"staging is {tuple(staging.shape)} {staging.dtype}, not [{expected}] uint8")
