"""Calls as JSON objects with `name` and `arguments`: Hermes and Qwen, Granite, Nemotron Nano 2.

    <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>      hermes (Granite 4 as well)
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]              granite (3.x)
    <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>      nemotron

One object or a list of them is read in each format. A marker inside a JSON string is text.
"""

from __future__ import annotations

import json
import re
from functools import partial

from router.text.answer.calls import CallFormat, Calls
from router.text.answer.incoming import Incoming, Markers, Steps, Take

MAX_UNNAMED = 16 << 10
"""Characters of a call before its name, after which it is content: the text is read once more then."""

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_PLAIN_RUN = re.compile(r"[\s\w,:+\-.]*", re.ASCII)
_SCALAR = re.compile(r"[\w+\-.]*", re.ASCII)
_CLOSING = {"{": "}", "[": "]"}
_LIST, _NEXT, _OBJECT, _END, _COLON, _QUOTE = (Markers([each]) for each in '[,{}:"')


class JsonScanner:
    """Finds the end of one JSON value in text that arrives in pieces. What lies between brackets is not validated."""

    def __init__(self) -> None:
        self.is_broken = False
        self._open: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False
        self._is_scalar = False

    def scan(self, text: str) -> tuple[int, bool]:
        """Number of characters that belong to the value, and whether it goes on after them."""
        at = 0
        while at < len(text):
            if self._is_scalar:
                at = _end(_SCALAR, text, at)
                return at, at == len(text)
            at = self._scan_string(text, at) if self._in_string else self._scan_structure(text, at)
            if self.is_broken or (self._has_begun and not self._open and not self._in_string and not self._is_scalar):
                return at, False
        return at, True

    def _scan_string(self, text: str, at: int) -> int:
        if not self._is_escaped:
            at = _end(_STRING_RUN, text, at)
            if at == len(text):
                return at
        character = text[at]
        if character < " ":
            self.is_broken = True
            return at
        self._in_string = self._is_escaped or character != '"'
        self._is_escaped = not self._is_escaped and character == "\\"
        return at + 1

    def _scan_structure(self, text: str, at: int) -> int:
        if self._open:
            at = _end(_PLAIN_RUN, text, at)
            if at == len(text):
                return at
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._open.append(character)
        elif self._open and character == _CLOSING[self._open[-1]]:
            self._open.pop()
        elif not self._open and _SCALAR.fullmatch(character):
            self._is_scalar = self._has_begun = True
            return at
        else:
            self.is_broken = True
            return at
        self._has_begun = True
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def read_json_calls(incoming: Incoming, calls: Calls, opening: str, *, closings: Markers) -> Steps[None]:
    """Reads an object or a list of them, and the closing marker after it."""
    yield from incoming.spaces()
    is_list = yield from incoming.skip(_LIST)
    while True:
        yield from incoming.spaces()
        is_whole = yield from _read_call(incoming, calls, closings)
        if not is_whole or calls.is_full:
            break
        yield from incoming.spaces()
        if not is_list or not (yield from incoming.skip(_NEXT)):
            break
    if not calls.is_full:
        yield from incoming.drop(" \t\r\n]}")
        yield from incoming.skip(closings)


def _read_call(incoming: Incoming, calls: Calls, closings: Markers) -> Steps[bool]:
    """Reads one object; False if it is broken, and the rest is no list of calls either."""
    if not (yield from incoming.skip(_OBJECT)):
        return False
    has_begun = has_arguments = False
    early: list[str] = []  # arguments before the name
    while True:
        yield from incoming.spaces()
        if (yield from incoming.skip(_END)):
            break
        key = yield from _read_string(incoming)
        yield from incoming.spaces()
        if key is None or not (yield from incoming.skip(_COLON)):
            return False
        yield from incoming.spaces()
        if key == "name" and not has_begun:
            name = yield from _read_string(incoming)
            if not name:
                return False
            calls.start(name)
            calls.arguments("".join(early))
            has_begun = True
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            take = calls.arguments if has_begun else early.append
            if not (yield from _read_arguments(incoming, take, closings, None if has_begun else MAX_UNNAMED)):
                return False
        elif not (yield from _read_value(incoming, _ignore, None if has_begun else MAX_UNNAMED)):
            return False
        yield from incoming.spaces()
        yield from incoming.skip(_NEXT)
    if has_begun and not has_arguments:
        calls.arguments("{}")
    return has_begun


def _read_arguments(incoming: Incoming, take: Take, closings: Markers, limit: int | None) -> Steps[bool]:
    """Reads arguments; those that some models write as a string of JSON, decoded. Broken ones are taken as they are,
    to the closing marker."""
    is_string = (yield from incoming.peek()) == '"'
    text: list[str] = []
    is_whole = yield from _read_value(incoming, text.append if is_string else take, limit)
    if is_string:
        decoded = _decoded("".join(text)) if is_whole else None
        take("".join(text) if decoded is None else decoded)
    if not is_whole and limit is None:
        yield from incoming.until(closings, take)
    return is_whole


def _read_value(incoming: Incoming, take: Take, limit: int | None = None) -> Steps[bool]:
    """Reads one JSON value; False if it is broken, at the place where it is."""
    scanner = JsonScanner()
    has_ended = yield from incoming.scan(scanner.scan, take, limit)
    return has_ended and not scanner.is_broken


def _read_string(incoming: Incoming) -> Steps[str | None]:
    if (yield from incoming.peek()) != '"':
        return None
    text: list[str] = []
    is_whole = yield from _read_value(incoming, text.append, MAX_UNNAMED)
    return _decoded("".join(text)) if is_whole else None


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _ignore(text: str) -> None:
    pass


def _format(openings: tuple[str, ...], closings: tuple[str, ...]) -> CallFormat:
    return CallFormat(partial(read_json_calls, closings=Markers(closings)), openings, closings)


HERMES = _format(("<tool_call>",), ("</tool_call>",))
GRANITE = _format(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))
NEMOTRON = _format(("<TOOLCALL>",), ("</TOOLCALL>",))
