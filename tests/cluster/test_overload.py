"""More prompts at once than a prefill node computes within the time that a transfer may stand still."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.cluster.cluster import Cluster, with_engine
from tests.support.cluster.nodes import status_of
from tests.support.patience import PATIENCE_S

NUM_PROMPTS, PROMPT_TOKENS = 10, 1500
TIMEOUT_S = 2.0


def test_every_prompt_of_a_long_line_is_answered_and_computed_once(tiny_checkpoint, tmp_path) -> None:
    dice = random.Random(0)
    prompts = [[dice.randrange(5, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    engine = with_engine(cache_bytes=256 << 20, max_step_tokens=128)
    changes = {"engine": engine, "decode": {"reservation_timeout_s": TIMEOUT_S}}
    with Cluster(tiny_checkpoint("qwen35"), tmp_path, **changes) as cluster:

        def ask(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code

        began_s = time.monotonic()
        with ThreadPoolExecutor(NUM_PROMPTS) as clients:
            statuses = list(clients.map(ask, prompts))
        assert statuses == [200] * NUM_PROMPTS
        assert time.monotonic() - began_s > 1.5 * TIMEOUT_S, "the line was too short to show anything"
        status = asyncio.run(status_of(cluster.processes["p0"].ready["address"]))
        assert status.counters["computed_tokens"] == NUM_PROMPTS * PROMPT_TOKENS
        assert status.waiting_tokens == 0 and status.prefill_tokens_per_s > 0
