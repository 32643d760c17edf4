"""The choice of a decode node for a running request that moves: it receives everything, and computes nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate


def choose_receiver(
    candidates: Sequence[Candidate], sender: str, num_tokens: int, sent: Mapping[str, int]
) -> Candidate | None:
    """The node with the fewest answers among those that have room for one more of `num_tokens`; None: there is none.

    Nodes that are preferred for decoding come first.

    sender  the node that has the request now
    sent    how many requests have been sent to each node, by name, since it reported its load
    """
    with_room = [
        node
        for node in candidates
        if node.may_decode and node.name != sender and node.load.free_slots > sent.get(node.name, 0)
        and node.load.free_tokens > num_tokens * (1 + sent.get(node.name, 0))
    ]  # fmt: skip

    def burden(node: Candidate) -> tuple[bool, int, str]:
        answers = node.load.num_decoding + node.load.num_coming + sent.get(node.name, 0)
        return (not node.role.includes(Role.DECODE), answers, node.name)

    return min(with_room, key=burden, default=None)
