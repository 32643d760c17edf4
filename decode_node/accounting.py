"""Counters of a decode node: where its prompts are computed, and the bytes that its hits kept off the network.

A request whose prompt is computed by a prefill node reuses the attention hit alone: the transfer overwrites the state,
so a state that this node holds is neither hit nor miss. A prompt computed on this node reuses what all cache groups
have in common. Hits themselves are counted by the cache (`headrace/cache/stats.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.cache.layout import CacheLayout
from headrace.engine.sequence import Admitted


@dataclass
class HitAccounting:
    """Totals since start, in requests and tokens; `layout` converts tokens to bytes."""

    layout: CacheLayout
    remote_requests: int = 0
    local_requests: int = 0
    remote_hit_tokens: int = 0

    def admitted(self, admitted: Admitted, *, computes_here: bool) -> None:
        """Counts one request. `computes_here`: a state that arrives is fetched, and the rest is computed here."""
        if admitted.state_arrives and not computes_here:
            self.remote_requests += 1
            self.remote_hit_tokens += admitted.reused_tokens
        else:
            self.local_requests += 1

    def counters(self) -> dict[str, float]:
        """Returns counts by metric name. `bytes_not_moved`: attention blocks that no prefill node had to send."""
        blocks = self.remote_hit_tokens // self.layout.block_size
        return {
            "remote_requests": float(self.remote_requests),
            "local_requests": float(self.local_requests),
            "remote_hit_tokens": float(self.remote_hit_tokens),
            "bytes_not_moved": float(blocks * self.layout.block_bytes),
        }
