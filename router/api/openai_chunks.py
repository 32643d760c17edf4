"""The parts that the JSON of OpenAI's chats and completions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from headrace.request import FinishReason
from router.api.answer_writer import AnswerUsage, ChoiceEnd, RenderedDelta, event
from router.api.generation import GenerationRequest
from router.api.logprobs import dumps, prompt_logprobs_items
from router.errors import ApiError
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"headrace-{version('headrace')}"
"""Answers' `system_fingerprint`: under one, the same seed gives the same answer."""


class OpenAIChunks:
    """Chunks of one answer, each with the answer's envelope. `kind` is their `object`."""

    def __init__(self, generation: GenerationRequest, kind: str) -> None:
        self._generation = generation
        self._head = self._envelope(kind)[:-1]
        self._chunk_head = f'{self._head},"choices":[{{"index":'
        self._chunk_tail = '}],"usage":null}' if generation.include_usage else "}]}"
        self._num_generated = [0] * len(generation.requests)  # tokens of each choice so far

    def _envelope(self, kind: str) -> str:
        generation = self._generation
        fields = {"id": generation.id, "object": kind, "created": generation.created, "model": generation.model}
        return dumps(fields | {"system_fingerprint": FINGERPRINT})

    def chunk(self, index: int, body: str, logprobs: str, end: ChoiceEnd | None) -> bytes:
        """The event for a part of one choice."""
        finish = '"finish_reason":null' if end is None else _end_fields(end)
        tail = self._chunk_tail
        if self._generation.continuous_usage:
            tail = f'}}],"usage":{self._usage_so_far(index)}}}'
        return event(f'{self._chunk_head}{index},{body},"logprobs":{logprobs},{finish}{tail}')

    def count(self, index: int, delta: RenderedDelta) -> None:
        """Counts a delta's tokens as its choice's: chunks from now on say so, if the client asked for that."""
        self._num_generated[index] += delta.num_generated

    def _usage_so_far(self, index: int) -> str:
        """The usage of one choice, as vLLM has it in each chunk."""
        return dumps(_token_counts(len(self._generation.prompt_of(index).tokens), self._num_generated[index]))

    def has_tokens(self, delta: RenderedDelta) -> bool:
        """True for a delta with token ids or log-probabilities that the client asked for."""
        return delta.logprobs is not None or (self._generation.return_token_ids and bool(delta.token_ids))

    def token_ids(self, delta: RenderedDelta) -> str:
        """A chunk's `token_ids`, if the client asked for them."""
        return f',"token_ids":{list(delta.token_ids)}' if self._generation.return_token_ids else ""

    def end(self, usage: AnswerUsage) -> bytes:
        """The chunk with the usage, if the client asked for it, and the end of the stream."""
        if not self._generation.include_usage:
            return DONE
        return event(f'{self._head},"choices":[],"usage":{dumps(openai_usage(usage))}}}') + DONE

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks."""
        return event(error.json())

    def choice_end(self, deltas: Sequence[RenderedDelta], logprobs: str, end: ChoiceEnd) -> str:
        """The fields of a whole choice after its text."""
        fields = f'"logprobs": {logprobs}, {_end_fields(end)}'
        if self._generation.return_token_ids:
            fields += f', "token_ids": {[token_id for delta in deltas for token_id in delta.token_ids]}'
        return fields

    def prompt_items(self, delta: TextDelta, names: TokenBytes) -> str | None:
        """The items of `prompt_logprobs` that a delta of the prompt adds, if the client asked for them."""
        wanted = delta.is_prompt and self._generation.shows_prompt_logprobs
        return prompt_logprobs_items(delta.tokens, names) if wanted else None

    def prompt_logprobs(self, deltas: Sequence[RenderedDelta]) -> str:
        """The field `prompt_logprobs`, if the client asked for it."""
        if not self._generation.shows_prompt_logprobs:
            return ""
        return f', "prompt_logprobs": [{", ".join(delta.prompt for delta in deltas if delta.prompt)}]'

    def whole(self, kind: str, choices: Sequence[str], usage: AnswerUsage, more: str = "") -> bytes:
        """The whole answer of rendered choices; `more`: rendered fields behind the others."""
        head = self._envelope(kind)[:-1]
        return f'{head}, "choices": [{", ".join(choices)}], "usage": {dumps(openai_usage(usage))}{more}}}'.encode()


def _end_fields(end: ChoiceEnd) -> str:
    """A choice's `finish_reason`, and vLLM's `stop_reason`: a stop string, a stop token's id, or null."""
    stop = end.stop if end.stop is not None else end.stop_token
    # An answer that was cut keeps its reason: its last call may be cut, too.
    reason = "tool_calls" if end.has_calls and end.reason is FinishReason.STOP else end.reason.value
    return f'"finish_reason": "{reason}", "stop_reason": {dumps(stop)}'


def openai_usage(usage: AnswerUsage) -> dict[str, Any]:
    """The `usage` of chats and completions."""
    fields: dict[str, Any] = {
        **_token_counts(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields if usage.report is None else fields | {"headrace": usage.report}


def _token_counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
