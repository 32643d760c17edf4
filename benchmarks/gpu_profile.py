"""Where a piece of work spends the device's time, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
from torch.profiler import ProfilerActivity

MOST_KERNELS = 30


def profile(work: Callable[[], object]) -> str:
    """A Markdown table of the kernels that take longest, for one run of `work` after one without the profiler."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities = [ProfilerActivity.CUDA]
    work()
    with torch.profiler.profile(activities=activities) as run:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    on_device = torch.cuda.is_available()
    # An operator's row repeats the time of the kernels that it launched: with both, each would count twice.
    spent = [
        (event.self_device_time_total if on_device else event.self_cpu_time_total, event.count, event.key)
        for event in run.key_averages()
        if not on_device or _is_on_device(event)
    ]
    total_us = sum(us for us, _, _ in spent) or 1
    gaps = f", {gaps_us(run.events()) / 1e3:.2f} ms of gaps between" if on_device else ""
    lines = [f"{total_us / 1e3:.2f} ms on the device{gaps}", "", "| share | ms | calls | kernel |", "|---|---|---|---|"]
    for us, count, name in sorted(spent, reverse=True)[:MOST_KERNELS]:
        lines.append(f"| {us / total_us:.1%} | {us / 1e3:.3f} | {count} | {name[:100].replace('|', '/')} |")
    return "\n".join(lines)


def gaps_us(events: Iterable[FunctionEvent]) -> float:
    """How long the device had nothing to do between the first of its events and the last."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events if _is_on_device(event))
    ends = accumulate((end for _, end in spans), max)
    return sum(max(0.0, begin - end) for (begin, _), end in zip(spans[1:], ends, strict=False))


def _is_on_device(event: FunctionEvent | FunctionEventAvg) -> bool:
    return "cuda" in str(event.device_type).lower()
