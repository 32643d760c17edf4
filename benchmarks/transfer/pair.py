"""Both ends of the transfer benchmarks: processes that transfer for real, one device each.

    with Ends(prefill_device="cuda:0", decode_device="cuda:1", shape=shape_of(...), num_buffers=8) as ends:
        seconds = ends.one_at_a_time(plan, rounds=20)

`benchmarks.transfer.end` runs in them. Times are of the machine's monotonic clock, which both processes read.
"""

import itertools
import multiprocessing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.transfer.end import DEADLINE_S, WARM_UPS, Shape, run
from transfer.protocol.plan import TransferPlan


@dataclass(frozen=True)
class Took:
    """Seconds from a computed prompt to its last landing, and each end's processor seconds in its event loop's thread.

    A loop that polls a device is busy while it waits. With enough transfers at once it always finds one that can
    continue, and its host time then bounds them.
    """

    seconds: float
    prefill_host_s: float
    decode_host_s: float


class Ends:
    """Both processes, from the parent's side. `kwargs` reach both, `ucx` for one."""

    def __init__(self, prefill_device: str, decode_device: str, shape: Shape, **kwargs: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for device in (prefill_device, decode_device):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(theirs, device, shape, kwargs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._prefill, self._decode = self._pipes
        self._nonces = itertools.count(1)
        self._answer(self._prefill)
        self._address = self._answer(self._decode)

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends its process
        for process in self._processes:
            process.join(10)
            process.kill()

    def one_at_a_time(self, plan: TransferPlan, rounds: int) -> list[Took]:
        """Times of single transfers, from a computed prompt to the last landing."""
        return [self._together([self._fresh(plan)], 1) for _ in range(WARM_UPS + rounds)][WARM_UPS:]

    def in_flight(self, plan: TransferPlan, rounds: int, at_once: int) -> Took:
        """The average time of a transfer, with `at_once` under way."""
        self._together([self._fresh(plan) for _ in range(2 * at_once)], at_once)
        took = self._together([self._fresh(plan) for _ in range(rounds)], at_once)
        return Took(took.seconds / rounds, took.prefill_host_s / rounds, took.decode_host_s / rounds)

    def sends(self, num_bytes: int, rounds: int, at_once: int) -> float:
        """Average seconds of a bare message from a staging buffer, with `at_once` under way."""
        call = {"peer": self._address, "num_bytes": num_bytes, "at_once": at_once}
        self._call(self._prefill, "sends", rounds=WARM_UPS * at_once, **call)
        return self._call(self._prefill, "sends", rounds=rounds, **call) / rounds

    def parts(self, plan: TransferPlan, rounds: int) -> dict[str, float]:
        """Median seconds that one end waits for each step on the plan's first message."""
        return self._call(self._prefill, "parts", plan=plan, rounds=rounds)

    def arrived(self) -> bool:
        """True if the last transfer's bytes all lie where they should."""
        return self._call(self._decode, "arrived")

    def describe(self) -> dict[str, str]:
        return self._call(self._prefill, "describe")

    def _fresh(self, plan: TransferPlan) -> TransferPlan:
        return replace(plan, nonce=next(self._nonces))

    def _together(self, plans: list[TransferPlan], at_once: int) -> Took:
        self._call(self._decode, "expect", plans=plans)
        self._prefill.send(("send", {"plans": plans, "peer": self._address, "at_once": at_once}))
        self._decode.send(("landed", {}))
        began_s, prefill_host_s = self._answer(self._prefill)
        landed_s, decode_host_s = self._answer(self._decode)
        return Took(landed_s - began_s, prefill_host_s, decode_host_s)

    def _call(self, pipe: Connection, name: str, **arguments: Any) -> Any:
        pipe.send((name, arguments))
        return self._answer(pipe)

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(2 * DEADLINE_S):
            raise TimeoutError(f"no answer in {2 * DEADLINE_S:.0f} s")
        answer = pipe.recv()
        if isinstance(answer, str) and answer.startswith("Traceback"):
            raise RuntimeError(f"an end failed:\n{answer}")
        return answer
