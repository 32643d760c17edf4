"""Links and sessions of nodes in /cluster and /metrics."""

from dataclasses import asdict, replace

import pytest

from headrace.step_costs import StepCosts
from headrace.wire.node_messages import LinkStatus, NodeStatus, Role
from tests.support.router.fake_nodes import fake_cluster, node_info, node_status
from tests.unit.router.conftest import Running, StartRouter

GOOD = LinkStatus("d0", ("cuda_ipc/cuda", "tcp/eth0"), 110e-6, 230e9)
SLOW = LinkStatus("d1", ("tcp/eth0",), 300e-6, 1.5e9, warning="transfers between two GPUs go over tcp/eth0")
GONE = LinkStatus("d2", error="no connection to '10.0.0.7:9'")
NEW = LinkStatus("d3")


@pytest.fixture
async def running(start_router: StartRouter) -> Running:
    """A router with a node that reports four links, and failures by cause."""
    running = await start_router(fake_cluster([1]), register=False)
    plain = node_status()
    counters = {"group=state,direction=sent/transfer_bytes": 7.0, "cause=deadline/transfer_failures": 2.0}
    status = NodeStatus(0, 0, plain.blocks, plain.slots, {**counters, "state/hit_tokens": 5.0}, (GOOD, SLOW, GONE, NEW))
    running.server.nodes.register(node_info("p0", Role.PREFILL), status)
    return running


async def test_cluster_shows_every_link_with_its_warning_or_error(running: Running) -> None:
    links = (await running.http.get("/cluster")).json()["links"]
    assert [(link["from"], link["to"]) for link in links] == [("p0", "d0"), ("p0", "d1"), ("p0", "d2"), ("p0", "d3")]
    assert (links[0]["lanes"], links[0]["bytes_per_s"]) == (["cuda_ipc/cuda", "tcp/eth0"], 230e9)
    assert [link["warning"] for link in links] == [None, SLOW.warning, None, None]
    assert [link["error"] for link in links] == [None, None, GONE.error, None]
    assert [link["round_trip_s"] for link in links] == [110e-6, 300e-6, None, None]


async def test_metrics_show_links_and_counters_with_labels(running: Running) -> None:
    lines = (await running.http.get("/metrics")).text.splitlines()
    for line in (
        'headrace_link_bytes_per_second{node="p0",peer="d0",role="prefill"} 2.3e+11',
        'headrace_link_round_trip_seconds{node="p0",peer="d1",role="prefill"} 0.0003',
        'headrace_link_healthy{node="p0",peer="d0",role="prefill"} 1.0',
        'headrace_link_healthy{node="p0",peer="d1",role="prefill"} 0.0',
        'headrace_link_healthy{node="p0",peer="d2",role="prefill"} 0.0',
        'headrace_node_transfer_bytes_total{direction="sent",group="state",node="p0",role="prefill"} 7.0',
        'headrace_node_transfer_failures_total{cause="deadline",node="p0",role="prefill"} 2.0',
        'headrace_node_hit_tokens_total{group="state",node="p0",role="prefill"} 5.0',
    ):
        assert line in lines
    assert not [line for line in lines if "link_bytes_per_second" in line and 'peer="d2"' in line]


async def test_hits_are_those_that_the_nodes_count(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1]), register=False)
    attention = {"attention/lookups": 2.0, "attention/hit_tokens": 64.0, "attention/looked_up_tokens": 100.0}
    state = {"state/lookups": 1.0, "state/hit_tokens": 48.0, "state/looked_up_tokens": 50.0}
    for name, role, counters in (
        ("d0", Role.DECODE, attention | dict.fromkeys(state, 0.0)),
        ("p0", Role.PREFILL, attention | state),
    ):
        running.server.nodes.register(node_info(name, role), replace(node_status(), counters=counters))
    hits = (await running.http.get("/cluster")).json()["hits"]
    assert [tuple(row.values()) for row in hits] == [
        ("d0", "decode", "attention", 64, 100),  # its states arrive: no lookup of the state group
        ("p0", "prefill", "attention", 64, 100),
        ("p0", "prefill", "state", 48, 50),
    ]


async def test_load_and_step_costs_are_shown(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1]), register=False)
    costs = StepCosts(step_s=0.002, token_s=1e-5)
    load = {"num_decoding": 3, "context_tokens": 700, "waiting_tokens": 40, "waiting_lengths": (0, 0, 0, 8, 0, 32)}
    status = replace(node_status(), costs=costs, waiting_depths=900, **load)
    running.server.nodes.register(node_info("d0", Role.DECODE), status)
    node = (await running.http.get("/cluster")).json()["nodes"][0]
    assert node["load"] == load | {"waiting_lengths": [0, 0, 0, 8, 0, 32]}
    assert node["costs"] == asdict(costs)
    lines = (await running.http.get("/metrics")).text.splitlines()
    for line in (
        'headrace_node_decoding{node="d0",role="decode"} 3.0',
        'headrace_node_context_tokens{node="d0",role="decode"} 700.0',
        'headrace_node_waiting_tokens{node="d0",role="decode"} 40.0',
        'headrace_node_step_cost_seconds{node="d0",part="step",role="decode"} 0.002',
        'headrace_node_step_cost_seconds{node="d0",part="token",role="decode"} 1e-05',
    ):
        assert line in lines


async def test_the_calls_of_each_router_are_shown(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1]), register=False, name="here")
    status = replace(node_status(), calls={"here": 3, "there": 4})
    running.server.nodes.register(node_info("p0", Role.PREFILL), status)
    cluster = (await running.http.get("/cluster")).json()
    assert cluster["router"] == "here"
    assert cluster["nodes"][0]["calls"] == {"here": 3, "there": 4}
    lines = (await running.http.get("/metrics")).text.splitlines()
    assert 'headrace_node_calls{node="p0",role="prefill",router="there"} 4.0' in lines


async def test_metrics_show_the_hidden_share_of_sent_transfers(start_router: StartRouter) -> None:
    """The share of totals since the node's start; a node that has sent nothing has none."""
    running = await start_router(fake_cluster([1], prefill=3), register=False)
    sent = {"direction=sent,group=attention/transfer_seconds": 3.0, "direction=sent,group=state/transfer_seconds": 1.0}
    received = {"direction=received,group=attention/transfer_seconds": 9.0}
    counters: dict[str, dict[str, float]] = {
        "p0": sent | received | {"transfer_hidden_seconds": 2.5},
        "p1": sent,
        "p2": received | dict.fromkeys(sent, 0.0) | {"transfer_hidden_seconds": 0.0},
    }
    for name, counted in counters.items():
        status = replace(node_status(), counters=counted)
        running.server.nodes.register(node_info(name, Role.PREFILL), status)
    lines = (await running.http.get("/metrics")).text.splitlines()
    assert [line for line in lines if line.startswith("headrace_node_transfer_overlap_ratio{")] == [
        'headrace_node_transfer_overlap_ratio{node="p0",role="prefill"} 0.625',
        'headrace_node_transfer_overlap_ratio{node="p1",role="prefill"} 0.0',
    ]


async def test_metrics_show_a_nodes_role_now_and_keep_the_labels_of_its_counters(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1], decode=2))
    await running.http.post("/cluster/nodes/d0/role", json={"role": "both"})
    lines = (await running.http.get("/metrics")).text.splitlines()
    assert 'headrace_node_role{node="d0",role="both"} 1.0' in lines
    assert 'headrace_node_steps_total{node="d0",role="decode"} 3.0' in lines
