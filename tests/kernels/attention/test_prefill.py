"""Triton prefill attention against float64, on a GPU or in the interpreter."""

from functools import partial

import pytest
import torch

from headrace.kernels.attention.prefill import PagedChunks, PrefillTile, paged_prefill_triton
from tests.kernels.attention.paged import BLOCK, DEVICE, Paged, check_prefill, needs_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(0, 33)], [(17, 18)], [(5, 40)], [(0, 20), (33, 50), (0, 1), (31, 48)]], ids=str
)
def test_prefill_sees_its_prefix_and_itself(spans: list[tuple[int, int]], dtype: torch.dtype):
    check_prefill(spans, 4, 2, 16, dtype, partial(paged_prefill_triton, tile=PrefillTile(32, 32, 4, 2)))


@pytest.mark.parametrize(("H", "KV", "D"), [(3, 1, 16), (2, 2, 48), (8, 1, 10)])
def test_prefill_groups_any_number_of_query_heads_of_any_size(H: int, KV: int, D: int):
    check_prefill([(7, 30)], H, KV, D, torch.float32)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("H", "KV", "D"), [(32, 8, 64), (12, 4, 128), (16, 4, 256), (6, 2, 80), (20, 1, 96)])
@pytest.mark.parametrize(
    "spans", [[(0, 63), (64, 129), (0, 1), (300, 301), (1000, 1100)], [(0, 600)], [(500, 564)]], ids=str
)
def test_prefill_of_real_shapes(spans: list[tuple[int, int]], H: int, KV: int, D: int, dtype: torch.dtype):
    check_prefill(spans, H, KV, D, dtype)


def test_an_empty_prefill_is_none():
    paged = Paged([1], 2, 1, 16)
    chunks = PagedChunks.build([], [], [], BLOCK, DEVICE)
    assert paged_prefill_triton(paged.queries(0), paged.k_pool, paged.v_pool, 1.0, chunks).shape == (0, 2, 16)
