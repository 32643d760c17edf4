"""What becomes of a request on a decode node whose router is lost."""

import pytest

from decode_node.events import (
    Adopted,
    Orphaned,
    ReplyDecoded,
    RouterLost,
    Running,
)
from headrace.engine.sequence import Finished
from headrace.request import FinishReason
from headrace.wire.messages import (
    LocalPrefill,
    Tokens,
)
from node_runtime.lifecycle import (
    CallEnded,
    Release,
    Released,
    Reply,
)
from tests.support.node.decode_lifecycle import (
    LOCAL,
    REMOTE,
    SECOND,
    STATES,
    THIRD,
    new_lifecycle,
)


def test_a_request_whose_router_is_lost_goes_on_for_another_one() -> None:
    request = new_lifecycle(Running(REMOTE))
    assert request.on(RouterLost()) == []
    assert request.state == Orphaned(REMOTE)
    assert request.on(Adopted(100, SECOND)) == [Reply(LocalPrefill(100)), Reply(SECOND)]
    assert request.on(THIRD) == [Reply(THIRD)]
    assert request.on(Finished(FinishReason.LENGTH)) == [ReplyDecoded(FinishReason.LENGTH, REMOTE)]
    assert request.on(CallEnded()) == [Release()]


def test_a_router_that_has_shown_every_token_so_far_gets_the_next_ones() -> None:
    request = new_lifecycle(Orphaned(LOCAL))
    assert request.on(Adopted(100, Tokens(()))) == [Reply(LocalPrefill(100))]
    assert request.state == Running(LOCAL)


def test_a_request_that_no_router_continues_is_released() -> None:
    request = new_lifecycle(Orphaned(REMOTE))
    assert request.on(CallEnded()) == [Release()]
    assert request.state == Released()


@pytest.mark.parametrize("name", [name for name in STATES if name not in ("running", "released")])
def test_a_request_that_does_not_run_is_released_when_its_router_is_lost(name: str) -> None:
    request, ended = new_lifecycle(STATES[name]), new_lifecycle(STATES[name])
    assert request.on(RouterLost()) == ended.on(CallEnded())
    assert request.state == Released()
