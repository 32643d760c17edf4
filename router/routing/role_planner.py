"""Which node of fixed roles should change its role, by how far the nodes of each role were used lately. Pure.

    use of prefill nodes = share of them that have prompts to compute
    use of decode nodes  = share of their blocks or slots in use, whichever is more, less that of requests whose prompts
                           have yet to be computed: these hold room, but nothing decodes

If the nodes of one role were used by more than HIGH_USE, averaged over a whole window, and those of the other would be
by less than LOW_USE with one node less, the least used of these changes over. The window begins anew then, so that each
change shows its effect before the next; the distance of both bounds keeps a node from going back and forth. One node of
each role always stays. Nodes of both roles are left as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.wire.node_messages import NodeStatus, PoolStatus, Role

HIGH_USE = 0.9
LOW_USE = 0.7
LEAST_SAMPLES = 5
"""In a window: a single heartbeat may have met an odd moment."""


@dataclass(frozen=True)
class RoleUse:
    """How far the nodes of each role are used, from 0 to 1."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class RoleChange:
    """The planner's advice. `reason`: for people."""

    node: str
    role: Role
    reason: str


def use_now(nodes: Mapping[str, tuple[Role, NodeStatus]]) -> RoleUse:
    """Returns the use by the last heartbeats. `nodes`: role and status of each, by name."""
    prefill, decode = _of_role(nodes, Role.PREFILL), _of_role(nodes, Role.DECODE)
    num_busy = sum(status.waiting_tokens > 0 for status in prefill)
    num_prompts = sum(status.running + status.waiting for status in prefill)
    slots, blocks = _share([status.slots for status in decode]), _share([status.blocks for status in decode])
    num_held = sum(status.slots.in_use for status in decode)
    decoding = max(0.0, 1 - num_prompts / num_held) if num_held else 0.0
    return RoleUse(num_busy / len(prefill) if prefill else 0.0, max(slots, blocks) * decoding)


def plan_roles(use: RoleUse, nodes: Mapping[str, tuple[Role, NodeStatus]]) -> RoleChange | None:
    """Returns the change that the use asks for; None: the roles are well as they are."""
    for short, spare, needed, given in (
        (Role.PREFILL, Role.DECODE, use.prefill, use.decode),
        (Role.DECODE, Role.PREFILL, use.decode, use.prefill),
    ):
        givers = {name: status for name, (role, status) in nodes.items() if role is spare}
        if needed <= HIGH_USE or len(givers) < 2:
            continue
        with_less = given * len(givers) / (len(givers) - 1)
        if with_less < LOW_USE:
            least = min(givers, key=lambda name: (givers[name].waiting_tokens, givers[name].slots.in_use, name))
            reason = (
                f"{short.value} nodes are used by {needed:.0%}, and {spare.value} nodes would be by {with_less:.0%} "
                "with one less"
            )
            return RoleChange(least, short, reason)
    return None


class RolePlanner:
    """Advises a change when a whole window of samples asks for it."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, RoleUse]] = deque()
        self._began_s: float | None = None

    def sample(self, now_s: float, nodes: Mapping[str, tuple[Role, NodeStatus]]) -> RoleChange | None:
        """Takes the statuses of this moment; returns the change that is due."""
        if self._began_s is None:
            self._began_s = now_s
        self._samples.append((now_s, use_now(nodes)))
        while self._samples[0][0] < now_s - self._window_s:
            self._samples.popleft()
        if now_s - self._began_s < self._window_s or len(self._samples) < LEAST_SAMPLES:
            return None
        change = plan_roles(_mean([use for _, use in self._samples]), nodes)
        if change is not None:
            self._samples.clear()
            self._began_s = now_s
        return change


def _of_role(nodes: Mapping[str, tuple[Role, NodeStatus]], role: Role) -> list[NodeStatus]:
    return [status for each, status in nodes.values() if each is role]


def _share(pools: Sequence[PoolStatus]) -> float:
    total = sum(pool.total for pool in pools)
    return sum(pool.in_use for pool in pools) / total if total else 0.0


def _mean(uses: Sequence[RoleUse]) -> RoleUse:
    return RoleUse(sum(use.prefill for use in uses) / len(uses), sum(use.decode for use in uses) / len(uses))
