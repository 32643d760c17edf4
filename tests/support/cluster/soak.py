"""Thousands of small transfers in a row between two processes over UCX, and what the two hold meanwhile.

One session in ten is cancelled by its receiver, and all its messages come late, so that what is dropped is counted too.
"""

import asyncio
import gc
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import torch

from node_runtime.packing import staging_memory
from tests.support.transfer.transfer_plans import contents, secret_of
from transfer.buffers import Buffer, StagingBuffer
from transfer.protocol.errors import TransferFailed
from transfer.protocol.plan import PlannedMessage, TransferPlan
from transfer.receiver import IncomingTransfer, TransferReceiver
from transfer.sender import TransferSender
from transfer.staging import Staging, StagingConfig
from transfer.ucx import UcxConfig, open_transport

STAGING = StagingConfig(num_buffers=4, buffer_bytes=32 << 10)
AT_ONCE = 10
CANCELLED_ONE_IN = 10
PARTS = 6
"""Of a session: an envelope and a payload for each of its three messages."""
DEADLINE_S = 60.0
MAX_GROWTH_KIB = 512
"""Of a run, however long: 50 bytes a session would be more in 10,000. Allocators settle within less."""

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True)
class Sample:
    """What one process holds after `num_sessions`, while none is open.

    mappings       of files, devices and shared memory. Private memory is in rss_kib: its mappings come and go as the
                   allocators like it (an arena of Python's is a mapping, or joins the one beside it)
    device_kib     in use on the process's GPU, by whomever: what a peer's memory is mapped with, too; 0 on a host
    dropped_parts  ever
    """

    num_sessions: int
    rss_kib: int
    open_files: int
    threads: int
    mappings: int
    device_kib: int
    endpoints: int
    operations: int
    staging_held: int
    nonces: int
    tasks: int
    dropped_parts: int

    def held(self) -> dict[str, int]:
        """All that must not grow by a single one."""
        counted = asdict(self)
        for name in ("num_sessions", "rss_kib", "dropped_parts"):
            del counted[name]
        return counted


def rss_growth_kib(samples: list[Sample]) -> float:
    """From first to last along a straight line through all: one sudden page-in is no growth, a leak is."""
    slope, _ = statistics.linear_regression([s.num_sessions for s in samples], [s.rss_kib for s in samples])
    return slope * (samples[-1].num_sessions - samples[0].num_sessions)


def grown(samples: list[Sample]) -> list[str]:
    """What there is more of in the last sample than in the first, in words."""
    first, last = samples[0].held(), samples[-1].held()
    found = [f"{name} {first[name]} -> {count}" for name, count in last.items() if count > first[name]]
    growth_kib = rss_growth_kib(samples)
    return [*found, *([f"memory by {growth_kib:.0f} KiB"] if growth_kib > MAX_GROWTH_KIB else [])]


def plan_of(nonce: int) -> TransferPlan:
    """Two attention messages of two blocks and of one, some short enough to be sent eagerly, and a state."""
    return TransferPlan(
        nonce=nonce,
        num_tokens=50,
        first_block=1,
        block_size=16,
        block_bytes=4096,
        state_bytes=30_000,
        max_message_bytes=8192,
    )


def batches(num_sessions: int) -> Iterator[range]:
    for first in range(1, num_sessions + 1, AT_ONCE):
        yield range(first, min(first + AT_ONCE, num_sessions + 1))


def is_cancelled(nonce: int) -> bool:
    return nonce % CANCELLED_ONE_IN == 0


def as_tensor(buffer: Buffer) -> torch.Tensor:
    return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)


