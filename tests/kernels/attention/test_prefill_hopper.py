"""Warp-specialised prefill attention against float64, on a Hopper GPU alone."""

from functools import partial

import pytest
import torch

from headrace.kernels.attention.prefill import PagedChunks
from headrace.kernels.attention.prefill_hopper import fits_hopper, hopper_splits, paged_prefill_hopper
from tests.kernels.attention.paged import BLOCK, DEVICE, check_prefill, needs_gpu

AWKWARD_SPANS = [
    [(0, 1)],
    [(0, 64)],
    [(63, 65)],
    [(0, 63), (64, 129), (0, 1), (300, 301), (1000, 1100), (127, 128), (5, 70)],
    [(0, 1500)],
    [(5000, 5200), (0, 5000)],
    [(3000, 3130), (40, 40), (40, 40), (0, 62)],  # unused sequences and padding, as in captured passes
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
@pytest.mark.parametrize("splits", [None, 1, 2, 7])
@pytest.mark.parametrize("spans", AWKWARD_SPANS, ids=str)
def test_rows_see_their_prefix_and_themselves(
    spans: list[tuple[int, int]], splits: int | None, H: int, KV: int, D: int, dtype: torch.dtype
):
    needs_hopper(H, KV, D, dtype)
    check_prefill(spans, H, KV, D, dtype, partial(paged_prefill_hopper, splits=splits))


def test_splits_follow_from_shapes():
    def splits(rows: int, table_blocks: int = 2048, H: int = 16, KV: int = 4, D: int = 256) -> int:
        table = torch.empty(1, table_blocks, dtype=torch.int32)
        q, k_pool = torch.empty(rows, H, D, dtype=torch.bfloat16), torch.empty(1, BLOCK, KV, D)
        return hopper_splits(q, k_pool, PagedChunks(table[0, :1], table[0, :1], table), num_programs=132)

    assert [splits(rows) for rows in (128, 256, 512, 1024, 1280, 2048, 8192)] == [8, 4, 2, 1, 4, 1, 1]
    assert [splits(rows, 2048, 32, 8, 64) for rows in (256, 512, 768, 1024)] == [5, 3, 1, 3]
    assert splits(128, 16) == splits(128, 128) == 2 and splits(128, 129) == 3  # 1,024 keys are one split's
    assert splits(1024, 16) == 1


def test_heads_that_it_was_not_measured_for_do_not_fit():
    assert not fits_hopper(torch.empty(1, 12, 96, dtype=torch.bfloat16, device=DEVICE), torch.empty(1, BLOCK, 4, 96))
    assert not fits_hopper(torch.empty(1, 16, 256, device=DEVICE), torch.empty(1, BLOCK, 4, 256))  # float32
