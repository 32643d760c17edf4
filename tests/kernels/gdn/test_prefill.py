"""The torch reference of the gated delta rule's scan against token-by-token float64."""

import pytest

from tests.kernels.recurrences import Case, PrefillTests

CASES = [Case("gdn", (4, 8, 6), 5e-5), Case("gdn_repeat", (4, 8, 6), 5e-5)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestReference(PrefillTests):
    """The torch reference."""
