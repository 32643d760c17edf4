"""The JSON of answers, whole or as server-sent events. A chunk is joined from strings, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.api.generation import GenerationRequest
from router.api.logprobs import chat_logprobs, completion_logprobs
from router.text.text_stream import TextDelta, joined
from router.text.token_bytes import TokenBytes

DONE = b"data: [DONE]\n\n"
ANSWER_END = b"\n"  # after the JSON of a whole answer


def event(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


class ResponseWriter:
    """Writes the answer to one generation request in the shape of chats or of completions."""

    def __init__(self, generation: GenerationRequest, names: TokenBytes) -> None:
        self._generation = generation
        self._names = names
        self._object = "chat.completion.chunk" if generation.is_chat else "text_completion"
        self._head = self._envelope(self._object)[:-1]
        self._usage_tail = ',"usage":null}' if generation.include_usage else "}"

    def _envelope(self, kind: str) -> str:
        generation = self._generation
        return json.dumps(
            {"id": generation.id, "object": kind, "created": generation.created, "model": generation.model}
        )

    def role(self, index: int) -> bytes:
        """The chunk before a choice's first text: the role of a chat's message, nothing for a completion."""
        if not self._generation.is_chat:
            return b""
        return self._chunk(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """The chunk for the next text of a choice; nothing for a delta without text, token ids or log-probabilities."""
        logprobs = self._logprobs(index, delta)
        has_ids = self._generation.return_token_ids and delta.tokens
        if not delta.text and logprobs is None and not has_ids:
            return b""
        text = json.dumps(delta.text)
        body = f'"delta":{{"content":{text}}}' if self._generation.is_chat else f'"text":{text}'
        if self._generation.return_token_ids:
            body += f',"token_ids":{[token.id for token in delta.tokens]}'
        return self._chunk(index, body, json.dumps(logprobs), None)

    def finish(self, index: int, finish_reason: str) -> bytes:
        """The chunk after a choice's last text."""
        body = '"delta":{}' if self._generation.is_chat else '"text":""'
        return self._chunk(index, body, "null", finish_reason)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The chunk after the last choice."""
        return event(f'{self._head},"choices":[],"usage":{json.dumps(usage)}}}')

    def _chunk(self, index: int, body: str, logprobs: str, finish_reason: str | None) -> bytes:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        choice = f'{{"index":{index},{body},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return event(f'{self._head},"choices":[{choice}]{self._usage_tail}')

    def whole(self, choices: Sequence[tuple[Sequence[TextDelta], str]], usage: Mapping[str, Any]) -> bytes:
        """The answer without streaming, from each choice's deltas and finish reason."""
        rendered = [self._choice(index, deltas, reason) for index, (deltas, reason) in enumerate(choices)]
        head = json.loads(self._envelope("chat.completion" if self._generation.is_chat else self._object))
        return json.dumps({**head, "choices": rendered, "usage": usage}).encode()

    def _choice(self, index: int, deltas: Sequence[TextDelta], finish_reason: str) -> dict[str, Any]:
        answer = joined(deltas)
        logprobs = self._logprobs(index, answer)
        end: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if self._generation.return_token_ids:
            end["token_ids"] = [token.id for token in answer.tokens]
        if self._generation.is_chat:
            return {"index": index, "message": {"role": "assistant", "content": answer.text}, **end}
        return {"index": index, "text": answer.text, **end}

    def _logprobs(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        if self._generation.requests[index].sampling.logprobs is None or not delta.tokens:
            return None
        if self._generation.is_chat:
            return chat_logprobs(delta.tokens, self._names)
        return completion_logprobs(delta.tokens, delta.offsets, self._names)
