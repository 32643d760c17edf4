"""Settings of the decode role."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config import at_least, positive, refuse
from node_runtime.config import RuntimeConfig


@dataclass(frozen=True)
class LocalPrefillConfig:
    """When a decode node computes the rest of a prompt itself instead of receiving the state.

    max_tokens   it resumes from its own checkpoint when at most this many tokens are left; 0: never
    max_share    largest share of the prompt that these tokens may be
    """

    max_tokens: int = 64
    max_share: float = 0.5

    def __post_init__(self) -> None:
        share = [] if 0 < self.max_share <= 1 else [f"max_share {self.max_share}: must lie in (0, 1]"]
        refuse(at_least(self, 0, "max_tokens", remedy=", 0 turns local prefill off"), share)


@dataclass(frozen=True)
class DecodeConfig(RuntimeConfig):
    """Settings of a node as it decodes: those of `RuntimeConfig`, and these.

    reservation_timeout_s  longest time without progress in a transfer, counted from the prompt's first chunk on:
                           a prompt may have to wait for others first. The request's own deadline holds as well
    orphan_timeout_s       how long a running request goes on after its router was lost, for another that is asked for
                           it; only requests whose client sent an `x-request-id` do
    max_unsent_tokens      an answer is paused when so many of its tokens wait to be sent, because the router takes no
                           more of them; it keeps its blocks until others need them
    local_prefill          when it computes the rest of a prompt itself
    """

    reservation_timeout_s: float = 60.0
    orphan_timeout_s: float = 10.0
    max_unsent_tokens: int = 256
    local_prefill: LocalPrefillConfig = field(default_factory=LocalPrefillConfig)

    def _faults(self) -> list[str]:
        return [
            *super()._faults(),
            *positive(self, "reservation_timeout_s", "orphan_timeout_s"),
            *at_least(self, 1, "max_unsent_tokens"),
        ]
