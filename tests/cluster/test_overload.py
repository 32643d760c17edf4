"""More prompts at once than a prefill node computes within the time that a transfer may stand still."""

import asyncio
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from headrace.step_costs import StepCosts
from tests.support.cluster.cluster import Cluster, with_engine
from tests.support.cluster.nodes import status_of
from tests.support.patience import PATIENCE_S

PROMPT_TOKENS = 1500
TIMEOUT_S = 3.0


def test_every_prompt_of_a_long_line_is_answered_and_computed_once(tiny_checkpoint, tmp_path) -> None:
    dice = random.Random(0)
    engine = with_engine(cache_bytes=256 << 20, max_step_tokens=128)
    changes = {"engine": engine, "decode": {"reservation_timeout_s": TIMEOUT_S}}
    with Cluster(tiny_checkpoint("qwen35"), tmp_path, **changes) as cluster:

        def ask(_: int) -> float:
            body = {
                "prompt": [dice.randrange(5, 500) for _ in range(PROMPT_TOKENS)],
                "max_tokens": 2,
                "ignore_eos": True,
            }
            began_s = time.monotonic()
            httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()
            return time.monotonic() - began_s

        ask(0)
        num_prompts = math.ceil(2 * TIMEOUT_S / ask(0))  # a line of twice the timeout on this machine, fast or busy
        num_asked, slowest_s = 2, 0.0
        while slowest_s < TIMEOUT_S:  # else it was slower for the first ones, and the line too short to show anything
            with ThreadPoolExecutor(num_prompts) as clients:
                slowest_s = max(clients.map(ask, range(num_prompts)))
            num_asked += num_prompts
            num_prompts *= 2
        status = asyncio.run(status_of(cluster.processes["p0"].ready["address"]))
        assert status.counters["computed_tokens"] == num_asked * PROMPT_TOKENS
        assert status.waiting_tokens == 0
        reported = cluster.nodes()["p0"]["costs"]
        assert reported["token_s"] != StepCosts().token_s, "heartbeats bring what it has measured"
