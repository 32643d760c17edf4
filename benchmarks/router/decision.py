"""The router's own work for one decision: hits of all nodes, a snapshot, the policy's choice, the ledger's entry.

    python -m benchmarks router-decision [--policy NAME ...]

A prompt of 32,000 tokens in blocks of 16, its hashing left out. Eight nodes hold some part of it with a checkpoint
every 1,024 tokens or so, of the others half its first 4,096 tokens. Each has measured its links to all others, and has
up to 48 requests of this router under way, 2,000 in all; one of eight is in prefill. Times are of the thread's
processor, medians and the 99th percentile: other processes do not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from headrace.cache.hashing import prefix_keys
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.cache.types import PrefixKey
from headrace.step_costs import TIMED_STEPS
from headrace.wire.cache_updates import CacheSnapshotPart
from headrace.wire.node_messages import LinkStatus, NodeInfo, NodeStatus, PoolStatus, Role
from router.cluster.cluster_index import ClusterIndex
from router.routing.ledger import Ledger
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.by_name import POLICIES
from router.routing.snapshots import Snapshots

PROMPT_TOKENS, BLOCK_TOKENS = 32_000, 16
BLOCKS_A_CHECKPOINT = 64
REQUESTS_A_NODE = 48
HOLDERS, SYSTEM_TOKENS = 8, 4096
STATES = StateGroup(36, (4352, 3), (32, 64, 128))
LAYOUT = CacheLayout("model", "bfloat16", "float32", BLOCK_TOKENS, (AttentionGroup(4, 8, 128),), (STATES,))
TITLES = ("nodes", "policy", "hits alone", "snapshot", "choice", "ledger", "decision", "p99")


def main(
    policy: Annotated[list[str], typer.Option(help="names of policies")] = ["predicted", "round_robin"],  # noqa: B006
    nodes: Annotated[list[int], typer.Option(help="numbers of nodes")] = [8, 64, 1000],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="decisions of a round")] = 200,
    rounds: Annotated[int, typer.Option(help="the quickest is printed: others share the processor's caches")] = 5,
) -> None:
    """Prints microseconds for each number of nodes and each policy: medians of the round that was quickest."""
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    keys = prefix_keys(range(PROMPT_TOKENS), BLOCK_TOKENS)
    for number in nodes:
        cluster = Cluster(number, keys)
        for name in policy:
            timed = [[cluster.decide(name, turn * repeats + each) for each in range(repeats)] for turn in range(rounds)]
            quickest = min(timed, key=lambda rows: sorted(row[-1] for row in rows)[repeats // 2])
            medians = [sorted(column)[repeats // 2] for column in zip(*quickest, strict=True)]
            largest = sorted(row[-1] for row in quickest)[int(repeats * 0.99)]
            cells = (f"{seconds * 1e6:,.0f} us" for seconds in (*medians, largest))
            print(f"| {number} | {name} | {' | '.join(cells)} |")


class Cluster:
    """Nodes of all roles that have reported, with requests under way."""

    def __init__(self, number: int, keys: Sequence[PrefixKey]) -> None:
        rng = random.Random(number)
        self.keys = {BLOCK_TOKENS: keys}
        self.index, self.ledger = ClusterIndex(), Ledger()
        self.snapshots = Snapshots(self.index, self.ledger, roles_are_fixed=False)
        self.roles = {f"n{i:04}": rng.choice((Role.PREFILL, Role.DECODE, Role.BOTH)) for i in range(number)}
        pool = PoolStatus(65536, 20000, 40000, 5536, 40000)
        names = list(self.roles)
        for name, role in self.roles.items():
            info = NodeInfo(name, role, 1, f"{name}:1", f"{name}:2", LAYOUT, 131072, 65536, 512, 1, "cuda", 1 << 20, 2)
            links = tuple(LinkStatus(peer, ("cuda_ipc",), 1e-4, 3e10) for peer in names if peer != name)
            status = NodeStatus(20, 2, pool, pool, {TIMED_STEPS: 99.0}, links=links)
            self.snapshots.heartbeat(info, status, 0.0)
            depth = rng.choice((0, rng.randint(0, len(keys)), len(keys)))
            if len(self.index) >= HOLDERS:  # the others have seen the system prompt at most
                depth = rng.choice((0, SYSTEM_TOKENS // BLOCK_TOKENS))
            checkpoints = [keys[i] for i in range(0, depth, BLOCKS_A_CHECKPOINT) if rng.random() < 0.8]
            part = CacheSnapshotPart(1, 1, tuple(keys[:depth]), tuple(checkpoints), True)
            self.index.add((name, 1), BLOCK_TOKENS).apply(part)
        self._start(rng)

    def _start(self, rng: random.Random) -> None:
        candidates = self.snapshots.take(self.roles, {}, PROMPT_TOKENS, 0.0)
        names = list(self.roles)
        for i in range(min(REQUESTS_A_NODE * len(names), 2000)):
            number, request = -1 - i, RoutedRequest(-1 - i, rng.randint(100, 30_000), 200)
            other = {BLOCK_TOKENS: prefix_keys(range(i, i + request.num_tokens), BLOCK_TOKENS)}
            plan = Plan(rng.choice(names), rng.choice(names))
            self.ledger.sent(request, plan, candidates, other, boundaries=(64, request.num_tokens // 2))
            self.ledger.reserved(number)
            self.ledger.started(number, 0.0)
            if i % 8:
                self.ledger.prompt_computed(number, 0.0)

    def decide(self, policy: str, number: int) -> tuple[float, float, float, float, float]:
        """Seconds of the hits alone, of the whole snapshot, of the choice and of the ledger's entry; and in all."""
        now_s = 0.5 + number
        began_s = time.thread_time()
        self.index.match(self.keys, max_tokens=PROMPT_TOKENS - 1)
        matched_s = time.thread_time()
        candidates = self.snapshots.take(self.roles, self.keys, PROMPT_TOKENS, now_s)
        taken_s = time.thread_time()
        request = RoutedRequest(number, PROMPT_TOKENS, 200)
        plan = POLICIES[policy].choose(request, candidates)
        chosen_s = time.thread_time()
        assert plan is not None
        self.ledger.sent(request, plan, candidates, self.keys)
        ended_s = time.thread_time()
        self.ledger.ended(number, now_s)
        return (
            matched_s - began_s,
            taken_s - matched_s,
            chosen_s - taken_s,
            ended_s - chosen_s,
            ended_s - matched_s,
        )
