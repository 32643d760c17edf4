"""The JSON of the Responses API, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from headrace.request import FinishReason
from router.api.answer_writer import AnswerUsage, ChoiceEnd, RenderedDelta, event
from router.api.generation import GenerationRequest
from router.api.logprobs import dumps
from router.api.openai_chunks import DONE
from router.api.responses_api.conversations import ResponseRequest
from router.api.responses_api.output_items import Event, OutputItems
from router.errors import ApiError
from router.text.answer.parts import merged
from router.text.text_stream import TextDelta
from router.text.token_bytes import TokenBytes

Keep = Callable[[str, str, tuple[bytes, ...]], None]


class ResponseWriter:
    """Writes the answer to one body of /v1/responses; an `AnswerWriter`. There is one choice.

    keep   takes the id, the JSON and the new items of a response that has ended, to be stored; called in any thread
    """

    def __init__(
        self,
        request: ResponseRequest,
        keep: Keep,
        generation: GenerationRequest,
        names: TokenBytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._request = request
        self._keep = keep
        self._generation = generation
        self._clock = clock
        self._items = OutputItems(generation.id.removeprefix(generation.id_prefix))
        self._end = ChoiceEnd(FinishReason.STOP)
        self._number = 0

    def render(self, index: int, delta: TextDelta) -> RenderedDelta:
        return RenderedDelta("", (), None, delta.parts)

    def begin(self, index: int) -> bytes:
        response = self._resource("in_progress", None)
        return b"".join(
            self._event((f"response.{name}", f'"response":{response}')) for name in ("created", "in_progress")
        )

    def delta(self, index: int, delta: RenderedDelta) -> bytes:
        return b"".join(self._event(each) for part in delta.parts for each in self._items.of(part))

    def finish(self, index: int, end: ChoiceEnd) -> bytes:
        self._end = end
        return b"".join(map(self._event, self._items.end(is_cut=end.reason is FinishReason.LENGTH)))

    def end(self, usage: AnswerUsage) -> bytes:
        return self._event((f"response.{self._status}", f'"response":{self._ended(usage)}')) + DONE

    def failure(self, error: ApiError) -> bytes:
        is_clients = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
        cause = {"code": "invalid_prompt" if is_clients else "server_error", "message": error.message}
        response = self._resource("failed", None, error=cause)
        return self._event(("response.failed", f'"response":{response}')) + DONE

    def whole(self, choices: Sequence[tuple[Sequence[RenderedDelta], ChoiceEnd]], usage: AnswerUsage) -> bytes:
        ((deltas, end),) = choices
        for part in merged(part for delta in deltas for part in delta.parts):
            for _ in self._items.of(part):
                pass
        self.finish(0, end)
        return self._ended(usage).encode()

    @property
    def _status(self) -> str:
        return "incomplete" if self._end.reason is FinishReason.LENGTH else "completed"

    def _ended(self, usage: AnswerUsage) -> str:
        response = self._resource(self._status, usage)
        if self._request.store:
            items = (*self._request.items, *(dumps(item).encode() for item in self._items.done))
            self._keep(self._generation.id, response, items)
        return response

    def _resource(self, status: str, usage: AnswerUsage | None, error: dict[str, Any] | None = None) -> str:
        fields = {
            "id": self._generation.id,
            "created_at": self._generation.created,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items.done,
            "usage": None if usage is None else _usage(usage),
        }
        return f"{dumps(fields)[:-1]}, {self._request.resource}}}"

    def _event(self, each: Event) -> bytes:
        kind, fields = each
        data = f'{{"type":"{kind}","sequence_number":{self._number},{fields}}}'
        self._number += 1
        return event(data, kind)


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return fields if usage.report is None else fields | {"headrace": usage.report}
