"""A request's way from one decode node to another, with its blocks and state. Pure; part of `RequestLifecycle`.

    Decoding -> Decoding(is_halting) -> Relocating -> Moving -> Decoding

A receiver that has not reserved costs nothing: the request stays where it is. What fails later is repaired as the
transfer of a prefill is, or by starting over.
"""

from __future__ import annotations

from headrace.request import FinishReason
from router.requests.events import FindReceiver, Instruction, SendHalt, StartOver
from router.requests.states import Decoding, Migrating, Moving, Relocating, RequestState

Transition = tuple[RequestState, list[Instruction]]


def may_relocate(state: RequestState) -> bool:
    """True while a decode node generates, and more tokens are wanted than it has sent."""
    return state == Decoding()


def is_relocating(state: RequestState) -> bool:
    """True from MoveWanted until the request decodes again, has begun again or is over."""
    match state:
        case Decoding(is_halting=True) | Relocating() | Moving(from_decode=True):
            return True
    return False


def on_move_wanted(state: RequestState) -> Transition:
    return (Decoding(is_halting=True), [SendHalt()]) if may_relocate(state) else (state, [])


def halt_answered(state: RequestState, is_halted: bool, sender: str | None, newest_token: int) -> Transition | None:
    """None: the state does not allow it."""
    match state:
        case Decoding(finish=None, is_stopped=False, is_halting=True) if is_halted:
            return Relocating(sender, newest_token), [FindReceiver()]
        case Decoding(finish=None, is_stopped=False, is_halting=True):
            return Migrating(), [StartOver()]  # preempted: it would be computed again there, too
        case Decoding(is_halting=True):
            return state, []  # its end is on the way
    return None


def answer_is_complete(state: RequestState) -> FinishReason | None:
    """The finish of an answer that lacks nothing but its node's report."""
    match state:
        case Decoding(is_stopped=True):
            return FinishReason.STOP
        case Decoding(FinishReason() as finish):
            return finish
    return None
