"""How a request leaves a decode node for another one: halted, and handed over or going on."""

import pytest

from decode_node.events import (
    CancelSending,
    FinishAnswer,
    HaltAnswer,
    HandingOver,
    ReplyDecoded,
    ResumeAnswer,
    Running,
    SendRequest,
    Standing,
    StateSent,
)
from headrace.engine.sequence import Finished, Halted
from headrace.request import FinishReason
from headrace.wire.messages import (
    GoOn,
    Halt,
    HaltReply,
    HandedOver,
    HandOver,
    Stop,
)
from node_runtime.lifecycle import (
    CallBroken,
    CallEnded,
    Done,
    Fail,
    Release,
    Reply,
)
from tests.support.node.decode_lifecycle import (
    COMPUTED,
    REMOTE,
    RESERVED,
    SECOND,
    STATES,
    UNREADABLE,
    new_lifecycle,
)


def test_a_running_request_is_handed_over() -> None:
    request = new_lifecycle(Running(REMOTE))
    assert request.on(Halt()) == [HaltAnswer()]
    assert request.on(SECOND) == [Reply(SECOND)], "sampled before the engine halted it"
    assert request.on(Halted(COMPUTED)) == [Reply(HaltReply(is_halted=True))]
    assert request.on(HandOver(RESERVED)) == [SendRequest(RESERVED, COMPUTED)]
    assert request.on(StateSent()) == [Reply(HandedOver())]
    assert request.is_over
    assert request.on(CallEnded()) == [Release()]


def test_a_halted_request_may_go_on_and_halt_again() -> None:
    request = new_lifecycle(Standing(REMOTE, COMPUTED))
    assert request.on(GoOn()) == [ResumeAnswer()]
    assert request.on(SECOND) == [Reply(SECOND)]
    assert request.on(Halt()) == [HaltAnswer()]


def test_a_preempted_request_is_not_halted() -> None:
    request = new_lifecycle(Running(REMOTE))
    assert request.on(Halted(None)) == [Reply(HaltReply(is_halted=False))]
    assert request.on(SECOND) == [Reply(SECOND)]


def test_a_halted_request_may_be_stopped() -> None:
    request = new_lifecycle(Standing(REMOTE, COMPUTED))
    assert request.on(Stop()) == [FinishAnswer()]
    assert request.on(Finished(FinishReason.STOP)) == [ReplyDecoded(FinishReason.STOP, REMOTE)]


def test_a_request_that_is_being_handed_over_ends_elsewhere() -> None:
    request = new_lifecycle(HandingOver())
    assert [request.on(command) for command in (Stop(), GoOn(), Halt(), HandOver(RESERVED))] == [[]] * 4
    assert request.on(Finished(FinishReason.STOP)) == [], "by a stop that came before"
    assert request.on(CallBroken(UNREADABLE)) == [Fail(UNREADABLE)], "the transfer failed"
    assert request.on(CallEnded()) == [CancelSending(), Release()]


@pytest.mark.parametrize("name", ["admitting", "receiving", "interrupted", "renewing"])
def test_a_request_without_a_token_of_its_own_is_not_halted(name: str) -> None:
    request = new_lifecycle(STATES[name])
    assert request.on(Halt()) == [Reply(HaltReply(is_halted=False))]
    assert request.state == STATES[name]


def test_commands_to_move_that_cross_with_the_end_change_nothing() -> None:
    request = new_lifecycle(Done())
    assert [request.on(command) for command in (Halt(), GoOn(), HandOver(RESERVED))] == [[]] * 3
