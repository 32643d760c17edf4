"""The cluster benchmarks' processes and client: failed starts leave nothing running, times are those of tokens."""

import time
from pathlib import Path

import pytest

from benchmarks.cluster.client import Answer
from benchmarks.cluster.processes import ClusterFailed, Processes

MODEL = Path(__file__).parents[3] / "tiny_models" / "headrace-tiny-granite-h"


def test_tokens_of_one_event_share_its_wait() -> None:
    answer = Answer(9.0, (10.0, 11.0, 13.0, 13.0, 14.0), (1, 2, 3, 4, 5), {})
    assert answer.first_token_s == 1.0
    assert answer.gaps_s == [1.0, 1.0, 1.0, 1.0]


def test_a_node_that_does_not_start_is_named_and_nothing_is_left_running(tmp_path: Path) -> None:
    nodes = {"p0": ("prefill", {"engine": {"cache_bytes": 1}})}
    with pytest.raises(ClusterFailed, match=r"p0 did not start[\s\S]*raise cache_bytes"):  # noqa: SIM117
        with Processes(tmp_path, MODEL, nodes) as cluster:
            cluster.wait_ready(time.perf_counter() + 60)
    assert [child.popen.poll() is None for child in cluster._children] == [False, False]