class Side:
    def __init__(self, device: str, num_sessions: int, num_samples: int) -> None:
        # One thread that waits for the other process: a pool starts a second one when the first is slow to rest.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        self._device = torch.device(device)
        memory = staging_memory(device)
        self.transport = open_transport(UcxConfig(cuda=self._device.type == "cuda"))
        self.staging = Staging(STAGING, memory)
        self.samples: list[Sample] = []
        self._every = max(AT_ONCE, num_sessions // num_samples)
        self._warm_up = max(num_sessions // 5, 2 * AT_ONCE)
        self._next = self._warm_up

    async def batch_ended(self, num_sessions: int, dropped_parts: int) -> None:
        """dropped_parts: so many will have been, once all that is late has come."""
        if num_sessions < self._next:
            return
        self._next += self._every
        async with asyncio.timeout(DEADLINE_S):  # what is cancelled and late may still be under way
            while self._is_at_work() or self.transport.stats.dropped_parts < dropped_parts:
                await asyncio.sleep(0.01)
        gc.collect()
        with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
            rss_pages, mappings = int(statm.read().split()[1]), sum("/" in line for line in maps)
        transport = self.transport
        self.samples.append(
            Sample(
                num_sessions=num_sessions,
                rss_kib=rss_pages * PAGE_KIB,
                open_files=len(os.listdir("/proc/self/fd")),
                threads=len(os.listdir("/proc/self/task")),
                mappings=mappings,
                device_kib=self._device_kib(),
                endpoints=len(transport._outgoing) + len(transport._incoming) + len(transport._unidentified),
                operations=transport.progress.num_operations,
                staging_held=STAGING.num_buffers - self.staging.num_free,
                nonces=len(transport._demultiplexer),
                tasks=len(asyncio.all_tasks()),
                dropped_parts=transport.stats.dropped_parts,
            )
        )

    def _is_at_work(self) -> bool:
        return self.transport.progress.num_operations > 0 or self.staging.num_free < STAGING.num_buffers

    def _device_kib(self) -> int:
        if self._device.type == "cpu":
            return 0
        free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
        return int(all_bytes - free_bytes) // 1024


async def decode(device: str, num_sessions: int, num_samples: int, pipe: Connection) -> None:
    side = Side(device, num_sessions, num_samples)
    receiver = TransferReceiver(side.transport, side.staging)

    def expect(nonce: int) -> IncomingTransfer:
        plan = plan_of(nonce)

        async def land(message: PlannedMessage, buffer: StagingBuffer) -> None:
            if not torch.equal(as_tensor(buffer.payload).cpu(), as_tensor(contents(message, nonce))):
                raise AssertionError(f"session {nonce} landed other bytes than its own")

        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        return receiver.expect(plan, secret=secret_of(nonce), land=land, deadline_s=deadline_s)

    pipe.send(side.transport.address)
    for nonces in batches(num_sessions):
        incoming = [expect(nonce) for nonce in nonces]
        for transfer in incoming:
            if is_cancelled(transfer.plan.nonce):
                transfer.cancel()
        pipe.send("expecting")
        outcomes = await asyncio.gather(*(transfer.landed() for transfer in incoming), return_exceptions=True)
        for nonce, outcome in zip(nonces, outcomes, strict=True):
            if isinstance(outcome, TransferFailed) != is_cancelled(nonce) or isinstance(outcome, AssertionError):
                raise AssertionError(f"session {nonce}: {outcome}")
        await side.batch_ended(nonces[-1], dropped_parts=PARTS * (nonces[-1] // CANCELLED_ONE_IN))
    pipe.send(side.samples)
    await asyncio.to_thread(pipe.recv)  # until the sender is done, too
    await side.transport.close()


async def prefill(device: str, num_sessions: int, num_samples: int, pipe: Connection) -> list[Sample]:
    side = Side(device, num_sessions, num_samples)
    sender = TransferSender(side.transport, side.staging)
    peer = await asyncio.to_thread(pipe.recv)

    async def send(nonce: int) -> None:
        plan = plan_of(nonce)

        async def pack(message: PlannedMessage, buffer: StagingBuffer) -> None:
            as_tensor(buffer.payload).copy_(as_tensor(contents(message, nonce)))  # done when it returns: it is pageable

        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        transfer = sender.open(plan, peer, secret=secret_of(nonce), pack=pack, deadline_s=deadline_s)
        transfer.tokens_computed(plan.num_tokens)
        transfer.finish(42)
        await transfer.done()

    for nonces in batches(num_sessions):
        await asyncio.to_thread(pipe.recv)
        await asyncio.gather(*map(send, nonces))
        await side.batch_ended(nonces[-1], dropped_parts=0)
    await side.transport.close()
    return side.samples


def run_decode(device: str, num_sessions: int, num_samples: int, pipe: Connection) -> None:
    asyncio.run(decode(device, num_sessions, num_samples, pipe))


def run_prefill(device: str, num_sessions: int, num_samples: int, pipe: Connection, answer: Connection) -> None:
    answer.send(asyncio.run(prefill(device, num_sessions, num_samples, pipe)))


def soak(
    num_sessions: int,
    *,
    devices: tuple[str, str] = ("cpu", "cpu"),
    num_samples: int = 20,
    timeout_s: float = 600.0,
) -> dict[str, list[Sample]]:
    """The samples of each side, by time, the first after the warm-up. `devices`: of the sender and of the receiver.

    Raises AssertionError when a session did not end as it should, or not in time.
    """
    context = multiprocessing.get_context("spawn")
    decodes, prefills = context.Pipe()
    here, there = context.Pipe(duplex=False)
    sends, receives = ((device, num_sessions, num_samples) for device in devices)
    processes = [
        context.Process(target=run_decode, args=(*receives, decodes), daemon=True),
        context.Process(target=run_prefill, args=(*sends, prefills, there), daemon=True),
    ]
    for process in processes:
        process.start()
    for end in (decodes, there):
        end.close()
    try:
        assert here.poll(timeout_s), f"{num_sessions} sessions did not end in {timeout_s} s"
        prefill_samples = here.recv()
        assert prefills.poll(timeout_s), "the receiver did not end"
        decode_samples = prefills.recv()
        prefills.send("done")
        for process in processes:
            process.join(timeout_s)
    finally:
        for process in processes:
            process.kill()
    return {"prefill": prefill_samples, "decode": decode_samples}
