"""Decides whether a decode node computes a prompt itself or has a prefill node compute it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.config import LocalPrefillConfig
from headrace.cache.hits import HitPolicy, PrefixHit, ReceiveState, ResumeLocally
from node_runtime.fetch_policy import FetchPolicy


@dataclass(frozen=True)
class PrefillLocation:
    """Picks the hit policy of one request.

    num_tokens       the prompt's length
    is_scored        the whole prompt must be computed for its logprobs, so that no hit shortens it
    is_handed_over   another decode node sends the state: nothing is to be computed
    fetch            decides what a node that must compute the prompt fetches from another one; None: nothing
    """

    config: LocalPrefillConfig
    num_tokens: int
    may_prefill_remotely: bool
    is_scored: bool = False
    is_handed_over: bool = False
    fetch: FetchPolicy | None = None

    def hit_policy(self, hit: PrefixHit) -> HitPolicy:
        """Returns the policy for this hit, which covers at most all tokens but one."""
        if self.is_handed_over:
            return ReceiveState()
        if not self.may_prefill_remotely and self.fetch is not None:
            return self.fetch.hit_policy(hit)
        left = self.num_tokens - hit.resumable_tokens
        is_short = left <= self.config.max_tokens and left <= self.config.max_share * self.num_tokens
        if not self.may_prefill_remotely or (hit.resumable_tokens and is_short and not self.is_scored):
            return ResumeLocally()
        return ReceiveState()
