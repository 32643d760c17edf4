"""Parts of an answer as output items and their events."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.api.responses_api.output_items import Event, OutputItems
from router.text.answer.parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText, merged

PARTS: list[AnswerPart] = [
    ReasoningText("Look "),
    ReasoningText("it up."),
    ContentText("One moment."),
    CallStart(0, "call-a", "look_up"),
    CallArguments(0, '{"month": "June"}'),
    CallStart(1, "call-b", "now"),
]


def run(parts: Sequence[AnswerPart], *, is_cut: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events as a client reads them, and the items."""
    items = OutputItems("1")
    found = [*(event for part in parts for event in items.of(part)), *items.end(is_cut=is_cut)]
    return [_read(each) for each in found], items.done


def _read(each: Event) -> dict[str, Any]:
    kind, fields = each
    event: dict[str, Any] = json.loads(f"{{{fields}}}")
    return {"type": kind} | event


def kinds(events: Iterable[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_events_come_in_the_order_of_the_specification():
    events, items = run(PARTS)
    assert kinds(events) == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
    ]
    reasoning, message, look_up, now = items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Look it up."}]
    assert message["content"][0]["text"] == "One moment."
    assert (look_up["call_id"], look_up["name"], look_up["arguments"]) == ("call-a", "look_up", '{"month": "June"}')
    assert (now["call_id"], now["arguments"]) == ("call-b", "")
    assert len({item["id"] for item in items}) == 4
    assert {item["status"] for item in items} == {"completed"}


def test_an_answer_without_text_has_an_empty_message():
    events, (message,) = run([])
    assert kinds(events) == [
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done")
    ]
    assert message["content"][0]["text"] == ""


def test_only_the_last_item_of_a_cut_answer_is_incomplete():
    _, items = run(PARTS[:3], is_cut=True)
    assert [item["status"] for item in items] == ["completed", "incomplete"]


@given(st.lists(st.sampled_from([ContentText("a"), ReasoningText("b"), ContentText("c\n")]), max_size=12))
def test_the_events_add_up_to_the_items_however_the_text_was_cut(parts: list[AnswerPart]):
    events, items = run(parts)
    assert run(merged(parts))[1] == items
    texts: dict[str, str] = {}
    added: list[str] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(added)
                added.append(event["item"]["id"])
                texts[added[-1]] = ""
            case "output_text.delta" | "reasoning_text.delta":
                assert event["item_id"] == added[-1]
                texts[added[-1]] += event["delta"]
            case "output_item.done":
                assert event["item"] == items[event["output_index"]]
                assert event["item"]["content"][0]["text"] == texts[added[-1]]
    assert len(added) == len(items)
