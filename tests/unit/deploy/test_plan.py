"""The actors that a cluster file describes."""

from pathlib import Path

from deploy.config import cluster_config
from deploy.plan import planned_nodes, planned_routers

ROOT = Path(__file__).parents[3]
HERE = "ab" * 28  # an id of a host, as Ray writes it
MODEL = str(ROOT / "tiny_models" / "headrace-tiny-qwen3.5")


def config(**data):
    return cluster_config({"model": MODEL, **data}, source="c.yaml", base=ROOT)


def test_each_router_has_its_own_name_and_ports_and_nodes_get_all_addresses():
    routers = planned_routers(config(router={"count": 2, "port": 8000}), HERE, "127.0.0.2")
    assert [planned.name for planned in routers] == ["router0", "router1"]
    configs = [planned.arguments[1] for planned in routers]
    assert [each.port for each in configs] == [8000, 8001]
    assert len({each.control_port for each in configs} - {0}) == 2  # free ones, chosen once
    assert {planned.demand.host_id for planned in routers} == {HERE}
    for node in planned_nodes(config(), ["a:1", "b:2"]):
        assert node.arguments[0].router_addresses == ("a:1", "b:2")


def test_one_router_is_called_router_and_nodes_of_other_hosts_reach_it():
    (router,) = planned_routers(config(ray={"address": "auto"}), HERE, "127.0.0.2")
    assert (router.name, router.arguments[1].control_host) == ("router", "127.0.0.2")


def test_a_placement_becomes_a_demand_and_options_of_ray():
    placement = {"num_cpus": 2, "num_gpus": 1, "resources": {"prefill_host": 0.5}, "strategy": "spread"}
    nodes = planned_nodes(config(prefill={"count": 2, "placement": placement}), ())
    assert [str(node.demand) for node in nodes] == [
        "p0 asks for 2 CPU, 1 GPU, 0.5 prefill_host",
        "p1 asks for 2 CPU, 1 GPU, 0.5 prefill_host",
        "d0 asks for 0.25 CPU",
    ]
    options = nodes[1].ray_options()
    assert (options["name"], options["num_cpus"], options["num_gpus"]) == ("p1", 2, 1)
    assert (options["resources"], options["scheduling_strategy"]) == ({"prefill_host": 0.5}, "SPREAD")
    assert options["max_restarts"] == -1
    environment = options["runtime_env"]["env_vars"]
    assert environment["RAY_USE_UVLOOP"] == "0", "the loop of a node with a GPU follows its engine's right of way"
    assert "runtime_env" not in nodes[2].ray_options(), "Ray starts workers anew for each"
