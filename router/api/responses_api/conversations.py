"""Items of the Responses API as a chat: the same body, template and limits as for /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from router.api.body_schemas import checked_body, parse_body
from router.api.chat_schemas import ChatBody
from router.api.generation import GenerationRequest
from router.api.responses_api.response_bodies import (
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    FunctionTool,
    InputItem,
    JsonSchemaFormat,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    TextContent,
)
from router.api.text_parts import RefusalPart
from router.errors import bad_request
from router.parsing.body_parser import ServedModel

SEPARATOR = "\n"  # between texts of one message
MAX_ECHO_BYTES = 1 << 20
"""The request's own fields in each of a response's three resources, held while the request waits and runs."""
MAX_STORED_ITEMS_BYTES = 8 << 20
UNREAD = {"id", "status", "encrypted_content"}  # of an input item
ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True)
class ResponseRequest:
    """One body of /v1/responses, read.

    resource   the fields of the response that the body decides, as JSON without braces
    items      JSON of the items of the body's input, if the response is to be stored
    """

    generation: GenerationRequest
    resource: str
    items: tuple[bytes, ...]
    store: bool


@dataclass(frozen=True)
class PreviousWanted:
    """A body that continues a stored response, and must be read again with its items."""

    response_id: str


def read_response(data: bytes, model: ServedModel) -> ResponseRequest | PreviousWanted:
    """The request of a body of /v1/responses; raises ApiError for a body that cannot be served."""
    body = parse_body(ResponsesBody, data)
    model.check_name(body.model)
    if body.previous_response_id is not None:
        return PreviousWanted(body.previous_response_id)
    return _request(body, model, b"[]")


def read_continued(previous: Sequence[bytes], data: bytes, model: ServedModel) -> ResponseRequest:
    """The request of a body with a previous response, of which it gets the stored items; raises ApiError for a body
    that cannot be served.

    They are joined here: 8 ms of a worker's time for 7 MB, and not of the event loop's.
    """
    return _request(parse_body(ResponsesBody, data), model, b"[" + b",".join(previous) + b"]")


def _request(body: ResponsesBody, model: ServedModel, previous: bytes) -> ResponseRequest:
    given = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    chat = _chat_body(body, [*ITEMS.validate_json(previous), *given])
    generation = model.builder.chat(chat, id_prefix="resp_")
    store = body.store is not False
    items = tuple(map(_dumped, given)) if store else ()
    if (size := len(previous) + sum(map(len, items))) > MAX_STORED_ITEMS_BYTES:
        raise bad_request(
            f"input of {size} bytes, with that of previous responses: at most {MAX_STORED_ITEMS_BYTES} are stored; "
            "send store: false and all items in input",
            "input",
        )
    resource = json.dumps(_resource(body, generation))[1:-1]
    if len(resource) > MAX_ECHO_BYTES:
        raise bad_request(
            f"instructions, tools, text and metadata of {len(resource)} bytes: at most {MAX_ECHO_BYTES}, for they are "
            "part of the response; shorten them",
            "instructions",
        )
    return ResponseRequest(generation, resource, items, store)


def _dumped(item: InputItem) -> bytes:
    return item.model_dump_json(exclude_none=True, exclude=UNREAD).encode()


def _chat_body(body: ResponsesBody, items: Sequence[InputItem]) -> ChatBody:
    text_format = None if body.text is None else body.text.format
    response_format: dict[str, Any] | None = None
    if isinstance(text_format, JsonSchemaFormat):
        schema = {"name": text_format.name, "schema": text_format.schema_, "strict": text_format.strict}
        response_format = {"type": "json_schema", "json_schema": schema}
    elif text_format is not None:
        response_format = {"type": text_format.type}
    fields: dict[str, Any] = {
        "messages": messages_of(body.instructions, items),
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(body) if body.tools else None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": response_format,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "stream": body.stream,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "headrace": body.headrace,
    }
    return checked_body(ChatBody, fields)


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The items as a chat's messages.

    The reasoning, text and calls of one answer are one message. System and developer messages at the beginning are one
    with the instructions, since templates know one system prompt.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn = _turn(messages, is_new=lambda turn: bool(turn["content"]) or "tool_calls" in turn)
                turn["content"] = _text(item.content)
            case MessageItem():
                role = "user" if item.role == "user" else "system"
                if role == "system" and [each["role"] for each in messages] == ["system"]:
                    messages[0]["content"] += SEPARATOR + _text(item.content)
                else:
                    messages.append({"role": role, "content": _text(item.content)})
            case ReasoningItem():
                turn = _turn(messages, is_new=lambda turn: True)
                turn["reasoning_content"] = SEPARATOR.join(part.text for part in item.content or item.summary or ())
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages, is_new=lambda turn: False).setdefault("tool_calls", []).append(call)
            case FunctionOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages


def _turn(messages: list[dict[str, Any]], is_new: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The assistant's message at the end, or a new one."""
    if not messages or messages[-1]["role"] != "assistant" or is_new(messages[-1]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | Sequence[TextContent | RefusalPart]) -> str:
    return content if isinstance(content, str) else SEPARATOR.join(part.text for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(body: ResponsesBody) -> Any:
    if isinstance(body.tool_choice, FunctionChoice):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return body.tool_choice


def _resource(body: ResponsesBody, generation: GenerationRequest) -> dict[str, Any]:
    """The fields of a response that do not depend on the answer, in full as the Open Responses specification asks."""
    text_format = None if body.text is None else body.text.format
    form: dict[str, Any] = {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True)
    reasoning = body.reasoning
    choice, sampling = body.tool_choice, generation.requests[0].sampling
    return {
        "object": "response",
        "model": generation.model,
        "previous_response_id": body.previous_response_id,
        "instructions": body.instructions,
        "tools": [_echoed(tool) for tool in body.tools or ()],
        "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": form},
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": 0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "truncation": "disabled",
        "store": body.store is not False,
        "background": False,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "safety_identifier": None,
        "prompt_cache_key": None,
        "user": None,
    }


def _echoed(tool: FunctionTool) -> dict[str, Any]:
    return {**tool.model_dump(), "strict": bool(tool.strict)}
