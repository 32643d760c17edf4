"""Decides whether a node fetches what another one holds of a prompt, or computes it. Pure.

    seconds to compute = what the node's steps take for the saved tokens, at their depth, times the prompts here
    seconds to fetch   = latency_s + bytes of (blocks beyond this node's own hit + one state) / bytes_per_s

A fetch delays the prompt that it is for, while the others are computed; tokens that are computed delay them all. All
figures are the node's own measurements (`CostFit`, `MeasuredFetches`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.cache.hits import FetchState, HitPolicy, PrefixHit, ResumeLocally
from headrace.cache.layout import CacheLayout
from headrace.step_costs import StepCosts
from node_runtime.config import FetchConfig

_RESUME = ResumeLocally()


def _alone() -> int:
    return 1


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """Estimated costs of fetching. The defaults, of a slow link, hold until a node has measured its own."""

    bytes_per_s: float = 500e6
    latency_s: float = 0.010

    def fetch_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Picks the hit policy of one request.

    costs                of fetching
    step_costs           of computing, in steps of `chunk_tokens`
    num_tokens           the prompt's length
    fetch_source_tokens  leading tokens that another node probably holds, with a checkpoint at their end; None: no
                         source is known
    num_prompts          how many prompts wait or are computed here, this one among them; called when the policy is
    is_scored            the whole prompt must be computed for its logprobs: nothing of it is skipped
    """

    config: FetchConfig
    costs: FetchCosts
    step_costs: StepCosts
    chunk_tokens: int
    layout: CacheLayout
    num_tokens: int
    fetch_source_tokens: int | None
    is_scored: bool = False
    num_prompts: Callable[[], int] = _alone

    def hit_policy(self, hit: PrefixHit) -> HitPolicy:
        """Returns the policy for this hit, which covers at most all tokens but one."""
        fetch = self.candidate(hit)
        return fetch if fetch is not None and self._pays(fetch, hit) else _RESUME

    def candidate(self, hit: PrefixHit) -> FetchState | None:
        """Returns the fetch that is possible and saves enough tokens, whether it pays or not; None: there is none."""
        fetch_source_tokens = self.fetch_source_tokens
        if not self.config.enabled or self.is_scored or fetch_source_tokens is None:
            return None
        if not 0 < fetch_source_tokens < self.num_tokens or fetch_source_tokens % self.layout.block_size:
            return None  # a wrong hint: at least one token is computed, and checkpoints lie at block boundaries
        saved_tokens = fetch_source_tokens - hit.resumable_tokens
        return FetchState(fetch_source_tokens) if saved_tokens >= self.config.min_tokens else None

    def _pays(self, fetch: FetchState, hit: PrefixHit) -> bool:
        num_blocks = (fetch.num_tokens - fetch.reusable_tokens(hit)) // self.layout.block_size
        num_bytes = num_blocks * self.layout.block_bytes + self.layout.state_bytes
        compute_s = self.step_costs.prefill_s(hit.resumable_tokens, fetch.num_tokens, chunk_tokens=self.chunk_tokens)
        return self.costs.fetch_s(num_bytes) <= self.config.max_time_ratio * compute_s * max(self.num_prompts(), 1)
