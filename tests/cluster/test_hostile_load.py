"""Ordinary chats beside clients that are slow, rude or greedy: for seconds; `make campaigns` makes it ten minutes."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster.hostile_clients import KINDS
from tests.support.cluster.hostile_load import HostileLoad, run

MODEL = Path(__file__).parents[2] / "tiny_models" / "headrace-tiny-qwen3.5"
SHORT = {
    "num_chats": 6,
    "think_s": 2.0,
    "max_concurrent": 8,
    "long_prompt": 4000,
    "num_filling": 0,
    "crowd": dict.fromkeys(KINDS, 1),
}
CAMPAIGN_S = 120.0
"""From so many seconds on it is the campaign: 50 chats, whose delays are judged, and what stays in the processes."""
MAX_RATIO = 1.5
MAX_GROWTH_MIB = 64
"""Of a process: what freed prompts and answers of some MiB each leave in the allocators' arenas. A leak of 1 KiB an
attempt would be several times as much in ten minutes."""

pytestmark = pytest.mark.slow


@pytest.mark.timeout(3600)
async def test_hostile_clients_cost_no_ordinary_answer_and_leave_nothing(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seconds = pytestconfig.getoption("--hostile-seconds")
    is_campaign = seconds >= CAMPAIGN_S
    load = HostileLoad(seconds) if is_campaign else HostileLoad(seconds, **SHORT)
    report = await run(MODEL, tmp_path, load, say=partial(print, flush=True))
    print("\n" + report.table())
    for phase in report.phases:
        assert phase.wrong == []
        assert phase.num_given_up == 0
        assert phase.held == {}
    if is_campaign:
        assert max(report.ratio("first_token_s"), report.ratio("gap_s")) <= MAX_RATIO
        quiet, *_, after = report.phases
        for name, before in quiet.usages.items():
            assert after.usages[name].rss_kib - before.rss_kib < MAX_GROWTH_MIB << 10
            assert after.usages[name].open_files <= before.open_files + 2  # connections that clients keep
