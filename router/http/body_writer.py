"""Writing of an answer's body past ASGI: a part at once, in the call that has it, where `send` would wait for nothing.

A part by `send` needs a task to be woken and passes a wrapper of every middleware: a fifth of the router's time for
a token that is an event of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY = "headrace.body_writer"


class BodyWriter:
    """Writes parts of one answer's body. Its caller sees to it that none is under way by `send` meanwhile."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope holds this

    @property
    def may_write(self) -> bool:
        """True while the body is under way, in chunks, and its client reads."""
        cycle = self._cycle()
        return (
            cycle is not None
            and cycle.response_started
            and cycle.chunked_encoding is True
            and not (cycle.flow.write_paused or cycle.response_complete or cycle.transport.is_closing())
        )

    def write(self, data: bytes) -> None:
        """Writes the next part, which has at least a byte: an empty chunk ends a body. Only while `may_write`."""
        cycle = self._cycle()
        assert cycle is not None
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def offer_body_writer(scope: MutableMapping[str, Any], cycle: RequestResponseCycle) -> None:
    """Has `body_writer_of` find the writer of a request's answer."""
    scope[_KEY] = BodyWriter(cycle)


def body_writer_of(scope: MutableMapping[str, Any]) -> BodyWriter | None:
    """The writer for the answer to a request; None: its server has none, as that of some tests."""
    writer: BodyWriter | None = scope.get(_KEY)
    return writer
