"""Reader of one answer: its reasoning, then its content and tool calls in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.text.answer.calls import CallFormat, Calls, Schemas
from router.text.answer.incoming import Incoming, Markers, Steps
from router.text.answer.parts import AnswerPart, ContentText, ReasoningText, merged
from router.text.answer.trimmed import Trimmed


@dataclass(frozen=True)
class ReasoningMarkers:
    """The markers around an answer's reasoning."""

    start: str
    end: str


class AnswerReader:
    """An AnswerParser for reasoning and tool calls, in the formats that are given.

    Whitespace around reasoning and calls is dropped: templates write their own when the answer comes back. A call in
    the middle of the reasoning ends it, as Qwen3.5's and Kimi's do now and then; a marker alone is text.

    begins_reasoning   the prompt ends inside the reasoning
    new_id             the id of a call, by its index
    """

    def __init__(
        self,
        reasoning: ReasoningMarkers | None,
        call_format: CallFormat | None,
        *,
        begins_reasoning: bool,
        schemas: Schemas,
        max_calls: int | None,
        new_id: Callable[[int], str],
    ) -> None:
        self._incoming = Incoming()
        self._parts: list[AnswerPart] = []
        calls = Calls(self._incoming, self._parts.append, schemas, new_id, max_calls)
        self._reading = _Reading(reasoning, call_format, self._incoming, self._parts, calls, begins_reasoning)
        self._steps = self._reading.read()
        next(self._steps)

    @property
    def is_reasoning(self) -> bool:
        return self._reading.is_reasoning

    @property
    def is_complete(self) -> bool:
        return self._reading.is_complete

    def push(self, text: str) -> list[AnswerPart]:
        self._incoming.add(text)
        return self._advance()

    def finish(self) -> list[AnswerPart]:
        self._incoming.end()
        return self._advance()

    def _advance(self) -> list[AnswerPart]:
        next(self._steps, None)
        parts = merged(self._parts) if len(self._parts) > 1 else list(self._parts)
        self._parts.clear()
        return parts


class _Reading:
    """How far an answer is read. It does not hold its own steps: a cycle for each answer would be left to the garbage
    collector, whose pauses all answers share."""

    def __init__(
        self,
        reasoning: ReasoningMarkers | None,
        call_format: CallFormat | None,
        incoming: Incoming,
        parts: list[AnswerPart],
        calls: Calls,
        begins_reasoning: bool,
    ) -> None:
        self._reasoning = reasoning
        self._format = call_format
        self._incoming = incoming
        self._parts = parts
        self._calls = calls
        self._openings = call_format.openings if call_format is not None else ()
        self._closings = call_format.closings if call_format is not None else ()
        self._content = self._trimmed(ContentText, drops_leading=False)
        self.is_reasoning = begins_reasoning and reasoning is not None
        self.is_complete = False

    def read(self) -> Steps[None]:
        """Reads the whole answer."""
        yield from self._read_answer()
        self.is_complete = self._calls.is_full
        yield

    def _trimmed(self, part: type[ContentText | ReasoningText], *, drops_leading: bool) -> Trimmed:
        put = self._parts.append
        return Trimmed(lambda text: put(part(text)), drops_leading=drops_leading)

    def _read_answer(self) -> Steps[None]:
        yield
        if self._reasoning is not None:
            spaces = yield from self._incoming.spaces()
            has_start = yield from self._incoming.skip(Markers([self._reasoning.start]))
            if has_start or self.is_reasoning:
                self.is_reasoning = True
                yield from self._read_reasoning(self._reasoning.end)
                self.is_reasoning = False
                self._content = self._trimmed(ContentText, drops_leading=True)
            else:
                self._content.take(spaces)
        yield from self._read_content()

    def _read_reasoning(self, end: str) -> Steps[None]:
        text = self._trimmed(ReasoningText, drops_leading=True)
        markers = Markers([end, *self._openings])
        while (found := (yield from self._incoming.until(markers, text.take))) != end:
            if found is None:
                text.flush()
                return
            if (yield from self._read_calls(found)):
                return
            text.take(found)

    def _read_content(self) -> Steps[None]:
        markers = Markers([*self._openings, *self._closings])
        while not self._calls.is_full:
            found = yield from self._incoming.until(markers, self._content.take)
            if found is None:
                if self._calls.count == 0:
                    self._content.flush()
                return
            if found in self._openings and (yield from self._read_calls(found)):
                self._content = self._trimmed(ContentText, drops_leading=True)
            elif found in self._openings or self._calls.count == 0:
                self._content.take(found)

    def _read_calls(self, opening: str) -> Steps[bool]:
        """Reads the calls behind an opening marker; False, and nothing is read, if there are none."""
        assert self._format is not None
        count = self._calls.count
        self._incoming.record()
        yield from self._format.read(self._incoming, self._calls, opening)
        if self._calls.count == count:
            self._incoming.put_back()
            return False
        return True
