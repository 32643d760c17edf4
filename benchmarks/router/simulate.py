"""Routing policies on request traces and agents' chats, simulated.

    python -m benchmarks router --trace FILE [--trace FILE ...] [--policy NAME ...] [--nodes 8 ...] [--speed 1 ...]
    python -m benchmarks router --trace FILE --policy predicted --speed 8 --speed 16 --speed 32 --plot PNG
    python -m benchmarks router --chats 48 --nodes 2 --nodes 1P1D --token-gap-ms 10

Discrete events: the real policy chooses, the real cache code keeps and evicts, the real scheduler cuts prompts into
chunks; steps take what `StepCosts` says, hand-overs what links take (docs/routing.md). A node holds 1.05 M tokens, as
in the replays by Dynamo's own mock engine that the figures of docs/benchmarks/routing.md stand beside.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import process_time
from typing import Annotated

import typer

from benchmarks.router.cluster import Arrangement, SimulatedCluster
from benchmarks.router.plot import plot
from benchmarks.router.report import HEADER, Result, cells
from benchmarks.router.work import NodeShape
from benchmarks.router.workload import Chats, ChatShape, MooncakeTrace, Workload
from benchmarks.timing import table_header, table_row
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.eviction import Lru
from headrace.engine.pool_sizes import TOKENS_PER_STATE
from headrace.step_costs import StepCosts
from router.routing.plan import NO_OBJECTIVES, Objectives
from router.routing.policies.by_name import POLICIES

NODE_TOKENS = 1 << 20
CHAT_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Setting:
    """One run. `trace` or `chats`; `is_hybrid` False: a model of attention alone, whose every block is resumed from."""

    nodes: str
    policy: str
    trace: Path | None = None
    speed: float = 1.0
    chats: ChatShape | None = None
    is_hybrid: bool = False
    eviction: str = Lru.name
    node_tokens: int = NODE_TOKENS
    objectives: Objectives = NO_OBJECTIVES
    is_fair: bool = True

    def workload(self) -> Workload:
        if self.chats is not None:
            return Chats(self.chats, CHAT_BLOCK_TOKENS)
        assert self.trace is not None, "a trace or chats"
        return MooncakeTrace.read(self.trace, self.speed)


def arrangement(nodes: str, shape: NodeShape) -> Arrangement:
    """From `8` (undivided nodes), `4P4D` (fixed roles) or `4P4D~` (elastic). Raises ValueError for anything else."""
    match = re.fullmatch(r"(?:(\d+)P(\d+)D)?(\d+)?(~?)", nodes)
    if match is None or nodes in ("", "~"):
        raise ValueError(f"nodes {nodes!r}: give a number of undivided nodes, 8, or of each role, 4P4D, elastic: 4P4D~")
    prefill, decode, both = (int(each or 0) for each in match.groups()[:3])
    return Arrangement(both, prefill, decode, shape=shape, elastic=bool(match[4]))


def simulate(setting: Setting) -> Result:
    """Runs one setting and checks every node's cache after it."""
    workload = setting.workload()
    shape = NodeShape(
        num_blocks=setting.node_tokens // workload.block_size,
        num_slots=setting.node_tokens // TOKENS_PER_STATE if setting.is_hybrid else 1024,
        block_size=workload.block_size,
        costs=StepCosts(),
        checkpoints=checkpoint_policy("branch" if setting.is_hybrid else "none"),
        eviction=setting.eviction,
        is_hybrid=setting.is_hybrid,
        is_fair=setting.is_fair,
    )
    nodes = arrangement(setting.nodes, shape)
    cluster = SimulatedCluster(nodes, POLICIES[setting.policy], workload, setting.objectives)
    gc.collect()
    gc.disable()  # as good as nothing in a run is garbage, and a tenth of its time would go into looking for some
    start_s = process_time()
    cluster.run()
    cpu_s = process_time() - start_s
    gc.enable()
    result = Result.of(cluster, cpu_s)
    for node in cluster.nodes:
        node.cache.check()
    return result


def main(
    trace: Annotated[list[Path], typer.Option(help="Mooncake .jsonl; may be repeated")] = [],  # noqa: B006
    chats: Annotated[int, typer.Option(help="agents' chats at once, instead of a trace")] = 0,
    policy: list[str] = [*POLICIES],  # noqa: B006
    nodes: Annotated[list[str], typer.Option(help="8 undivided ones, 4P4D, or 4P4D~, elastic")] = ["8"],  # noqa: B006
    speed: Annotated[list[float], typer.Option(help="of a trace")] = [1.0],  # noqa: B006
    hybrid: Annotated[bool, typer.Option(help="with states; else a model of attention alone")] = False,
    node_tokens: Annotated[int, typer.Option(help="that a node holds")] = NODE_TOKENS,
    eviction: Annotated[str, typer.Option(help="docs/cache-policy.md; lru is what others have")] = Lru.name,
    token_gap_ms: Annotated[float | None, typer.Option(help="bounds the prompts in a step")] = None,
    first_come: Annotated[bool, typer.Option(help="prompts in order of arrival, not by the real scheduler")] = False,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="write the figure here")] = None,
    jobs: int = os.cpu_count() or 1,
) -> None:
    """Routing policies on request traces and agents' chats, simulated."""
    objectives = Objectives(token_gap_s=None if token_gap_ms is None else token_gap_ms / 1000)
    loads: Sequence[tuple[Path | None, float]] = [(None, 1.0)] if chats else list(product(trace, speed))
    settings = [
        Setting(
            each,
            name,
            path,
            times,
            ChatShape(at_once=chats, total=10 * chats) if chats else None,
            hybrid or bool(chats),
            eviction,
            node_tokens=node_tokens,
            objectives=objectives,
            is_fair=not first_come,
        )
        for (path, times), each, name in product(loads, nodes, policy)
    ]
    print(table_header(*HEADER))
    runs = []
    with ProcessPoolExecutor(jobs) as workers:
        for setting, result in zip(settings, workers.map(simulate, settings), strict=True):
            load = f"{chats} chats" if setting.trace is None else setting.trace.stem.removesuffix("_trace")
            print(table_row(load, f"x{setting.speed:g}", setting.nodes, setting.policy, *cells(result)), flush=True)
            runs.append((f"{load}, {setting.nodes}", setting.policy, setting.speed, result))
    if plot_to:
        plot(plot_to, runs)
