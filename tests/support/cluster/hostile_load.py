"""Ordinary chats, first among themselves, then beside a crowd of hostile clients: what becomes of them, and what stays.

report = await run(model, folder, HostileLoad(seconds=600))
print(report.table())
"""

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from router.config import RouterConfig
from tests.support.cluster.client_process import client_process
from tests.support.cluster.cluster import Cluster, with_engine
from tests.support.cluster.hostile_clients import KINDS, TENANT_HEADER, Target, hostile_clients, random_prompt
from tests.support.cluster.recall_clients import ASK_TIMEOUT_S, Answer, Habits
from tests.support.cluster.recall_load import RecallLoad, percentile
from tests.support.cluster.usage import Usage, processor_s, settled, usages

MODEL_TOKENS = 40_960
"""The shipped models know 8,192; beyond, their answers make no sense, but cost what they cost."""
ENGINE = with_engine(
    max_step_tokens=256, max_running=64, cache_bytes=128 << 20, state_share=0.2, max_model_tokens=MODEL_TOKENS
)
"""States for all requests that the router lets in, and for checkpoints: the default share counts on long prompts."""

CROWD = {
    **dict.fromkeys(KINDS, 2),
    "reads nothing": 8,
    "reads a byte a second": 8,
    "never sends its body": 8,
    "aborts": 4,
    "wants penalties": 1,
    "wants prompt logprobs": 1,
    "sends a giant text": 1,
}
"""Hostile clients of each kind; the overload comes on top."""


@dataclass(frozen=True)
class HostileLoad:
    """seconds         beside the hostile clients
    alone_share     of these seconds without them, before; half as long to warm up, and after
    num_chats       ordinary ones, at a time
    think_s         of each between two questions
    max_concurrent  the router's; three times as many clients overload it
    max_per_client  of these places, for one tenant: each chat is one, and each kind of hostile clients
    long_prompt     tokens
    num_filling     long prompts before all else: they touch the whole cache once, which is memory that no client costs
    """

    seconds: float = 600.0
    alone_share: float = 0.5
    num_chats: int = 50
    think_s: float = 10.0
    max_concurrent: int = 64
    max_per_client: int = 4
    long_prompt: int = 32_000
    num_filling: int = 4
    crowd: Mapping[str, int] = field(default_factory=lambda: CROWD)

    @property
    def alone_s(self) -> float:
        return self.alone_share * self.seconds

    @property
    def full_crowd(self) -> dict[str, int]:
        return {**self.crowd, "overloads": 3 * self.max_concurrent}


@dataclass
class Phase:
    """The ordinary chats of one part of a run, and what the processes use at its end, when everything has ended.

    cores   processor seconds a second that each process took
    """

    name: str
    seconds: float
    answers: list[Answer]
    cores: dict[str, float]
    usages: dict[str, Usage] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        times = [self.first_token_s(0.5), self.first_token_s(0.95), self.gap_s(0.5), self.gap_s(0.95)]
        shown = "".join(f"{time_s * 1e3:>{width}.0f}" for time_s, width in zip(times, (17, 7, 9, 7), strict=True))
        counts = f"{self.num_right:>7}{len(self.wrong):>7}{self.num_given_up:>9}{self.errors.total():>7}"
        return f"{self.name:<10}{self.seconds:>5.0f}{counts}{shown}  {self.held or 'nothing'}"

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    @property
    def wrong(self) -> list[str]:
        return [answer.wrong for answer in self.answers if answer.wrong]

    @property
    def errors(self) -> Counter[str]:
        return Counter(error for answer in self.answers for error in answer.errors)

    @property
    def num_given_up(self) -> int:
        return sum(not answer.is_right and not answer.wrong for answer in self.answers)

    def first_token_s(self, share: float) -> float:
        times = [it.first_token_s - it.asked_s for it in self.answers if it.first_token_s is not None]
        return percentile(times, share) or 0.0

    def gap_s(self, share: float) -> float:
        return percentile((gap for answer in self.answers for gap in answer.gaps_s), share) or 0.0


