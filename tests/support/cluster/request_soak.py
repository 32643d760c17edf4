"""Thousands of requests in a row through a cluster, and what its processes hold meanwhile; storms of aborted ones.

samples = await soak(model, folder, num_requests=20_000)
print(table(samples))
"""

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from tests.support.cluster.client_process import Clients, client_process
from tests.support.cluster.cluster import Cluster, with_engine
from tests.support.cluster.request_clients import Progress, Storm, abort_storms, request_clients
from tests.support.cluster.usage import Usage, settled, usages
from tests.support.patience import PATIENCE_S

NUM_SAMPLES = 50
WARM_UP_SHARE = 0.25
"""Of the requests: pools, the router's index and the allocators' arenas fill meanwhile."""
ENGINE = with_engine(cache_bytes=4 << 20)
"""Small: blocks and the router's copy of the index are full after a few hundred requests."""


@dataclass(frozen=True)
class Sample:
    num_requests: int
    usages: dict[str, Usage]
    metrics_bytes: int
    """Of /metrics: labels that grow with requests show here."""


def growth_kib_a_request(samples: Sequence[Sample], process: str) -> float:
    """Slope of the straight line through all of a process's samples after the warm-up."""
    warm = [it for it in samples if it.num_requests >= WARM_UP_SHARE * samples[-1].num_requests]
    slope, _ = statistics.linear_regression(
        [it.num_requests for it in warm], [it.usages[process].rss_kib for it in warm]
    )
    return slope


def table(samples: Sequence[Sample]) -> str:
    names = list(samples[0].usages)
    lines = [f"{'requests':>9}" + "".join(f"{n + ': KiB':>14}{'files':>7}" for n in names) + f"{'/metrics':>10}"]
    for sample in samples:
        used = "".join(f"{sample.usages[name].rss_kib:>14}{sample.usages[name].open_files:>7}" for name in names)
        lines.append(f"{sample.num_requests:>9}{used}{sample.metrics_bytes:>10}")
    growth = ", ".join(f"{name} {growth_kib_a_request(samples, name):.3f}" for name in names)
    lines.append(f"KiB a request after the first {WARM_UP_SHARE:.0%}: {growth}")
    return "\n".join(lines)


async def soak(model: Path, folder: Path, num_requests: int) -> list[Sample]:
    """Raises AssertionError for a request that failed, and when something that requests held did not come back."""
    samples: list[Sample] = []
    async with _running(Cluster(model, folder, engine=ENGINE)) as cluster:
        asked = Progress(0)
        errors: list[str] = []

        def hear(progress: Progress) -> None:
            nonlocal asked
            asked = progress
            errors.extend(progress.errors)

        def sample(num_requests: int) -> None:
            pids = {name: process.pid for name, process in cluster.processes.items()}
            metrics = httpx.get(f"{cluster.url}/metrics", timeout=PATIENCE_S).content
            samples.append(Sample(num_requests, usages(pids), len(metrics)))

        say_each = max(1, num_requests // NUM_SAMPLES)
        clients: Clients = partial(request_clients, cluster.url, num_requests, say_each, 0)
        async with client_process(clients, hear):
            while asked.num_asked < num_requests:
                before = asked
                async with asyncio.timeout(PATIENCE_S):
                    while asked is before:
                        await asyncio.sleep(0.02)
                await asyncio.to_thread(sample, asked.num_asked)
        assert errors == []
        assert await asyncio.to_thread(settled, cluster.url) == {}
        await asyncio.to_thread(sample, num_requests)
    return samples


async def storms(model: Path, folder: Path, num_storms: int, *, num_timed: int, num_aborted: int = 300) -> list[Storm]:
    """Raises AssertionError for a request that failed and was not aborted, and when something did not come back."""
    blown: list[Storm] = []
    async with _running(Cluster(model, folder)) as cluster:
        clients: Clients = partial(abort_storms, cluster.url, num_storms, num_aborted, num_timed, 0)
        async with client_process(clients, blown.append):
            async with asyncio.timeout(num_storms * PATIENCE_S):
                while len(blown) < num_storms:
                    await asyncio.sleep(0.05)
        assert [error for storm in blown for error in storm.errors] == []
        assert await asyncio.to_thread(settled, cluster.url) == {}
    return blown


def storm_table(blown: Sequence[Storm]) -> str:
    lines = [f"{'storm':>6}{'before, 1/s':>13}{'after, 1/s':>12}{'after/before':>14}"]
    for number, it in enumerate(blown):
        lines.append(f"{number:>6}{it.before:>13.2f}{it.after:>12.2f}{it.after / it.before:>14.3f}")
    before, after = _throughputs(blown)
    lines.append(f"{'all':>6}{before:>13.2f}{after:>12.2f}{throughput_kept(blown):>14.3f}")
    return "\n".join(lines)


def throughput_kept(blown: Sequence[Storm]) -> float:
    """Throughput of all requests behind the storms, by that of those before them: single storms vary by a tenth."""
    before, after = _throughputs(blown)
    return after / before


def _throughputs(blown: Sequence[Storm]) -> tuple[float, float]:
    """Before and after all storms: as many requests each time."""
    return statistics.harmonic_mean([it.before for it in blown]), statistics.harmonic_mean([it.after for it in blown])


@asynccontextmanager
async def _running(cluster: Cluster) -> AsyncIterator[Cluster]:
    await asyncio.to_thread(cluster.__enter__)
    try:
        yield cluster
    finally:
        await asyncio.to_thread(cluster.__exit__)
