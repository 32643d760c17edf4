"""Bodies as agents send them: histories of other servers, fields of other APIs, parts that a text model lacks."""

import json
from typing import Any

import pytest

from router.api.anthropic.message_schemas import MessagesBody
from router.api.body_schemas import Body, parse_body
from router.api.chat_schemas import ChatBody
from router.api.responses_api.conversations import messages_of
from router.api.responses_api.response_bodies import ResponsesBody
from router.errors import ApiError

USER: Any = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
RESPONSE: dict[str, Any] = {"input": "Hi"}
MESSAGES: dict[str, Any] = {"model": "little", "messages": [USER], "max_tokens": 3}
REFUSAL: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
RESULT: Any = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
OLD_CALL: Any = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}


def of_user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def read(cls: type[Body], body: dict[str, Any], **fields: Any) -> Any:
    return parse_body(cls, json.dumps({**body, **fields}).encode())


@pytest.mark.parametrize(
    ("cls", "body", "fields", "message"),
    [
        (ChatBody, CHAT, {"messages": of_user({"type": "image_url"})}, "messages.0.content: type 'image_url' is not"),
        (ChatBody, CHAT, {"messages": [OLD_CALL]}, "messages.0: function_call is not supported: use tool_calls"),
        (ChatBody, CHAT, {"messages": [{**USER, "audio": {"id": "a"}}]}, "messages.0: audio is not supported"),
        (
            ChatBody,
            CHAT,
            {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "tools: type 'custom' is not served",
        ),
        (ChatBody, CHAT, {"web_search_options": {}}, "web_search_options {} is not supported"),
        (ChatBody, CHAT, {"best_of": 2}, "best_of 2 is not supported"),
        (ResponsesBody, RESPONSE, {"input": of_user({"type": "input_image"})}, "content: type 'input_image' is not"),
        (ResponsesBody, RESPONSE, {"input": [{"type": "item_reference", "id": "a"}]}, "type 'item_reference' is not"),
        (ResponsesBody, RESPONSE, {"tools": [{"type": "web_search"}]}, "'web_search': not served: use tools of type"),
        (ResponsesBody, RESPONSE, {"seed": 3}, "seed 3 is not supported: use /v1/chat/completions"),
        (ResponsesBody, RESPONSE, {"max_tokens": 3}, "use max_output_tokens"),
        (MessagesBody, MESSAGES, {"messages": of_user({"type": "document"})}, "content: type 'document' is not served"),
        (MessagesBody, MESSAGES, {"messages": of_user(RESULT)}, "tool_result.content: type 'image' is not served"),
        (
            MessagesBody,
            MESSAGES,
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "describe a tool that the client",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(
    cls: type[Body], body: dict[str, Any], fields: dict[str, Any], message: str
):
    with pytest.raises(ApiError) as refused:
        read(cls, body, **fields)
    assert refused.value.status == 400
    assert message in refused.value.message and refused.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("cls", "body", "name"),
    [
        (ChatBody, CHAT, "max_completion_tokens"),
        (ResponsesBody, RESPONSE, "max_output_tokens"),
        (MessagesBody, MESSAGES, "max_tokens"),
        (MessagesBody, MESSAGES, "top_k"),
    ],
)
def test_a_whole_number_may_have_a_fraction_of_zero(cls: type[Body], body: dict[str, Any], name: str):
    value = getattr(read(cls, body, **{name: 3.0}), name)
    assert (value, type(value)) == (3, int)
    with pytest.raises(ApiError, match=name):
        read(cls, body, **{name: 3.5})


def test_an_assistants_refusal_is_its_text():
    assert read(ChatBody, CHAT, messages=[USER, REFUSAL, USER]).messages[1].for_template()["content"] == "No."
    body = read(ResponsesBody, RESPONSE, input=[USER, REFUSAL, USER])
    assert messages_of(None, body.input)[1] == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("function", [{"name": "now"}, {"name": "now", "parameters": None}])
def test_a_function_without_parameters_has_none(function: dict[str, Any]):
    body = read(ChatBody, CHAT, tools=[{"type": "function", "function": function}])
    assert body.offered_tools[0]["function"] == {"name": "now", "parameters": {"type": "object", "properties": {}}}


def test_fields_that_ask_for_nothing_are_no_error():
    read(ChatBody, CHAT, tools=[], tool_choice="auto", web_search_options=None, best_of=1, store=True, metadata={})
    read(ResponsesBody, RESPONSE, tools=[], seed=None, stop=[], ignore_eos=False, skip_special_tokens=True)
    read(MessagesBody, MESSAGES, tools=[], system=[], mcp_servers=[], chat_template_kwargs={})
