"""A bounded pool of equal buffers that payloads pass through on their way between blocks and the wire.

The bound is the back-pressure: a sender that finds no buffer packs later, a receiver that finds none leaves
the payload with its sender.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from transfer.buffers import Buffer, HostMemory, StagingMemory
from transfer.protocol.errors import LayoutMismatch, TransferTimeout
from transfer.protocol.stats import WaitStats


@dataclass(frozen=True, slots=True)
class StagingConfig:
    """Sizes of the pool; its memory, `num_buffers * buffer_bytes`, is allocated at start.

    num_buffers    how many messages may be in staging at once; two for each session that should move at once
    buffer_bytes   holds the largest message: the state, or `max_message_bytes` of attention blocks
    """

    num_buffers: int = 4
    buffer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.num_buffers < 1:
            raise LayoutMismatch(f"staging num_buffers {self.num_buffers} < 1: give it at least one buffer")
        if self.buffer_bytes < 1:
            raise LayoutMismatch(f"staging buffer_bytes {self.buffer_bytes} < 1: it must hold the whole state")


class Staging:
    """Belongs to one event loop. Waiters are served in order of arrival."""

    def __init__(
        self,
        config: StagingConfig,
        memory: StagingMemory | None = None,
        waits: WaitStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """memory: where the buffers lie; None: on the host. waits: counted there, beside another pool's."""
        self.memory = memory or HostMemory()
        self.waits = waits or WaitStats()
        self._clock = clock
        self._config = config
        self._free = self.memory.allocate(config.num_buffers, config.buffer_bytes)
        self._num_held = 0
        self._waiters: deque[asyncio.Future[Buffer]] = deque()

    @property
    def buffer_bytes(self) -> int:
        return self._config.buffer_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    @asynccontextmanager
    async def hold(self, num_bytes: int, deadline_s: float) -> AsyncIterator[Buffer]:
        """A buffer's first `num_bytes`, given back at the end of the block.

        Raises `TransferTimeout` when none was free in time. Leave the block only when nothing reads or writes
        the buffer any more: await the transport's operations inside it.
        """
        buffer = await self.take(num_bytes, deadline_s)
        try:
            yield buffer[:num_bytes]
        finally:
            self.give(buffer)

    async def take(self, num_bytes: int, deadline_s: float) -> Buffer:
        """A whole buffer that holds so much, for `give` later on: `hold` in two calls, as it costs less time."""
        self.require(num_bytes)
        buffer = self._free.pop() if self._free else await self._wait(deadline_s)
        self._num_held += 1
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Back, once, what `take` returned: nothing reads or writes it any more."""
        self._num_held -= 1
        self._grant(buffer)

    def require(self, num_bytes: int) -> None:
        """Raise `LayoutMismatch` if no buffer can ever hold this much."""
        if num_bytes > self.buffer_bytes:
            raise LayoutMismatch(
                f"a message of {num_bytes} bytes > staging buffer_bytes {self.buffer_bytes}: raise "
                "buffer_bytes, or lower max_message_bytes if it is not the state"
            )

    def check(self) -> None:
        """Every buffer is free or held, none is free twice, and nobody waits while one is free."""
        granted = sum(waiter.done() and not waiter.cancelled() for waiter in self._waiters)
        assert len(self._free) + self._num_held + granted == self._config.num_buffers
        assert len({id(buffer) for buffer in self._free}) == len(self._free)
        assert not self._free or all(waiter.done() for waiter in self._waiters)  # granted, and has yet to run

    async def _wait(self, deadline_s: float) -> Buffer:
        waiter: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.waits.count += 1
        began_s = self._clock()
        try:
            async with asyncio.timeout_at(deadline_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():  # granted in the very turn that gave up
                self._grant(waiter.result())
            if isinstance(error, TimeoutError):
                raise TransferTimeout(
                    f"none of {self._config.num_buffers} staging buffers came free in time: raise num_buffers"
                ) from None
            raise
        finally:
            self.waits.seconds += self._clock() - began_s
            self._waiters.remove(waiter)

    def _grant(self, buffer: Buffer) -> None:
        """To the first who still waits; there is a free buffer only while nobody does."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(buffer)
                return
        self._free.append(buffer)
