"""The live page of a real cluster at work, in a real browser."""

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.support.browser import in_browser, part, shown
from tests.support.cluster.asking import ASK_TIMEOUT_S, ask
from tests.support.cluster.cluster import Cluster
from tests.support.engine.oracle import random_prompt

PAGE_SECONDS = 60
"""Several heartbeats of the nodes: each second of the page's is a poll, which takes real time."""


@pytest.mark.slow
@in_browser
async def test_a_browser_draws_what_flows_hits_and_gaps(tiny_checkpoint, tmp_path: Path) -> None:
    with Cluster(tiny_checkpoint("qwen35"), tmp_path) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ASK_TIMEOUT_S) as client:

            async def chats(seeds: Iterable[int], num_tokens: int) -> None:
                for seed in seeds:
                    prompt = random_prompt(200, seed=seed)
                    answer = await ask(client, prompt, num_tokens)
                    await ask(client, [*prompt, *answer.tokens, 5], 8)

            lengths = (8, 2000, 3000)  # of the longer ones at least one is always being answered
            tasks = [asyncio.create_task(chats(count(i, 3), length)) for i, length in enumerate(lengths)]
            page, console = await shown(cluster.url, tmp_path / "profile", PAGE_SECONDS)
            assert [task for task in tasks if task.done()] == []
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
    assert console == ""
    assert re.search(r'<line class="link flows"', part(page, "map"))
    assert re.search(r"[1-9]\d* running", part(page, "map"))
    assert re.fullmatch(r"\d+ %", part(page, "hits-now"))
    assert re.fullmatch(r"\d+\.\d ms", part(page, "gaps-now"))
    for chart in ("tokens", "hit-share", "gaps"):
        assert re.search(r'points="\d', part(page, chart)), chart
