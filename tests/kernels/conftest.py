"""Each kernel's test begins with the same random numbers, and with memory that holds nothing of use."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded_and_poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialised is NaN, of integers the largest: what a kernel leaves out shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
