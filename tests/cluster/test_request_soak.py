"""Requests in a row leave nothing behind, nor do storms of aborted ones; `make campaigns` makes both long."""

from pathlib import Path

import pytest

from tests.support.cluster.request_soak import growth_kib_a_request, soak, storm_table, storms, table, throughput_kept

MODEL = Path(__file__).parents[2] / "tiny_models" / "headrace-tiny-qwen3.5"
MAX_GROWTH_KIB = 1.0
"""A request, after the warm-up."""
MIN_JUDGED_REQUESTS = 5_000
"""With fewer, the allocators' steps of some MiB are more than that."""
MIN_JUDGED_STORMS = 20
NUM_TIMED = 50
"""Requests before and after each storm, whose throughput is compared."""
MIN_THROUGHPUT_KEPT = 0.95

pytestmark = pytest.mark.slow


@pytest.mark.timeout(3600)
async def test_requests_in_a_row_leave_nothing_in_any_process(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    num_requests = pytestconfig.getoption("--soak-requests")
    samples = await soak(MODEL, tmp_path, num_requests)  # asserts that all are answered, and everything comes back
    print("\n" + table(samples))
    middle, last = samples[len(samples) // 2], samples[-1]
    for name in last.usages:
        assert last.usages[name].open_files <= middle.usages[name].open_files
        if num_requests >= MIN_JUDGED_REQUESTS:
            assert growth_kib_a_request(samples, name) < MAX_GROWTH_KIB
    assert last.metrics_bytes < 1.1 * middle.metrics_bytes


@pytest.mark.timeout(3600)
async def test_three_hundred_aborted_requests_slow_nobody_down_and_leave_nothing(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    num_storms = pytestconfig.getoption("--abort-storms")
    is_judged = num_storms >= MIN_JUDGED_STORMS
    num_timed = NUM_TIMED if is_judged else 8
    blown = await storms(MODEL, tmp_path, num_storms, num_timed=num_timed)  # asserts that everything comes back
    print("\n" + storm_table(blown))
    if is_judged:
        assert throughput_kept(blown) >= MIN_THROUGHPUT_KEPT
