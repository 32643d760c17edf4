"""Errors of the hand-over. A message says the value, the limit and the remedy."""


class TransferError(Exception):
    """Root of every error that this package raises on purpose."""


class LayoutMismatch(TransferError, ValueError):
    """The two sides, or the plan and the staging buffers, do not fit each other; nothing was sent."""


class IllegalTransition(TransferError):
    """A session got an event that cannot happen in its phase: a bug in its caller, not in its peer."""


class TransportUnavailable(TransferError):
    """The transport cannot start here: a missing library, a bad setting, or a link that is not allowed."""


class PeerUnreachable(TransferError):
    """No connection to the peer could be made: a bad address, or nobody listens there."""


class ConnectionLost(TransferError):
    """The peer died or its connection broke; whatever was in flight with it is gone."""


class TransferTimeout(TransferError):
    """An operation did not complete by its deadline."""


class Truncated(TransferError):
    """A message was longer than the buffer offered for it; nothing of it may be used."""


class MalformedEnvelope(TransferError):
    """The bytes of an envelope are not one of ours, or of another version."""


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
    """A session failed on this side. Nothing of it lands, or is sent, from here on.

    cause   one short word for metrics: see `transfer.protocol.events.Cause`
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{cause}: {message}")
        self.cause = cause
