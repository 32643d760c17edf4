"""The torch reference of Kimi delta attention's scan against token-by-token float64."""

import pytest

from tests.kernels.recurrences import Case, PrefillTests


@pytest.mark.parametrize("case", [Case("kda", (4, 8, 6), 5e-5)], ids=lambda case: case.name)
class TestReference(PrefillTests):
    """The torch reference."""
