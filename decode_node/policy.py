"""Where a request's prompt is computed, seen from its decode node: pure."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.config import LocalPrefillConfig
from headrace.cache.hits import HitPolicy, PrefixHit, ReceiveState, ResumeLocally


@dataclass(frozen=True)
class PrefillPlace:
    """Picks the hit policy of one request.

    num_tokens   its prompt's length
    is_scored    its whole prompt must be computed for its logprobs: nothing of it is short
    """

    config: LocalPrefillConfig
    num_tokens: int
    may_prefill_remotely: bool
    is_scored: bool = False

    def hit_policy(self, hit: PrefixHit) -> HitPolicy:
        """`hit` is what a local prefill could use: at most all tokens but one."""
        left = self.num_tokens - hit.resumable_tokens
        is_short = left <= self.config.max_tokens and left <= self.config.max_share * self.num_tokens
        if not self.may_prefill_remotely or (hit.resumable_tokens and is_short and not self.is_scored):
            return ResumeLocally()
        return ReceiveState()
