"""The router's work for many answers that stream at once, at one or more commits of this repository.

    python -m benchmarks router-streams [COMMIT ...] [--streams 96] [--tokens 1000] [--step-ms 5]

Nodes without engines, in this process, send a token to each of their answers at every step, over gRPC as real ones do;
as many clients as streams read chats from the router, which has a process of its own. It may be slower than its nodes:
how late the answers end, and what has arrived meanwhile, is printed beside its processor time. A commit is `.` for the
working tree; several are run in turn, in alternating order.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import urlsplit

import grpc.aio
import typer

from benchmarks.router.commits import ROOT, processor_s, tree_of
from benchmarks.timing import table_header, table_row
from decode_node.service import DecodeService
from headrace.request import FinishReason, Token
from headrace.tracing import NoTracing
from headrace.wire.client import RegistryClient
from headrace.wire.generated import headrace_pb2 as pb
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import DecodeDone, DecodeEvent, DecodeReport, LocalPrefill, Start, Tokens
from headrace.wire.node_messages import NodeStatus, PoolStatus, Role
from headrace.wire.server import ControlServer
from node_runtime.router_calls import RouterCalls
from node_runtime.token_feeds import FedCall, TokenFeeds
from tests.support.router.fake_nodes import node_info
from tests.support.router.model_folder import write_model_folder

SERVER = """
import asyncio, sys, uvloop
from headrace.pauses import keep_pauses_short
from router.config import RouterConfig
from router.server import RouterServer


