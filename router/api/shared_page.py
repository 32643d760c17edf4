"""A page that is rendered at once for all who wait for it, and in a bounded share of the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SHARE = 1 / 10
"""Share of the event loop's time that the renderings of one page have: /metrics takes 4 ms with two nodes, and whoever
asked for it on many connections at a time made each token of all others wait for all of them."""


class SharedPage:
    """One page. Whoever asks gets a rendering that began after he asked; one that took t begins 9 t after the last.

    render   makes the page, on the event loop
    """

    def __init__(self, render: Callable[[], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._clock = clock
        self._free_s = 0.0  # when the next rendering may begin
        self._next: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """The page as it is now, or soon; raises what rendering it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._rendered())
        return await asyncio.shield(self._next)  # a client that leaves does not take it from the others

    async def _rendered(self) -> bytes:
        await asyncio.sleep(max(0.0, self._free_s - self._clock()))
        self._next = None
        began_s = self._clock()
        try:
            return self._render()
        finally:
            ended_s = self._clock()
            self._free_s = ended_s + (ended_s - began_s) * (1 / SHARE - 1)
