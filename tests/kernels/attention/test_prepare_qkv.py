"""Norm, rotation and cache write in one Triton kernel against the reference that composes them."""

import pytest
import torch

from headrace.kernels.attention.prepare_qkv import prepare_qkv_torch, prepare_qkv_triton
from headrace.kernels.attention.rotary import inverse_frequencies, rotary_angles
from tests.kernels.attention.paged import BLOCK, DEVICE
from tests.kernels.naive import NAN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotary_dim", [0, 8, 24])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("H", [6, 0])
def test_prepared_queries_and_keys_equal_norm_rotation_and_store(
    H: int, has_norm: bool, rotary_dim: int, dtype: torch.dtype
):
    T, KV, D = 5, 3, 24
    projected = torch.randn(T, (H + 2 * KV) * D + 7, device=DEVICE).to(dtype)
    norm = torch.rand(H + KV, D, device=DEVICE) if has_norm else None
    rotary = None
    if rotary_dim:
        positions = torch.tensor([0, 3, 70, 71, 4000], device=DEVICE)
        rotary = rotary_angles(positions, inverse_frequencies(rotary_dim, 1e4, DEVICE))
    block, offset = (torch.tensor(values, device=DEVICE) for values in ([2, 0, 2, 2, 1], [15, 0, 3, 4, 7]))
    results, pools = [], []
    for prepare in (prepare_qkv_torch, prepare_qkv_triton):
        pool = torch.full((4, 2, 2, BLOCK, KV, D), NAN, dtype=dtype, device=DEVICE)
        pools.append(pool)
        k_pool, v_pool = pool[:, 1, 0], pool[:, 1, 1]
        results.append(prepare(projected.clone(), k_pool, v_pool, block, offset, H, norm, 1e-3, rotary))
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for expected, actual in zip((*results[0], pools[0]), (*results[1], pools[1]), strict=True):
        torch.testing.assert_close(actual, expected, atol=bound, rtol=bound, equal_nan=True)


def test_no_rows_prepare_nothing():
    pool = torch.full((2, BLOCK, 1, 16), NAN, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    q, k, v = prepare_qkv_triton(torch.empty(0, 64, device=DEVICE), pool, pool, none, none, 2, None, 1e-3, None)
    assert (len(q), len(k), len(v)) == (0, 0, 0)
