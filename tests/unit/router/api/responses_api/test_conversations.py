"""Items of the Responses API as a chat's messages."""

import json
from typing import Any

import pytest

from router.api.responses_api.conversations import (
    ITEMS,
    PreviousWanted,
    ResponseRequest,
    messages_of,
    read_continued,
    read_response,
)
from router.errors import ApiError
from router.parsing.body_parser import ServedModel
from router.text.tokens import ModelTokens


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(instructions, ITEMS.validate_json(json.dumps(items)))


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def called(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_reasoning_text_and_calls_of_one_answer_are_one_message():
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}], "id": "m"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]}
    assert messages({"role": "user", "content": "q"}, reasoning, text, call("a"), call("b"), output, text) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [called("a"), called("b")]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "content": "Wait."},
    ]


def test_what_begins_another_turn_is_another_message():
    text = {"role": "assistant", "content": "a"}
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert messages(text, text, call("a"), text, reasoning, call("b")) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a", "tool_calls": [called("a")]},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [called("b")]},
    ]


def test_instructions_and_the_first_system_messages_are_one_system_prompt():
    first = [{"role": "developer", "content": "Kind."}, {"role": "system", "content": "Brief."}]
    user = {"role": "user", "content": "q"}
    assert messages(*first, user, instructions="Be:")[0] == {"role": "system", "content": "Be:\nKind.\nBrief."}
    assert [each["role"] for each in messages(user, first[0])] == ["user", "system"]


def test_a_continued_body_has_the_prompt_of_all_items(tokens: ModelTokens):
    model = ServedModel("little", tokens, 2048)
    before = [b'{"role":"user","content":"a\\nb"}', b'{"role":"assistant","content":"c"}']
    body = json.dumps({"input": "d", "previous_response_id": "resp_1", "instructions": "Be brief."}, indent=1).encode()
    assert read_response(body, model) == PreviousWanted("resp_1")
    both = read_continued(before, body, model)
    items = [*(json.loads(item) for item in before), {"role": "user", "content": "d"}]
    whole = read_response(json.dumps({"input": items, "instructions": "Be brief."}).encode(), model)
    assert isinstance(whole, ResponseRequest)
    assert both.generation.requests[0].tokens == whole.generation.requests[0].tokens
    assert [json.loads(item)["content"] for item in both.items] == ["d"]


@pytest.mark.parametrize("kind", ["item_reference", "image_generation_call", "computer_call"])
def test_items_of_other_kinds_are_not_read(kind: str):
    with pytest.raises(ValueError, match=kind):
        messages({"type": kind, "id": "x"})


def test_only_what_the_model_may_read_is_stored_and_nothing_unless_asked(tokens: ModelTokens):
    model = ServedModel("little", tokens, 2048)
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": "x" * 1000,
        "status": "completed",
    }
    body: dict[str, Any] = {"input": [reasoning, {"role": "user", "content": "a"}]}
    stored = read_response(json.dumps(body).encode(), model)
    assert isinstance(stored, ResponseRequest)
    assert json.loads(stored.items[0]) == {"type": "reasoning", "summary": []}
    unstored = read_response(json.dumps(body | {"store": False}).encode(), model)
    assert isinstance(unstored, ResponseRequest) and unstored.items == ()


def test_what_a_waiting_request_holds_is_bounded(tokens: ModelTokens):
    """The template of this model leaves reasoning and tools out: the length of the prompt bounds neither."""
    model = ServedModel("little", tokens, 2048)
    text = {"type": "reasoning_text", "text": "x" * 1_000_000}
    items = [*({"type": "reasoning", "content": [text]} for _ in range(9)), {"role": "user", "content": "a"}]
    with pytest.raises(ApiError, match=r"at most 8388608 are stored; send store: false"):
        read_response(json.dumps({"input": items}).encode(), model)
    before = [json.dumps(item).encode() for item in items]
    with pytest.raises(ApiError, match=r"at most 8388608 are stored"):
        read_continued(before, b'{"input": "a", "previous_response_id": "resp_1"}', model)
    assert isinstance(read_response(json.dumps({"input": items, "store": False}).encode(), model), ResponseRequest)
    with pytest.raises(ApiError, match=r"metadata of 1[0-9]+ bytes: at most 1048576"):
        read_response(json.dumps({"input": "a", "metadata": {"a": "x" * 1_100_000}}).encode(), model)
