"""Metrics of a real cluster: well formed, explained, and all that the dashboard and the alerts ask for."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.speculation.config import SpeculationConfig
from router.node_counters import TEXTS
from tests.support.cluster.cluster import SMALL, Cluster
from tests.support.patience import PATIENCE_S

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
CHAT = {
    "messages": [{"role": "user", "content": "What is the code of June? " * 20}],
    "max_tokens": 8,
    "ignore_eos": True,
}
NAME = re.compile(r"\b((?:headrace|process)_\w+)")


@pytest.fixture(scope="module")
def exposition(tiny_checkpoint, tmp_path_factory) -> str:
    drafting = replace(SMALL, speculation=SpeculationConfig(drafter="ngram"))  # its counters exist with a drafter alone
    with Cluster(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("metrics"), engine=drafting) as cluster:
        httpx.post(f"{cluster.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S).raise_for_status()
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            text = httpx.get(f"{cluster.url}/metrics", timeout=PATIENCE_S).text
            if 'headrace_node_transfer_sessions_total{direction="sent",node="p0",role="prefill"} 1.0' in text:
                return text
            assert time.monotonic() < deadline_s, text
            time.sleep(0.05)


def test_every_metric_parses_and_says_what_it_counts(exposition: str):
    families = list(text_string_to_metric_families(exposition))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert len(family.documentation) > 10 and family.documentation != "A counter of the node", family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        if family.name.startswith("headrace_"):
            assert not family.name.endswith(("_ms", "_us", "_kb", "_mb", "_percent")), family.name


def test_every_text_is_of_a_counter_that_nodes_have(exposition: str):
    counters = {
        family.name.removeprefix("headrace_node_")
        for family in text_string_to_metric_families(exposition)
        if family.name.startswith("headrace_node_") and family.type == "counter"
    }
    assert counters == TEXTS.keys()


def test_every_query_of_the_dashboard_names_a_metric_that_exists(exposition: str):
    samples = {sample.name for family in text_string_to_metric_families(exposition) for sample in family.samples}
    samples |= {family.name + suffix for family in text_string_to_metric_families(exposition)
                for suffix in (("_total",) if family.type == "counter" else ("",))}  # fmt: skip
    dashboard = json.loads((GRAFANA / "headrace.json").read_text())
    rules = [
        rule for group in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    queries += [rule["expr"] for rule in rules]
    labels = {sample.name: sample.labels.keys() for family in text_string_to_metric_families(exposition)
              for sample in family.samples}  # fmt: skip
    for rule in rules:
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) - {"instance"}
        assert all(told <= labels[name] for name in NAME.findall(rule["expr"]) if name in labels), rule
    assert len(queries) > 40
    for query in queries:
        names = NAME.findall(query)
        assert names and set(names) <= samples, query


def test_a_requests_stages_add_up_to_its_whole_time(exposition: str):
    sums = {
        (sample.name, sample.labels.get("stage")): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name.endswith("_seconds_sum") and "model" in sample.labels
    }
    stages = [value for (name, _), value in sums.items() if name == "headrace_request_stage_seconds_sum"]
    assert len(stages) >= 3 and sum(stages) == pytest.approx(sums["headrace_request_seconds_sum", None])
