"""A node that misbehaves on purpose, in a process of its own, and that keeps a journal with times.

`Process.start(name, FaultyNode(config, ...), folder)`, as with any other config. What is added is added here, from
outside: no product code knows of it. The network's faults begin with SIGUSR2, and with STALL its engine stands still
for good. The journal holds a JSON line for each
session that is expected here (its receiver's end) or failed here (either end), for each fault that was committed here,
and for each SIGUSR1 (what the node holds at that moment). `at` is the clock that all processes share, monotonic.
"""

import asyncio
import json
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.wire.node_messages import NodeInfo
from node.config import NodeConfig
from node.server import node_server
from node_runtime import server
from tests.support.transfer.faulty import FaultyTransport, flip_chosen
from transfer.backend import Arrival, ArrivalListener, Connection, Transport
from transfer.buffers import Buffer
from transfer.link import LINK_NONCE
from transfer.protocol.envelope import Tag
from transfer.protocol.stats import TransportStats
from transfer.ucx import UcxConfig, open_transport

LATE_DEADLINE_S = 5.0
STALL = signal.SIGRTMIN
STALLED_S = 3600.0


@dataclass(frozen=True)
class FaultyNode:
    """flip_share   of the parts that it receives, those that arrive with a flipped bit
    late_share   of the payloads that it sends, those that the network keeps for `late_s` after it took them
    apart_s      from one fault of the node to the next, at the least. If that is longer than a request's attempts take,
                 one of its three, at two nodes, meets no fault
    """

    config: NodeConfig
    journal: Path
    flip_share: float = 0.0
    late_share: float = 0.0
    late_s: float = 0.0
    apart_s: float = 0.0
    seed: int = 0


class Journal:
    """`is_armed`: faults are committed from now on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self.is_armed = False

    def arm(self) -> None:
        self.is_armed = True

    def note(self, what: str, **fields: object) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), "what": what, **fields}) + "\n")


class Dice:
    """Chooses what goes wrong at one node: nothing until the journal is armed, or soon after the last fault."""

    def __init__(self, node: FaultyNode, journal: Journal) -> None:
        self.random = random.Random(node.seed)
        self._apart_s = node.apart_s
        self._journal = journal
        self._next_s = 0.0

    def chooses(self, share: float) -> bool:
        """True for such a share of what it is asked about."""
        if not self._journal.is_armed or time.monotonic() < self._next_s or self.random.random() >= share:
            return False
        self._next_s = time.monotonic() + self._apart_s
        return True


class NotedStats(TransportStats):
    """cause   of the session that failed last"""

    cause = ""

    def session_failed(self, cause: str) -> None:
        self.cause = str(cause)
        super().session_failed(cause)


class LateConnection:
    """Tells the sender that a part was taken, and delivers it much later: after what was sent behind it."""

    def __init__(self, inner: Connection, node: FaultyNode, dice: Dice, journal: Journal) -> None:
        self._inner = inner
        self._node = node
        self._dice = dice
        self._journal = journal
        self.id = inner.id
        self.watch = inner.watch

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._inner.lanes

    def send(self, tag: Tag, part: Buffer, deadline_s: float) -> asyncio.Future[None]:
        may_be_late = tag.is_payload and tag.nonce != LINK_NONCE
        if not may_be_late or not self._dice.chooses(self._node.late_share):
            return self._inner.send(tag, part, deadline_s)
        loop = asyncio.get_running_loop()
        loop.call_later(self._node.late_s, self._send_late, tag, part.copy())
        taken = loop.create_future()
        taken.set_result(None)
        return taken

    def _send_late(self, tag: Tag, part: Buffer) -> None:
        self._journal.note("fault", fault="late", nonce=tag.nonce)
        sent = self._inner.send(tag, part, asyncio.get_running_loop().time() + LATE_DEADLINE_S)
        sent.add_done_callback(lambda done: done.exception())


class FaultyNodeTransport(FaultyTransport):
    def __init__(self, inner: Transport, stats: NotedStats, node: FaultyNode, journal: Journal) -> None:
        dice = Dice(node, journal)

        def byte_of(part: Arrival) -> int | None:
            if part.tag.nonce == LINK_NONCE or not dice.chooses(node.flip_share):
                return None
            journal.note("fault", fault="flip", nonce=part.tag.nonce, is_payload=part.tag.is_payload)
            return dice.random.randrange(part.num_bytes)

        super().__init__(inner, flip_chosen(byte_of))
        self._stats, self._node, self._dice, self._journal = stats, node, dice, journal
        self._connections: dict[int, Connection] = {}

    async def connect(self, peer: str, deadline_s: float) -> Connection:
        connection = await super().connect(peer, deadline_s)
        late = LateConnection(connection, self._node, self._dice, self._journal)
        return self._connections.setdefault(connection.id, late)

    def expect(self, nonce: int, listener: ArrivalListener) -> None:
        if nonce != LINK_NONCE:
            self._journal.note("expected", nonce=nonce)
        super().expect(nonce, listener)

    def hasten(self, nonce: int, deadline_s: float) -> None:
        """What a session does when it has failed."""
        self._journal.note("failed", nonce=nonce, cause=self._stats.cause)
        super().hasten(nonce, deadline_s)


class FaultyServer:
    """Starts and stops like the node that it wraps. One a process."""

    def __init__(self, node: FaultyNode) -> None:
        self._journal = Journal(node.journal)
        self._faulty = node
        vars(server)["open_transport"] = self._open_faulty
        config = node.config
        self._node = node_server(config)

    def _open_faulty(self, config: UcxConfig) -> Transport:
        self._transport = open_transport(config)
        self._transport.stats = stats = NotedStats()
        return FaultyNodeTransport(self._transport, stats, self._faulty, self._journal)

    @property
    def info(self) -> NodeInfo:
        return self._node.info

    async def start(self) -> None:
        await self._node.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._note_held)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._journal.arm)
        asyncio.get_running_loop().add_signal_handler(STALL, self._stall)

    def _stall(self) -> None:
        """As on a GPU whose kernel never ends: the engine's thread stands still, and all others go on."""
        self._node._engine.post(lambda: time.sleep(STALLED_S))

    def _note_held(self) -> None:
        runtime = self._node.runtime
        pools = (runtime.outgoing, runtime.incoming)
        for pool in pools:
            pool.check()
        self._journal.note(
            "held",
            staging=sum(self._node.config.staging_buffers - pool.num_free for pool in pools),
            dropped=self._transport.stats.dropped_parts,
            operations=self._transport.progress.num_operations,
            nonces=len(self._transport._demultiplexer) - 1,  # the link's sink is always expected
        )

    async def wait_closed(self) -> None:
        await self._node.wait_closed()

    async def stop(self) -> None:
        await self._node.stop()
