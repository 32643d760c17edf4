"""The tool calls of one answer, as the readers of the formats find them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from router.text.answer.incoming import Incoming, Steps
from router.text.answer.parts import AnswerPart, CallArguments, CallStart

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its parameters."""


class Calls:
    """Numbers and names calls, and passes their parts on.

    schemas     of the tools that the model may call
    new_id      the id of a call, by its index; for models that write no ids
    max_calls   None: any number
    """

    def __init__(
        self,
        incoming: Incoming,
        put: Callable[[AnswerPart], None],
        schemas: Schemas,
        new_id: Callable[[int], str],
        max_calls: int | None,
    ) -> None:
        self.schemas = schemas
        self._incoming = incoming
        self._put = put
        self._new_id = new_id
        self._max_calls = max_calls
        self.count = 0

    @property
    def is_full(self) -> bool:
        """True once no further call may begin."""
        return self._max_calls is not None and self.count >= self._max_calls

    def start(self, name: str, call_id: str | None = None) -> None:
        """A call begins for certain: what was read of it is not content."""
        self._incoming.stop_recording()
        self._put(CallStart(self.count, call_id or self._new_id(self.count), name))
        self.count += 1

    def arguments(self, text: str) -> None:
        """The next fragment of the arguments of the call that began last."""
        if text:
            self._put(CallArguments(self.count - 1, text))


class ReadCalls(Protocol):
    """Reads the calls behind one opening marker.

    Whether a call began tells `calls.count`: if none did, the caller takes the text for content.
    """

    def __call__(self, incoming: Incoming, calls: Calls, opening: str) -> Steps[None]: ...


@dataclass(frozen=True)
class CallFormat:
    """How models of a family write tool calls.

    openings   markers at which calls may begin
    closings   markers that may end them; without meaning elsewhere after a call
    inner      markers between them, which may be special tokens, too
    """

    read: ReadCalls
    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()


def escaped(text: str) -> str:
    """The text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
