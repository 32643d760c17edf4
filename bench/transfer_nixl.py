"""NIXL between two GPUs, for `bench.transfer_gpu`: one-sided writes of one piece, and of many scattered ones.

As NIXL's own examples do it: both ends register their memory, the writer loads the other's metadata, prepares a
transfer once, posts it and asks until it is done. Nothing is packed, hashed or checked.
"""

import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

ANSWER_TIMEOUT_S = 20.0
WARM_UPS = 3
Descriptor = tuple[int, int, int]
"""Address, bytes, device."""


def rows(
    devices: tuple[str, str], blocks: int, block_bytes: int, rounds: int
) -> Iterator[tuple[str, str, int, float, float]]:
    """What, messages, how many at once, seconds, bytes; nothing when NIXL is not installed."""
    if importlib.util.find_spec("nixl_cu13") is None:
        return
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    reader = context.Process(target=_hold, args=(far, devices[1], blocks, block_bytes), daemon=True)
    reader.start()
    try:
        yield from _write(near, devices[0], blocks, block_bytes, rounds)
    finally:
        near.close()
        reader.join(10)
        reader.kill()


def _agent(name: str, memory: torch.Tensor, *, in_a_thread: bool) -> Any:
    """`in_a_thread`: it makes progress by itself. Otherwise only while it is asked for a transfer's state."""
    from nixl_cu13 import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=in_a_thread))
    agent.register_memory(memory)
    return agent


def _pool(device: str, blocks: int, block_bytes: int) -> torch.Tensor:
    torch.cuda.set_device(device)
    return torch.ones((2 * blocks, block_bytes), dtype=torch.uint8, device=device)


def _pieces(memory: torch.Tensor, blocks: int) -> dict[str, list[Descriptor]]:
    """The same bytes as one piece, and as scattered blocks."""
    block_bytes, device = memory.shape[1], memory.get_device()
    scattered = torch.randperm(2 * blocks)[:blocks].tolist()
    return {
        "1": [(memory.data_ptr(), blocks * block_bytes, device)],
        f"{blocks:,}": [(memory.data_ptr() + block * block_bytes, block_bytes, device) for block in scattered],
    }


def _hold(pipe: Connection, device: str, blocks: int, block_bytes: int) -> None:
    """The passive end: its memory is written until the pipe closes."""
    memory = _pool(device, blocks, block_bytes)
    agent = _agent("decode", memory, in_a_thread=True)  # or the writer never connects: nobody asks anything here
    pipe.send((agent.get_agent_metadata(), _pieces(memory, blocks)))
    try:
        pipe.recv()
    except EOFError:
        return


def _write(
    pipe: Connection, device: str, blocks: int, block_bytes: int, rounds: int
) -> Iterator[tuple[str, str, int, float, float]]:
    memory = _pool(device, blocks, block_bytes)
    agent = _agent("prefill", memory, in_a_thread=False)
    if not pipe.poll(ANSWER_TIMEOUT_S):
        raise TimeoutError(f"NIXL's other end did not start in {ANSWER_TIMEOUT_S:.0f} s")
    metadata, remote = pipe.recv()
    peer = agent.add_remote_agent(metadata)
    for pieces, near in _pieces(memory, blocks).items():
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(near, "VRAM"), agent.get_xfer_descs(remote[pieces], "VRAM"), peer
        )
        seconds = [_posted(agent, handle) for _ in range(WARM_UPS + rounds)][WARM_UPS:]
        agent.release_xfer_handle(handle)
        yield "NIXL, a write of as many bytes", f"{pieces} pieces", 1, statistics.median(seconds), blocks * block_bytes


def _posted(agent: Any, handle: Any) -> float:
    began_s = time.monotonic()
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
        if time.monotonic() - began_s > ANSWER_TIMEOUT_S:
            raise TimeoutError(f"a NIXL write did not end in {ANSWER_TIMEOUT_S:.0f} s")
    if state != "DONE":
        raise RuntimeError(f"a NIXL write ended as {state}")
    return time.monotonic() - began_s
