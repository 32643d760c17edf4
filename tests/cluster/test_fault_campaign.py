"""Every kind of fault a few times under load; `make campaigns` does each fifty times, with both shipped models.

With `--fault-drafter ngram`, `suffix` or `mtp` all nodes draft, but for those that Ray starts.
"""

from pathlib import Path

import pytest

from headrace.speculation.config import MTP, SpeculationConfig
from tests.support.cluster.fault_campaign import SCENARIOS, SESSION_FAULTS, UNDER_RAY, run
from tests.support.cluster.fault_cluster import FaultCluster
from tests.support.cluster.fault_rounds import CUT_S, DEADLINE_S
from tests.support.cluster.fault_row import Row, table
from tests.support.cluster.netns import NamespacesUnavailable
from tests.support.cluster.recall_load import percentile

MODELS = Path(__file__).parents[2] / "tiny_models"

pytestmark = pytest.mark.slow


def failures(row: Row) -> int:
    return sum(row.sessions_failed.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both models only in a long campaign: one of them meets every fault in a short one. Granite has no MTP layer."""
    has_both = metafunc.config.getoption("--fault-rounds") > 3 and metafunc.config.getoption("--fault-drafter") != MTP
    metafunc.parametrize("model", ["headrace-tiny-qwen3.5", "headrace-tiny-granite-h"][: 1 + has_both])


@pytest.mark.parametrize("name", SCENARIOS)
async def test_no_answer_is_wrong_and_everything_comes_back(
    name: str, model: str, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, drafter = pytestconfig.getoption("--fault-rounds"), pytestconfig.getoption("--fault-drafter")
    monkeypatch.setattr(FaultCluster, "speculation", SpeculationConfig(drafter, "fixed"))
    try:
        row = await run(name, MODELS / model, tmp_path, rounds=rounds)  # asserts that everything comes back
    except NamespacesUnavailable as why:
        pytest.skip(str(why))
    print("\n" + table([row]))
    assert row.wrong == []
    assert row.right > 0
    assert row.rounds >= rounds
    assert row.given_up == 0
    assert row.errors == {} or name == "router killed"
    assert row.quarantined_too_soon == []
    if drafter != "none" and name not in UNDER_RAY:
        assert 0 < row.accepted <= row.drafted
    if name in SESSION_FAULTS:
        assert failures(row) > 0  # the faults met sessions
    match name:
        case "prefill node killed" | "decode node killed":
            assert percentile(row.known_s, 0.95) < 2
        case "prefill node stopped" | "decode node stopped":
            assert percentile(row.known_s, 0.5) < DEADLINE_S + 1
        case "link cut and restored":
            assert row.slowest_known_s < CUT_S[1] - 1  # nobody waits until the network is back
        case "decode nodes killed all the time":
            # One for each round at least: of eight answers in three rounds up to four begin behind the last kill.
            assert row.migrated >= row.rounds
        case "message late":
            assert row.dropped >= rounds
