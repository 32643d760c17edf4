import gc
import weakref

import pytest

from headrace.request import FinishReason, Request, Sampling, Token
from headrace.token_array import TokenArray
from headrace.wire.messages import DecodeDone, DecodeReport, LocalPrefill, Tokens
from router.errors import IllegalEvent, deadline_passed
from router.requests.events import DecodeStarted, GaveUp
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import RequestPhase
from router.requests.table import RECENT, RequestTable


def opened(table: RequestTable, name: str, now_s: float = 0.0) -> RequestLifecycle:
    request = Request(name, TokenArray.of((1, 2, 3)), 3, Sampling(max_tokens=4, seed=0))
    life = RequestLifecycle(request, max_attempts=3, now_s=now_s)
    table.add(life)
    return life


def counts(table: RequestTable) -> dict[RequestPhase, int]:
    return {phase: count for phase, count in table.counts().items() if count}


def test_counts_follow_the_phases():
    table = RequestTable()
    a, b = opened(table, "a"), opened(table, "b")
    b.on(LocalPrefill(0), 1.0)
    assert counts(table) == {RequestPhase.QUEUED: 1, RequestPhase.PREFILLING: 1}
    a.on(GaveUp(deadline_passed(1)), 2.0)
    table.close(a)
    assert counts(table) == {RequestPhase.PREFILLING: 1, RequestPhase.FAILED: 1}


def test_an_open_request_cannot_be_closed_nor_opened_twice():
    table = RequestTable()
    life = opened(table, "a")
    with pytest.raises(IllegalEvent, match="still queued"):
        table.close(life)
    with pytest.raises(IllegalEvent, match="already in the table"):
        opened(table, "a")


def test_rows_show_open_requests_and_the_last_ended_ones():
    table = RequestTable()
    for index in range(RECENT + 5):
        life = opened(table, f"r{index}")
        for event in (DecodeStarted("d0"), LocalPrefill(2), Tokens((Token(5),))):
            life.on(event, 1.0)
        life.on(DecodeDone(FinishReason.STOP, DecodeReport("d0", 2, 2, "resumed", 1)), 2.0)
        table.close(life)
    opened(table, "open", 3.0)
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
        "moves": 0,
        "age_s": 4.0,
        "stages": [
            {"stage": "queue", "node": None, "start_s": 0.0, "seconds": 1.0},
            {"stage": "prefill", "node": "d0", "start_s": 1.0, "seconds": 0.0},
            {"stage": "decode", "node": "d0", "start_s": 1.0, "seconds": 1.0},
        ],
        "error": None,
    }


def test_a_request_that_ended_is_a_row_and_keeps_neither_prompt_nor_answer():
    table = RequestTable()
    life = opened(table, "a")
    life.on(GaveUp(deadline_passed(1)), 1.0)
    table.close(life)
    ended = weakref.ref(life)
    del life
    gc.collect()
    assert ended() is None
    assert [row["id"] for row in table.rows(2.0)] == ["a"]
