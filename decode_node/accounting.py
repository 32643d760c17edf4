"""Where the prompts of a decode node were computed, and what its hits spared the hand-overs.

A request whose prompt is prefilled remotely reuses the attention hit, and its state groups are skipped: the
transfer overwrites the state, so what they would have matched is no hit and no miss. A request that is
prefilled here uses the hit that all groups have in common. The hits themselves are counted by the cache
(`headrace/cache/stats.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.cache.layout import CacheLayout
from headrace.engine.sequence import Admitted


@dataclass
class HitAccounting:
    """Totals since start, in requests and tokens; `layout` says what a token weighs."""

    layout: CacheLayout
    remote_requests: int = 0
    local_requests: int = 0
    remote_hit_tokens: int = 0

    def admitted(self, admitted: Admitted) -> None:
        """Counts one request."""
        if admitted.state_arrives:
            self.remote_requests += 1
            self.remote_hit_tokens += admitted.reused_tokens
        else:
            self.local_requests += 1

    def counters(self) -> dict[str, float]:
        """By metric name. `bytes_not_moved`: of attention blocks that no prefill node had to send."""
        blocks = self.remote_hit_tokens // self.layout.block_size
        return {
            "remote_requests": float(self.remote_requests),
            "local_requests": float(self.local_requests),
            "remote_hit_tokens": float(self.remote_hit_tokens),
            "bytes_not_moved": float(blocks * self.layout.block_bytes),
        }
