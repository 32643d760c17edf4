"""Counters of a transport and of the sessions over it, for metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field

from transfer.protocol.plan import PlannedMessage


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Sizes and times of one completed session, on one side.

    seconds            sender: from `open` until the transport has taken over the last byte, prefill included;
                       receiver: from the first envelope to the last landing
    attention_seconds  in which blocks moved between this side's pool and the other side
    state_seconds      in which the state moved; time in which both moved is shared by their bytes
    hidden_seconds     the part of both in which the prompt was still computed, so that nobody waited. 0 on the
                       receiving side, which does not know
    """

    attention_tokens: int
    attention_bytes: int
    state_bytes: int
    messages: int
    seconds: float
    attention_seconds: float
    state_seconds: float
    hidden_seconds: float


@dataclass(slots=True)
class TransferTotals:
    """Completed sessions in one direction: sums of their `TransferStats`."""

    sessions: int = 0
    attention_bytes: int = 0
    state_bytes: int = 0
    attention_seconds: float = 0.0
    state_seconds: float = 0.0
    hidden_seconds: float = 0.0

    def add(self, stats: TransferStats) -> None:
        self.sessions += 1
        self.attention_bytes += stats.attention_bytes
        self.state_bytes += stats.state_bytes
        self.attention_seconds += stats.attention_seconds
        self.state_seconds += stats.state_seconds
        self.hidden_seconds += stats.hidden_seconds


@dataclass(slots=True)
class TransportStats:
    """Totals since start; parts are envelopes and payloads alike.

    probe_sent_bytes, probe_received_bytes   the parts of `sent_bytes` and `received_bytes` that measured links
    dropped_parts, dropped_bytes   of sessions that are not expected (cancelled, failed, or never known)
    connections_lost               for any reason: a dead peer, a broken network, a deadline here, a close here
    forced_closes                  connections closed because an operation outlived its deadline
    sent, received                 completed sessions
    sent_to                        those sent to each peer's address since somebody last took them out
    failures                       failed sessions of either side, by cause
    refusals                       parts not sent by the holder of their session's secret, by cause
    """

    sent_parts: int = 0
    sent_bytes: int = 0
    received_parts: int = 0
    received_bytes: int = 0
    probe_sent_bytes: int = 0
    probe_received_bytes: int = 0
    dropped_parts: int = 0
    dropped_bytes: int = 0
    connections_opened: int = 0
    connections_lost: int = 0
    forced_closes: int = 0
    sent: TransferTotals = field(default_factory=TransferTotals)
    received: TransferTotals = field(default_factory=TransferTotals)
    sent_to: dict[str, TransferTotals] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)

    def session_failed(self, cause: str) -> None:
        self.failures[cause] = self.failures.get(cause, 0) + 1

    def part_refused(self, cause: str) -> None:
        self.refusals[cause] = self.refusals.get(cause, 0) + 1


@dataclass(slots=True)
class WaitStats:
    """Number and total seconds of waits for a staging buffer."""

    count: int = 0
    seconds: float = 0.0


class MovingTime:
    """Seconds of one session in which its messages moved, however many at a time.

    Time in which blocks and the state move together is shared between them by their bytes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.attention_seconds = 0.0
        self.state_seconds = 0.0
        self.hidden_seconds = 0.0
        self._clock = clock
        self._attention_bytes = 0
        self._state_bytes = 0
        """Bytes that move now, like `_attention_bytes`."""
        self._is_computing = False
        self._since_s = clock()

    def began(self, message: PlannedMessage) -> None:
        """Counts the message as moving, until `ended`."""
        self._account()
        self._attention_bytes += message.attention_bytes
        self._state_bytes += message.state_bytes

    def ended(self, message: PlannedMessage) -> None:
        self._account()
        self._attention_bytes -= message.attention_bytes
        self._state_bytes -= message.state_bytes

    def computing(self, is_computing: bool) -> None:
        """Sets whether the prompt is being computed: time of moving is hidden meanwhile."""
        self._account()
        self._is_computing = is_computing

    def _account(self) -> None:
        now_s = self._clock()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        num_bytes = self._attention_bytes + self._state_bytes
        if num_bytes:
            self.attention_seconds += elapsed_s * self._attention_bytes / num_bytes
            self.state_seconds += elapsed_s * self._state_bytes / num_bytes
            self.hidden_seconds += elapsed_s if self._is_computing else 0.0
