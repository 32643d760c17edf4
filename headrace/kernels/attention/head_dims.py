"""Head dims of any size inside Triton's attention kernels: tiles are powers of two, columns past the head are masked.

Where the head dim is a power of two nothing is masked: each helper then compiles to what it stands for.
"""

import triton
import triton.language as tl

LARGEST_HEAD_DIM = 256  # larger tiles do not fit a multiprocessor's shared memory


@triton.constexpr_function
def padded(head_dim):
    """Columns of a tile that holds heads of `head_dim` values: a power of two, at least the 16 that a product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())


@triton.jit
def inside(is_row, d, D: tl.constexpr):
    """Mask of a tile: the rows [R] that exist, and of columns d [padded D] the D of the head."""
    if d.shape[0] == D:
        return is_row[:, None]
    else:
        return is_row[:, None] & (d < D)[None, :]


@triton.jit
def inside_parts(is_part, d, D: tl.constexpr):
    """As `inside`, of parts [R, S] that exist of R rows."""
    if d.shape[0] == D:
        return is_part[:, :, None]
    else:
        return is_part[:, :, None] & (d < D)[None, None, :]


@triton.jit
def load_heads(pointers, d, D: tl.constexpr):
    """Rows that all exist, columns past the head zero."""
    if d.shape[0] == D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
