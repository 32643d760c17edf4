"""Times and tables: a kernel's row and floor, kernels that fail, gaps between kernels, alternating comparisons."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import triton

from benchmarks.timing import BYTES_A_SECOND, FLOPS_A_SECOND, HEADER, Row, compare, gaps_us, measure


def failing(error: Exception) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        raise error

    return prepare


@pytest.mark.parametrize(
    ("num_bytes", "flops", "work", "floor_us"),
    [
        (64 << 20, 1e9, "64.00 MiB", (64 << 20) / BYTES_A_SECOND * 1e6),
        (64 << 20, 790e9, "790.0 GFLOP", 790e9 / FLOPS_A_SECOND * 1e6),
    ],
)
def test_a_row_has_the_time_the_bound_of_the_work_and_the_fraction_of_its_floor(
    num_bytes: float, flops: float, work: str, floor_us: float
) -> None:
    cells = [cell.strip() for cell in str(Row("scan", "1 x 8", 2 * floor_us, num_bytes, flops)).split("|")[1:-1]]
    assert cells == ["scan", "1 x 8", work, f"{2 * floor_us:.1f}", f"{floor_us:.1f}", "50%"]
    assert len(cells) == HEADER.splitlines()[0].count("|") - 1


def test_a_variant_that_does_not_fit_the_chip_has_no_time() -> None:
    row = measure("scan", "1 x 8", failing(triton.runtime.errors.OutOfResources(300, 227, "shared memory")), 1.0)
    assert math.isnan(row.time_us)


def test_a_fault_of_a_kernel_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure("scan", "1 x 8", failing(RuntimeError("CUDA error: an illegal memory access")), 1.0)


def event(start: float, end: float, device: str = "DeviceType.CUDA") -> SimpleNamespace:
    return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), device_type=device)


def test_gaps_are_what_no_kernel_covers() -> None:
    overlapping = [event(0, 10), event(2, 4), event(5, 12), event(20, 21), event(23, 25)]
    assert gaps_us(reversed(overlapping)) == 8 + 2


def test_the_hosts_events_fill_no_gap() -> None:
    assert gaps_us([event(0, 1), event(1, 5, "DeviceType.CPU"), event(5, 6)]) == 4
    assert gaps_us([]) == 0


def test_a_comparison_alternates_the_order_and_leaves_the_first_round_out() -> None:
    calls: list[tuple[str, int]] = []

    def first(number: int) -> float:
        calls.append(("first", number))
        return [100.0, 1.0, 2.0, 4.0][number]

    def second(number: int) -> float:
        calls.append(("second", number))
        return [100.0, 2.0, 6.0, 4.0][number]

    found = compare(first, second, rounds=3)
    assert (found.first_s, found.second_s, found.ratio) == (1.0, 2.0, 2.0)
    assert [name for name, _ in calls] == ["second", "first", "first", "second"] * 2
    assert [number for _, number in calls] == [0, 0, 1, 1, 2, 2, 3, 3]
