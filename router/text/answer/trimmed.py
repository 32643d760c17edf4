"""Streamed text without the whitespace around it."""

from __future__ import annotations

from router.text.answer.incoming import Take


class Trimmed:
    """Passes text on; whitespace is held back until more text follows it. `drops_leading`: not the whitespace before
    the first text."""

    def __init__(self, take: Take, *, drops_leading: bool) -> None:
        self._take = take
        self._held: list[str] = []
        self._drops_leading = drops_leading
        self.has_text = False

    def take(self, text: str) -> None:
        text_end = len(text.rstrip())
        if text_end:
            self._take("".join([*self._held, text[:text_end]]) if self._keeps_held else text[:text_end].lstrip())
            self._held = []
            self.has_text = True
        if text_end < len(text):
            self._held.append(text[text_end:])

    @property
    def _keeps_held(self) -> bool:
        return self.has_text or not self._drops_leading

    def flush(self) -> None:
        """Passes on the whitespace at the end."""
        if self._held and self._keeps_held:
            self._take("".join(self._held))
        self._held = []
