"""Stop strings in streamed text: found across deltas, and by default never shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts one text at the first stop string, which is then `found`. Text that may begin one is held back until that
    is certain.

    The stop string that ends first wins, and of several the longest: the outcome does not depend on how the text is cut
    into deltas. A character takes the same time whatever was held before it.
    """

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: the text ends with the stop string instead of before it."""
        self._beginnings = [_Beginning(stop) for stop in stops]
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now: none once a stop string is `found`."""
        if self.found is not None:
            return ""
        if not self._beginnings:
            return text
        num_held, text = len(self._held), self._held + text
        for place in range(num_held, len(text)):
            character = text[place]
            for beginning in self._beginnings:
                beginning.follow(character)
            whole = [each.stop for each in self._beginnings if each.is_whole]
            if whole:
                self.found, self._held = max(whole, key=len), ""
                return text[: place + 1 if self._is_shown else place + 1 - len(self.found)]
        keep = len(text) - max(each.length for each in self._beginnings)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Beginning:
    """The longest end of a text that begins `stop`; it has `length` characters.

    Source    Knuth, Morris, Pratt: Fast pattern matching in strings (1977)
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # For each beginning of the string, the longest shorter one with which it ends.
        self._shorter = [0]
        for character in stop[1:]:
            self._shorter.append(self._after(self._shorter[-1], character))

    @property
    def is_whole(self) -> bool:
        return self.length == len(self.stop)

    def follow(self, character: str) -> None:
        """The text's next character; not to be called once it is whole."""
        self.length = self._after(self.length, character)

    def _after(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._shorter[length - 1]
        return length + (self.stop[length] == character)
