"""Calls between section tokens, with ids of the model's own: Kimi K2.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

The model's id is the call's id: the template writes it again when the call comes back in the next turn.
"""

from __future__ import annotations

import re

from router.text.answer.calls import CallFormat, Calls
from router.text.answer.incoming import Incoming, Markers, Steps
from router.text.answer.trimmed import Trimmed

_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_IS_CALL = Markers([_BEGIN])
_ID_ENDS = Markers([_ARGUMENTS, _END, _BEGIN, *_SECTION_ENDS])
_CALL_ENDS = Markers([_END, *_SECTION_ENDS])
_IS_END = Markers(_SECTION_ENDS)


def _read(incoming: Incoming, calls: Calls, opening: str) -> Steps[None]:
    if opening != _BEGIN:
        yield from incoming.spaces()
        if not (yield from incoming.skip(_IS_CALL)):
            return
    while True:
        written: list[str] = []
        found = yield from incoming.until(_ID_ENDS, written.append)
        call_id = "".join(written).strip()
        name = _ID.fullmatch(call_id)
        if found != _ARGUMENTS or name is None:
            return
        calls.start(name[1], call_id)
        arguments = Trimmed(calls.arguments, drops_leading=True)
        found = yield from incoming.until(_CALL_ENDS, arguments.take)
        if found == _END and not arguments.has_text:
            calls.arguments("{}")
        if found != _END or calls.is_full:
            return
        yield from incoming.spaces()
        if (yield from incoming.skip(_IS_END)) or not (yield from incoming.skip(_IS_CALL)):
            return


KIMI = CallFormat(_read, (*_SECTIONS, _BEGIN), (*_SECTION_ENDS, _END), (_ARGUMENTS,))
