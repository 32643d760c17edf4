"""Per-group hit accounting of a decode node.

A request whose prompt is prefilled remotely reuses the attention hit, and its state groups are skipped: the
transfer overwrites the state, so what they would have matched is no hit and no miss. A request that is
prefilled here uses the hit that all groups have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Admitted


@dataclass
class HitAccounting:
    """Totals since start, in requests and tokens."""

    remote_requests: int = 0
    remote_attention_hit_tokens: int = 0
    state_groups_skipped: int = 0
    local_requests: int = 0
    local_attention_hit_tokens: int = 0
    local_state_hit_tokens: int = 0
    local_reused_tokens: int = 0

    def admitted(self, admitted: Admitted) -> None:
        """Counts one request's hit, in the groups that it consulted."""
        if admitted.state_arrives:
            self.remote_requests += 1
            self.remote_attention_hit_tokens += admitted.reused_tokens
            self.state_groups_skipped += 1
        else:
            self.local_requests += 1
            self.local_attention_hit_tokens += admitted.hit.attention_tokens
            self.local_state_hit_tokens += admitted.hit.state_tokens
            self.local_reused_tokens += admitted.reused_tokens
