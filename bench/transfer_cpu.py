"""One hand-over of 64 MiB between two processes on this machine, beside a memcpy in the same run.

    python -m bench.transfer_cpu [--transports tcp] [--rounds 15]

A row is one way to cut the same bytes into messages. Timed from the first token count to the last landing, so
it holds everything: pack (a copy), digest, transfer, digest, land (a copy). Attention and state are half each.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from transfer.admission import SECRET_BYTES
from transfer.buffers import Buffer, allocate_host
from transfer.plan import PlannedMessage, TransferPlan
from transfer.receiver import HandoverReceiver, IncomingHandover
from transfer.sender import HandoverSender
from transfer.staging import Staging, StagingConfig
from transfer.ucx import open_transport
from transfer.ucx_config import UcxConfig

TOTAL_BYTES = 64 << 20
MESSAGE_BYTES = (32 << 20, 8 << 20, 2 << 20)
STAGING = StagingConfig(num_buffers=3, buffer_bytes=TOTAL_BYTES // 2)
DEADLINE_S = 120.0
SECRET = bytes(SECRET_BYTES)  # both processes know it, as both know the plans


def plans(rounds: int) -> list[TransferPlan]:
    """Every round of every row; the nonce is its number."""
    return [
        TransferPlan(
            nonce=number,
            num_tokens=512,
            first_block=0,
            block_size=16,
            block_bytes=1 << 20,
            state_bytes=TOTAL_BYTES // 2,
            max_message_bytes=message_bytes,
        )
        for number, message_bytes in enumerate(
            (message_bytes for _ in range(rounds) for message_bytes in MESSAGE_BYTES), start=1
        )
    ]


async def decode(config: UcxConfig, rounds: int, pipe: Connection) -> None:
    """Expect all rounds at once; report when each had landed, by the machine's monotonic clock."""
    transport = open_transport(config)
    receiver = HandoverReceiver(transport, Staging(STAGING))
    blocks = allocate_host(TOTAL_BYTES)

    async def land(message: PlannedMessage, buffer: Buffer) -> None:
        start = message.first_block << 20
        blocks[start : start + message.num_bytes] = buffer

    async def landed_s(handover: IncomingHandover) -> float:
        await handover.landed()
        return time.monotonic()

    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    waiting = [
        asyncio.create_task(landed_s(receiver.expect(plan, secret=SECRET, land=land, deadline_s=deadline_s)))
        for plan in plans(rounds)
    ]
    pipe.send(transport.address)
    for landing in waiting:
        pipe.send(await landing)
    await transport.close()


async def prefill(config: UcxConfig, rounds: int, pipe: Connection) -> dict[int, list[float]]:
    """Seconds of each round, by message size."""
    transport = open_transport(config)
    sender = HandoverSender(transport, Staging(STAGING))
    blocks = np.arange(TOTAL_BYTES, dtype=np.int64).astype(np.uint8)

    async def pack(message: PlannedMessage, buffer: Buffer) -> None:
        start = message.first_block << 20
        buffer[:] = blocks[start : start + message.num_bytes]

    address = pipe.recv()
    seconds: dict[int, list[float]] = {message_bytes: [] for message_bytes in MESSAGE_BYTES}
    for plan in plans(rounds):
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        handover = sender.open(plan, address, secret=SECRET, pack=pack, deadline_s=deadline_s)
        began_s = time.monotonic()
        handover.tokens_computed(plan.num_tokens)
        handover.finish()
        await handover.done()
        if not pipe.poll(DEADLINE_S):
            raise TimeoutError(f"round {plan.nonce} did not land in {DEADLINE_S} s")
        seconds[plan.max_message_bytes].append(pipe.recv() - began_s)
    await transport.close()
    return seconds


def copy_seconds(rounds: int) -> list[float]:
    source, target = np.ones(TOTAL_BYTES, np.uint8), allocate_host(TOTAL_BYTES)
    seconds = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began_s)
    return seconds


def row(name: str, seconds: list[float]) -> str:
    best, median = (TOTAL_BYTES / 1e9 / value for value in (min(seconds), statistics.median(seconds)))
    return f"{name:<28}{best:>10.2f}{median:>10.2f}"


def run_decode(config: UcxConfig, rounds: int, pipe: Connection) -> None:
    asyncio.run(decode(config, rounds, pipe))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transports", default=UcxConfig().transports)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    config = UcxConfig(transports=arguments.transports)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=run_decode, args=(config, arguments.rounds, there), daemon=True
    )
    process.start()
    seconds = asyncio.run(prefill(config, arguments.rounds, here))
    process.join(DEADLINE_S)
    print(f"{TOTAL_BYTES >> 20} MiB, {config.transports}; GB/s {'best':>11}{'median':>10}")
    print(row("memcpy", copy_seconds(arguments.rounds)))
    for message_bytes, values in seconds.items():
        print(row(f"hand-over, {message_bytes >> 20} MiB messages", values))


if __name__ == "__main__":
    main()
