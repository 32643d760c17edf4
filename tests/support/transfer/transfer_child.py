"""One end of real transfers, in a process of its own: obeys JSON lines on stdin, reports on stdout.

    python -m tests.support.transfer.transfer_child '{"transports": "tcp"}' [cuda:0]

Its staging lies on the device, a GPU's or the host's.
Every message's bytes are `contents(message, nonce)`, so the receiving process can check them by itself.
See `tests.support.transfer.transfer_peer` for the other end of the pipes.
"""

import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from node_runtime.packing import staging_memory
from tests.support.transfer.transfer_plans import contents, secret_of
from transfer.buffers import Buffer, StagingBuffer
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import OutgoingTransfer, TransferSender
from transfer.staging import Staging, StagingConfig
from transfer.ucx import UcxConfig, open_transport

STAGING = StagingConfig(num_buffers=3, buffer_bytes=16 << 20)


def say(**report: object) -> None:
    print(json.dumps(report), flush=True)


class Child:
    """Commands are methods; each takes the command's fields and answers under the command's `id`."""

    def __init__(self, config: UcxConfig, device: str) -> None:
        memory = staging_memory(device)
        self.transport = open_transport(replace(config, cuda=device != "cpu"))
        self.staging = Staging(STAGING, memory)
        self.sender = TransferSender(self.transport, self.staging)
        self.receiver = TransferReceiver(self.transport, self.staging)
        self.outgoing: dict[int, OutgoingTransfer] = {}
        self.incoming: dict[int, IncomingTransfer] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.expected: dict[int, Buffer] = {}

    def obey(self, line: bytes) -> None:
        fields = json.loads(line)
        task = asyncio.create_task(self._answer(fields.pop("id"), fields.pop("do"), fields))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, call: int, do: str, fields: dict[str, Any]) -> None:
        try:
            say(id=call, result=await getattr(self, do)(**fields))
        except TransferFailed as failed:
            say(id=call, result={"failed": failed.cause, "reason": str(failed)})
        except Exception as error:  # the test must see it, whatever it is
            say(id=call, result={"error": repr(error)})

    async def expect(self, plan: dict[str, int], within_s: float) -> dict[str, Any]:
        planned = TransferPlan(**plan)
        wrong = 0

        async def land(message: PlannedMessage, buffer: StagingBuffer) -> None:
            nonlocal wrong
            wrong += not torch.equal(
                torch.as_tensor(buffer.payload).cpu(), torch.from_numpy(contents(message, planned.nonce))
            )
            say(landed=message.index)

        deadline_s = asyncio.get_running_loop().time() + within_s
        secret = secret_of(planned.nonce)
        transfer = self.receiver.expect(planned, secret=secret, land=land, deadline_s=deadline_s)
        self.incoming[planned.nonce] = transfer
        say(expecting=planned.nonce)
        landed = await transfer.landed()
        return {"first_token": landed.first_token, "wrong": wrong, **asdict(landed.stats)}

    async def send(self, plan: dict[str, int], peer: str, within_s: float, tokens: int, finish: bool) -> dict[str, Any]:
        planned = TransferPlan(**plan)

        async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
            torch.as_tensor(buffer.payload).copy_(torch.from_numpy(contents(message, planned.nonce)))

        deadline_s = asyncio.get_running_loop().time() + within_s
        secret = secret_of(planned.nonce)
        transfer = self.sender.open(planned, peer, secret=secret, pack=pack, deadline_s=deadline_s)
        self.outgoing[planned.nonce] = transfer
        transfer.tokens_computed(tokens)
        if finish:
            transfer.finish(42)
        return asdict(await transfer.done())

    async def go_on(self, nonce: int, tokens: int) -> None:
        """The rest of a prompt of which only some tokens were computed."""
        self.outgoing[nonce].tokens_computed(tokens)
        self.outgoing[nonce].finish(42)

    async def cancel(self, nonces: list[int]) -> None:
        """Sessions of either direction."""
        for nonce in nonces:
            (self.incoming | self.outgoing)[nonce].cancel()

    async def report(self) -> dict[str, Any]:
        self.staging.check()
        return {
            "free": self.staging.num_free,
            "operations": self.transport.progress.num_operations,
            "cpu_s": time.process_time(),
            "open_files": len(os.listdir("/proc/self/fd")),
            "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "describe": self.transport.describe(),
            **asdict(self.transport.stats),
        }


async def main(config: UcxConfig, device: str) -> None:
    child = Child(config, device)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
    say(address=child.transport.address)
    while line := await lines.readline():
        child.obey(line)
    await child.transport.close()


if __name__ == "__main__":
    asyncio.run(main(UcxConfig(**json.loads(sys.argv[1])), *(sys.argv[2:] or ["cpu"])))
