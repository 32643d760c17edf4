"""The two ends of the transfer benchmarks: processes that hand over for real, one device each.

    with Ends(prefill_device="cuda:0", decode_device="cuda:1", shape=shape_of(...), num_buffers=8) as ends:
        seconds = ends.one_at_a_time(plan, rounds=20)

What runs in them is `benchmarks.transfer_end`. Times are of the machine's monotonic clock, which both processes read.
"""

import itertools
import multiprocessing
import statistics
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.transfer_end import DEADLINE_S, WARM_UPS, Shape, run
from transfer.protocol.plan import TransferPlan


@dataclass(frozen=True)
class Took:
    """Seconds from the first word to the last landing, and each end's host time in them: processor seconds of its event
    loop's thread. A loop that asks a device in turns is busy while it waits: with enough hand-overs at once it always
    finds one that can go on, and its host time is then what bounds them."""

    seconds: float
    prefill_host_s: float
    decode_host_s: float


class Ends:
    """Both processes, from the parent's side. `kwargs` reach both, e.g. `spin_s` and `ucx`."""

    def __init__(self, prefill_device: str, decode_device: str, shape: Shape, **kwargs: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for role, device in (("prefill", prefill_device), ("decode", decode_device)):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(theirs, role, device, shape, kwargs), daemon=True)
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
        """Each: from the word that everything is computed to the last landing."""
        return [self._together([self._fresh(plan)], 1) for _ in range(WARM_UPS + rounds)][WARM_UPS:]

    def in_flight(self, plan: TransferPlan, rounds: int, at_once: int) -> Took:
        """A hand-over on average, with so many at once."""
        self._together([self._fresh(plan) for _ in range(2 * at_once)], at_once)
        took = self._together([self._fresh(plan) for _ in range(rounds)], at_once)
        return Took(took.seconds / rounds, took.prefill_host_s / rounds, took.decode_host_s / rounds)

    def timeline(self, plan: TransferPlan, rounds: int) -> dict[str, float]:
        """When a hand-over's steps begin and end: median seconds from the word that everything is computed.

        From here on all steps are noted, which costs a little time.
        """
        for pipe in self._pipes:
            self._call(pipe, "note_steps")
        seconds: dict[str, list[float]] = {}
        for _ in range(WARM_UPS + rounds):
            self._together([self._fresh(plan)], 1)
            steps = [step for pipe in self._pipes for step in self._call(pipe, "noted")]
            begins_s = min(at_s for _, at_s in steps)
            for name, at_s in steps:
                seconds.setdefault(name, []).append(at_s - begins_s)
        medians = {name: statistics.median(each[WARM_UPS:]) for name, each in seconds.items()}
        return dict(sorted(medians.items(), key=lambda step: step[1]))

    def profiles(self, plan: TransferPlan, rounds: int, at_once: int) -> list[str]:
        """Where each end's event loop spends its time with so many at once, function by function."""
        for pipe in self._pipes:
            self._call(pipe, "profile")
        self._together([self._fresh(plan) for _ in range(rounds)], at_once)
        return [self._call(pipe, "profiled") for pipe in self._pipes]

    def sends(self, num_bytes: int, rounds: int, at_once: int) -> float:
        """Seconds a bare message of a staging buffer takes on average, with so many at once."""
        call = {"peer": self._address, "num_bytes": num_bytes, "at_once": at_once}
        self._call(self._prefill, "sends", rounds=WARM_UPS * at_once, **call)
        return self._call(self._prefill, "sends", rounds=rounds, **call) / rounds

    def parts(self, plan: TransferPlan, rounds: int) -> dict[str, float]:
        """Median seconds that one end waits for each thing it does to the plan's first message."""
        return self._call(self._prefill, "parts", plan=plan, rounds=rounds)

    def arrived(self) -> bool:
        """Whether what the last hand-over brought lies where it should, byte for byte."""
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
