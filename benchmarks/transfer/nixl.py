"""NIXL between two GPUs, beside `transfer-gpu`: one-sided writes of one piece, and of many scattered ones.

As NIXL's own examples do it: both ends register their memory, the writer loads the other's metadata, prepares a
transfer once, posts it and polls until it is done. Nothing is packed, hashed or checked. Both ends run in a command of
their own, which prints its steps and its rows: whatever happens there (an error, a crash, a call that never returns),
`rows` ends within its deadline and reports the last step.
"""

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch

DEADLINE_S = 30.0
WARM_UPS = 3


class NixlFailed(Exception):
    """NIXL is not there, or its command failed; the message has the last line that it printed."""


@dataclass(frozen=True)
class Row:
    """A write of `num_bytes` in as many `pieces`."""

    pieces: str
    seconds: float
    num_bytes: int


def rows(devices: tuple[str, str], blocks: int, block_bytes: int, rounds: int) -> Iterator[Row]:
    """NIXL's rows; raises NixlFailed within DEADLINE_S unless all of them came."""
    if find_spec("nixl_cu13") is None:
        raise NixlFailed("nixl_cu13 is not installed")
    arguments = [*devices, str(blocks), str(block_bytes), str(rounds)]
    yield from printed_rows([sys.executable, "-m", "benchmarks.transfer.nixl", *arguments], DEADLINE_S)


def printed_rows(command: Sequence[str], deadline_s: float) -> Iterator[Row]:
    """Rows that a command prints; raises NixlFailed if it fails or runs longer than `deadline_s` seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    timer = threading.Timer(deadline_s, os.killpg, (process.pid, signal.SIGKILL))  # the passive end, too
    timer.start()
    last = "nothing"
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("row: "):
                yield Row(**json.loads(line.removeprefix("row: ")))
            elif line.strip():
                last = line.strip()
        if process.wait() != 0:
            raise NixlFailed(f"status {process.returncode}; the last line: {last}")
    finally:
        timer.cancel()
        process.kill()


def _agent(name: str, memory: torch.Tensor, *, in_a_thread: bool) -> Any:
    """An agent that makes progress in a thread of its own, or only while it is polled."""
    from nixl_cu13 import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=in_a_thread))
    agent.register_memory(memory)
    return agent


def _pool(device: str, blocks: int, block_bytes: int) -> torch.Tensor:
    torch.cuda.set_device(device)
    return torch.ones((2 * blocks, block_bytes), dtype=torch.uint8, device=device)


def _pieces(memory: torch.Tensor, blocks: int) -> dict[str, list[tuple[int, int, int]]]:
    """The same bytes as one piece and as scattered blocks: address, bytes and device of each piece."""
    block_bytes, device = memory.shape[1], memory.get_device()
    scattered = torch.randperm(2 * blocks)[:blocks].tolist()
    return {
        "1": [(memory.data_ptr(), blocks * block_bytes, device)],
        f"{blocks:,}": [(memory.data_ptr() + block * block_bytes, block_bytes, device) for block in scattered],
    }


def _hold(peer: Connection, device: str, blocks: int, block_bytes: int) -> None:
    """The passive end: its memory is written until it is killed."""
    memory = _pool(device, blocks, block_bytes)
    agent = _agent("decode", memory, in_a_thread=True)  # or the writer never connects: nothing polls here
    peer.send((agent.get_agent_metadata(), _pieces(memory, blocks)))
    time.sleep(DEADLINE_S)


def _write(peer: Connection, device: str, blocks: int, block_bytes: int, rounds: int) -> None:
    memory = _pool(device, blocks, block_bytes)
    agent = _agent("prefill", memory, in_a_thread=False)
    print("the writer waits for the passive end", flush=True)
    metadata, remote = peer.recv()
    name = agent.add_remote_agent(metadata)
    for pieces, near in _pieces(memory, blocks).items():
        print(f"the writer writes {pieces} pieces", flush=True)
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(near, "VRAM"), agent.get_xfer_descs(remote[pieces], "VRAM"), name
        )
        seconds = [_posted_s(agent, handle) for _ in range(WARM_UPS + rounds)][WARM_UPS:]
        agent.release_xfer_handle(handle)
        print("row:", json.dumps(asdict(Row(pieces, statistics.median(seconds), blocks * block_bytes))), flush=True)


def _posted_s(agent: Any, handle: Any) -> float:
    began_s = time.monotonic()
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"a write ended as {state}")
    return time.monotonic() - began_s


if __name__ == "__main__":
    first, second, *sizes = sys.argv[1:]
    num_blocks, num_bytes, num_rounds = map(int, sizes)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=_hold, args=(there, second, num_blocks, num_bytes), daemon=True).start()
    _write(here, first, num_blocks, num_bytes, num_rounds)
