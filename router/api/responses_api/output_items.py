"""The output items of one response: parts of the answer in, items and their events out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.api.logprobs import dumps
from router.text.answer.parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText

Event = tuple[str, str]
"""An event's type, and its other fields as JSON without braces."""

PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """Items in the order of their parts. `base` is what their ids are made of.

    Events come as the Responses API orders them: an item is added, its content part is added, deltas, the whole text,
    the part, the item.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._texts: list[str] = []  # of the open item
        self._item: dict[str, Any] | None = None
        self.done: list[dict[str, Any]] = []

    def of(self, part: AnswerPart) -> Iterator[Event]:
        """The events for the next part; a part of another kind completes the item before it."""
        match part:
            case ContentText(text):
                yield from self._text("message", text)
            case ReasoningText(text):
                yield from self._text("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self.complete()
                yield self._added("function_call", {"call_id": call_id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                self._texts.append(text)
                yield "response.function_call_arguments.delta", f'{self._place()},"delta":{dumps(text)}'

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """The events after the last part; an answer without any gets an empty message."""
        if self._item is None and not self.done:
            yield from self._text("message", "")
        yield from self.complete("incomplete" if is_cut else "completed")

    def complete(self, status: str = "completed") -> Iterator[Event]:
        """The events that complete the open item, if there is one."""
        item = self._item
        if item is None:
            return
        text = "".join(self._texts)
        place, kind = self._place(), item["type"]
        if kind == "function_call":
            item["arguments"] = text
            name = dumps(item["name"])
            yield "response.function_call_arguments.done", f'{place},"name":{name},"arguments":{dumps(text)}'
        else:
            part = _part(kind, text)
            item["content"] = [part]
            extra = ',"logprobs":[]' if kind == "message" else ""
            yield f"response.{PARTS[kind]}.done", f'{place},"content_index":0,"text":{dumps(text)}{extra}'
            yield "response.content_part.done", f'{place},"content_index":0,"part":{dumps(part)}'
        item["status"] = status
        yield "response.output_item.done", f'"output_index":{len(self.done)},"item":{dumps(item)}'
        self.done.append(item)
        self._item, self._texts = None, []

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._item is None or self._item["type"] != kind:
            yield from self.complete()
            fields = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
            yield self._added(kind, fields)
            part = dumps(_part(kind, ""))
            yield "response.content_part.added", f'{self._place()},"content_index":0,"part":{part}'
        self._texts.append(text)
        if text:
            extra = ',"logprobs":[]' if kind == "message" else ""
            yield f"response.{PARTS[kind]}.delta", f'{self._place()},"content_index":0,"delta":{dumps(text)}{extra}'

    def _added(self, kind: str, fields: dict[str, Any]) -> Event:
        item_id = f"{PREFIXES[kind]}{self._base}-{len(self.done)}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        return "response.output_item.added", f'"output_index":{len(self.done)},"item":{dumps(self._item)}'

    def _place(self) -> str:
        assert self._item is not None
        return f'"item_id":"{self._item["id"]}","output_index":{len(self.done)}'


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
