"""A thousand hand-overs in a row leave nothing behind; `python -m benchmarks soak` makes it ten thousand."""

import pytest

from tests.support.cluster.soak import grown, soak


@pytest.mark.slow
def test_a_thousand_sessions_in_a_row_leave_nothing_behind() -> None:
    sides = soak(1000, timeout_s=120)
    for samples in sides.values():
        assert len(samples) > 10
        assert grown(samples) == []
        assert samples[-1].endpoints == 1
    assert sides["decode"][-1].dropped_parts == 600  # of a hundred cancelled sessions, six parts each
