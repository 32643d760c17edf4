"""Agents' chats on two GPUs: two undivided ones, one of each role, and the same two with elastic roles, in one run.

    python3 -m benchmarks gpu-arrangements [--load "48 chats"] [--gap-ms 10] [--devices cuda:0 cuda:1] [--out DIR]
    python -m benchmarks gpu-arrangements --devices cpu cpu --model tiny_models/headrace-tiny-qwen3.5 --scale 16 # trial

Does dividing the work pay at a bound on the gap between tokens? All clusters stand at the same time and take turns;
each request names the gap as its objective. `undivided` is two clusters of one node that does all, each with half of
the chats. Nodes of the role prefill have chunks of their own: only prompts wait for their steps. Beside each measured
row stands the same arrangement in the simulator, with the step costs and links that these nodes have measured about
themselves.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cluster.agents import PROCESSES, run_chats
from benchmarks.cluster.processes import NodeSettings, Processes, end_on_sigterm
from benchmarks.router.cluster import Arrangement, SimulatedCluster
from benchmarks.router.report import Result
from benchmarks.router.simulate import CHAT_BLOCK_TOKENS
from benchmarks.router.work import NodeShape
from benchmarks.router.workload import Chats, ChatShape
from benchmarks.shapes import SHAPES, write_shape
from benchmarks.timing import table_header, table_row
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.eviction import Lru
from headrace.engine.graphs import PREFILL_ROWS
from headrace.step_costs import StepCosts
from headrace.wire.node_messages import Role
from router.routing.candidates import LinkCosts
from router.routing.plan import Objectives
from router.routing.policies.by_name import POLICIES

START_TIMEOUT_S = 240.0
POLICY = "predicted"
LOADS = {
    "48 chats": ChatShape(48, 16384, 1024, 128, 8, 396),
    "96 chats": ChatShape(96, 16384, 1024, 128, 8, 492),
    "short turns": ChatShape(48, 16384, 256, 256, 8, 396),
    "long": ChatShape(48, 65536, 4096, 200, 8, 396),
    "decode-heavy": ChatShape(96, 1000, 0, 1000, 1, 492),
    "prefill-heavy": ChatShape(48, 30000, 0, 50, 1, 396),
}
"""By name: those of docs/benchmarks.md; of each the last 300 chats are measured."""
HEADER = table_header(
    "load", "gap", "arrangement", "req/s", "of undivided", "cached %", "first turns p50 / p95 ms",
    "later p50 / p95 ms", "gaps p50 / p95 / p99 ms", "ways",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """An arrangement of two devices: its clusters, the roles in each, and how they are simulated.

    roles   of each cluster's nodes, in the order of the devices that the cluster has
    """

    roles: Sequence[Sequence[str]]
    is_elastic: bool
    simulated: Mapping[str, int]


KINDS = {
    "undivided": Kind((("both",), ("both",)), False, {"both": 1}),
    "fixed 1P1D": Kind((("prefill", "decode"),), False, {"prefill": 1, "decode": 1}),
    "elastic": Kind((("prefill", "decode"),), True, {"prefill": 1, "decode": 1}),
}


def node_settings(device: str, cache_gib: float, chunk_tokens: int) -> dict[str, Any]:
    engine: dict[str, Any] = {"device": device, "cache_bytes": int(cache_gib * 2**30), "max_running": 128}
    if device == "cpu":
        return {"engine": {**engine, "threads": 1, "max_step_tokens": chunk_tokens}}
    engine |= {"load_format": "dummy", "state_dtype": "bfloat16", "max_model_tokens": 102_400}
    return {"engine": engine | {"max_step_tokens": chunk_tokens}, "staging_buffers": 8, "max_message_bytes": 64 << 20}


@dataclass(frozen=True)
class Chunks:
    """engine.max_step_tokens of nodes of the role prefill, and of all others."""

    prefill: int
    others: int

    def of(self, role: str) -> int:
        return self.prefill if role == Role.PREFILL.value else self.others


def clusters_of(kind: Kind, devices: Sequence[str], cache_gib: float, chunks: Chunks) -> list[NodeSettings]:
    """Each cluster's nodes; the devices go around."""
    left = iter(devices)
    return [
        {
            f"{role[0]}{number}": (role, node_settings(next(left), cache_gib, chunks.of(role)))
            for number, role in enumerate(roles)
        }
        for roles in kind.roles
    ]


