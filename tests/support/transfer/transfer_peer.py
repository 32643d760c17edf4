"""Starts `tests.support.transfer.transfer_child` processes and talks to them: the control plane of transfer tests."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S
from transfer.protocol.plan import TransferPlan

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = PATIENCE_S
CALL_TIMEOUT_S = PATIENCE_S


class Peer:
    """A child process. Every wait is bounded; a child that dies fails whatever waits for it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._said: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    @asynccontextmanager
    async def start(cls, *enter: str, device: str = "cpu", **config: object) -> AsyncIterator["Peer"]:
        """enter: a command prefix, such as a namespace's; device: of its staging; config: fields of `UcxConfig`."""
        process = await asyncio.create_subprocess_exec(
            *enter, sys.executable, "-m", "tests.support.transfer.transfer_child", json.dumps(config), device,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        peer = cls(process)
        try:
            ready = await peer.heard("address", timeout_s=START_TIMEOUT_S)
            peer.address = ready["address"]
            yield peer
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await peer._listener

    def call(self, do: str, **fields: object) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        call = len(self._answers)
        self._answers[call] = answer
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": call, "do": do, **fields}).encode() + b"\n")
        return asyncio.ensure_future(asyncio.wait_for(answer, CALL_TIMEOUT_S))

    async def expect(self, plan: TransferPlan, within_s: float = 30) -> asyncio.Future[Any]:
        """Returns once the child expects the session; the future is the session's end."""
        answer = self.call("expect", plan=asdict(plan), within_s=within_s)
        await self.heard("expecting", plan.nonce)
        return answer

    def send(
        self, plan: TransferPlan, to: "Peer", within_s: float = 30, tokens: int | None = None
    ) -> asyncio.Future[Any]:
        """All of it, or only what `tokens` of the prompt allow."""
        return self.call(
            "send",
            plan=asdict(plan),
            peer=to.address,
            within_s=within_s,
            tokens=plan.num_tokens if tokens is None else tokens,
            finish=tokens is None,
        )

    async def report(self) -> dict[str, Any]:
        return await self.call("report")

    async def heard(self, key: str, value: object = None, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """The first report under this key (and with this value)."""
        async with asyncio.timeout(timeout_s), self._news:
            while True:
                for report in self._said:
                    if key in report and value in (None, report[key]):
                        return report
                if self.process.stdout is None or self.process.stdout.at_eof():
                    raise RuntimeError(f"the child ended before it said {key}; its stderr says why")
                await self._news.wait()

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while True:
            line = await self.process.stdout.readline()
            report = json.loads(line) if line else {}
            answer = self._answers.get(report.get("id", -1))
            async with self._news:
                if answer is not None and not answer.done():
                    answer.set_result(report["result"])
                self._said.append(report)
                self._news.notify_all()
            if not line:
                break
        for answer in self._answers.values():
            answer.cancel()


@asynccontextmanager
async def two(
    one: AbstractAsyncContextManager[Peer], other: AbstractAsyncContextManager[Peer]
) -> AsyncIterator[tuple[Peer, Peer]]:
    """Both at once: most of a child's start is imports."""
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            first, second = (group.create_task(stack.enter_async_context(each)) for each in (one, other))
        yield first.result(), second.result()
