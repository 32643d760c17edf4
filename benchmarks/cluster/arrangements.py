"""Agents' chats on GPUs: undivided ones, one of each role, and the same with elastic roles, in one run.

    python3 -m benchmarks gpu-arrangements [--load "48 chats"] [--gap-ms 10] [--out DIR]
    python3 -m benchmarks gpu-arrangements --load "48 chats:10" --load decode-heavy:0 --load "short turns:0:240"
    python3 -m benchmarks gpu-arrangements --device cuda:0 --device cuda:1 --device cuda:2 --device cuda:3
    python3 -m benchmarks gpu-arrangements --shape qwen35-4b --drafts 0 --drafts 3 --one-by-one --state-share 0.25
    python -m benchmarks gpu-arrangements --device cpu --device cpu --model tiny_models/headrace-tiny-qwen3.5 --scale 16

Does dividing the work pay at a bound on the gap between tokens? All clusters stand at the same time and take turns,
or each starts in its turn (`--one-by-one`) and has the devices' memory to itself; each request names the gap as its
objective, and with `--later-first-ms` each turn but a chat's first one a time to its first token. `undivided` is as
many clusters of one node that does all, each with its part of the chats; with four GPUs `fixed` and `elastic` have
two nodes of each role. Nodes of the role prefill have chunks of their own: only prompts wait for their steps. After
the measured rows come the same arrangements in the simulator, with the step costs and links that these nodes have
measured about themselves. With `--probe-steps` each node without drafts ends its log, in `--out`, with tables of its
steps: what they took, what the host did meanwhile, and which were the slowest.

With `--drafts 3` all nodes have `speculation: {drafter: mtp, max_drafts: 3, count: auto}`, so the shape needs an MTP
layer (qwen35-4b). Which drafts are right is pinned (benchmarks/pinned_drafts.py): 3.39 tokens a step where all 3 are
checked, 2.73 where 2 are; the column counts what came of it, with the steps that have no drafts. The simulator
chooses drafts by the same rule, and has all answers get the mean of what a step's give.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cluster.agents import PROCESSES, run_chats
from benchmarks.cluster.kinds import KINDS, Caches, Chunks, Contender, clusters_of, router_settings
from benchmarks.cluster.processes import NodeSettings, Processes, end_on_sigterm
from benchmarks.cluster.twin import Measured, simulated
from benchmarks.pinned_drafts import GOLDEN
from benchmarks.router.drafts import Drafts
from benchmarks.router.host import MEASURED_HOST, HostCosts
from benchmarks.router.report import Result
from benchmarks.router.workload import ChatShape
from benchmarks.shapes import SHAPES, write_shape
from benchmarks.timing import table_header, table_row

START_TIMEOUT_S = 240.0
SIMULATED_RUNS = 5
PINNED_NODE, PROBED_NODE = "benchmarks.cluster.pinned_node", "benchmarks.cluster.probed_node"
LOADS = {
    "48 chats": ChatShape(48, 16384, 1024, 128, 8, 396),
    "96 chats": ChatShape(96, 16384, 1024, 128, 8, 492),
    "short turns": ChatShape(48, 16384, 256, 256, 8, 396),
    "long": ChatShape(48, 65536, 4096, 200, 8, 396),
    "decode-heavy": ChatShape(96, 1000, 0, 1000, 1, 492),
    "prefill-heavy": ChatShape(48, 30000, 0, 50, 1, 396),
}
"""By name: those of docs/benchmarks/gpu-clusters.md; of each the last 300 chats are measured."""
HEADER = table_header(
    "load", "gap / later first", "arrangement", "req/s", "of undivided", "of no drafts", "tokens a step", "cached %",
    "first turns p50 / p95 ms", "later p50 / p95 ms", "gaps p50 / p95 / p99 ms", "ways",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One arrangement, measured or simulated. Times in seconds.

    undivided             rate of the undivided nodes with as many drafts
    without               rate of the same arrangement without drafts; None: it has none, or that was not measured
    tokens_a_step         of a sequence
    later_first_token_s   that each later turn asked for
    """

    load: str
    token_gap_s: float | None
    name: str
    requests_per_s: float
    undivided: float
    without: float | None
    tokens_a_step: float | None
    cached_share: float
    first_turns_s: Sequence[float]
    later_turns_s: Sequence[float]
    gaps_s: Sequence[float]
    ways: str = ""
    later_first_token_s: float | None = None

    def __str__(self) -> str:
        asked = f"{_asked(self.token_gap_s)} / {_asked(self.later_first_token_s)}"
        rate = self.requests_per_s
        ratios = (_cell(None if base is None else rate / base) for base in (self.undivided, self.without))
        cached, tokens = f"{100 * self.cached_share:.1f}", _cell(self.tokens_a_step)
        times = (
            " / ".join(f"{1e3 * t:.1f}" for t in each) for each in (self.first_turns_s, self.later_turns_s, self.gaps_s)
        )
        return table_row(self.load, asked, self.name, f"{rate:.2f}", *ratios, tokens, cached, *times, self.ways)


