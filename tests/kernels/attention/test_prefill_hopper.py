"""Warp-specialised prefill attention against float64, on a Hopper GPU alone."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention import paged_attention
from headrace.kernels.attention.paged_attention import PagedPrefill, paged_prefill
from headrace.kernels.attention.prefill import PagedChunks
from headrace.kernels.attention.prefill_hopper import fits_hopper
from tests.kernels.attention.paged import BLOCK, DEVICE, check_prefill, needs_gpu
from tests.kernels.naive import NAN

AWKWARD_SPANS = [
    [(0, 1)],
    [(0, 64)],
    [(63, 65)],
    [(0, 63), (64, 129), (0, 1), (300, 301), (1000, 1100), (127, 128), (5, 70)],
    [(0, 1500)],
    [(5000, 5200), (0, 5000)],
]


def needs_hopper(H: int, KV: int, D: int, dtype: torch.dtype) -> None:
    if not fits_hopper(torch.empty(1, H, D, dtype=dtype, device=DEVICE), torch.empty(1, BLOCK, KV, D)):
        pytest.skip("not a Hopper GPU")


@needs_gpu
@pytest.mark.parametrize(
    ("H", "KV", "D", "dtype"),
    [
        (32, 8, 64, torch.bfloat16),
        (3, 1, 64, torch.bfloat16),
        (2, 2, 64, torch.float16),
        (12, 4, 128, torch.bfloat16),
        (32, 2, 128, torch.bfloat16),
        (2, 2, 128, torch.float16),
        (16, 4, 256, torch.bfloat16),
        (8, 1, 256, torch.bfloat16),
        (2, 2, 256, torch.float16),
    ],
)
@pytest.mark.parametrize("spans", AWKWARD_SPANS, ids=str)
def test_rows_see_their_prefix_and_themselves(
    spans: list[tuple[int, int]], H: int, KV: int, D: int, dtype: torch.dtype, monkeypatch
):
    """As the engine calls it: `paged_prefill` chooses it for heads of 64, 128 and 256."""
    needs_hopper(H, KV, D, dtype)
    monkeypatch.delattr(paged_attention, "paged_prefill_triton")
    monkeypatch.setattr(paged_attention, "extend_splits", lambda q, k_pool, chunks: 1)
    lengths = tuple(end - start for start, end in spans)

    def prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, chunks: PagedChunks) -> Tensor:
        unread = q.new_full((len(q), KV, D), NAN)
        return paged_prefill(q, unread, unread, k_pool, v_pool, scale, PagedPrefill(lengths, chunks))

    check_prefill(spans, H, KV, D, dtype, prefill)


def test_heads_that_it_was_not_measured_for_do_not_fit():
    assert not fits_hopper(torch.empty(1, 12, 96, dtype=torch.bfloat16, device=DEVICE), torch.empty(1, BLOCK, 4, 96))
    assert not fits_hopper(torch.empty(1, 16, 256, device=DEVICE), torch.empty(1, BLOCK, 4, 256))  # float32
