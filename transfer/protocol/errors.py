"""Errors of transfers. Each message names the value, the limit and the remedy."""


class TransferError(Exception):
    """Root of every error that this package raises on purpose."""


class LayoutMismatch(TransferError, ValueError):
    """The two sides, or a plan and the staging buffers, do not fit each other; nothing was sent."""


class IllegalTransition(TransferError):
    """A session received an event that is impossible in its phase: a bug in its caller, not in its peer."""


class TransportUnavailable(TransferError):
    """The transport cannot start here: a missing library, a bad setting, or a link that is not allowed."""


class PeerUnreachable(TransferError):
    """No connection to the peer could be made: a bad address, or nothing listens there."""


class ConnectionLost(TransferError):
    """The peer died or its connection broke; operations in flight with it have failed."""


class TransferTimeout(TransferError):
    """An operation did not complete by its deadline."""


class Truncated(TransferError):
    """A message was longer than its buffer; none of it may be used."""


class MalformedEnvelope(TransferError):
    """The bytes are no envelope of this protocol and version."""


class NoSecret(TransferError):
    """A reservation came without the secret that its sender must sign with; nothing was sent."""


class Unauthenticated(TransferError):
    """A part was not sent by the holder of its session's secret; the session continues without it.

    cause   one short word for metrics: see `transfer.protocol.authentication.RefusalCause`
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class TransferFailed(TransferError):
    """A session failed on this side. Nothing of it lands or is sent any more.

    cause   one short word for metrics: see `transfer.protocol.events.Cause`
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause
