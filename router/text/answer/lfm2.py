"""Calls as a list of Python calls: LFM2.

    <|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>

Values are translated as they arrive: Python's strings, `True` and `None` to JSON's. Asked for JSON, the model writes
JSON objects between the same markers.
"""

from __future__ import annotations

from router.text.answer.calls import CallFormat, Calls, escaped
from router.text.answer.incoming import Incoming, Markers, Steps, Take
from router.text.answer.json_calls import read_json_calls

_OPENING, _CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"
_IS_CLOSING = Markers([_CLOSING])
_LIST, _NEXT, _CALL_END, _EQUALS = (Markers([each]) for each in "[,)=")
_NAME_ENDS = Markers(["(", "\n", "<", "{", "["])
_WORDS = {"True": "true", "False": "false", "None": "null"}
_BRACKETS = {"(": "[", "[": "[", "{": "{", ")": "]", "]": "]", "}": "}"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4}


def _read(incoming: Incoming, calls: Calls, opening: str) -> Steps[None]:
    yield from incoming.spaces()
    if (yield from incoming.peek()) == "{":
        yield from read_json_calls(incoming, calls, opening, closings=_IS_CLOSING)
        return
    yield from incoming.skip(_LIST)
    yield from incoming.spaces()
    if (yield from incoming.peek()) == "{":
        yield from read_json_calls(incoming, calls, opening, closings=_IS_CLOSING)
        return
    while True:
        name: list[str] = []
        found = yield from incoming.until(_NAME_ENDS, name.append)
        if found != "(" or not "".join(name).strip():
            return
        calls.start("".join(name).strip())
        is_whole = yield from _read_arguments(incoming, calls)
        if not is_whole or calls.is_full:
            return
        yield from incoming.spaces()
        if not (yield from incoming.skip(_NEXT)):
            break
    yield from incoming.drop(" \t\r\n])")
    yield from incoming.skip(_IS_CLOSING)


def _read_arguments(incoming: Incoming, calls: Calls) -> Steps[bool]:
    """Reads keyword arguments to the closing bracket; False if the text ends before."""
    calls.arguments("{")
    separator = ""
    while True:
        yield from incoming.spaces()
        if (yield from incoming.skip(_CALL_END)):
            calls.arguments("}")
            return True
        name = yield from incoming.word()
        yield from incoming.spaces()
        if not name or not (yield from incoming.skip(_EQUALS)):
            calls.arguments(escaped(name))
            yield from incoming.until(_IS_CLOSING, calls.arguments)
            return False
        calls.arguments(f'{separator}"{name}": ')
        yield from incoming.spaces()
        if not (yield from _read_value(incoming, calls.arguments)):
            return False
        yield from incoming.skip(_NEXT)
        separator = ", "


def _read_value(incoming: Incoming, take: Take) -> Steps[bool]:
    depth = 0
    while True:
        character = yield from incoming.peek()
        if not character:
            return False
        if depth == 0 and character in ",)":
            return True
        if character in "'\"":
            if not (yield from _read_string(incoming, take)):
                return False
        elif character.isalpha() or character == "_":
            word = yield from incoming.word()
            take(_WORDS.get(word, word))
        else:
            depth += (character in "([{") - (character in ")]}")
            if depth < 0:  # the list's own end
                return True
            yield from incoming.character()
            take(_BRACKETS.get(character, character))


def _read_string(incoming: Incoming, take: Take) -> Steps[bool]:
    quote = yield from incoming.character()
    is_quote = Markers([quote])
    if (yield from incoming.skip(is_quote)):  # empty, or the second of three
        if not (yield from incoming.skip(is_quote)):
            take('""')
            return True
        quote *= 3
    take('"')
    ends = Markers([quote, "\\"])
    while True:
        found = yield from incoming.until(ends, lambda text: take(escaped(text)))
        if found == quote:
            take('"')
            return True
        if found is None:
            return False
        yield from _read_escape(incoming, take)


def _read_escape(incoming: Incoming, take: Take) -> Steps[None]:
    character = yield from incoming.character()
    if character in _HEX_LENGTHS:
        digits = ""
        while len(digits) < _HEX_LENGTHS[character] and (yield from incoming.peek()) in set("0123456789abcdefABCDEF"):
            digits += yield from incoming.character()
        take(f"\\u{digits:0>4}" if len(digits) == _HEX_LENGTHS[character] else f"\\\\{character}{digits}")
    elif character:
        take(_ESCAPES.get(character, f"\\\\{escaped(character)}"))


LFM2 = CallFormat(_read, (_OPENING,), (_CLOSING,))
