"""The torch reference of the Mamba2 scan against token-by-token float64."""

import pytest

from tests.kernels.recurrences import Case, PrefillTests

CASES = [Case("ssd", (4, 8, 6), 5e-5), Case("ssd_groups", (4, 8, 6), 5e-5)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestReference(PrefillTests):
    """The torch reference."""
