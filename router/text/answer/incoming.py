"""Text that arrives in pieces, for readers written as if it were there: generators that yield when they need more."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A reader: each yield waits for more text, or for the end of it; `yield from` returns its value."""
Take = Callable[[str], object]

_WORD = re.compile(r"\w*")


class Markers:
    """Strings that a text is searched for; none of them may be part of another."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.all = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, self.all)) or r"(?!)")
        self._beginnings = {marker[:length] for marker in self.all for length in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def search(self, text: str) -> re.Match[str] | None:
        """The first of them in the text."""
        return self._pattern.search(text)

    def match(self, text: str) -> re.Match[str] | None:
        """The one that the text begins with."""
        return self._pattern.match(text)

    def may_match(self, text: str) -> bool:
        """True if more text could make it begin with one of them."""
        return not text or text in self._beginnings

    def num_held(self, text: str) -> int:
        """Length of the longest end of the text that may begin one of them."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class Incoming:
    """The text that has arrived and is not read yet. All readers' decisions wait for the text that they need, so that
    none depends on how it was cut into pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._has_ended = False
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """No more text will arrive."""
        self._has_ended = True

    def record(self) -> None:
        """From now on, `put_back` returns to this place."""
        self._recorded = []

    def stop_recording(self) -> None:
        """Keeps nothing for `put_back` any more."""
        self._recorded = None

    def put_back(self) -> None:
        """Everything since `record` is unread again."""
        self._text = "".join([*(self._recorded or []), self._text])
        self._recorded = None

    def _read(self, length: int) -> str:
        read, self._text = self._text[:length], self._text[length:]
        if self._recorded is not None:
            self._recorded.append(read)
        return read

    def until(self, markers: Markers, take: Take) -> Steps[str | None]:
        """Reads to the end of the first marker and returns it; None at the end of the text.

        `take` gets the text before it, as early as it cannot belong to a marker.
        """
        while True:
            if found := markers.search(self._text):
                if found.start():
                    take(self._read(found.start()))
                return self._read(len(found[0]))
            held = 0 if self._has_ended else markers.num_held(self._text)
            if len(self._text) > held:
                take(self._read(len(self._text) - held))
            if self._has_ended:
                return None
            yield

    def skip(self, markers: Markers) -> Steps[str | None]:
        """Reads the marker that the text begins with and returns it; None, and reads nothing, if there is none."""
        while True:
            if found := markers.match(self._text):
                return self._read(len(found[0]))
            if self._has_ended or not markers.may_match(self._text):
                return None
            yield

    def drop(self, characters: str) -> Steps[str]:
        """Reads these characters as far as there are others, and returns them."""
        read = []
        while True:
            length = len(self._text) - len(self._text.lstrip(characters))
            if length:
                read.append(self._read(length))
            if self._text or self._has_ended:
                return "".join(read)
            yield

    def spaces(self) -> Steps[str]:
        """Reads whitespace and returns it."""
        return self.drop(" \t\r\n")

    def peek(self) -> Steps[str]:
        """The next character, unread; empty at the end of the text."""
        while not self._text and not self._has_ended:
            yield
        return self._text[:1]

    def character(self) -> Steps[str]:
        """Reads the next character; empty at the end of the text."""
        yield from self.peek()
        return self._read(1)

    def word(self) -> Steps[str]:
        """Reads letters, digits and underscores as far as there are others, and returns them."""
        read = []
        while True:
            found = _WORD.match(self._text)
            assert found is not None
            if found[0]:
                read.append(self._read(found.end()))
            if self._text or self._has_ended:
                return "".join(read)
            yield

    def scan(self, scan: Callable[[str], tuple[int, bool]], take: Take, limit: int | None = None) -> Steps[bool]:
        """Reads as far as `scan` says: of a text, how many characters it reads, and whether it needs more.

        False if the text, or `limit` characters, ended before.
        """
        left = limit
        while True:
            text = self._text if left is None else self._text[:left]
            length, needs_more = scan(text)
            if length:
                take(self._read(length))
            if not needs_more:
                return True
            if left is not None:
                left -= length
            if self._has_ended or left == 0:
                return False
            yield
