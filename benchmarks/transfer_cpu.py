"""Hand-overs between two processes of one host, beside a memcpy between shared buffers and asyncio's TCP in one run.

    python -m benchmarks transfer-cpu [--mib 64] [--rounds 15] [--transports tcp]

A hand-over is timed from the word that the prompt is computed to the last landing, so it holds everything: gather (a
copy), digest, transfer, digest, scatter (a copy), with a session around them; one at a time. Half of the bytes are
blocks of 64 KiB, half are the state. The TCP row only moves as many bytes: `sock_sendall` to `sock_recv_into`.
"""

import argparse
import mmap
import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.transfer_end import shape_of
from benchmarks.transfer_ends import Ends
from benchmarks.transfer_tcp import tcp_seconds
from transfer.ucx_config import UcxConfig

BLOCK_BYTES = 64 << 10
MESSAGE_MIB = (32, 8, 2)


def row(name: str, seconds: list[float], num_bytes: int) -> str:
    best, median = (num_bytes / 1e9 / value for value in (min(seconds), statistics.median(seconds)))
    return f"| {name} | {best:.2f} | {median:.2f} |"


def copy_seconds(num_bytes: int, rounds: int) -> list[float]:
    """Between two shared mappings, by one process."""
    source, target = (np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8) for _ in range(2))
    source[:], target[:] = 1, 0
    seconds = []
    for _ in range(rounds):
        began_s = time.monotonic()
        target[:] = source
        seconds.append(time.monotonic() - began_s)
    return seconds


def rows(num_bytes: int, rounds: int, ucx: UcxConfig) -> Iterator[str]:
    yield f"{num_bytes >> 20} MiB, {ucx.transports}\n\n| what | best GB/s | median GB/s |\n|---|---:|---:|"
    yield row("memcpy between shared buffers", copy_seconds(num_bytes, rounds), num_bytes)
    yield row("asyncio TCP", tcp_seconds(num_bytes, rounds), num_bytes)
    half = num_bytes // 2
    shape = shape_of(half // BLOCK_BYTES, BLOCK_BYTES, half, dtype="float32", state_dtype="float32")
    with Ends("cpu", "cpu", shape, num_buffers=3, ucx=ucx) as ends:
        for mib in MESSAGE_MIB:
            plan = shape.plan(max_message_bytes=mib << 20)
            transfers = [took.seconds for took in ends.one_at_a_time(plan, rounds)]
            yield row(f"hand-over, {mib} MiB messages", transfers, plan.total_bytes)
            if not ends.arrived():
                raise AssertionError("what arrived is not what left")
        for part, seconds in ends.parts(shape.plan(max_message_bytes=half), rounds).items():
            yield row(f"{part} of {half >> 20} MiB of blocks alone", [seconds], half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transports", default=UcxConfig().transports)
    arguments = parser.parse_args()
    for line in rows(arguments.mib << 20, arguments.rounds, UcxConfig(transports=arguments.transports)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
