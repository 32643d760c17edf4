"""What may happen to a cluster, again and again, under load; and what came of it.

    row = await run("prefill node killed", model, folder, rounds=50)

Every answer is compared with the undisturbed cluster's: it is the same, or an error, or wrong. Afterwards everything
that requests held must be back on all nodes.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node_runtime.config import MIN_WATCHDOG_S
from tests.support.cluster import fault_ray
from tests.support.cluster.cluster import with_engine
from tests.support.cluster.fault_ray import of_headrace_up, on_raylets
from tests.support.cluster.fault_restarts import (
    engine_stalled,
    killed_again_and_again,
    router_killed,
    stopped_in_turn,
    with_settings,
)
from tests.support.cluster.fault_rounds import (
    LATE_S,
    damaged,
    killed,
    late,
    on_two_hosts,
    severed,
    stopped,
    with_faults,
)
from tests.support.cluster.fault_row import Row
from tests.support.cluster.recall_clients import ASK_TIMEOUT_S, Habits
from tests.support.cluster.recall_load import ANSWER_TOKENS, RecallLoad

WATCHED = {"watchdog_s": MIN_WATCHDOG_S}


@dataclass(frozen=True)
class Scenario:
    """is_patient   one fault after the other: no request need meet several
    min_rounds   so that each role has its turn, most answers have moved, or some session meets what is rare
    """

    cluster: Callable[[Path, Path], AbstractAsyncContextManager[Any]]
    round: Callable[[Any, random.Random, Row], Awaitable[None]]
    habits: Habits = field(default_factory=Habits)
    answer_tokens: int = ANSWER_TOKENS
    is_patient: bool = True
    min_rounds: int = 1


async def run(name: str, model: Path, folder: Path, *, rounds: int, seed: int = 0) -> Row:
    """Raises AssertionError when something that requests held did not come back. `wrong` is the caller's to judge."""
    began_s = time.monotonic()
    row, dice = Row(name), random.Random(f"{name} {seed}")
    scenario = SCENARIOS[name]
    rounds = max(rounds, scenario.min_rounds)
    async with scenario.cluster(model, folder) as cluster:
        load = await RecallLoad.against(cluster.url, model, seed, answer_tokens=scenario.answer_tokens)
        faults_began_s = time.monotonic()
        cluster.arm()
        async with load.running(scenario.habits):
            while row.rounds < rounds:
                assert row.missed < 3 * rounds + 10, f"{row.missed} faults met no session: {cluster.logs()}"
                await asyncio.sleep(dice.uniform(0.0, 0.3))
                await scenario.round(cluster, dice, row)
                if scenario.is_patient:
                    await load.answered(2 * scenario.habits.num_clients)
        row.judge(load)
        for entry in cluster.journal("failed", faults_began_s):
            row.sessions_failed[entry["cause"]] = row.sessions_failed.get(entry["cause"], 0) + 1
        await asyncio.to_thread(cluster.assert_all_is_back)
        row.drafted, row.accepted = await asyncio.to_thread(cluster.num_drafted)
        row.dropped = sum(entry["dropped"] for entry in cluster.last_held())
    row.seconds = time.monotonic() - began_s
    return row


SESSION_FAULTS = {
    "prefill node killed": Scenario(with_faults(), killed("p")),
    "decode node killed": Scenario(with_faults(), killed("d")),
    "prefill node stopped": Scenario(with_faults(), stopped("p")),
    "decode node stopped": Scenario(with_faults(), stopped("d")),
    "bit flipped": Scenario(with_faults(flip_share=0.02, apart_s=12.0), damaged, min_rounds=3),
    "link cut and restored": Scenario(on_two_hosts, severed),
    "message late": Scenario(with_faults(late_share=0.03, late_s=LATE_S, apart_s=5.0), late),
}
"""They aim at sessions: a round met one."""

RESTARTS = {
    "router killed": Scenario(with_settings(), router_killed, Habits(patience_s=ASK_TIMEOUT_S)),
    "nodes stopped in turn (SIGTERM)": Scenario(with_settings(), stopped_in_turn, min_rounds=2),
    "engine stalled": Scenario(with_settings(prefill=WATCHED, decode=WATCHED), engine_stalled, min_rounds=2),
    # Answers of 400 tokens move so often that ten rounds see 12 end, of 128 about 25. Eight clients are too many for a
    # busy machine: some answers lose three nodes before their next token, which is the router's `max_attempts`.
    "decode nodes killed all the time": Scenario(
        with_settings(engine=with_engine(max_step_tokens=48, max_running=8, cache_bytes=24 << 20)),
        killed_again_and_again,
        Habits(num_clients=4),
        answer_tokens=128,
        is_patient=False,
        min_rounds=3,
    ),
}

UNDER_RAY = {
    "nodes stopped in turn (under Ray)": Scenario(of_headrace_up, fault_ray.stopped_in_turn, min_rounds=2),
    "raylet killed": Scenario(on_raylets, fault_ray.raylet_killed),
}

SCENARIOS = SESSION_FAULTS | RESTARTS | UNDER_RAY
