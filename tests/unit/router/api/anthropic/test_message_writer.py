"""Parts of an answer as Anthropic's blocks and events."""

import json
from typing import Any

import pytest

from headrace.request import FinishReason
from router.api.answer_writer import AnswerUsage, ChoiceEnd, RenderedDelta
from router.api.anthropic.message_writer import MessageWriter
from router.api.body_schemas import checked_body
from router.api.chat_schemas import ChatBody
from router.api.generation import RequestBuilder
from router.text.answer.parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText
from router.text.tokens import ModelTokens

PARTS: list[AnswerPart] = [
    ReasoningText("Look "),
    ReasoningText("it up."),
    ContentText("One moment."),
    CallStart(0, "call-a", "look_up"),
    CallArguments(0, '{"month": '),
    CallArguments(0, '"June"}'),
    CallStart(1, "call-b", "now"),
]
USAGE = AnswerUsage(10, 7, 4)
CALLED = ChoiceEnd(FinishReason.STOP, has_calls=True)


@pytest.fixture
def writer(tokens: ModelTokens) -> MessageWriter:
    chat = checked_body(ChatBody, {"messages": [{"role": "user", "content": "a"}]})
    generation = RequestBuilder("little", tokens, lambda: 100).chat(chat, id_prefix="msg_")
    return MessageWriter(generation, tokens.token_bytes)


def delta(*parts: AnswerPart) -> RenderedDelta:
    return RenderedDelta("", (), None, parts)


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for each in data.decode().split("\n\n")[:-1]:
        name, _, content = each.partition("\n")
        event = json.loads(content.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_a_whole_message_has_a_block_for_each_kind_of_part(writer: MessageWriter):
    message = json.loads(writer.whole([([delta(*PARTS[:3]), delta(*PARTS[3:])], CALLED)], USAGE))
    thinking, text, look_up, now = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Look it up.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "One moment."}
    assert look_up == {"type": "tool_use", "id": "call-a", "name": "look_up", "input": {"month": "June"}}
    assert now == {"type": "tool_use", "id": "call-b", "name": "now", "input": {}}
    assert (message["stop_reason"], message["usage"]["input_tokens"]) == ("tool_use", 6)


def test_a_streams_blocks_follow_each_other_and_add_up_to_the_whole(writer: MessageWriter):
    data = writer.begin(0) + b"".join(writer.delta(0, delta(part)) for part in PARTS)
    start, ping, *blocks, end, stop = events(data + writer.finish(0, CALLED) + writer.end(USAGE))
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    assert start["message"]["content"] == []
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["cache_read_input_tokens"] == 4
    open_block, content = None, []
    for event in blocks:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(content)
                open_block = event["index"]
                content.append({**event["content_block"], "pieces": []})
            case "content_block_delta":
                assert event["index"] == open_block
                content[-1]["pieces"].append(event["delta"])
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert open_block is None
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    *thoughts, signature = content[0]["pieces"]
    assert "".join(piece["thinking"] for piece in thoughts) == "Look it up."
    whole = json.loads(writer.whole([([delta(*PARTS)], CALLED)], USAGE))
    assert signature == {"type": "signature_delta", "signature": whole["content"][0]["signature"]}
    assert "".join(piece["partial_json"] for piece in content[2]["pieces"]) == '{"month": "June"}'
    assert (content[2]["id"], content[2]["input"], content[3]["pieces"]) == ("call-a", {}, [])


@pytest.mark.parametrize("broken", ['{"month": ', "[1]", '"a"', '{"a": NaN}', "[" * 100_000, "{" + '"a":{' * 9999])
def test_broken_arguments_are_passed_on_as_they_are(writer: MessageWriter, broken: str):
    parts = delta(CallStart(0, "c", "f"), CallArguments(0, broken))
    (call,) = json.loads(writer.whole([([parts], CALLED)], USAGE))["content"]
    assert call["input"] == {"invalid_arguments": broken}


def test_a_cut_answer_says_so_even_with_calls(writer: MessageWriter):
    cut = ChoiceEnd(FinishReason.LENGTH, has_calls=True)
    assert json.loads(writer.whole([([delta(*PARTS)], cut)], USAGE))["stop_reason"] == "max_tokens"
