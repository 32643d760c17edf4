"""Settings of the prefill role."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config import at_least, positive, refuse
from node_runtime.config import RuntimeConfig


@dataclass(frozen=True)
class FetchConfig:
    """When a node that computes a prompt fetches cached parts of it (answers of earlier turns) from another node.

    enabled         false: the node computes everything that its own cache lacks
    min_tokens      a fetch must save at least this many tokens
    max_time_ratio  largest estimated time of a fetch, as a share of the time to compute the same tokens; above 1 the
                    node fetches even where computing is faster, and saves its compute for other prompts
    timeout_s       a fetch that has not landed by then is abandoned, and the node computes the prompt
    """

    enabled: bool = True
    min_tokens: int = 64
    max_time_ratio: float = 1.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "min_tokens", remedy="; enabled: false turns fetching off"),
            positive(self, "max_time_ratio", "timeout_s"),
        )


@dataclass(frozen=True)
class PrefillConfig(RuntimeConfig):
    """Settings of a node as it prefills: those of `RuntimeConfig`, and these.

    fetch_from_decode  when it fetches cached parts of a prompt from other nodes
    """

    fetch_from_decode: FetchConfig = field(default_factory=FetchConfig)
