"""Seconds that hosts take in the simulator: a node's beside its device, and the router's before it decides.

A node's engine runs in turns. A turn begins when a step does, obeys the orders that have come since the last one,
composes the step after that one and launches it behind it: what arrives within a step waits for its end and for the
whole step that was launched already. The tokens of a step are known when the next one begins, which waits for the
host if that is later than the device.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_SHARE = 1 / 8
"""Share of a step's time that a turn beside it obeys orders for, as in headrace/engine/engine.py."""

LEAD = 2.0
"""A step left open is made before the device is done, by so many times what a turn takes, as there."""


@dataclass(frozen=True)
class HostCosts:
    """Seconds beside those of the devices; the default is none: only devices take time, and orders are obeyed at once.

    launches_ahead   engines run in turns, as above; needed for those costs that a turn has
    leaves_open      a step behind prompts alone is made as late as the device allows (headrace/engine/loop.py)
    answer_s         of a turn, for each answer in its step
    prompts_s        more for a turn whose step computes prompts
    request_s        more for each request that the turn takes in: commands and admission
    router_s         from a request's arrival until the router has chosen its nodes
    """

    launches_ahead: bool = False
    leaves_open: bool = False
    answer_s: float = 0.0
    prompts_s: float = 0.0
    request_s: float = 0.0
    router_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.launches_ahead and (self.answer_s or self.prompts_s or self.request_s or self.leaves_open):
            raise ValueError("launches_ahead is False, but a turn costs time or leaves a step open: set it")

    def turn_s(self, num_answers: int, num_requests: int, *, has_prompts: bool) -> float:
        """A turn's time until its step is launched."""
        return self.answer_s * num_answers + self.request_s * num_requests + self.prompts_s * has_prompts


NO_HOST = HostCosts()
MEASURED_HOST = HostCosts(True, True, answer_s=45e-6, prompts_s=3.7e-3, request_s=5e-3, router_s=25e-3)
"""Granite-h-micro on H200s and H100s, docs/benchmarks/gpu-clusters.md. A step of 48 answers alone takes its host
2.2 ms, which no constant part of that was told from. With 54 answers and prompts it takes 6.1 beside commands and
admissions, and these 2.0 in each turn with 0.4 requests. The router chose after 25 ms."""
