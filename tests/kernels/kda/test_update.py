"""Kimi delta attention's decode steps against token-by-token float64."""

import pytest

from tests.kernels.recurrences import Case, UpdateTests


@pytest.mark.parametrize("case", [Case("kda", (4, 8, 6), 5e-5)], ids=lambda case: case.name)
class TestReference(UpdateTests):
    """The torch reference."""
