"""Where a request's prompt is computed, seen from its decode node: pure."""

from __future__ import annotations

from dataclasses import dataclass

from cache.hits import HitPolicy, PrefixHit, ReceiveState, ResumeLocally
from decode_node.config import LocalPrefillConfig


@dataclass(frozen=True)
class PrefillPlace:
    """Picks the hit policy of one request. `num_tokens` is its prompt's length."""

    config: LocalPrefillConfig
    num_tokens: int
    may_prefill_remotely: bool

    def hit_policy(self, hit: PrefixHit) -> HitPolicy:
        """`hit` is what a local prefill could use: at most all tokens but one."""
        left = self.num_tokens - hit.resumable_tokens
        is_short = left <= self.config.max_tokens and left <= self.config.max_share * self.num_tokens
        if not self.may_prefill_remotely or (hit.resumable_tokens and is_short):
            return ResumeLocally()
        return ReceiveState()
