"""What asyncio's sockets move between two processes of one host, for `benchmarks.transfer_cpu`."""

import asyncio
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

ANSWER_TIMEOUT_S = 60.0


def tcp_seconds(num_bytes: int, rounds: int) -> list[float]:
    """From the first byte handed to the socket to the last one received by the other process."""
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
