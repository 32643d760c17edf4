"""The JSON of Anthropic's messages, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from headrace.request import FinishReason
from router.api.answer_writer import AnswerUsage, ChoiceEnd, RenderedDelta, event
from router.api.anthropic.message_errors import message_error
from router.api.generation import GenerationRequest
from router.api.logprobs import dumps
from router.api.tool_arguments import json_object
from router.errors import ApiError
from router.text.answer.parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText, merged
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes


class MessageWriter:
    """Writes the answer to one body of /v1/messages; an `AnswerWriter`. There is one choice."""

    def __init__(self, generation: GenerationRequest, names: TokenBytes) -> None:
        self._generation = generation
        self._blocks = BlockEvents()
        self._end = ChoiceEnd(FinishReason.STOP)

    def render(self, index: int, delta: TextDelta) -> RenderedDelta:
        return RenderedDelta("", (), None, delta.parts)

    def begin(self, index: int) -> bytes:
        prompt_tokens = self._generation.requests[0].num_prompt_tokens
        message = self._message("[]", "null", "null", _usage(AnswerUsage(prompt_tokens, 0, 0)))
        return _event("message_start", f'"message":{message}') + _event("ping")

    def delta(self, index: int, delta: RenderedDelta) -> bytes:
        return b"".join(self._blocks.of(part) for part in delta.parts)

    def finish(self, index: int, end: ChoiceEnd) -> bytes:
        self._end = end
        return self._blocks.stop()

    def end(self, usage: AnswerUsage) -> bytes:
        reason = _stop_reason(self._end)
        delta = dumps({"stop_reason": reason, "stop_sequence": self._end.stop})
        return _event("message_delta", f'"delta":{delta},"usage":{_usage(usage)}') + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return event(message_error(error), "error")

    def whole(self, choices: Sequence[tuple[Sequence[RenderedDelta], ChoiceEnd]], usage: AnswerUsage) -> bytes:
        ((deltas, end),) = choices
        parts = merged(part for delta in deltas for part in delta.parts)
        blocks = f"[{','.join(_whole_blocks(parts))}]"
        reason = dumps(_stop_reason(end))
        return self._message(blocks, reason, dumps(end.stop), _usage(usage)).encode()

    def _message(self, content: str, stop_reason: str, stop_sequence: str, usage: str) -> str:
        generation = self._generation
        head = dumps({"id": generation.id, "type": "message", "role": "assistant", "model": generation.model})[:-1]
        return (
            f'{head},"content":{content},"stop_reason":{stop_reason},"stop_sequence":{stop_sequence},"usage":{usage}}}'
        )


class BlockEvents:
    """The events of the content blocks of one streamed message, numbered in order."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[AnswerPart] | None = None
        self._thinking = ""

    def of(self, part: AnswerPart) -> bytes:
        """The events for the next part; a part of another kind ends the block before it."""
        match part:
            case ContentText(text):
                return self._begun(ContentText, {"type": "text", "text": ""}) + self._delta("text_delta", "text", text)
            case ReasoningText(text):
                begun = self._begun(ReasoningText, {"type": "thinking", "thinking": "", "signature": ""})
                self._thinking += text
                return begun + self._delta("thinking_delta", "thinking", text)
            case CallStart(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self.stop() + self._begun(CallStart, call)
            case CallArguments(_, text):
                return self._delta("input_json_delta", "partial_json", text)

    def stop(self) -> bytes:
        """The events that end the open block, if there is one."""
        if self._open is None:
            return b""
        signed = b""
        if self._open is ReasoningText:
            signed = self._delta("signature_delta", "signature", _signature(self._thinking))
        self._open, self._thinking = None, ""
        return signed + _event("content_block_stop", f'"index":{self._index}')

    def _begun(self, kind: type[AnswerPart], block: dict[str, Any]) -> bytes:
        if self._open is kind:
            return b""
        stopped = self.stop()
        self._open = kind
        self._index += 1
        return stopped + _event("content_block_start", f'"index":{self._index},"content_block":{dumps(block)}')

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        delta = f'{{"type":"{kind}","{field}":{dumps(text)}}}'
        return _event("content_block_delta", f'"index":{self._index},"delta":{delta}')


def _whole_blocks(parts: Sequence[AnswerPart]) -> list[str]:
    blocks: list[str] = []
    for place, part in enumerate(parts):
        match part:
            case ContentText(text):
                blocks.append(dumps({"type": "text", "text": text}))
            case ReasoningText(text):
                blocks.append(dumps({"type": "thinking", "thinking": text, "signature": _signature(text)}))
            case CallStart(index, call_id, name):
                following = (each for each in parts[place + 1 :] if isinstance(each, CallArguments))
                arguments = "".join(each.text for each in following if each.index == index)
                head = dumps({"type": "tool_use", "id": call_id, "name": name})[:-1]
                blocks.append(f'{head},"input":{json_object(arguments)}}}')
    return blocks


def _event(kind: str, fields: str = "") -> bytes:
    return event(f'{{"type":"{kind}"{"," if fields else ""}{fields}}}', kind)


def _signature(thinking: str) -> str:
    """Some clients drop reasoning that has none; nothing here reads it."""
    return blake2b(thinking.encode(errors="replace"), digest_size=16).hexdigest()


def _stop_reason(end: ChoiceEnd) -> str:
    if end.stop is not None:
        return "stop_sequence"
    if end.reason is FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if end.has_calls else "end_turn"


def _usage(usage: AnswerUsage) -> str:
    """Anthropic counts cached tokens of the prompt apart from its others."""
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    return dumps(fields if usage.report is None else fields | {"headrace": usage.report})
