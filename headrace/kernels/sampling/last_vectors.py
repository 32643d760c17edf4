"""Hidden vectors of sequences' last tokens, wherever they lie: in the pool of states or in the ring behind it.

    out_n = pool[place_n] if place_n < S, ring[place_n - S] if place_n >= S, zeros if place_n is -1

Shapes    places [N] int64; pool [S, D], any stride over slots; ring [P, D] and out [N, D], no gaps
Contract  what nobody has written may be NaN: it is not read
Numerics  bit-exact
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.lib.dispatch import runs_triton
from headrace.kernels.lib.pdl import OVERLAPPED, let_next_start, wait_for_previous
from headrace.kernels.lib.sizes import cdiv, next_power_of_2


def read_last_vectors(places: Tensor, pool: Tensor, ring: Tensor, out: Tensor) -> None:
    D = pool.shape[1]
    if ring.shape[1:] != (D,) or out.shape != (len(places), D) or {ring.dtype, out.dtype} != {pool.dtype}:
        raise ValueError(
            f"pool {tuple(pool.shape)}, ring {tuple(ring.shape)}, places {tuple(places.shape)} and out "
            f"{tuple(out.shape)} of {pool.dtype}, {ring.dtype}, {out.dtype} disagree"
        )
    (read_last_vectors_triton if runs_triton(pool) else read_last_vectors_torch)(places, pool, ring, out)


def read_last_vectors_torch(places: Tensor, pool: Tensor, ring: Tensor, out: Tensor) -> None:
    in_states = pool.index_select(0, places.masked_fill(places >= len(pool), 0).clamp(min=0))
    in_ring = ring.index_select(0, (places - len(pool)).clamp(min=0))
    is_in_ring = (places >= len(pool))[:, None]
    out.copy_(torch.where(is_in_ring, in_ring, in_states).masked_fill_((places < 0)[:, None], 0))


@triton.jit
def _last_vectors_kernel(
    place_ptr, pool_ptr, ring_ptr, out_ptr, stride_pool, num_slots, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    let_next_start()
    wait_for_previous()
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    place = tl.load(place_ptr + n)
    is_in_ring = place >= num_slots
    ptr = tl.where(is_in_ring, ring_ptr + (place - num_slots) * D, pool_ptr + place * stride_pool)
    vector = tl.load(ptr + d, mask=d < tl.where(place >= 0, D, 0), other=0.0)
    tl.store(out_ptr + n * D + d, vector, mask=d < D)


def read_last_vectors_triton(places: Tensor, pool: Tensor, ring: Tensor, out: Tensor) -> None:
    N, D = out.shape
    if pool.stride(1) != 1 or not ring.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"strides {pool.stride()}, {ring.stride()}, {out.stride()}: vectors must lie without gaps")
    block = min(1024, next_power_of_2(D))
    if N:
        _last_vectors_kernel[(N, cdiv(D, block))](
            places, pool, ring, out, pool.stride(0), len(pool), D=D, BLOCK_D=block, num_warps=4, **OVERLAPPED
        )
