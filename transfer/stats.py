"""What a transport and the sessions over it counted: plain numbers, for metrics to read."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TransportStats:
    """Totals since start; parts are envelopes and payloads alike.

    dropped_parts, dropped_bytes   of sessions this side does not expect (cancelled, failed, or never known)
    connections_lost               however: a dead peer, a broken network, our own deadline, our own close
    forced_closes                  connections closed because an operation outlived its deadline
    failures                       failed sessions of either side, by cause
    refusals                       parts that nobody who knows their session's secret sent, by cause
    """

    sent_parts: int = 0
    sent_bytes: int = 0
    received_parts: int = 0
    received_bytes: int = 0
    dropped_parts: int = 0
    dropped_bytes: int = 0
    connections_opened: int = 0
    connections_lost: int = 0
    forced_closes: int = 0
    sessions_completed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)

    def session_failed(self, cause: str) -> None:
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def part_refused(self, cause: str) -> None:
        self.refusals[cause] = self.refusals.get(cause, 0) + 1


@dataclass(frozen=True, slots=True)
class HandoverStats:
    """One completed session, as one side saw it.

    seconds   sender: from `open` to the last byte taken over by the transport, which includes the prefill
              itself; receiver: from the first envelope to the last landing
    """

    attention_tokens: int
    attention_bytes: int
    state_bytes: int
    messages: int
    seconds: float
