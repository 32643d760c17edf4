"""What a decode node is told at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engine.config import ConfigError
from node_runtime.config import NodeConfig


@dataclass(frozen=True)
class LocalPrefillConfig:
    """When a decode node computes the rest of a prompt itself rather than have its state sent.

    max_tokens   it resumes from its own checkpoint when at most this many tokens are left; 0: never
    max_share    and when these are at most this share of the prompt
    """

    max_tokens: int = 64
    max_share: float = 0.5

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens {self.max_tokens}: must not be negative, 0 turns local prefill off")
        if not 0 < self.max_share <= 1:
            raise ConfigError(f"max_share {self.max_share}: must lie in (0, 1]")


@dataclass(frozen=True)
class DecodeNodeConfig(NodeConfig):
    """`reservation_timeout_s` is how long a hand-over may take, from its reservation to its landing."""

    reservation_timeout_s: float = 60.0
    local_prefill: LocalPrefillConfig = field(default_factory=LocalPrefillConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reservation_timeout_s <= 0:
            raise ConfigError(f"reservation_timeout_s {self.reservation_timeout_s}: must be above 0")
