"""Sessions in a row leave nothing behind: a thousand; `make campaigns` makes it ten thousand."""

from dataclasses import asdict

import pytest

from tests.support.cluster.soak import grown, rss_growth_kib, soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sessions_in_a_row_leave_nothing_behind(pytestconfig: pytest.Config) -> None:
    num_sessions = pytestconfig.getoption("--soak-sessions")
    sender, receiver = pytestconfig.getoption("--soak-devices")
    sides = soak(num_sessions, devices=(sender, receiver))
    for side, samples in sides.items():
        print(f"\n{side} (memory grew by {rss_growth_kib(samples):.0f} KiB)")
        print("".join(f"{name:>14}" for name in asdict(samples[0])))
        for sample in samples:
            print("".join(f"{count:>14}" for count in asdict(sample).values()))
        assert len(samples) > 10
        assert grown(samples) == []
        assert samples[-1].endpoints == 1
    cancelled = num_sessions // 10
    assert sides["decode"][-1].dropped_parts == 6 * cancelled
