"""What a prefill node is told at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.config import ConfigError
from node_runtime.config import NodeConfig


@dataclass(frozen=True)
class FetchConfig:
    """When a prefill node fetches what a decode node holds of a prompt (answers of earlier turns) rather than
    compute it.

    enabled         False: it computes whatever is not in its own cache
    min_tokens      a fetch must save this many tokens at least
    max_time_ratio  and be estimated to take at most this share of the time that computing them takes; above 1 it
                    fetches even what it could compute sooner, to spare its compute for other prompts
    timeout_s       a fetch that has not landed by then is given up, and the prompt computed
    """

    enabled: bool = True
    min_tokens: int = 64
    max_time_ratio: float = 1.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ConfigError(f"min_tokens {self.min_tokens}: must be at least 1; enabled: false turns fetching off")
        for name in ("max_time_ratio", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} {getattr(self, name)}: must be above 0")


@dataclass(frozen=True)
class PrefillNodeConfig(NodeConfig):
    """A prefill node; see `NodeConfig`, and `FetchConfig` for what it asks of decode nodes."""

    fetch_from_decode: FetchConfig = field(default_factory=FetchConfig)
