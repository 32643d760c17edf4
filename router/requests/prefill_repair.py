"""The repair of a prefill that failed, or whose transfer did. Pure; part of `RequestLifecycle`.

A reservation stays: it is renewed, and another prefill node serves it, with the first token if the client has seen it.
"""

from __future__ import annotations

from router.requests.states import (
    AwaitingFirstToken,
    AwaitingRenewal,
    Migrating,
    Moving,
    Prefilling,
    PrefillingAlone,
    Queued,
    RequestState,
    Reserved,
)


def awaits_prefill(state: RequestState, nonce: int | None) -> bool:
    """True while the request still needs the prefill for this reservation; None: the one without a reservation."""
    match state:
        case Reserved(current) | Prefilling(current) | Moving(current) | AwaitingFirstToken(current):
            return nonce == current
        case Queued() | Migrating() | PrefillingAlone():
            return nonce is None
    return False


def renewal(state: RequestState) -> AwaitingRenewal | None:
    """The state while the reservation is renewed. None: there is none, or it has landed and the first token is lost."""
    match state:
        case Reserved(_, first_token) | Moving(_, first_token):
            return AwaitingRenewal(first_token, state.phase)
        case Prefilling():
            return AwaitingRenewal(None, state.phase)
    return None
