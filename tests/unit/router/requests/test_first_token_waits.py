"""Where a token gap is asked for, the prefill node's token is shown with the decode node's first."""

import asyncio
import json
from typing import Any

import pytest

from headrace.request import FinishReason
from headrace.wire import messages as m
from headrace.wire.errors import NodeBusy, NodeLost
from router.errors import deadline_passed
from router.requests import events as ev
from router.requests.events import FailRequest, FinishRequest, SendRenew, Show, StartOver, StartPrefill
from router.requests.states import RequestPhase
from tests.support.loop_clock import leap_to, soon
from tests.support.router.fake_nodes import fake_cluster, reservation
from tests.support.router.request_lives import DECODED, LANDED, PREFILLED, A, B, C, after, decoding, life, moving
from tests.support.router.request_lives import prefilling as prefilling_within
from tests.unit.router.conftest import StartRouter
from tests.unit.router.requests.conftest import TEXT, ask, assert_idle, at_the_gate, decode_node, text_of

GAP_S = 0.01
HELD_S = 0.25
TIMEOUT_S = 60.0
OBJECTIVES = {"objectives": {"token_gap_s": GAP_S}}
GONE = NodeLost("d0", "gone")


def test_the_first_token_comes_with_the_second_and_in_order():
    request = prefilling_within(GAP_S)
    assert request.on(m.FirstToken(A), 1.0) == []
    assert request.phase is RequestPhase.MOVING
    assert request.on(PREFILLED, 2.0) == []
    assert request.on(LANDED, 3.0) == []
    assert request.on(m.Tokens((B,)), 4.0) == [Show((A, B))]
    assert request.on(m.Tokens((C,)), 5.0) == [Show((C,))]
    assert request.on(DECODED, 6.0) == [FinishRequest(FinishReason.LENGTH)]
    assert request.generated == [7, 8, 9]


def test_a_transfer_that_overtakes_the_first_token_changes_nothing():
    request = after(prefilling_within(GAP_S), LANDED)
    assert request.on(m.FirstToken(A), 1.0) == []
    assert request.on(m.Tokens((B,)), 2.0) == [Show((A, B))]
    request = after(prefilling_within(GAP_S), LANDED, m.Tokens((B,)))
    assert request.on(m.FirstToken(A), 3.0) == [Show((A,)), Show((B,))]


def test_without_a_decode_node_nothing_is_awaited():
    """A stop at the first token, one token alone, and a prompt that the decode node computes itself."""
    ended = prefilling_within(GAP_S).on(m.FirstToken(A, FinishReason.STOP), 1.0)
    assert ended == [Show((A,)), FinishRequest(FinishReason.STOP)]
    ended = after(prefilling_within(GAP_S), LANDED).on(m.FirstToken(A, FinishReason.STOP), 1.0)
    assert ended == [Show((A,)), FinishRequest(FinishReason.STOP)]
    alone = after(life(GAP_S, max_tokens=1), ev.PrefillStarted("p0", None))
    assert alone.on(m.FirstToken(A, FinishReason.LENGTH), 1.0) == [Show((A,))]
    local = after(life(GAP_S), ev.DecodeStarted("d0"), m.LocalPrefill(0))
    assert local.on(m.Tokens((A,)), 1.0) == [Show((A,))]


@pytest.mark.parametrize(
    ("failure", "instruction"),
    [
        (ev.DecodeLost(GONE), StartOver()),
        (m.SessionFailed(1, "digest"), SendRenew(1)),
        (ev.PrefillFailed(1, NodeLost("p0", "gone")), SendRenew(1)),
        (ev.PrefillFailed(1, NodeBusy("p0", "full")), StartOver()),
        (ev.PrefillFailed(1, None), StartOver()),
        (ev.NodeLeaves(), StartOver()),
    ],
)
def test_whatever_fails_meanwhile_shows_it_first(failure: ev.Event, instruction: ev.Instruction):
    request = moving(GAP_S)
    assert request.on(failure, 1.0) == [Show((A,)), instruction]
    assert request.shown.request_so_far.tokens[-1] == 7


