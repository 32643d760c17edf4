"""What a profile says of the time in which the device had nothing to do."""

from types import SimpleNamespace

from benchmarks.gpu_profile import gaps_us


def event(start: float, end: float, device: str = "DeviceType.CUDA") -> SimpleNamespace:
    return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), device_type=device)


def test_gaps_are_what_no_kernel_covers():
    overlapping = [event(0, 10), event(2, 4), event(5, 12), event(20, 21), event(23, 25)]
    assert gaps_us(reversed(overlapping)) == 8 + 2


def test_the_hosts_events_fill_no_gap():
    assert gaps_us([event(0, 1), event(1, 5, "DeviceType.CPU"), event(5, 6)]) == 4
    assert gaps_us([]) == 0
