"""The JSON of answers, whole or as server-sent events. A chunk is joined from strings, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.api.generation import GenerationRequest
from router.api.logprobs import Columns, chat_logprobs, columns_of, completion_logprobs, dumps, logprobs_json
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes

DONE = b"data: [DONE]\n\n"
ANSWER_END = b"\n"  # after the JSON of a whole answer


def event(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


@dataclass(frozen=True)
class RenderedDelta:
    """A delta whose log-probabilities are JSON already; None: it has none."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: Columns | None


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
        return dumps({"id": generation.id, "object": kind, "created": generation.created, "model": generation.model})

    def role(self, index: int) -> bytes:
        """The chunk before a choice's first text: the role of a chat's message, nothing for a completion."""
        if not self._generation.is_chat:
            return b""
        return self._chunk(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def render(self, index: int, delta: TextDelta) -> RenderedDelta:
        """Renders the delta's log-probabilities, in any thread; raises ApiError (500) for those that are no numbers."""
        ids, columns = tuple(token.id for token in delta.tokens), None
        if ids and self._generation.requests[index].sampling.logprobs is not None:
            if self._generation.is_chat:
                columns = columns_of(chat_logprobs(delta.tokens, self._names))
            else:
                columns = columns_of(completion_logprobs(delta.tokens, delta.offsets, self._names))
        return RenderedDelta(delta.text, ids, columns)

    def delta(self, index: int, delta: RenderedDelta) -> bytes:
        """The chunk for the next text of a choice; nothing for a delta without text, token ids or log-probabilities."""
        has_ids = self._generation.return_token_ids and delta.token_ids
        if not delta.text and delta.logprobs is None and not has_ids:
            return b""
        text = dumps(delta.text)
        body = f'"delta":{{"content":{text}}}' if self._generation.is_chat else f'"text":{text}'
        if self._generation.return_token_ids:
            body += f',"token_ids":{list(delta.token_ids)}'
        return self._chunk(index, body, self._logprobs([delta]), None)

    def finish(self, index: int, finish_reason: str) -> bytes:
        """The chunk after a choice's last text."""
        body = '"delta":{}' if self._generation.is_chat else '"text":""'
        return self._chunk(index, body, "null", finish_reason)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The chunk after the last choice."""
        return event(f'{self._head},"choices":[],"usage":{dumps(usage)}}}')

    def _chunk(self, index: int, body: str, logprobs: str, finish_reason: str | None) -> bytes:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        choice = f'{{"index":{index},{body},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return event(f'{self._head},"choices":[{choice}]{self._usage_tail}')

    def whole(self, choices: Sequence[tuple[Sequence[RenderedDelta], str]], usage: Mapping[str, Any]) -> bytes:
        """The answer without streaming, from each choice's deltas and finish reason."""
        rendered = [self._choice(index, deltas, reason) for index, (deltas, reason) in enumerate(choices)]
        head = self._envelope("chat.completion" if self._generation.is_chat else self._object)[:-1]
        return f'{head}, "choices": [{", ".join(rendered)}], "usage": {dumps(usage)}}}'.encode()

    def _choice(self, index: int, deltas: Sequence[RenderedDelta], finish_reason: str) -> str:
        text = dumps("".join(delta.text for delta in deltas))
        body = (
            f'"message": {{"role": "assistant", "content": {text}}}' if self._generation.is_chat else f'"text": {text}'
        )
        end = f'"logprobs": {self._logprobs(deltas)}, "finish_reason": "{finish_reason}"'
        if self._generation.return_token_ids:
            end += f', "token_ids": {[token_id for delta in deltas for token_id in delta.token_ids]}'
        return f'{{"index": {index}, {body}, {end}}}'

    def _logprobs(self, deltas: Sequence[RenderedDelta]) -> str:
        parts = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        return logprobs_json(parts, is_chat=self._generation.is_chat)