@dataclass
class Report:
    """phases     without the hostile clients, with them, and without them again
    outcomes   of the hostile clients' attempts, by kind
    """

    load: HostileLoad
    phases: list[Phase] = field(default_factory=list)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def ratio(self, figure: str, share: float = 0.95) -> float:
        """Of the hostile phase to the quiet one: `first_token_s` or `gap_s`."""
        quiet, hostile = (getattr(phase, figure)(share) for phase in self.phases[:2])
        return float(hostile / quiet)

    def table(self) -> str:
        return "\n".join([*self._chats(), "", *self._processes(), "", *self._hostiles()])

    def _chats(self) -> Iterator[str]:
        yield f"{self.load.num_chats} chats, {self.load.think_s} s between two questions; times in ms"
        yield (
            f"{'phase':<10}{'s':>5}{'right':>7}{'wrong':>7}{'given up':>9}{'errors':>7}"
            f"{'first token p50':>17}{'p95':>7}{'gap p50':>9}{'p95':>7}  still held"
        )
        for phase in self.phases:
            yield str(phase)
            for error, count in phase.errors.most_common():
                yield f"    {count} errors: {error}"
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            ratios = self.ratio("first_token_s", share), self.ratio("gap_s", share)
            yield f"{name} with hostiles to without: first token {ratios[0]:.2f}, gap {ratios[1]:.2f}"

    def _processes(self) -> Iterator[str]:
        yield f"{'process':<10}" + "".join(
            f"{phase.name + ': MiB':>16}{'files':>7}{'threads':>9}" for phase in self.phases
        )
        for name in self.phases[0].usages:
            used = [phase.usages[name] for phase in self.phases]
            yield f"{name:<10}" + "".join(f"{u.rss_kib / 1024:>16.1f}{u.open_files:>7}{u.threads:>9}" for u in used)
        for phase in self.phases:
            cores = ", ".join(f"{name} {busy:.2f}" for name, busy in phase.cores.items())
            yield f"cores busy, {phase.name}: {cores}"

    def _hostiles(self) -> Iterator[str]:
        for kind, outcomes in self.outcomes.items():
            yield f"{kind:<26}" + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common(6))


async def run(
    model: Path, folder: Path, load: HostileLoad, seed: int = 0, say: Callable[[str], None] = lambda line: None
) -> Report:
    """Takes `load.seconds`, twice `load.alone_s`, and a minute. Judges nothing: that is the caller's.

    say   gets each part's row when the part is over: a run that is cut off has shown what it has
    """
    report = Report(load)
    long_model = _with_length(model, folder / model.name)
    async with _cluster(long_model, folder, load) as cluster:
        recall = await RecallLoad.against(cluster.url, model, seed, as_chats=True)
        habits = Habits(load.num_chats, load.think_s, patience_s=ASK_TIMEOUT_S, tenant_header=TENANT_HEADER)

        async def phase(name: str, seconds: float) -> None:
            before, spent_s = len(recall.answers), processor_s(pids)
            async with recall.running(habits):
                await asyncio.sleep(seconds)
                now_s = processor_s(pids)
            cores = {name: (now_s[name] - spent_s.get(name, 0.0)) / seconds for name in now_s}
            report.phases.append(Phase(name, seconds, recall.answers[before:], cores))
            say(str(report.phases[-1]))

        async def look() -> None:
            held = await asyncio.to_thread(settled, cluster.url)
            report.phases[-1].usages, report.phases[-1].held = usages(pids), held

        pids = {name: process.pid for name, process in cluster.processes.items()}
        where = urlsplit(cluster.url)
        assert where.hostname is not None and where.port is not None
        target = Target(where.hostname, where.port, load.long_prompt)
        await _fill(cluster.url, load)
        if load.num_filling:
            await _do_all_once(target)
        await phase("warm-up", load.alone_s / 2)
        report.phases.clear()
        await phase("quiet", load.alone_s)
        await look()

        def hear(said: tuple[str, str]) -> None:
            kind, outcome = said
            report.outcomes.setdefault(kind, Counter())[outcome] += 1

        async with client_process(partial(hostile_clients, target, load.full_crowd, seed), hear):
            await phase("hostile", load.seconds)
        await look()
        await phase("after", load.alone_s / 2)
        await look()
    return report


async def _fill(url: str, load: HostileLoad) -> None:
    dice = random.Random(0)
    async with httpx.AsyncClient(base_url=url, timeout=ASK_TIMEOUT_S) as http:
        for _ in range(load.num_filling):
            body = {"prompt": random_prompt(dice, load.long_prompt), "max_tokens": 2, "ignore_eos": True}
            reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text


async def _do_all_once(target: Target) -> None:
    """Each kind of costly work once, and so many giant texts at a time as parsing processes there are: what starts or
    grows with the first of its kind is no growth that hostile clients cause."""
    once = ["wants penalties", "wants prompt logprobs", "wants sixteen choices"]
    giants = [replace(target, tenant=f"giant {number}") for number in range(RouterConfig.parse_processes)]
    attempts = [KINDS[kind](replace(target, tenant=kind), random.Random(kind)) for kind in once]
    attempts += [KINDS["sends a giant text"](giant, random.Random(giant.tenant)) for giant in giants]
    statuses = await asyncio.gather(*attempts)
    assert statuses == ["200"] * len(once) + ["400"] * len(giants)


@asynccontextmanager
async def _cluster(model: Path, folder: Path, load: HostileLoad) -> AsyncIterator[Cluster]:
    places = load.max_concurrent
    router = {
        "max_concurrent": places,
        "max_queue": 4 * places,
        "max_concurrent_per_client": load.max_per_client,
        "client_header": TENANT_HEADER,
    }
    cluster = Cluster(model, folder, engine=ENGINE, router=router)
    await asyncio.to_thread(cluster.__enter__)
    try:
        yield cluster
    finally:
        await asyncio.to_thread(cluster.__exit__)


def _with_length(model: Path, folder: Path) -> Path:
    """A copy of the model that accepts prompts of MODEL_TOKENS."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MODEL_TOKENS}))
    return folder