def _asked(objective_s: float | None) -> str:
    return "any" if objective_s is None else f"{1e3 * objective_s:g} ms"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@dataclass(frozen=True)
class Sampled:
    """Tokens that the nodes of some clusters have drawn, and those of them that had been drafted."""

    tokens: float
    accepted: float

    @classmethod
    def of(cls, clusters: Sequence[Processes]) -> Sampled:
        counters = [node["counters"] for each in clusters for node in each.cluster()["nodes"]]
        tokens, accepted = (sum(each.get(f"{name}_tokens", 0) for each in counters) for name in ("sampled", "accepted"))
        return cls(tokens, accepted)

    def tokens_a_step(self, before: Sampled) -> float:
        """Tokens of a sequence in a step: each step gives one, and the accepted ones."""
        tokens = self.tokens - before.tokens
        return tokens / (tokens - (self.accepted - before.accepted))


@dataclass(frozen=True)
class Work:
    """Chats with a name, and the gap between tokens that each request asks for; None: any."""

    load: str
    chats: ChatShape
    token_gap_s: float | None

    def asking(self, later_first_ms: float) -> Work:
        """The same with an objective for the first token of later turns; 0: none."""
        return replace(self, chats=replace(self.chats, later_first_token_s=later_first_ms / 1e3 or None))


@dataclass
class Comparison:
    """One work: `measure` its contenders in turn, of each number of drafts the undivided nodes first."""

    work: Work
    num_devices: int
    seed: int
    deadline_s: float
    pool: Executor
    rates: dict[Contender, float] = field(default_factory=dict)
    reported: dict[Contender, Measured] = field(default_factory=dict)

    def measure(self, contender: Contender, clusters: Sequence[Processes]) -> Row:
        """The arrangement as it is; what its nodes report is noted, too."""
        before = Sampled.of(clusters)
        urls, work = [each.url for each in clusters], self.work
        figures = run_chats(self.pool, urls, work.chats, work.token_gap_s, self.seed, self.deadline_s).figures()
        tokens_a_step = Sampled.of(clusters).tokens_a_step(before)
        self.reported[contender] = Measured.of(clusters[0].cluster())
        self.rates[contender] = figures.requests_per_s
        ways = ", ".join(f"{way} {count}" for way, count in figures.paths.items())
        return Row(
            work.load, work.token_gap_s, contender.name, figures.requests_per_s, *_bases(contender, self.rates),
            tokens_a_step, figures.cached_share, figures.first_turns_s, figures.later_turns_s, figures.gaps_s, ways,
            work.chats.later_first_token_s,
        )  # fmt: skip

    def simulated(self, chunks: Chunks) -> Iterator[Row]:
        """The measured arrangements, by what their nodes reported."""
        rates: dict[Contender, float] = {}
        for contender, reported in self.reported.items():
            row = simulated_row(self.work, contender, self.num_devices, reported, chunks, rates)
            rates[contender] = row.requests_per_s
            yield row


