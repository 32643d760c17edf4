"""The same arrangement in the simulator, with the costs and the link that its nodes report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cluster.kinds import POLICY, Chunks, Kind
from benchmarks.router.cluster import Arrangement, SimulatedCluster
from benchmarks.router.drafts import NO_DRAFTS, Drafts
from benchmarks.router.host import HostCosts
from benchmarks.router.report import Result
from benchmarks.router.simulate import CHAT_BLOCK_TOKENS
from benchmarks.router.work import NodeShape
from benchmarks.router.workload import Chats, ChatShape
from headrace.cache.checkpoints import checkpoint_policy
from headrace.cache.eviction import Lru
from headrace.engine.graphs.captured_passes import PREFILL_ROWS
from headrace.step_costs import StepCosts
from headrace.wire.node_messages import Role
from router.routing.candidates import LinkCosts
from router.routing.plan import Objectives
from router.routing.policies.by_name import POLICIES

NODE_BLOCK_TOKENS = 16
"""Tokens in a block of the nodes that report figures; `CHAT_BLOCK_TOKENS` are in one of the simulator's."""


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


def simulated(
    kind: Kind,
    num_devices: int,
    shape: ChatShape,
    measured: Measured,
    chunks: Chunks,
    token_gap_s: float | None,
    host: HostCosts,
    seed: int = 0,
    drafts: Drafts = NO_DRAFTS,
) -> Result:
    """One cluster of this arrangement, with its part of the chats. `seed`: of how late steps are."""
    roles, *others = kind.clusters(num_devices)
    parts = 1 + len(others)
    mine = replace(shape, at_once=shape.at_once // parts, total=shape.total // parts)
    node = NodeShape(
        num_blocks=measured.num_blocks * NODE_BLOCK_TOKENS // CHAT_BLOCK_TOKENS,
        num_slots=measured.num_slots,
        block_size=CHAT_BLOCK_TOKENS,
        costs=measured.costs,
        checkpoints=checkpoint_policy("branch"),
        eviction=Lru.name,
        max_step_tokens=chunks.others,
        pass_rows=PREFILL_ROWS,
        drafts=drafts,
        host=host,
    )
    prefill = replace(node, costs=measured.prefill_costs or node.costs, max_step_tokens=chunks.prefill)
    arrangement = Arrangement(
        **Counter(roles), shape=node, prefill_shape=prefill, elastic=kind.is_elastic, link=measured.link
    )
    workload = Chats(mine, CHAT_BLOCK_TOKENS)
    cluster = SimulatedCluster(arrangement, POLICIES[POLICY], workload, Objectives(token_gap_s=token_gap_s), seed)
    cluster.run()
    return Result.of(cluster, 1.0)