def router_settings(kind: Kind) -> dict[str, Any]:
    roles = "elastic" if kind.is_elastic else "fixed"
    return {"max_concurrent": 512, "max_queue": 512, "heartbeat_s": 0.5, "policy": POLICY, "roles": roles}


# ------------------------------------------------------------ the same in the simulator


@dataclass(frozen=True)
class Measured:
    """Figures that the nodes of a cluster report about themselves.

    costs           of the node that has decoded most, which are fitted to both parts of a step
    prefill_costs   of a node of the role prefill, if there is one
    """

    costs: StepCosts
    prefill_costs: StepCosts | None
    link: LinkCosts
    num_blocks: int
    num_slots: int

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Measured:
        """From `/cluster`."""
        node = max(report["nodes"], key=lambda each: each["counters"].get("sampled_tokens", 0))
        prefills = (StepCosts(**each["costs"]) for each in report["nodes"] if each["role"] == Role.PREFILL.value)
        links = [each for each in report.get("links") or [] if each.get("bytes_per_s")]
        link = LinkCosts(links[0]["round_trip_s"], links[0]["bytes_per_s"]) if links else LinkCosts()
        costs, blocks, slots = StepCosts(**node["costs"]), node["blocks"]["total"], node["slots"]["total"]
        return cls(costs, next(prefills, None), link, blocks, slots)


