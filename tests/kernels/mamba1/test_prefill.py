"""The torch reference of the Mamba1 scan against token-by-token float64."""

import pytest

from tests.kernels.recurrences import Case, PrefillTests


@pytest.mark.parametrize("case", [Case("mamba1", (8, 5), 5e-5)], ids=lambda case: case.name)
class TestReference(PrefillTests):
    """The torch reference."""
