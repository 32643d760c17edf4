"""Norms of a projection's parts against each part's own."""

import pytest
import torch

from headrace.kernels.dense.rms_norm import rms_norm_torch
from headrace.kernels.mamba1.norms import norm_parts, norm_parts_torch, norm_parts_triton
from tests.kernels.mamba1.layers import DEVICE


@pytest.mark.parametrize("implementation", [norm_parts_torch, norm_parts_triton])
@pytest.mark.parametrize(("rows", "rank", "state_size"), [(3, 7, 6), (2, 160, 16), (0, 4, 4)])
def test_each_part_is_normed_by_itself(implementation, rows: int, rank: int, state_size: int):
    width = rank + 2 * state_size
    x, weight = torch.randn(rows, width + 3, device=DEVICE)[:, :width], torch.rand(width, device=DEVICE)
    y = implementation(x, weight, rank, 1e-3)
    sizes = (rank, state_size, state_size)
    for part, x_part, weight_part in zip(y.split(sizes, 1), x.split(sizes, 1), weight.split(sizes), strict=True):
        torch.testing.assert_close(part, rms_norm_torch(x_part, weight_part, 1e-3), atol=1e-6, rtol=1e-6)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="4 time steps disagree"):
        norm_parts(torch.zeros(1, 9), torch.zeros(9), 4, 1e-3)
