"""Bodies as what a route makes of them, wherever that is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from router.api.generation import RequestBuilder
from router.errors import ApiError
from router.text.tokens import ModelTokens

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """The model that bodies are read for. `max_model_tokens` is the nodes' limit at this time, None without nodes."""

    name: str
    tokens: ModelTokens
    max_model_tokens: int | None

    def check_name(self, given: str | None) -> None:
        """Raises ApiError (404) for a body that names another model."""
        if given is not None and given != self.name:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model {given!r} is not served here; use {self.name!r}",
                param="model",
                code="model_not_found",
            )

    @property
    def builder(self) -> RequestBuilder:
        """The builder of generation requests."""
        return RequestBuilder(self.name, self.tokens, lambda: self.max_model_tokens)


Reader = Callable[[bytes, ServedModel], T]
"""Parses, renders and tokenizes a body of one route; raises ApiError for one that cannot be served. It travels to
another process by its name, so that it is a function of a module, or `functools.partial` of one."""


@dataclass(frozen=True)
class ParseJob(Generic[T]):
    """One body, and how to read it. `max_model_tokens` is the nodes' limit at this time, None without nodes."""

    read: Reader[T]
    data: bytes
    max_model_tokens: int | None


class BodyParser:
    """Reads bodies for one served model."""

    def __init__(self, model: str, tokens: ModelTokens) -> None:
        self._model = model
        self._tokens = tokens

    def parse(self, job: ParseJob[T]) -> T:
        """The body as its reader makes it; raises ApiError for a body that cannot be served."""
        return job.read(job.data, ServedModel(self._model, self._tokens, job.max_model_tokens))
