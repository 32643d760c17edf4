"""Processor time of the router for one streamed chat, at two commits of this repository.

    python -m benchmarks router-commits BEFORE [AFTER]

Both routers run at once, each in its own process from its commit's own files, over fake nodes in the same process. They
are asked in turn, so that a busy machine slows both; what counts is the processor time of all of a router's threads,
which others' work changes little. The fake nodes' part of it is the same in both and stays in the ratio: it lies nearer
to 1 for that.
"""

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.parse import urlsplit

import typer

from benchmarks.timing import table_header, table_row

ROOT = Path(__file__).parents[2]
SERVER = """
import asyncio, sys
from pathlib import Path
from tempfile import TemporaryDirectory

from router.config import RouterConfig
from router.server import RouterServer
from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import fake_cluster, node_status
from tests.support.router.model_folder import write_model_folder


async def main():
    with TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "m")
        text = ModelTokens(model).encode("The code of June is 471. A channel carries. " * 40)
        cluster = fake_cluster(text)
        config = RouterConfig(model, port=0, control_port=0, heartbeat_s=600.0)
        server = RouterServer(config, connect_to=cluster.connect)
        await server.start()
        for info in cluster.infos():
            server.nodes.register(info, node_status())
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop()


asyncio.run(main())
"""


class Router:
    """One commit's router. `ask` streams chats from it."""

    def __init__(self, process: subprocess.Popen[str], num_tokens: int) -> None:
        assert process.stdout is not None
        self._pid = process.pid
        url = urlsplit(process.stdout.readline().strip())
        if url.port is None:
            raise RuntimeError("a router did not start")
        self._address = (url.hostname, url.port)
        chat = {"messages": [{"role": "user", "content": "What is the code of June?"}], "max_tokens": num_tokens}
        body = json.dumps(chat | {"stream": True, "temperature": 0}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._request = head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def ask(self, count: int, at_once: int) -> float:
        """Seconds of processor time for each of `count` chats."""
        before_s = processor_s(self._pid)
        for _ in range(count // at_once):
            await asyncio.gather(*(self._chat() for _ in range(at_once)))
        return (processor_s(self._pid) - before_s) / (count // at_once * at_once)

    async def _chat(self) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(self._request)
        answer = await reader.read()
        writer.close()
        if b"[DONE]" not in answer:
            raise RuntimeError(f"no whole answer: {answer[:300]!r}")


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The files of a commit."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process so far, in seconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e9


@contextmanager
def router_of(commit: str, num_tokens: int) -> Iterator[Router]:
    with tree_of(commit) as tree:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SERVER]
        environment = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "TOKENIZERS_PARALLELISM": "false"}
        with subprocess.Popen(command, cwd=tree, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            yield Router(process, num_tokens)
            assert process.stdin is not None
            process.stdin.close()


def main(
    before: str,
    after: Annotated[str, typer.Argument()] = "HEAD",
    rounds: int = 60,
    chats: int = 12,
    at_once: int = 4,
    tokens: int = 200,
) -> None:
    """Processor time of the router for one streamed chat, at two commits."""
    asyncio.run(compare(before, after, rounds, chats, at_once, tokens))


async def compare(before: str, after: str, rounds: int, chats: int, at_once: int, tokens: int) -> None:
    with ExitStack() as stack:
        routers = [stack.enter_context(router_of(commit, tokens)) for commit in (before, after)]
        for router in routers:
            await router.ask(chats, at_once)  # warms up
        times: list[tuple[float, float]] = []
        for number in range(rounds):
            order = (0, 1) if number % 2 else (1, 0)
            taken = {place: await routers[place].ask(chats, at_once) for place in order}
            times.append((taken[0], taken[1]))
    ratios = sorted(after_s / before_s for before_s, after_s in times)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(table_header("", f"{before}, ms a chat", f"{after}, ms a chat"))
    print(table_row("median", *(f"{1e3 * statistics.median(column):.2f}" for column in zip(*times, strict=True))))
    print(table_row("least", *(f"{1e3 * min(column):.2f}" for column in zip(*times, strict=True))))
    print(
        f"\n{rounds} rounds of {chats} streamed chats of {tokens} tokens, {at_once} at once: ratio {middle:.3f} "
        f"(quartiles {low:.3f} to {high:.3f}, all {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )
