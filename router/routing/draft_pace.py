"""How fast the answers of a node are that drafts, beside one that does not. Pure: no clock.

    steps of answers = tokens sampled - drafts that were right          each step gives an answer one token without them
    drafted step     = plain step + check_s * share of steps with drafts + draft_s * drafts in a step
    stretch          = drafted step / plain step            at most 1 + drafts of an answer in a step
    pace             = stretch * steps of answers / tokens sampled

by what the node has counted of late, and by its own step costs for the answers that it has now. So a token of an answer
takes `pace` times as long as a step without drafts: 1 where nothing is drafted, less where drafts pay. Prompts come
between steps that take `stretch` times as long. The bound is for nodes that hardly generate: of their answers the fit
knows little, and may take a step without drafts for as good as nothing.
"""

from __future__ import annotations

import math

from headrace.step_costs import TIMED_STEPS, StepShape
from headrace.wire.node_messages import NodeStatus
from router.routing.candidates import RECENT_S

COUNTERS = SAMPLED, ACCEPTED, DRAFTED, CHECKS, STEPS = (
    "sampled_tokens", "accepted_tokens", "drafted_tokens", "draft_steps", TIMED_STEPS,
)  # fmt: skip


class DraftPace:
    """`pace` and `stretch`, by the heartbeats of one node so far; 1 before it has drafted."""

    def __init__(self) -> None:
        self.pace = self.stretch = 1.0
        self._counted: dict[str, float] | None = None
        self._lately = dict.fromkeys(COUNTERS, 0.0)

    def heartbeat(self, status: NodeStatus, seconds: float) -> None:
        """Takes over what the node has counted, `seconds` after the last time."""
        counted = {name: status.counters.get(name, 0.0) for name in COUNTERS}
        before, self._counted = self._counted, counted
        if before is None:
            return
        kept, lately = math.exp(-seconds / RECENT_S), self._lately
        for name in COUNTERS:
            lately[name] = kept * lately[name] + counted[name] - before[name]
        steps = lately[SAMPLED] - lately[ACCEPTED]
        if not lately[DRAFTED]:
            self.pace = self.stretch = 1.0
        elif status.num_decoding and steps > 0:
            costs, number = status.costs, status.num_decoding
            plain_s = costs.decode_part_s(StepShape(number, status.context_tokens))
            drafts = lately[DRAFTED] / steps
            check_s = costs.check_s * min(1.0, lately[CHECKS] / max(lately[STEPS], 1.0))
            more_s = check_s + costs.draft_s * number * drafts
            self.stretch = 1.0 + (more_s / plain_s if more_s < drafts * plain_s else drafts)
            self.pace = self.stretch * steps / lately[SAMPLED]
