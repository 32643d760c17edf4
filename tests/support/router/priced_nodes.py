"""Nodes of the usual costs, as the policy `predicted` prices them, and its choice among them."""

from headrace.cache.hits import PrefixHit
from headrace.step_costs import StepCosts
from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate, LinkCosts, Load
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.predicted import Predicted

LINK = LinkCosts(latency_s=0.002, bytes_per_s=50e9)
REQUEST = RoutedRequest(number=0, num_tokens=16384, answer_tokens=128)


def node(name: str, role: Role = Role.DECODE, hit: int = 0, state: int | None = None, **load: object) -> Candidate:
    state_tokens = hit if state is None else state
    return Candidate(
        name,
        role,
        hit=PrefixHit(hit, state_tokens, min(hit, state_tokens)),
        load=Load(**{"free_tokens": 1 << 20, "free_slots": 256, "prompt_use": 1.0} | load),  # type: ignore[arg-type]
        costs=StepCosts(),
        chunk_tokens=8192,
        block_size=16,
        bytes_per_token=8192,
        state_bytes=50 << 20,
        links={other: LINK for other in ("a", "b", "c", "d", "p") if other != name},
    )


def busy(num_decoding: int, context: int = 16384) -> dict[str, object]:
    return {"num_decoding": num_decoding, "context_tokens": num_decoding * context}


def line(*lengths: int) -> dict[str, object]:
    counts = [0] * 20
    for length in lengths:
        counts[length.bit_length() - 1] += length
    return {
        "waiting_tokens": sum(lengths),
        "waiting_depths": sum(length * (length - 1) // 2 for length in lengths),
        "waiting_lengths": tuple(counts),
        "num_waiting": len(lengths),
    }


def choose(*nodes: Candidate, request: RoutedRequest = REQUEST) -> Plan:
    plan = Predicted().choose(request, sorted(nodes, key=lambda each: each.name))
    assert plan is not None
    return plan