def _bases(contender: Contender, rates: Mapping[Contender, float]) -> tuple[float, float | None]:
    """The rates of the first arrangement with as many drafts, the undivided nodes, and of the same one without any."""
    undivided = next(rate for each, rate in rates.items() if each.num_drafts == contender.num_drafts)
    return undivided, rates.get(replace(contender, num_drafts=0)) if contender.num_drafts else None


def simulated_row(
    work: Work,
    contender: Contender,
    num_devices: int,
    measured: Measured,
    chunks: Chunks,
    rates: Mapping[Contender, float],
    host: HostCosts = MEASURED_HOST,
) -> Row:
    """An arrangement in the simulator. `rates`: of those simulated before.

    On average over SIMULATED_RUNS, in which steps are late at random: first turns depend on when a line begins to grow.
    """
    kind, num_runs = KINDS[contender.kind], SIMULATED_RUNS if measured.costs.late_s else 1
    drafts = Drafts(tuple(GOLDEN[: contender.num_drafts]))
    twins = [
        simulated(kind, num_devices, work.chats, measured, chunks, work.token_gap_s, host, seed, drafts)
        for seed in range(num_runs)
    ]

    def mean(figure: Callable[[Result], float]) -> float:
        return statistics.fmean(map(figure, twins))

    rate = mean(lambda twin: twin.requests_per_s) * len(kind.clusters(num_devices))
    tokens_a_step = mean(lambda twin: twin.tokens_a_step)
    return Row(
        work.load, work.token_gap_s, f"{contender.name}, simulated", rate,
        *_bases(contender, {**rates, contender: rate}), tokens_a_step,
        mean(lambda twin: twin.cached_share),
        (mean(lambda twin: twin.first_turns.p50), mean(lambda twin: twin.first_turns.p95)),
        (mean(lambda twin: twin.later_turns.p50), mean(lambda twin: twin.later_turns.p95)),
        (mean(lambda twin: twin.gaps.p50), mean(lambda twin: twin.gaps.p95), mean(lambda twin: twin.gaps.p99)),
        later_first_token_s=work.chats.later_first_token_s,
    )  # fmt: skip


def start(
    stack: ExitStack, folder: Path, model: Path, contenders: Mapping[Contender, Sequence[NodeSettings]], plain: str
) -> dict[Contender, list[Processes]]:
    """Starts all clusters at once, each in a folder of its own. `plain`: the module of nodes without drafts."""
    return {
        contender: [
            stack.enter_context(
                Processes(
                    folder / f"{contender.name} {number}",
                    model,
                    nodes,
                    router=router_settings(KINDS[contender.kind]),
                    node_module=PINNED_NODE if contender.num_drafts else plain,
                )
            )
            for number, nodes in enumerate(clusters)
        ]
        for contender, clusters in contenders.items()
    }