def test_a_token_that_a_failure_has_shown_is_not_shown_again():
    request = after(moving(GAP_S), ev.PrefillFailed(1, NodeLost("p0", "gone")))
    assert request.on(reservation(2), 2.0) == [StartPrefill(reservation(2), first_token=7)]
    after(request, ev.PrefillStarted("p1", 2))
    assert request.on(m.FirstToken(A), 3.0) == []
    assert request.on(LANDED, 4.0) == []
    assert request.on(m.Tokens((B,)), 5.0) == [Show((B,))]
    assert request.generated == [7, 8]


def test_a_decode_node_lost_after_the_landing_loses_no_token():
    request = decoding(GAP_S)
    assert request.on(ev.DecodeLost(GONE), 1.0) == [Show((A,)), StartOver()]
    after(request, ev.DecodeStarted("d1"), reservation(5), ev.PrefillStarted("p0", 5))
    assert request.on(m.FirstToken(B), 2.0) == []
    assert after(request, LANDED).on(m.Tokens((C,)), 3.0) == [Show((B, C))]
    assert request.generated == [7, 8, 9]


def test_an_end_a_move_and_a_deadline_show_it():
    assert decoding(GAP_S).on(DECODED, 1.0) == [Show((A,)), FinishRequest(FinishReason.LENGTH)]
    assert decoding(GAP_S).on(ev.MoveWanted(), 1.0) == [Show((A,)), ev.SendHalt()]
    cause = deadline_passed(5)
    assert moving(GAP_S).on(ev.GaveUp(cause), 1.0) == [Show((A,)), FailRequest(cause)]


# ------------------------------------------------------------ over HTTP


def events_of(text: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in text.split("\n\n"))
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


async def test_no_event_has_the_first_token_alone(start_router: StartRouter, answer: list[int]):
    running = await start_router(fake_cluster(answer, eos_id=0))
    body = {"prompt": "a", "stream": True, "max_tokens": 100, "return_token_ids": True}

    async def sizes(**fields: Any) -> list[int]:
        events = events_of((await running.http.post("/v1/completions", json=body | fields)).text)
        return [len(choice.get("token_ids") or []) for event in events for choice in event["choices"]]

    assert (await sizes(headrace=OBJECTIVES))[0] == 2
    assert (await sizes())[0] == 1


async def test_the_report_has_the_time_at_which_the_first_token_was_shown(start_router: StartRouter, answer: list[int]):
    cluster, now_s = fake_cluster(answer, eos_id=0), 100.0
    node = decode_node(cluster, "d0")
    node.gate = gate = asyncio.Semaphore(0)
    running = await start_router(cluster, clock=lambda: now_s)

    async def first_token_s(**headrace: Any) -> float:
        nonlocal now_s
        asking = asyncio.create_task(ask(running, headrace={"report": True} | headrace))
        await at_the_gate(node)  # the prefill node's token is there
        now_s += HELD_S
        for _ in answer:
            gate.release()
        return (await asking)["usage"]["headrace"]["routing"]["measured"]["first_token_s"]

    assert await first_token_s(**OBJECTIVES) == HELD_S
    assert await first_token_s() == 0.0


async def test_a_request_that_runs_out_of_time_has_its_first_token(start_router: StartRouter, answer: list[int]):
    cluster = fake_cluster(answer)
    node = decode_node(cluster, "d0")
    node.gate = asyncio.Semaphore(0)
    running = await start_router(cluster, request_timeout_s=TIMEOUT_S)
    body = {"prompt": "a", "stream": True, "return_token_ids": True, "headrace": OBJECTIVES}
    due_s = soon(TIMEOUT_S)
    asking = asyncio.create_task(running.http.post("/v1/completions", json=body))
    await at_the_gate(node)
    leap_to(due_s)
    *shown, last = events_of((await asking).text)
    assert [token for event in shown for choice in event["choices"] for token in choice["token_ids"]] == answer[:1]
    assert last["error"]["code"] == "deadline_exceeded"
    await assert_idle(running)


async def test_choices_and_their_logprobs_are_those_of_a_request_without_a_gap(
    start_router: StartRouter, answer: list[int]
):
    running = await start_router(fake_cluster(answer, eos_id=0))
    plain = await ask(running, n=2, logprobs=1)
    within = await ask(running, n=2, logprobs=1, headrace={"report": True} | OBJECTIVES)
    assert text_of(within) == TEXT
    assert within["choices"] == plain["choices"]
    assert within["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