async def main():
    config = RouterConfig(sys.argv[1], port=0, control_port=0, heartbeat_s=600.0, max_concurrent=1024)
    server = RouterServer(config)
    await server.start()
    keep_pauses_short()
    print(server.url, server.control_address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


uvloop.run(main())  # as the router's process does
"""
READ_EVERY_S = 0.01
"""How often all clients read: one woken by each event would cost this process more than a token costs the router."""
ROUND_TIMEOUT_S = 300.0
ANSWER_TEXT = "The code of June is 471. A channel carries the stream. "
CONTENT = re.compile(rb'"content":"((?:[^"\\]|\\.)*)"')


@dataclass(eq=False)
class Answer:
    """One answer in progress on a node. `rest` holds what goes by its call's own stream."""

    fed: FedCall
    left: int
    rest: asyncio.Queue[DecodeEvent] = field(default_factory=asyncio.Queue)


class SteppingRole:
    """A decode role that sends each of its answers one token a step."""

    def __init__(self, ids: Sequence[int], step_s: float) -> None:
        self._ids = ids
        self._step_s = step_s
        self._answers: set[Answer] = set()
        self.ended_s: list[float] = []

    async def run(
        self, start: Start, commands: Any, timeout_s: float, fed: FedCall
    ) -> AsyncGenerator[DecodeEvent, None]:
        reading = asyncio.create_task(_read_all(commands))
        answer = Answer(fed, start.request.sampling.max_tokens)
        try:
            yield LocalPrefill(0)
            self._answers.add(answer)
            while True:
                event = await answer.rest.get()
                yield event
                if isinstance(event, DecodeDone):
                    return
        finally:
            self._answers.discard(answer)
            reading.cancel()

    async def step_for_ever(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self._step_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            for answer in list(self._answers):
                self._send(answer)

    def _send(self, answer: Answer) -> None:
        answer.left -= 1
        token = Token(self._ids[answer.left % len(self._ids)])
        if answer.left == 0:
            self.ended_s.append(time.monotonic())
            answer.rest.put_nowait(Tokens((token,), FinishReason.LENGTH))
            answer.rest.put_nowait(DecodeDone(FinishReason.LENGTH, DecodeReport("n", 0, 0, "computed", 0)))
            self._answers.discard(answer)
        elif not answer.rest.empty() or not answer.fed.put_plain((token,)):
            answer.rest.put_nowait(Tokens((token,)))


async def _read_all(commands: AsyncIterator[Any]) -> None:
    with suppress(grpc.aio.UsageError):  # raised where a call has ended
        async for _ in commands:
            pass


class QuietNode(rpc.NodeServicer):
    """A node whose cache never changes."""

    async def CacheUpdates(self, request: Any, context: Any) -> AsyncIterator[pb.CacheUpdate]:
        await asyncio.Event().wait()
        yield pb.CacheUpdate()


@asynccontextmanager
async def node(name: str, role: SteppingRole, registry: RegistryClient) -> AsyncIterator[None]:
    """A node of this process, registered at a router."""
    service = DecodeService(role, RouterCalls(), TokenFeeds(), NoTracing())  # type: ignore[arg-type]

    def add(server: Any) -> None:
        rpc.add_DecodeServicer_to_server(service, server)
        rpc.add_NodeServicer_to_server(QuietNode(), server)  # type: ignore[abstract]

    server = ControlServer(["Decode", "Node"], add)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    stepping = asyncio.create_task(role.step_for_ever())
    try:
        pool = PoolStatus(1 << 16, 1 << 16, 0, 0, 0)
        status = NodeStatus(0, 0, pool, pool)
        info = node_info(name, Role.BOTH, address=address, max_model_tokens=1 << 17, num_blocks=1 << 16)
        await registry.register(info, status, timeout_s=10.0)
        yield
    finally:
        stepping.cancel()
        await server.stop(0)


class Client:
    """Asks for one streamed chat, and keeps what arrives with its time."""

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setblocking(False)
        self._socket.sendall(request)
        self.arrived: list[tuple[float, bytes]] = []
        self.has_ended = False

    def read(self) -> None:
        """Takes what has arrived."""
        with suppress(BlockingIOError):
            if data := self._socket.recv(1 << 20):
                self.arrived.append((time.monotonic(), data))
            else:
                self.has_ended = True
                self._socket.close()

    def check(self, text: str) -> int:
        """Events of the answer, which must be whole; raises RuntimeError."""
        data = b"".join(data for _, data in self.arrived)
        contents = [json.loads(f'"{found.decode()}"') for found in CONTENT.findall(data) if found]
        if "".join(contents) != text:
            raise RuntimeError(f"no whole answer: {data[:300]!r}")
        return len(contents)


@dataclass(frozen=True)
class Round:
    """One round of all streams. Times in seconds.

    behind_s   from the last token's step to its client, the mean of all answers
    """

    cpu_s: float
    wall_s: float
    num_events: int
    behind_s: float
    first_s: float


class Streams:
    """One commit's router with its nodes and clients."""

    def __init__(self, url: str, pid: int, roles: Sequence[SteppingRole], ids: Sequence[int], texts: Any) -> None:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self._address = (address.hostname, address.port)
        self._pid = pid
        self._roles = roles
        self._ids, self._text_of = ids, texts

    async def run(self, streams: int, num_tokens: int) -> Round:
        for role in self._roles:
            role.ended_s.clear()
        request = _request(num_tokens)
        began_s, cpu_s = time.monotonic(), processor_s(self._pid)
        clients = [Client(self._address, request) for _ in range(streams)]
        reading = clients
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while reading:
                await asyncio.sleep(READ_EVERY_S)
                for client in reading:
                    client.read()
                reading = [client for client in reading if not client.has_ended]
        wall_s, cpu_s = time.monotonic() - began_s, processor_s(self._pid) - cpu_s
        text = self._text_of([self._ids[left % len(self._ids)] for left in reversed(range(num_tokens))])
        sent_s = [ended_s for role in self._roles for ended_s in role.ended_s]
        read_s = [client.arrived[-1][0] for client in clients]
        return Round(
            cpu_s,
            wall_s,
            sum(client.check(text) for client in clients),
            statistics.fmean(read_s) - statistics.fmean(sent_s),
            statistics.median(client.arrived[0][0] for client in clients) - began_s,
        )


def _request(num_tokens: int) -> bytes:
    chat = {"messages": [{"role": "user", "content": "What is the code of June?"}], "max_tokens": num_tokens}
    body = json.dumps(chat | {"stream": True, "temperature": 0, "ignore_eos": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@contextmanager
def router_process(commit: str, model: Path) -> Iterator[tuple[int, str, str]]:
    """The process id, URL and control address of a commit's router."""
    with ExitStack() as stack:
        tree = ROOT if commit == "." else stack.enter_context(tree_of(commit))
        environment = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", SERVER, str(model)]
        pipe = subprocess.PIPE
        process = stack.enter_context(
            subprocess.Popen(command, cwd=tree, env=environment, stdin=pipe, stdout=pipe, text=True)
        )
        assert process.stdout is not None and process.stdin is not None
        stack.callback(process.stdin.close)
        url, control = process.stdout.readline().split()
        yield process.pid, url, control


@asynccontextmanager
async def streams_of(commit: str, model: Path, num_nodes: int, step_s: float) -> AsyncIterator[Streams]:
    from router.text.tokens import ModelTokens

    tokens = ModelTokens(model)
    ids = tokens.encode(ANSWER_TEXT, add_special_tokens=False)
    async with AsyncExitStack() as stack:
        pid, url, control = stack.enter_context(router_process(commit, model))
        registry = RegistryClient(control)
        stack.push_async_callback(registry.close)
        roles = [SteppingRole(ids, step_s) for _ in range(num_nodes)]
        for number, role in enumerate(roles):
            await stack.enter_async_context(node(f"n{number}", role, registry))
        yield Streams(url, pid, roles, ids, tokens.decode)


def main(
    commits: Annotated[list[str] | None, typer.Argument(help="`.`: the working tree")] = None,
    streams: int = 96,
    tokens: int = 1000,
    step_ms: Annotated[float, typer.Option(help="between two tokens of an answer")] = 5.0,
    nodes: int = 2,
    rounds: int = 3,
) -> None:
    """Processor time of the router for each token of many answers that stream at once."""
    asyncio.run(compare(commits or ["."], streams, tokens, step_ms / 1e3, nodes, rounds))


async def compare(
    commits: Sequence[str], streams: int, num_tokens: int, step_s: float, num_nodes: int, rounds: int
) -> None:
    with TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "m", max_tokens=1 << 17)
        async with AsyncExitStack() as stack:
            all_streams = [
                await stack.enter_async_context(streams_of(commit, model, num_nodes, step_s)) for commit in commits
            ]
            for each in all_streams:
                await each.run(streams, 16)  # warms up
            taken: list[list[Round]] = [[] for _ in commits]
            turns = list(zip(all_streams, taken, strict=True))
            for _ in range(rounds):
                for each, those in turns:
                    those.append(await each.run(streams, num_tokens))
                turns.reverse()  # the first one's processor has rested
    print(
        table_header("", "processor time a token, us", "busy", "tokens/s", "tokens an event", "behind, ms", "first, ms")
    )
    count = streams * num_tokens
    for commit, those in zip(commits, taken, strict=True):
        best = min(those, key=lambda each: each.cpu_s)
        print(
            table_row(
                commit,
                f"{1e6 * best.cpu_s / count:.1f}",
                f"{100 * best.cpu_s / best.wall_s:.0f} %",
                f"{count / best.wall_s:,.0f}",
                f"{count / best.num_events:.2f}",
                f"{1e3 * best.behind_s:.1f}",
                f"{1e3 * best.first_s:.0f}",
            )
        )
