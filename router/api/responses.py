"""The JSON that clients get, whole or as server-sent events. A chunk is a few string joins, no schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.api.generation import Order
from router.api.logprobs import chat_logprobs, completion_logprobs
from router.text.detokenizer import TokenBytes
from router.text.text_stream import Piece

DONE = b"data: [DONE]\n\n"


def event(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


class Replies:
    """Renders one order's answer; chat and completions differ in how text and logprobs are wrapped."""

    def __init__(self, order: Order, names: TokenBytes) -> None:
        self._order = order
        self._names = names
        self._object = "chat.completion.chunk" if order.is_chat else "text_completion"
        self._head = self._envelope(self._object)[:-1]
        self._usage_tail = ',"usage":null}' if order.include_usage else "}"

    def _envelope(self, kind: str) -> str:
        order = self._order
        return json.dumps({"id": order.id, "object": kind, "created": order.created, "model": order.model})

    def opening(self, index: int) -> bytes:
        """Before a choice's first text: a chat says who speaks."""
        if not self._order.is_chat:
            return b""
        return self._chunk(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def piece(self, index: int, piece: Piece) -> bytes:
        """Some more text of a choice; nothing while a character is incomplete or a stop string may begin."""
        logprobs = self._logprobs(index, piece)
        has_ids = self._order.return_token_ids and piece.tokens
        if not piece.text and logprobs is None and not has_ids:
            return b""
        text = json.dumps(piece.text)
        body = f'"delta":{{"content":{text}}}' if self._order.is_chat else f'"text":{text}'
        if self._order.return_token_ids:
            body += f',"token_ids":{[token.id for token in piece.tokens]}'
        return self._chunk(index, body, json.dumps(logprobs), None)

    def closing(self, index: int, finish_reason: str) -> bytes:
        """After a choice's last text."""
        body = '"delta":{}' if self._order.is_chat else '"text":""'
        return self._chunk(index, body, "null", finish_reason)

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """After the last choice."""
        return event(f'{self._head},"choices":[],"usage":{json.dumps(usage)}}}')

    def _chunk(self, index: int, body: str, logprobs: str, finish_reason: str | None) -> bytes:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        choice = f'{{"index":{index},{body},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return event(f'{self._head},"choices":[{choice}]{self._usage_tail}')

    def whole(self, choices: Sequence[tuple[Sequence[Piece], str]], usage: Mapping[str, Any]) -> bytes:
        """The answer without streaming: each choice's pieces and finish reason."""
        rendered = [self._choice(index, pieces, reason) for index, (pieces, reason) in enumerate(choices)]
        head = json.loads(self._envelope("chat.completion" if self._order.is_chat else self._object))
        return json.dumps({**head, "choices": rendered, "usage": usage}).encode()

    def _choice(self, index: int, pieces: Sequence[Piece], finish_reason: str) -> dict[str, Any]:
        joined = Piece(
            "".join(piece.text for piece in pieces),
            tuple(token for piece in pieces for token in piece.tokens),
            tuple(offset for piece in pieces for offset in piece.offsets),
        )
        logprobs = self._logprobs(index, joined)
        end: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if self._order.return_token_ids:
            end["token_ids"] = [token.id for token in joined.tokens]
        if self._order.is_chat:
            return {"index": index, "message": {"role": "assistant", "content": joined.text}, **end}
        return {"index": index, "text": joined.text, **end}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if self._order.requests[index].sampling.logprobs is None or not piece.tokens:
            return None
        if self._order.is_chat:
            return chat_logprobs(piece.tokens, self._names)
        return completion_logprobs(piece.tokens, piece.offsets, self._names)
