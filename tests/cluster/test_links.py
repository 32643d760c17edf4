"""Nodes that find out about each other: links measured by themselves, settings that differ."""

import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.engine.oracle import random_prompt
from tests.support.patience import PATIENCE_S

Links = dict[tuple[str, str], dict[str, Any]]
Told = dict[tuple[str, str, str], float]
NEVER = FetchConfig(enabled=False)


def until_links(cluster: Cluster, holds: Callable[[Links], bool], timeout_s: float = PATIENCE_S) -> Links:
    deadline_s = time.monotonic() + timeout_s
    while True:
        told = httpx.get(f"{cluster.url}/cluster", timeout=PATIENCE_S, verify=False).json()["links"]
        links = {(link["from"], link["to"]): link for link in told}
        if holds(links):
            return links
        assert time.monotonic() < deadline_s, f"{links}\n{cluster.logs()}"
        time.sleep(0.05)


def are_measured(links: Links) -> bool:
    return bool(links) and all(link["bytes_per_s"] is not None for link in links.values())


def test_every_pair_is_measured_and_again_when_one_came_back(tiny_checkpoint, tmp_path: Path) -> None:
    with Cluster(tiny_checkpoint("granite"), tmp_path, num_decode=2) as cluster:
        links = until_links(cluster, lambda links: len(links) == 6 and are_measured(links))
        assert set(links) == set(permutations(("p0", "d0", "d1"), 2))
        for link in links.values():
            assert any(lane.startswith("tcp/") for lane in link["lanes"])
            assert 0 < link["round_trip_s"] < 1
            assert (link["warning"], link["error"]) == (None, None)
        cluster.processes["d0"].kill()
        lost = until_links(cluster, lambda links: (links.get(("p0", "d0")) or {}).get("error") is not None)
        assert lost["p0", "d1"]["error"] is None
        until_links(cluster, lambda links: ("p0", "d0") not in links)  # it missed its heartbeats
        cluster.processes["d0"].wait()
        cluster.start_node("d0")
        until_links(cluster, lambda links: len(links) == 6 and are_measured(links))


def test_a_node_whose_max_message_bytes_differs_is_refused_with_both_values(tiny_checkpoint, tmp_path: Path) -> None:
    with Cluster(tiny_checkpoint("granite"), tmp_path, decode={"max_message_bytes": 4 << 20}) as cluster:
        cluster.decode = {"max_message_bytes": 8 << 20}
        refused = cluster.start_node("d1")
        refusal = "node d1: max_message_bytes 8388608 != 4194304 of p0; start all nodes with one max_message_bytes"
        deadline_s = time.monotonic() + PATIENCE_S
        for process in (cluster.processes["router"], refused):
            while refusal not in process.log.read_text():
                assert time.monotonic() < deadline_s, cluster.logs()
                time.sleep(0.05)
        assert set(cluster.nodes()) == {"p0", "d0"}


async def test_sessions_are_told_by_kind_in_metrics(tiny_checkpoint, tmp_path: Path) -> None:
    # Messages of 64 tokens and chunks of 256: only the last chunk's are left when the prompt is computed.
    small = {"max_message_bytes": 1 << 14}
    sizes: dict[str, Any] = {"decode": small, "prefill": small | {"fetch_from_others": NEVER}}
    with Cluster(tiny_checkpoint("granite"), tmp_path, **sizes) as cluster:
        answers = await ask_all(cluster.url, [random_prompt(length) for length in (700, 800, 900)], at_once=1)
        transfers = [answer.report["transfer"] for answer in answers]
        told = until_metrics(cluster, lambda told: told.get(("p0", "transfer_sessions", "sent")) == 3)
        assert told["p0", "transfer_bytes", "sent,attention"] == sum(t["attention_bytes"] for t in transfers)
        assert told["p0", "transfer_bytes", "sent,state"] == sum(t["state_bytes"] for t in transfers)
        seconds = told["p0", "transfer_seconds", "sent,attention"] + told["p0", "transfer_seconds", "sent,state"]
        assert 0 < told["p0", "transfer_hidden_seconds", ""] < seconds
        told = until_metrics(cluster, lambda told: told.get(("d0", "transfer_sessions", "received")) == 3)
        for kind in ("received,attention", "received,state"):
            assert told["d0", "transfer_seconds", kind] > 0
        moved = sum(transfer["attention_bytes"] + transfer["state_bytes"] for transfer in transfers)
        assert moved < told["p0", "transfer_sent_bytes", ""] < 1.1 * moved  # envelopes, but no probes of links
        assert {told["d0", "transfer_failures", cause] for cause in ("deadline", "peer_lost", "wrong_digest")} == {0}
        assert ("d0", "staging_waits", "") in told


def until_metrics(cluster: Cluster, holds: Callable[[Told], bool], timeout_s: float = PATIENCE_S) -> Told:
    """Nodes' counters as /metrics tells them: node, name, the values of the labels that remain."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        told: Told = {}
        metrics = httpx.get(f"{cluster.url}/metrics", timeout=PATIENCE_S, verify=False).text
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name.startswith("headrace_node_") and sample.name.endswith("_total"):
                    labels = dict(sorted(sample.labels.items()))
                    node, _ = labels.pop("node"), labels.pop("role")
                    name = sample.name.removeprefix("headrace_node_").removesuffix("_total")
                    told[node, name, ",".join(labels.values())] = sample.value
        if holds(told):
            return told
        assert time.monotonic() < deadline_s, f"{told}\n{cluster.logs()}"
        time.sleep(0.05)
