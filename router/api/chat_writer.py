"""The JSON of chats' answers, whole or as server-sent events. A chunk is joined from strings, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from router.api.answer_writer import AnswerUsage, ChoiceEnd, RenderedDelta
from router.api.generation import GenerationRequest
from router.api.logprobs import chat_logprobs, columns_of, dumps, logprobs_json
from router.api.openai_chunks import OpenAIChunks
from router.errors import ApiError
from router.text.answer.parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes


class ChatWriter:
    """Writes the answer to one chat; an `AnswerWriter`.

    Tokens go with the first chunk of their delta, whatever it holds: joined, their ids and log-probabilities are those
    of the whole answer, its markers included.
    """

    def __init__(self, generation: GenerationRequest, names: TokenBytes) -> None:
        self._generation = generation
        self._names = names
        self._chunks = OpenAIChunks(generation, "chat.completion.chunk")

    def render(self, index: int, delta: TextDelta) -> RenderedDelta:
        prompt = self._chunks.prompt_items(delta, self._names)
        if delta.is_prompt and not self._generation.echo:
            return RenderedDelta("", (), None, prompt=prompt)
        ids, columns = tuple([token.id for token in delta.tokens]), None
        if ids and self._generation.requests[index].sampling.logprobs is not None:
            columns = columns_of(chat_logprobs(delta.tokens, self._names))
        return RenderedDelta(delta.text, ids, columns, delta.parts, prompt, 0 if delta.is_prompt else len(ids))

    def begin(self, index: int) -> bytes:
        return self._chunks.chunk(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def delta(self, index: int, delta: RenderedDelta) -> bytes:
        self._chunks.count(index, delta)
        match delta.parts:
            case (ContentText(text),):  # by far the most
                fields = [f'"content":{dumps(text)}']
            case parts:
                fields = list(_chunk_fields(parts))
        if not fields and self._chunks.has_tokens(delta):
            fields = ['"content":""']
        ids = self._chunks.token_ids(delta)
        logprobs = "null" if delta.logprobs is None else _logprobs([delta])
        data = b""
        for each in fields:
            data += self._chunks.chunk(index, f'"delta":{{{each}}}{ids}', logprobs, None)
            ids, logprobs = "", "null"
        return data

    def finish(self, index: int, end: ChoiceEnd) -> bytes:
        return self._chunks.chunk(index, '"delta":{}', "null", end)

    def end(self, usage: AnswerUsage) -> bytes:
        return self._chunks.end(usage)

    def failure(self, error: ApiError) -> bytes:
        return self._chunks.failure(error)

    def whole(self, choices: Sequence[tuple[Sequence[RenderedDelta], ChoiceEnd]], usage: AnswerUsage) -> bytes:
        rendered = [
            f'{{"index": {index}, "message": {dumps(message(part for delta in deltas for part in delta.parts))}, '
            f"{self._chunks.choice_end(deltas, _logprobs(deltas), end)}}}"
            for index, (deltas, end) in enumerate(choices)
        ]
        return self._chunks.whole("chat.completion", rendered, usage, self._chunks.prompt_logprobs(choices[0][0]))


def message(parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """The assistant's message of a whole answer. Its content is null if it has only reasoning or calls."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[CallStart, list[str]]] = []
    for part in parts:
        match part:
            case ContentText(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallStart():
                calls.append((part, []))
            case CallArguments(index, text):
                calls[index][1].append(text)
    is_empty = not content and bool(reasoning or calls)
    fields: dict[str, Any] = {"role": "assistant", "content": None if is_empty else "".join(content)}
    if reasoning:
        fields["reasoning_content"] = "".join(reasoning)
    if calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(texts)}}
            for call, texts in calls
        ]
    return fields


def _chunk_fields(parts: Sequence[AnswerPart]) -> Iterator[str]:
    """The fields of a delta for each run of parts of one kind: clients look at one kind in a chunk."""
    for kind, run in groupby(parts, _field):
        if kind == "tool_calls":
            yield f'"tool_calls":[{",".join(map(dumps, _call_deltas(run)))}]'
        else:
            text = "".join(part.text for part in run if isinstance(part, ContentText | ReasoningText))
            yield f'"{kind}":{dumps(text)}'


def _field(part: AnswerPart) -> str:
    match part:
        case ContentText():
            return "content"
        case ReasoningText():
            return "reasoning_content"
    return "tool_calls"


def _call_deltas(parts: Iterable[AnswerPart]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                deltas.append({"index": index, "id": call_id, "type": "function", "function": function})
            case CallArguments(index, text):
                if not deltas or deltas[-1]["index"] != index:
                    deltas.append({"index": index, "function": {"arguments": ""}})
                deltas[-1]["function"]["arguments"] += text
    return deltas


def _logprobs(deltas: Sequence[RenderedDelta]) -> str:
    return logprobs_json([delta.logprobs for delta in deltas if delta.logprobs is not None], is_chat=True)