def simulated(kind: Kind, shape: ChatShape, measured: Measured, chunks: Chunks, token_gap_s: float | None) -> Result:
    """One cluster of this arrangement, with its part of the chats."""
    parts = len(kind.roles)
    mine = replace(shape, at_once=shape.at_once // parts, total=shape.total // parts)
    node = NodeShape(
        num_blocks=measured.num_blocks * 16 // CHAT_BLOCK_TOKENS,
        num_slots=measured.num_slots,
        block_size=CHAT_BLOCK_TOKENS,
        costs=measured.costs,
        checkpoints=checkpoint_policy("branch"),
        eviction=Lru.name,
        max_step_tokens=chunks.others,
        pass_rows=PREFILL_ROWS,
    )
    prefill = replace(node, costs=measured.prefill_costs or node.costs, max_step_tokens=chunks.prefill)
    arrangement = Arrangement(
        **kind.simulated, shape=node, prefill_shape=prefill, elastic=kind.is_elastic, link=measured.link
    )
    workload = Chats(mine, CHAT_BLOCK_TOKENS)
    cluster = SimulatedCluster(arrangement, POLICIES[POLICY], workload, Objectives(token_gap_s=token_gap_s))
    cluster.run()
    return Result.of(cluster, 1.0)


# ------------------------------------------------------------ rows


@dataclass(frozen=True)
class Row:
    """One arrangement, measured or simulated. Times in seconds; `undivided` is the rate of the undivided pair."""

    load: str
    token_gap_s: float | None
    name: str
    requests_per_s: float
    undivided: float
    cached_share: float
    first_turns_s: Sequence[float]
    later_turns_s: Sequence[float]
    gaps_s: Sequence[float]
    ways: str = ""

    def __str__(self) -> str:
        gap = "any" if self.token_gap_s is None else f"{1e3 * self.token_gap_s:g} ms"
        ratio, cached = self.requests_per_s / self.undivided, 100 * self.cached_share
        times = (
            " / ".join(f"{1e3 * t:.1f}" for t in each) for each in (self.first_turns_s, self.later_turns_s, self.gaps_s)
        )
        return table_row(
            self.load, gap, self.name, f"{self.requests_per_s:.2f}", f"{ratio:.2f}", f"{cached:.1f}", *times, self.ways
        )


@dataclass
class Comparison:
    """One load at one gap in all arrangements: `measure` them in turn, the undivided pair first."""

    load: str
    chats: ChatShape
    token_gap_s: float | None
    chunks: Chunks
    deadline_s: float
    pool: Executor
    rates: list[tuple[float, float]] = field(default_factory=list)  # measured and simulated, of each arrangement

    def measure(self, name: str, clusters: Sequence[Processes], seed: int) -> tuple[Row, Row, Measured]:
        """The arrangement as it is and as it is simulated, and what its nodes report."""
        kind, urls = KINDS[name], [each.url for each in clusters]
        figures = run_chats(self.pool, urls, self.chats, self.token_gap_s, seed, self.deadline_s).figures()
        reported = Measured.of(clusters[0].cluster())
        twin = simulated(kind, self.chats, reported, self.chunks, self.token_gap_s)
        self.rates.append((figures.requests_per_s, twin.requests_per_s * len(clusters)))
        undivided = self.rates[0]
        ways = ", ".join(f"{way} {count}" for way, count in figures.paths.items())
        real = Row(
            self.load, self.token_gap_s, name, figures.requests_per_s, undivided[0], figures.cached_share,
            figures.first_turns_s, figures.later_turns_s, figures.gaps_s, ways,
        )  # fmt: skip
        first, later, gaps = twin.first_turns, twin.later_turns, twin.gaps
        beside = Row(
            self.load, self.token_gap_s, f"{name}, simulated", self.rates[-1][1], undivided[1], twin.cached_share,
            (first.p50, first.p95), (later.p50, later.p95), (gaps.p50, gaps.p95, gaps.p99),
        )  # fmt: skip
        return real, beside, reported


def start(
    stack: ExitStack, folder: Path, model: Path, kinds: Mapping[str, Sequence[NodeSettings]]
) -> dict[str, list[Processes]]:
    """Starts all clusters at once, each in a folder of its own."""
    return {
        name: [
            stack.enter_context(
                Processes(folder / f"{name} {number}", model, nodes, router=router_settings(KINDS[name]))
            )
            for number, nodes in enumerate(clusters)
        ]
        for name, clusters in kinds.items()
    }


def scaled(shape: ChatShape, scale: int) -> ChatShape:
    """Shorter prompts, and fewer chats: for a trial of this file."""
    at_once = max(2, shape.at_once // scale)
    return replace(shape, at_once=at_once, first=shape.first // scale, new=shape.new // scale, total=5 * at_once)


def main(
    load: Annotated[list[str], typer.Option(help=f"of {', '.join(LOADS)}")] = ["48 chats"],  # noqa: B006
    gap_ms: Annotated[list[float], typer.Option(help="the objective between two tokens; 0: none")] = [10.0],  # noqa: B006
    kind: Annotated[list[str], typer.Option(help=f"of {', '.join(KINDS)}")] = [*KINDS],  # noqa: B006
    devices: tuple[str, str] = ("cuda:0", "cuda:1"),
    shape: str = "granite-h-micro",
    model: Annotated[Path | None, typer.Option(help="a checkpoint's folder, instead of a shape")] = None,
    cache_gib: Annotated[float, typer.Option(help="of each node, three of which share a device")] = 28.0,
    chunk_tokens: Annotated[int, typer.Option(help="engine.max_step_tokens of nodes that decode")] = 2048,
    prefill_chunk_tokens: Annotated[int, typer.Option(help="the same of nodes of the role prefill")] = 4096,
    scale: Annotated[int, typer.Option(help="divides lengths and chats: a trial of this file")] = 1,
    deadline: Annotated[float, typer.Option(help="seconds for everything")] = 560.0,
    out: Annotated[Path | None, typer.Option(help="where rows.jsonl and the logs stay")] = None,
) -> None:
    """Agents' chats on two GPUs: undivided, one of each role, elastic."""
    end_on_sigterm()
    deadline_s = time.perf_counter() + deadline
    chunks = Chunks(prefill_chunk_tokens, chunk_tokens)
    kinds = {name: clusters_of(KINDS[name], devices, cache_gib, chunks) for name in kind}
    agents = ProcessPoolExecutor(PROCESSES, get_context("spawn"))
    with tempfile.TemporaryDirectory() as scratch, agents as pool, ExitStack() as stack:
        folder = out or Path(scratch) / "run"
        running = start(stack, folder, model or write_shape(SHAPES[shape], Path(scratch) / shape), kinds)
        for cluster in chain.from_iterable(running.values()):
            cluster.wait_ready(min(deadline_s, cluster.started_s + START_TIMEOUT_S))
        print(HEADER, flush=True)
        for seed, (load_name, gap) in enumerate(product(load, gap_ms)):
            chats = LOADS[load_name] if scale == 1 else scaled(LOADS[load_name], scale)
            comparison = Comparison(load_name, chats, gap / 1000 or None, chunks, deadline_s, pool)
            for name, clusters in running.items():
                real, beside, reported = comparison.measure(name, clusters, seed)
                print(real, beside, sep="\n", flush=True)
                with (folder / "rows.jsonl").open("a") as lines:
                    lines.write(json.dumps([asdict(real), asdict(beside), asdict(reported)]) + "\n")
