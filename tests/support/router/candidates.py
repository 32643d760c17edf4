"""Candidates for tests of routing policies, and a policy whose choice is known."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.cache.hits import PrefixHit
from headrace.step_costs import StepCosts
from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate, LinkCosts, Load
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.round_robin import RoundRobin


def candidate(name: str, role: Role = Role.BOTH, *, hit: int | PrefixHit = 0, load: Load | None = None) -> Candidate:
    """A node that reaches no other; `hit`: tokens that it holds for every cache group."""
    return Candidate(
        name=name,
        role=role,
        hit=hit if isinstance(hit, PrefixHit) else PrefixHit(hit, hit, hit),
        load=load or Load(free_tokens=100_000, free_slots=100),
        costs=StepCosts(),
        chunk_tokens=8192,
        block_size=16,
        bytes_per_token=8192,
        state_bytes=1 << 20,
    )


def linked(*nodes: Candidate) -> Sequence[Candidate]:
    """The same nodes, each of which can send to each other one."""
    return [
        node._replace(links={other.name: LinkCosts() for other in nodes if other is not node})
        for node in sorted(nodes, key=lambda node: node.name)
    ]


class AlwaysTheFirst:
    """The first nodes by name that can serve a request."""

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        return RoundRobin().choose(replace(request, number=0), candidates)
