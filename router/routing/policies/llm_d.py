"""The weighted scorers of llm-d's endpoint picker.

    prefix   the prompt's share that is cached
    queue    (max - q) / (max - min) over the nodes; q: tokens of prompts that wait
    kv       the share of the node's blocks that no running request holds

Source: llm-d/llm-d-router's scorers and the usual weights of llm-d's guides, 3, 2 and 2; the profile of decode nodes
has no prefix scorer. Differences: llm-d counts requests that wait, not their tokens. It indexes attention blocks alone,
so that for a hybrid it counts some from which no node can resume, and so does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import at_least, refuse
from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.stages import two_stages


@dataclass(frozen=True)
class LlmD:
    """Highest sum of weighted scores, each from 0 to 1."""

    prefix_weight: float = 3.0
    queue_weight: float = 2.0
    kv_weight: float = 2.0

    def __post_init__(self) -> None:
        refuse(at_least(self, 0, "prefix_weight", "queue_weight", "kv_weight"))

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        of_role = {role: [node for node in candidates if node.role is role] for role in Role}
        queues = {role: [node.load.waiting_tokens for node in nodes] for role, nodes in of_role.items()}

        def decode(node: Candidate) -> float:
            return -(self.queue_weight * _queue_score(node, queues[node.role]) + self.kv_weight * _kv_score(node))

        def prefill(node: Candidate) -> float:
            return decode(node) - self.prefix_weight * node.hit.attention_tokens / max(request.num_tokens, 1)

        return two_stages(request, candidates, prefill=prefill, decode=decode, reason="score")


def _queue_score(node: Candidate, queues: Sequence[int]) -> float:
    longest, shortest = max(queues), min(queues)
    return 1.0 if longest == shortest else (longest - node.load.waiting_tokens) / (longest - shortest)


def _kv_score(node: Candidate) -> float:
    held = node.load.context_tokens + node.load.waiting_tokens
    return 1 - held / max(held + node.load.free_tokens, 1)
