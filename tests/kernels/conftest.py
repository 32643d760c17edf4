"""Every kernel test starts from the same random numbers and from poisoned memory."""

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite(
    "tests.kernels.attention.paged",
    "tests.kernels.conv.windows",
    "tests.kernels.dense.rows",
    "tests.kernels.recurrences",
    "tests.kernels.scans",
    "tests.kernels.updates",
)


@pytest.fixture(autouse=True)
def seeded_and_poisoned() -> Iterator[None]:
    """Uninitialised memory from torch is NaN, or the largest integer: an element that a kernel misses shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