def sized(shape: ChatShape, scale: int, total: int | None) -> ChatShape:
    """So many chats in all; for a trial of this file shorter prompts and fewer chats."""
    if scale > 1:
        at_once = max(2, shape.at_once // scale)
        first, new = shape.first // scale, shape.new // scale
        shape = replace(shape, at_once=at_once, first=first, new=new, total=5 * at_once)
    return shape if total is None else replace(shape, total=total)


def works(load: str, gaps_ms: Sequence[float], total: int | None, scale: int = 1) -> list[Work]:
    """The works that NAME[:GAP[:CHATS]] asks for; `gaps_ms` and `total` count where it names none of its own."""
    name, *own = load.split(":")
    if name not in LOADS or len(own) > 2:
        raise typer.BadParameter(f"{load!r} is not NAME[:GAP_MS[:CHATS]] of one of {', '.join(LOADS)}")
    try:
        gaps_ms = [float(own[0])] if own else gaps_ms
        total = int(own[1]) if len(own) == 2 else total
    except ValueError:
        raise typer.BadParameter(f"{load!r}: a gap is in ms, as 10, and chats are counted, as 300") from None
    return [Work(name, sized(LOADS[name], scale, total), gap / 1000 or None) for gap in gaps_ms]


def main(
    load: Annotated[list[str], typer.Option(help=f"NAME[:GAP_MS[:CHATS]] of {', '.join(LOADS)}")] = ["48 chats"],  # noqa: B006
    gap_ms: Annotated[list[float], typer.Option(help="the objective between two tokens; 0: none")] = [10.0],  # noqa: B006
    later_first_ms: Annotated[float, typer.Option(help="that of later turns for their first token; 0: none")] = 0.0,
    kind: Annotated[list[str], typer.Option(help=f"of {', '.join(KINDS)}")] = [*KINDS],  # noqa: B006
    drafts: Annotated[
        list[int], typer.Option(min=0, max=len(GOLDEN), help="of a sequence in a step at most; 0: none")
    ] = [0],  # noqa: B006
    device: Annotated[list[str], typer.Option(help="of one node each; two or four")] = ["cuda:0", "cuda:1"],  # noqa: B006
    shape: str = "granite-h-micro",
    model: Annotated[Path | None, typer.Option(help="a checkpoint's folder, instead of a shape")] = None,
    cache_gib: Annotated[float, typer.Option(help="of each node; one of each arrangement shares a device")] = 28.0,
    state_share: Annotated[float | None, typer.Option(help="engine.state_share")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="engine.max_step_tokens of nodes that decode")] = 2048,
    prefill_chunk_tokens: Annotated[int, typer.Option(help="the same of nodes of the role prefill")] = 4096,
    scale: Annotated[int, typer.Option(help="divides lengths and chats: a trial of this file")] = 1,
    chats: Annotated[int | None, typer.Option(help="in all, instead of the load's own number")] = None,
    probe_steps: Annotated[
        bool, typer.Option("--probe-steps", help="nodes without drafts log tables of steps")
    ] = False,
    one_by_one: Annotated[bool, typer.Option("--one-by-one", help="arrangements start in turn")] = False,
    deadline: Annotated[float, typer.Option(help="seconds for everything")] = 560.0,
    out: Annotated[Path | None, typer.Option(help="where rows.jsonl and the logs stay")] = None,
) -> None:
    """Agents' chats on GPUs: undivided, one of each role, elastic."""
    end_on_sigterm()
    deadline_s = time.perf_counter() + deadline
    asked = [work.asking(later_first_ms) for each in load for work in works(each, gap_ms, chats, scale)]
    chunks, caches = Chunks(prefill_chunk_tokens, chunk_tokens), Caches(cache_gib, state_share)
    contenders = {
        each: clusters_of(each, device, caches, chunks)
        for each in (Contender(name, num_drafts) for num_drafts, name in product(drafts, kind))
    }
    rounds = [{each: clusters} for each, clusters in contenders.items()] if one_by_one else [contenders]
    agents = ProcessPoolExecutor(PROCESSES, get_context("spawn"))
    with tempfile.TemporaryDirectory() as scratch, agents as pool:
        folder = out or Path(scratch) / "run"
        model = model or write_shape(SHAPES[shape], Path(scratch) / shape)
        comparisons = [Comparison(work, len(device), seed, deadline_s, pool) for seed, work in enumerate(asked)]
        print(HEADER, flush=True)
        for standing in rounds:
            with ExitStack() as stack:
                running = start(stack, folder, model, standing, PROBED_NODE if probe_steps else "node")
                for cluster in chain.from_iterable(running.values()):
                    stack.callback(cluster.terminate)  # all of them before the first is waited for
                for cluster in chain.from_iterable(running.values()):
                    cluster.wait_ready(min(deadline_s, cluster.started_s + START_TIMEOUT_S))
                for comparison, (contender, clusters) in product(comparisons, running.items()):
                    row = comparison.measure(contender, clusters)
                    print(row, flush=True)
                    with (folder / "rows.jsonl").open("a") as lines:
                        lines.write(json.dumps([asdict(row), asdict(comparison.reported[contender])]) + "\n")
        for row in chain.from_iterable(comparison.simulated(chunks) for comparison in comparisons):
            print(row, flush=True)
