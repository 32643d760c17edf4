"""Stop strings in streamed text: found across deltas, and by default never shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts one text at the first stop string, which is then `found`. Text that may begin one is held back until that
    is certain.

    The stop string that ends first wins, and of several the longest: the outcome does not depend on how the text is cut
    into deltas.
    """

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: the text ends with the stop string instead of before it."""
        self._stops = tuple(stops)
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now: none once a stop string is `found`."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self.found, self._held = text[start:end], ""
            return text[: end if self._is_shown else start]
        keep = len(text) - self._longest_beginning(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
