"""Anthropic's messages as a chat: the same body, template and limits as for /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from router.api.anthropic.message_schemas import (
    MAX_CACHE_MARKS,
    AnyBlock,
    CountBody,
    InputMessage,
    InputTool,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.body_schemas import checked_body, parse_body
from router.api.chat_schemas import ChatBody
from router.api.generation import GenerationRequest
from router.errors import bad_request
from router.parsing.body_parser import ServedModel
from router.text.message_ends import Mark

SEPARATOR = "\n"  # between texts of one message
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_messages(data: bytes, model: ServedModel) -> GenerationRequest:
    """The generation request of a body of /v1/messages; raises ApiError for a body that cannot be served."""
    body = parse_body(MessagesBody, data)
    model.check_name(body.model)
    chat = _Chat(body)
    sampling: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    if body.thinking is not None and model.tokens.formats.reasoning is not None:  # without reasoning, none to bound
        sampling["thinking_token_budget"] = body.thinking.max_tokens
    return model.builder.chat(chat.body(sampling), id_prefix="msg_", marks=chat.marks)


def read_count(data: bytes, model: ServedModel) -> bytes:
    """The answer to a body of /v1/messages/count_tokens; raises ApiError for a chat that no node can hold."""
    body = parse_body(CountBody, data)
    model.check_name(body.model)
    return json.dumps({"input_tokens": len(model.builder.chat_tokens(_Chat(body).body({})))}).encode()


class _Chat:
    """The messages of a body in OpenAI's form. `marks`: where `cache_control` stands in them."""

    def __init__(self, body: CountBody) -> None:
        self._body = body
        self._messages: list[dict[str, Any]] = []
        self.marks: list[Mark] = []
        num_marks = sum(tool.cache_control is not None for tool in body.tools or ())
        if body.system_blocks:
            num_marks += self._add("system", body.system_blocks)
        for message in body.messages:
            num_marks += self._add_message(message)
        if body.cache_control is not None:
            num_marks += 1  # the end of the last message is a boundary in any case
        if num_marks > MAX_CACHE_MARKS:
            raise bad_request(f"{num_marks} blocks with cache_control: at most {MAX_CACHE_MARKS}", "cache_control")
        self._is_prefilled = body.messages[-1].role == "assistant"
        if self._is_prefilled and "tool_calls" in self._messages[-1]:
            raise bad_request("the last message calls tools: end with their results, as a user's message", "messages")

    def body(self, sampling: dict[str, Any]) -> ChatBody:
        """The chat's body with these sampling fields; raises ApiError."""
        body, choice = self._body, self._body.tool_choice or ToolChoice(type="auto")
        output = body.output_config
        fields: dict[str, Any] = {
            "messages": self._messages,
            "continue_final_message": self._is_prefilled or None,
            "headrace": body.headrace,
            "tools": [_tool(tool) for tool in body.tools or ()] or None,
            "tool_choice": _tool_choice(choice) if body.tools else None,
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": {"enable_thinking": body.thinking is not None and body.thinking.type != "disabled"},
        }
        if output is not None and output.format is not None:
            schema = {"name": "answer", "schema": output.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return checked_body(ChatBody, fields | sampling)

    def _add_message(self, message: InputMessage) -> int:
        """Adds a turn and returns its number of cache marks. Each tool's result is a message of its own."""
        if isinstance(message.content, str):
            self._messages.append({"role": message.role, "content": message.content})
            return 0
        num_marks = 0
        for is_result, blocks in _runs(message.content):
            if is_result:
                for block in blocks:
                    num_marks += self._add_result(block)
            else:
                num_marks += self._add(message.role, blocks)
        return num_marks

    def _add_result(self, block: Any) -> int:
        content = block.content
        text = content if isinstance(content, str) else SEPARATOR.join(part.text for part in content or ())
        self._messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        return self._mark(text) if block.cache_control else 0

    def _add(self, role: str, blocks: Sequence[AnyBlock]) -> int:
        texts: list[str] = []
        message: dict[str, Any] = {"role": role, "content": ""}
        self._messages.append(message)
        num_marks = 0
        for block in blocks:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
                case ToolUseBlock():
                    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                    call = {"id": block.id, "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(call)
            if getattr(block, "cache_control", None) is not None:
                num_marks += self._mark(SEPARATOR.join(texts))
        message["content"] = SEPARATOR.join(texts)
        return num_marks

    def _mark(self, content: str) -> int:
        self.marks.append(Mark(len(self._messages), content))
        return 1


def _runs(blocks: Sequence[AnyBlock]) -> Iterator[tuple[bool, list[AnyBlock]]]:
    """Blocks in a row that are tool results, and those that are not."""
    run: list[AnyBlock] = []
    for block in blocks:
        is_result = isinstance(block, ToolResultBlock)
        if run and isinstance(run[-1], ToolResultBlock) != is_result:
            yield not is_result, run
            run = []
        run.append(block)
    if run:
        yield isinstance(run[-1], ToolResultBlock), run


def _tool(tool: InputTool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]
