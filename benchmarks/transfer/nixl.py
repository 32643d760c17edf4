"""NIXL between two GPUs, for `benchmarks.transfer.gpu`: one-sided writes of one piece, and of many scattered ones.

As NIXL's own examples do it: both ends register their memory, the writer loads the other's metadata, prepares a
transfer once, posts it and asks until it is done. Nothing is packed, hashed or checked.

Both ends are processes of their own. Whatever happens in them (an error, a crash, a call that never returns), `rows`
ends within DEADLINE_S and says in its last row how far they had come.
"""

import importlib.util
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

DEADLINE_S = 30.0
WARM_UPS = 3
Descriptor = tuple[int, int, int]
"""Address, bytes, device."""


class NixlFailed(Exception):
    """Says which end, at what, and why."""


@dataclass(frozen=True)
class Row:
    """A write of `num_bytes`; pieces: as how many."""

    pieces: str
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Stage:
    """The step that an end begins."""

    what: str


@dataclass(frozen=True)
class Failure:
    why: str


def rows(
    devices: tuple[str, str], blocks: int, block_bytes: int, rounds: int, deadline_s: float = DEADLINE_S
) -> Iterator[Row]:
    """Raises NixlFailed, at the latest `deadline_s` seconds from now, unless all rows came."""
    if importlib.util.find_spec("nixl_cu13") is None:
        raise NixlFailed("nixl_cu13 is not installed")
    yield from between_processes(_hold, _write, deadline_s, *devices, blocks, block_bytes, rounds)


def between_processes(
    hold: Callable[..., None], write: Callable[..., None], deadline_s: float, *args: Any
) -> Iterator[Row]:
    """Rows that `write(told, peer, *args)` sends, while `hold(told, peer, *args)` runs; each in its own process.

    told   a pipe for rows, stages and failures; peer: one between the two
    """
    context = multiprocessing.get_context("spawn")
    give_up_s = time.monotonic() + deadline_s
    peers = context.Pipe()
    processes: dict[str, BaseProcess] = {}
    told: dict[Connection, str] = {}
    for end, run, peer in (("passive end", hold, peers[0]), ("writer", write, peers[1])):
        ours, theirs = context.Pipe(duplex=False)
        processes[end] = context.Process(target=_guarded, args=(run, theirs, peer, *args), daemon=True)
        processes[end].start()
        theirs.close()
        peer.close()
        told[ours] = end
    try:
        yield from _told(told, processes, give_up_s)
    finally:
        for process in processes.values():
            process.kill()


def _told(told: dict[Connection, str], processes: dict[str, BaseProcess], give_up_s: float) -> Iterator[Row]:
    """Yields rows until the writer has finished."""
    stages = dict.fromkeys(told.values(), "start")
    while ready := wait(list(told), timeout=max(0.0, give_up_s - time.monotonic())):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            end = told[pipe]
            try:
                word = pipe.recv()
            except EOFError:
                processes[end].join(1.0)
                raise NixlFailed(f"the {end} died at: {stages[end]}; status {processes[end].exitcode}") from None
            match word:
                case Row():
                    yield word
                case Stage(what):
                    stages[end] = what
                case Failure(why):
                    raise NixlFailed(f"the {end} failed at: {stages[end]}; {why}")
                case None if end == "writer":
                    return
    raise NixlFailed("no answer in time; " + ", ".join(f"the {end} is at: {stage}" for end, stage in stages.items()))


def _guarded(run: Callable[..., None], told: Connection, *args: Any) -> None:
    try:
        run(told, *args)
        told.send(None)
    except BaseException as error:
        told.send(Failure(f"{error!r} in {traceback.extract_tb(error.__traceback__)[-1].name}"))


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


def _hold(told: Connection, peer: Connection, _: str, device: str, blocks: int, block_bytes: int, rounds: int) -> None:
    """The passive end: its memory is written until it is killed."""
    told.send(Stage("register memory"))
    memory = _pool(device, blocks, block_bytes)
    agent = _agent("decode", memory, in_a_thread=True)  # or the writer never connects: nobody asks anything here
    peer.send((agent.get_agent_metadata(), _pieces(memory, blocks)))
    told.send(Stage("be written"))
    time.sleep(DEADLINE_S)


def _write(told: Connection, peer: Connection, device: str, _: str, blocks: int, block_bytes: int, rounds: int) -> None:
    told.send(Stage("register memory"))
    memory = _pool(device, blocks, block_bytes)
    agent = _agent("prefill", memory, in_a_thread=False)
    told.send(Stage("wait for the passive end"))
    metadata, remote = peer.recv()
    told.send(Stage("load its metadata"))
    name = agent.add_remote_agent(metadata)
    for pieces, near in _pieces(memory, blocks).items():
        told.send(Stage(f"prepare a write of {pieces} pieces"))
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(near, "VRAM"), agent.get_xfer_descs(remote[pieces], "VRAM"), name
        )
        told.send(Stage(f"write {pieces} pieces"))
        seconds = [_posted(agent, handle) for _ in range(WARM_UPS + rounds)][WARM_UPS:]
        agent.release_xfer_handle(handle)
        told.send(Row(pieces, statistics.median(seconds), blocks * block_bytes))


def _posted(agent: Any, handle: Any) -> float:
    began_s = time.monotonic()
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"a write ended as {state}")
    return time.monotonic() - began_s
