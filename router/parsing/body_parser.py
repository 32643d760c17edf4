"""Bodies of chats and completions as generation requests, wherever that is computed."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from router.api.body_schemas import parse_body
from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.generation import GenerationRequest, RequestBuilder
from router.api.request_schemas import GenerationBody
from router.errors import ApiError
from router.text.tokens import ModelTokens

Kind = Literal["chat", "completion"]


@dataclass(frozen=True)
class ParseJob:
    """One body. `max_model_tokens` is the nodes' limit at this time, None without nodes."""

    kind: Kind
    data: bytes
    max_model_tokens: int | None


class BodyParser:
    """Parses, renders and tokenizes for one served model; raises ApiError."""

    def __init__(self, model: str, tokens: ModelTokens) -> None:
        self._model = model
        self._tokens = tokens

    def parse(self, job: ParseJob) -> GenerationRequest:
        """The generation request of a body; raises ApiError for a body that cannot be served."""
        builder = RequestBuilder(self._model, self._tokens, lambda: job.max_model_tokens)
        if job.kind == "chat":
            chat = parse_body(ChatBody, job.data)
            self._check_model(chat)
            return builder.chat(chat)
        completion = parse_body(CompletionBody, job.data)
        self._check_model(completion)
        return builder.completion(completion)

    def _check_model(self, body: GenerationBody) -> None:
        if body.model is not None and body.model != self._model:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model {body.model!r} is not served here; use {self._model!r}",
                param="model",
                code="model_not_found",
            )
