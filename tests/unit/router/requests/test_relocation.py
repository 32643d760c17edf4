"""A request that moves to another decode node, by literals: events in, instructions out."""

import pytest

from headrace.request import FinishReason, Request, Sampling, Token
from headrace.token_array import TokenArray
from headrace.wire import messages as m
from headrace.wire.errors import NodeLost, RequestRefused, TransferBroken
from router.errors import IllegalEvent
from router.requests import events as ev
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import Decoding, Migrating, Moving, Relocating, RequestState
from tests.support.router.fake_nodes import reservation

NEWEST = 77
LANDED = m.TransferReport(8, 100, 200, 0.5)
RESERVED = reservation(5)


def decoding(state: RequestState | None = None) -> RequestLifecycle:
    """A request that d0 decodes, with two tokens shown; or in a later state."""
    request = Request("r", TokenArray.of((1, 2, 3)), 3, Sampling(max_tokens=9, seed=0))
    life = RequestLifecycle(request, max_attempts=2, now_s=0.0)
    for event in (ev.DecodeStarted("d0"), m.LocalPrefill(0), m.Tokens((Token(70), Token(NEWEST)))):
        life.on(event, 1.0)
    life.state = state or life.state
    return life


def tell(life: RequestLifecycle, event: ev.Event) -> list[ev.Instruction]:
    return life.on(event, 2.0)


def test_a_request_moves_and_shows_nothing_twice() -> None:
    life = decoding()
    assert tell(life, ev.MoveWanted()) == [ev.SendHalt()]
    assert tell(life, m.Tokens((Token(78),))) == [ev.Show((Token(78),))], "sampled before the node halted"
    assert tell(life, m.HaltReply(True)) == [ev.FindReceiver()]
    assert life.state == Relocating("d0", 78)
    tell(life, ev.DecodeStarted("d1"))
    assert tell(life, RESERVED) == [ev.SendHandOver(RESERVED)]
    assert tell(life, m.HandedOver()) == []
    assert tell(life, LANDED) == []
    assert (life.state, life.report.moves, life.report.decode_node) == (Decoding(), 1, "d1")
    assert tell(life, m.Tokens((Token(79),))) == [ev.Show((Token(79),))]
    assert life.report.transfer is None, "the report is about the prompt's transfer"


def test_only_a_request_that_decodes_and_wants_more_moves() -> None:
    for state in (Migrating(), Decoding(FinishReason.LENGTH), Decoding(is_stopped=True), Decoding(is_halting=True)):
        life = decoding(state)
        assert tell(life, ev.MoveWanted()) == []
        assert life.state == state


def test_an_answer_that_ends_while_it_halts_has_ended() -> None:
    life = decoding(Decoding(is_halting=True))
    tell(life, m.Tokens((Token(1),), FinishReason.STOP))
    assert tell(life, m.HaltReply(True)) == [], "the node's report is on its way"
    assert tell(life, m.DecodeDone(FinishReason.STOP, m.DecodeReport("d0", 0, 0, "resumed", 0)))


def test_a_stop_string_found_while_it_halts_ends_it_where_it_is() -> None:
    life = decoding(Decoding(is_halting=True))
    assert tell(life, ev.StopFound()) == [ev.SendStop()]
    assert tell(life, m.HaltReply(True)) == []


def test_a_preempted_request_begins_again() -> None:
    life = decoding(Decoding(is_halting=True))
    assert tell(life, m.HaltReply(False)) == [ev.StartOver()]


@pytest.mark.parametrize("event", [ev.NoReceiver(), ev.DecodeLost(NodeLost("d1", "gone")), "refused"])
def test_without_a_receiver_it_goes_on_where_it_was(event: ev.Event | str) -> None:
    life = decoding(Relocating("d0", NEWEST))
    before = life.failures
    assert tell(life, ev.DecodeLost(RequestRefused("d1", "long")) if isinstance(event, str) else event) == [
        ev.SendGoOn()
    ]
    assert (life.state, life.report.decode_node, life.failures) == (Decoding(), "d0", before)
    assert tell(life, ev.NoReceiver()) == [], "a second word of it changes nothing"


def test_a_sender_that_is_lost_before_the_hand_over_begins_it_again() -> None:
    life = decoding(Relocating("d0", NEWEST))
    assert tell(life, ev.SenderLost(NodeLost("d0", "killed"))) == [ev.StartOver()]
    assert life.report.migrations == 1


@pytest.mark.parametrize(
    "event",
    [
        ev.SenderLost(NodeLost("d0", "killed")),
        ev.SenderLost(RequestRefused("d0", "another length")),
        m.SessionFailed(5, "digest"),
        ev.PrefillFailed(5, TransferBroken("d0", "it did not land")),
    ],
)
def test_a_move_that_fails_is_repaired_by_a_prefill_node_and_counts_against_nobody(event: ev.Event) -> None:
    life = decoding(Moving(5, NEWEST, from_decode=True))
    before = life.failures
    assert tell(life, event) == [ev.SendRenew(5)]
    renewed = reservation(6)
    assert tell(life, renewed) == [ev.StartPrefill(renewed, NEWEST)], "which samples a token that is shown already"
    assert (life.failures, life.report.moves) == (before, 0)
    assert tell(life, ev.SenderLost(NodeLost("d0", "late"))) == []


def test_a_node_that_leaves_begins_its_requests_again_unless_they_are_complete() -> None:
    assert tell(decoding(), ev.NodeLeaves()) == [ev.StartOver()]
    complete = decoding(Decoding(FinishReason.LENGTH))
    assert tell(complete, ev.NodeLeaves()) == [ev.FinishRequest(FinishReason.LENGTH)]


def test_a_halt_that_nobody_asked_for_is_a_defect() -> None:
    with pytest.raises(IllegalEvent):
        tell(decoding(), m.HaltReply(True))
