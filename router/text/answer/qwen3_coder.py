"""Calls as tags, with parameters in plain text: Qwen3-Coder, Qwen3.5, Nemotron 3.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A parameter's JSON type is that of the tool's schema; strings stream, other values come whole. The outer tags may lack.
"""

from __future__ import annotations

from router.text.answer.calls import CallFormat, Calls, escaped
from router.text.answer.incoming import Incoming, Markers, Steps
from router.text.answer.parameters import ParameterTypes, as_json

_OPENING, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_END_OF_CALL, _CLOSING = "</function>", "</tool_call>"

_IS_FUNCTION = Markers([_FUNCTION])
_IS_CLOSING = Markers([_CLOSING])
_NAME_ENDS = Markers([">", "<", "\n"])
_NEXT = Markers([_PARAMETER, _END_OF_CALL, _CLOSING])
_NEWLINE = Markers(["\n"])
# Without the newline before them, the others may be text: of code, for example.
_VALUE_ENDS = Markers(["</parameter>", f"\n{_PARAMETER}", f"\n{_END_OF_CALL}", f"\n{_CLOSING}"])


def _read(incoming: Incoming, calls: Calls, opening: str) -> Steps[None]:
    if opening == _OPENING:
        yield from incoming.spaces()
        if not (yield from incoming.skip(_IS_FUNCTION)):
            return
    name: list[str] = []
    if (yield from incoming.until(_NAME_ENDS, name.append)) != ">" or not name:
        return
    calls.start("".join(name).strip())
    types = ParameterTypes.of(calls.schemas.get("".join(name).strip()))
    calls.arguments("{")
    found = yield from incoming.until(_NEXT, lambda text: None)
    separator = ""
    while found == _PARAMETER:
        key: list[str] = []
        if (yield from incoming.until(_NAME_ENDS, key.append)) is None:
            return
        calls.arguments(f'{separator}"{escaped("".join(key).strip())}": ')
        found = yield from _read_value(incoming, calls, types.of_parameter("".join(key).strip()))
        if found == "</parameter>":
            found = yield from incoming.until(_NEXT, lambda text: None)
        separator = ", "
    if found is None:
        return
    calls.arguments("}")
    if found == _END_OF_CALL and not calls.is_full:
        yield from incoming.spaces()
        yield from incoming.skip(_IS_CLOSING)


def _read_value(incoming: Incoming, calls: Calls, types: frozenset[str]) -> Steps[str | None]:
    """Reads one value, without the newline on either side, and returns the marker after it."""
    yield from incoming.skip(_NEWLINE)
    if types == {"string"}:
        string = _JsonString(calls)
        found = yield from incoming.until(_VALUE_ENDS, string.take)
        string.end(is_cut=found is None)
    else:
        text: list[str] = []
        found = yield from incoming.until(_VALUE_ENDS, text.append)
        value = "".join(text)
        calls.arguments(value if found is None else as_json(value.removesuffix("\n"), types))
    return None if found is None else found.removeprefix("\n")


class _JsonString:
    """Writes a string as it arrives; its last newline is the format's."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._held = ""
        calls.arguments('"')

    def take(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._calls.arguments(escaped(text.removesuffix("\n")))

    def end(self, *, is_cut: bool) -> None:
        """The value's end; one that the answer's end cuts stays an open string."""
        self._calls.arguments(escaped(self._held) if is_cut else '"')


QWEN3_CODER = CallFormat(_read, (_OPENING, _FUNCTION), (_CLOSING, _END_OF_CALL), (_PARAMETER, "</parameter>"))
