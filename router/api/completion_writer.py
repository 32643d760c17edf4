"""The JSON of completions, whole or as server-sent events. A chunk is joined from strings, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.answer_writer import AnswerUsage, ChoiceEnd, RenderedDelta
from router.api.generation import GenerationRequest
from router.api.logprobs import columns_of, completion_logprobs, dumps, logprobs_json
from router.api.openai_chunks import OpenAIChunks
from router.errors import ApiError
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes


class CompletionWriter:
    """Writes the answer to one completion request; an `AnswerWriter`."""

    def __init__(self, generation: GenerationRequest, names: TokenBytes) -> None:
        self._generation = generation
        self._names = names
        self._chunks = OpenAIChunks(generation, "text_completion")

    def render(self, index: int, delta: TextDelta) -> RenderedDelta:
        prompt = self._chunks.prompt_items(delta, self._names)
        if delta.is_prompt and not self._generation.echo:
            return RenderedDelta("", (), None, prompt=prompt)
        ids, columns = tuple(token.id for token in delta.tokens), None
        if ids and self._generation.requests[index].sampling.logprobs is not None:
            columns = columns_of(completion_logprobs(delta.tokens, delta.offsets, self._names))
        num_generated = 0 if delta.is_prompt else len(ids)
        return RenderedDelta(delta.text, ids, columns, prompt=prompt, num_generated=num_generated)

    def begin(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, delta: RenderedDelta) -> bytes:
        self._chunks.count(index, delta)
        if not delta.text and not self._chunks.has_tokens(delta):
            return b""
        body = f'"text":{dumps(delta.text)}' + self._chunks.token_ids(delta)
        return self._chunks.chunk(index, body, _logprobs([delta]), None)

    def finish(self, index: int, end: ChoiceEnd) -> bytes:
        return self._chunks.chunk(index, '"text":""', "null", end)

    def end(self, usage: AnswerUsage) -> bytes:
        return self._chunks.end(usage)

    def failure(self, error: ApiError) -> bytes:
        return self._chunks.failure(error)

    def whole(self, choices: Sequence[tuple[Sequence[RenderedDelta], ChoiceEnd]], usage: AnswerUsage) -> bytes:
        rendered = [
            f'{{"index": {index}, "text": {dumps("".join(delta.text for delta in deltas))}, '
            f"{self._chunks.choice_end(deltas, _logprobs(deltas), end)}{self._chunks.prompt_logprobs(deltas)}}}"
            for index, (deltas, end) in enumerate(choices)
        ]
        return self._chunks.whole("text_completion", rendered, usage)


def _logprobs(deltas: Sequence[RenderedDelta]) -> str:
    return logprobs_json([delta.logprobs for delta in deltas if delta.logprobs is not None], is_chat=False)
