import pytest

from headrace.request import FinishReason, Request, Sampling, Token
from headrace.wire.messages import DecodeDone, DecodeReport, LocalPrefill, Tokens
from router.errors import IllegalEvent, deadline_passed
from router.requests.events import DecodeStarted, GaveUp
from router.requests.states import RequestPhase
from router.requests.table import RECENT, RequestTable


def request(name: str) -> Request:
    return Request(name, (1, 2, 3), 3, Sampling(max_tokens=4, seed=0))


def test_counts_follow_the_phases():
    table = RequestTable(max_attempts=3)
    table.open(request("a"), 0.0)
    table.open(request("b"), 0.0)
    table.on("b", LocalPrefill(0), 1.0)
    assert {phase: n for phase, n in table.counts().items() if n} == {
        RequestPhase.QUEUED: 1,
        RequestPhase.PREFILLING: 1,
    }
    table.on("a", GaveUp(deadline_passed(1)), 2.0)
    table.close("a")
    assert {phase: n for phase, n in table.counts().items() if n} == {
        RequestPhase.PREFILLING: 1,
        RequestPhase.FAILED: 1,
    }


def test_an_open_request_cannot_be_closed_nor_opened_twice():
    table = RequestTable(max_attempts=3)
    table.open(request("a"), 0.0)
    with pytest.raises(IllegalEvent, match="still queued"):
        table.close("a")
    with pytest.raises(IllegalEvent, match="already in the table"):
        table.open(request("a"), 0.0)


def test_rows_show_open_requests_and_the_last_ended_ones():
    table = RequestTable(max_attempts=3)
    for index in range(RECENT + 5):
        table.open(request(f"r{index}"), 0.0)
        for event in (DecodeStarted("d0"), LocalPrefill(2), Tokens((Token(5),))):
            table.on(f"r{index}", event, 1.0)
        table.on(f"r{index}", DecodeDone(FinishReason.STOP, DecodeReport("d0", 2, 2, "resumed", 1)), 2.0)
        table.close(f"r{index}")
    table.open(request("open"), 3.0)
    rows = list(table.rows(4.0))
    assert len(rows) == RECENT + 1
    assert rows[0]["id"] == "open"
    assert rows[1] == {
        "id": "r24",
        "phase": "done",
        "prompt_tokens": 3,
        "generated_tokens": 1,
        "prefill_node": None,
        "decode_node": "d0",
        "cached_tokens": 2,
        "migrations": 0,
        "age_s": 4.0,
        "error": None,
    }
