"""Norms, gates and experts as an H200 gets them: no spills."""

import pytest

from tests.support.kernels.compiled import compile_for_h200


@pytest.mark.slow
def test_kernels_compile_for_an_h200_without_spilling():
    from tests.support.kernels.launches import row_launches

    for report in compile_for_h200([launch for _, launch in row_launches()]):
        assert report.stack_bytes == 0 and report.shared_bytes <= 227 * 1024
