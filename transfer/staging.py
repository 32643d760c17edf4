"""A bounded pool of equal buffers, through which payloads pass between blocks and the wire.

The bound is the back-pressure: without a free buffer a sender packs later, and a receiver leaves the payload with its
sender. A sender's buffers come back when the receiver has taken what is in them; so that one that takes none does not
hold up the others, no receiver gets more than half of the buffers while sessions with another one are open.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from transfer.buffers import HostMemory, StagingBuffer, StagingMemory
from transfer.protocol.errors import LayoutMismatch, TransferTimeout
from transfer.protocol.stats import WaitStats


@dataclass(frozen=True, slots=True)
class StagingConfig:
    """Sizes of the pool. Its memory, `num_buffers * buffer_bytes`, is allocated at start.

    num_buffers    messages that may be in staging at once: two for each session that should move at once
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
    """The pool. Belongs to one event loop; waiters are served in order of arrival, but for those of a peer that has its
    share. `peer` is a receiver's address; all that name none, such as this node's own receivers, are one more peer."""

    def __init__(
        self,
        config: StagingConfig,
        memory: StagingMemory | None = None,
        waits: WaitStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """memory: of the buffers; None: host memory. waits: a count shared with another pool; None: its own."""
        self.memory = memory or HostMemory()
        self.waits = waits or WaitStats()
        self._clock = clock
        self._config = config
        self._free = list(self.memory.allocate(config.num_buffers, config.buffer_bytes))
        self._share = max(1, config.num_buffers // 2)
        self._held: Counter[str] = Counter()
        self._sessions: Counter[str] = Counter()
        self._waiters: deque[tuple[str, asyncio.Future[StagingBuffer]]] = deque()

    @property
    def buffer_bytes(self) -> int:
        return self._config.buffer_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def session_opened(self, peer: str) -> None:
        """From now on other peers get no more than their share."""
        self._sessions[peer] += 1

    def session_ended(self, peer: str) -> None:
        """Takes back, once, what `session_opened` said."""
        self._sessions[peer] -= 1
        self._sessions += Counter()  # drops peers without sessions
        self._serve()

    @asynccontextmanager
    async def hold(self, num_bytes: int, deadline_s: float) -> AsyncIterator[StagingBuffer]:
        """A buffer with a payload of `num_bytes`, given back at the end of the `async with` block.

        Raises `TransferTimeout` when none was free in time. Leave the block only when nothing reads or writes the
        buffer any more: await the transport's operations inside it.
        """
        buffer = await self.take(num_bytes, deadline_s)
        try:
            yield buffer
        finally:
            self.give(buffer)

    async def take(self, num_bytes: int, deadline_s: float, peer: str = "") -> StagingBuffer:
        """A buffer with a payload of `num_bytes`, to `give` back later: `hold` in two calls, which cost less time."""
        self.require(num_bytes)
        buffer = self._grant(peer) if self._free and self._may_hold(peer) else await self._wait(deadline_s, peer)
        buffer.cut(num_bytes)
        return buffer

    def give(self, buffer: StagingBuffer, peer: str = "") -> None:
        """Takes back, once, what `take` returned and nothing reads or writes any more."""
        self._held[peer] -= 1
        self._held += Counter()
        self._free.append(buffer)
        self._serve()

    def require(self, num_bytes: int) -> None:
        """Raises `LayoutMismatch` if no buffer can ever hold this much."""
        if num_bytes > self.buffer_bytes:
            raise LayoutMismatch(
                f"a message of {num_bytes} bytes > staging buffer_bytes {self.buffer_bytes}: raise "
                "buffer_bytes, or lower max_message_bytes if it is not the state"
            )

    def check(self) -> None:
        """Asserts that each buffer is free or held, none is free twice, and nobody waits who could have one."""
        assert len(self._free) + self._held.total() == self._config.num_buffers
        assert len({id(buffer) for buffer in self._free}) == len(self._free)
        waiting = {peer for peer, waiter in self._waiters if not waiter.done()}  # others run in the next turn
        assert not self._free or not any(map(self._may_hold, waiting))

    def _may_hold(self, peer: str) -> bool:
        return self._held[peer] < self._share or not self._sessions.keys() - {peer}

    async def _wait(self, deadline_s: float, peer: str) -> StagingBuffer:
        waiter: asyncio.Future[StagingBuffer] = asyncio.get_running_loop().create_future()
        self._waiters.append((peer, waiter))
        self.waits.count += 1
        began_s = self._clock()
        try:
            async with asyncio.timeout_at(deadline_s):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():  # granted in the turn in which it gave up
                self.give(waiter.result(), peer)
            if isinstance(error, TimeoutError):
                raise TransferTimeout(
                    f"none of {self._config.num_buffers} staging buffers came free in time: raise num_buffers"
                ) from None
            raise
        finally:
            self.waits.seconds += self._clock() - began_s
            self._waiters.remove((peer, waiter))

    def _grant(self, peer: str) -> StagingBuffer:
        self._held[peer] += 1
        return self._free.pop()

    def _serve(self) -> None:
        """Gives free buffers to the first waiters that may have one."""
        for peer, waiter in self._waiters:
            if self._free and not waiter.done() and self._may_hold(peer):
                waiter.set_result(self._grant(peer))
