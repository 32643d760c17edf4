"""Transfers between two processes of one host, beside a memcpy and TCP in one run; and the cost of authentication.

    python -m benchmarks transfer-cpu [--mib 64] [--rounds 15] [--transports tcp]
    python -m benchmarks authentication [--rounds 20000]

`transfer-cpu`: a transfer is timed from a computed prompt to the last landing, so it holds everything: gather (a copy),
digest, send, digest, scatter (a copy), with a session around them; one at a time. Half of the bytes are blocks of
64 KiB, half are the state. The TCP row only moves as many bytes: `sock_sendall` to `sock_recv_into`.

`authentication`: microseconds a message of any size. The MAC covers an envelope and the digest in it, not the payload
again; the last rows time a keyed hash of the payload itself, beside the digest that the host makes anyway.
"""

import asyncio
import mmap
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from blake3 import blake3

from benchmarks.timing import best_s, table_header, table_row
from benchmarks.transfer.ends import Ends, shape_of
from transfer.protocol.authentication import Verifier, new_secret, sign
from transfer.protocol.digest import page_hashes
from transfer.protocol.envelope import Envelope, new_nonce
from transfer.protocol.errors import Unauthenticated
from transfer.protocol.plan import TransferPlan
from transfer.ucx import UcxConfig

BLOCK_BYTES = 64 << 10
MESSAGE_MIB = (32, 8, 2)
ANSWER_TIMEOUT_S = 60.0
PAYLOAD_BYTES = 64 << 20  # to hash
REPEATS = 5


def row(name: str, seconds: list[float], num_bytes: int) -> str:
    best, median = (num_bytes / 1e9 / value for value in (min(seconds), statistics.median(seconds)))
    return table_row(name, f"{best:.2f}", f"{median:.2f}")


def copy_seconds(num_bytes: int, rounds: int) -> list[float]:
    """Seconds of copies between two shared mappings by one process."""
    source, target = (np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8) for _ in range(2))
    source[:], target[:] = 1, 0
    seconds = []
    for _ in range(rounds):
        began_s = time.monotonic()
        target[:] = source
        seconds.append(time.monotonic() - began_s)
    return seconds


def rows(num_bytes: int, rounds: int, ucx: UcxConfig) -> Iterator[str]:
    yield f"{num_bytes >> 20} MiB, {ucx.transports}\n\n{table_header('what', 'best GB/s', 'median GB/s')}"
    yield row("memcpy between shared buffers", copy_seconds(num_bytes, rounds), num_bytes)
    yield row("asyncio TCP", tcp_seconds(num_bytes, rounds), num_bytes)
    half = num_bytes // 2
    shape = shape_of(half // BLOCK_BYTES, BLOCK_BYTES, half, dtype="float32")
    with Ends("cpu", "cpu", shape, num_buffers=3, ucx=ucx) as ends:
        for mib in MESSAGE_MIB:
            plan = shape.plan(max_message_bytes=mib << 20)
            transfers = [took.seconds for took in ends.one_at_a_time(plan, rounds)]
            yield row(f"transfer, {mib} MiB messages", transfers, plan.total_bytes)
            if not ends.arrived():
                raise AssertionError("what arrived is not what left")
        for part, seconds in ends.parts(shape.plan(max_message_bytes=half), rounds).items():
            yield row(f"{part} of {half >> 20} MiB of blocks alone", [seconds], half)


def tcp_seconds(num_bytes: int, rounds: int) -> list[float]:
    """Seconds from the first byte given to a socket to the last one received by another process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_receive_tcp, args=(theirs, num_bytes, rounds), daemon=True
    )
    process.start()
    try:
        return asyncio.run(_send_tcp(ours, num_bytes, rounds))
    finally:
        process.join(ANSWER_TIMEOUT_S)
        process.kill()


def _receive_tcp(pipe: Connection, num_bytes: int, rounds: int) -> None:
    async def receive() -> None:
        loop, buffer = asyncio.get_running_loop(), np.zeros(num_bytes, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            pipe.send(server.getsockname())
            connection, _ = await loop.sock_accept(server)
        with connection:
            connection.setblocking(False)
            for _ in range(rounds):
                view = buffer.data
                while view:
                    view = view[await loop.sock_recv_into(connection, view) :]
                pipe.send(time.monotonic())

    asyncio.run(receive())


async def _send_tcp(pipe: Connection, num_bytes: int, rounds: int) -> list[float]:
    loop, payload, seconds = asyncio.get_running_loop(), np.ones(num_bytes, np.uint8), []
    with socket.create_connection(_answer(pipe)) as connection:
        connection.setblocking(False)
        for _ in range(rounds):
            began_s = time.monotonic()
            await loop.sock_sendall(connection, payload.data)
            seconds.append(_answer(pipe) - began_s)
    return seconds


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_TIMEOUT_S):
        raise TimeoutError(f"the other process did not answer in {ANSWER_TIMEOUT_S:.0f} s")
    return pipe.recv()


def main(mib: int = 64, rounds: int = 15, transports: str = UcxConfig().transports) -> None:
    """A transfer between two processes beside a memcpy and TCP."""
    for line in rows(mib << 20, rounds, UcxConfig(transports=transports)):
        print(line, flush=True)


def authentication(rounds: int = 20_000) -> None:
    """Microseconds that authenticating a message costs."""
    plan = TransferPlan(new_nonce(), 8192, 0, 16, 65536, PAYLOAD_BYTES, PAYLOAD_BYTES)
    secret = new_secret()
    header = Envelope.of(plan.nonce, 5, plan.messages[0]).fields() + bytes(16)
    data, forged = sign(header, secret), sign(header, new_secret())
    verifier = Verifier(secret)

    def refuse() -> None:
        try:
            verifier.verify_envelope(forged)
        except Unauthenticated:
            return
        raise AssertionError("a forged envelope was admitted")

    print(table_header("a message", "us"))
    for name, work in (
        ("sign (sender)", lambda: sign(header, secret)),
        ("verify and decode (receiver)", lambda: verifier.verify_envelope(data)),
        ("of these, decode", lambda: Envelope.decode(header)),
        ("refuse a forged one", refuse),
    ):
        print(table_row(name, f"{best_s(work, REPEATS, rounds) * 1e6:.2f}"))
    payload = np.random.default_rng(0).integers(0, 256, PAYLOAD_BYTES, np.uint8)
    print(f"\n{table_header(f'{PAYLOAD_BYTES >> 20} MiB on one core', 'ms')}")
    for name, work in (
        ("digest of the payload", lambda: page_hashes(payload)),
        ("keyed hash of the payload", lambda: blake3(payload.data, key=secret).digest()),
    ):
        print(table_row(name, f"{best_s(work, REPEATS) * 1e3:.1f}"))
