"""The actors of a cluster as its config describes them: names, settings, resources, hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.config import ClusterConfig, NodeGroup, Placement
from deploy.ports import free_ports
from deploy.resources import Demand
from headrace.host_process import own_niceness
from node.actor import NodeActor
from node.config import NodeConfig
from router.actor import RouterActor

ROUTER_CPUS = 0.25
LOCALHOST = "127.0.0.1"
GPU_NODE_ENVIRONMENT = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # see `assigned_device`, node/actor.py
    "RAY_USE_UVLOOP": "0",  # asyncio's own loop can follow the engine's right of way, headrace/right_of_way.py
}
STRATEGIES = {"pack": "DEFAULT", "spread": "SPREAD"}


@dataclass(frozen=True)
class PlannedActor:
    """An actor before its start.

    arguments  of the class's constructor
    options    for Ray, beside name, restarts and resources
    """

    actor_class: type
    arguments: Sequence[Any]
    demand: Demand
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.demand.name

    def ray_options(self) -> dict[str, Any]:
        """All options for Ray: restarted for ever, under its name."""
        custom = dict(self.demand.resources)
        cpus, gpus = custom.pop("CPU", 0), custom.pop("GPU", 0)
        return {
            "name": self.name,
            "max_restarts": -1,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "resources": custom,
            **self.options,
        }


def planned_routers(config: ClusterConfig, host_id: str, host: str) -> list[PlannedActor]:
    """The routers, all on the host with Ray's id `host_id`: clients and nodes look for a restarted one there.

    For the same reason a router's ports are chosen here, once. `host`: the address at which nodes reach that host.
    """
    router = config.router if config.ray.address is None else replace(config.router, control_host=host)
    count = config.router.count
    names = ["router"] if count == 1 else [f"router{index}" for index in range(count)]
    wanted = ((router.host, router.port), (router.control_host, router.control_port))
    free = iter(free_ports(*(host for host, first in wanted if not first for _ in range(count))))  # all different
    ports, control_ports = ([first + i if first else next(free) for i in range(count)] for _, first in wanted)
    return [
        PlannedActor(
            RouterActor,
            (name, replace(router, port=port, control_port=control_port), own_niceness()),
            Demand(name, {"CPU": ROUTER_CPUS}, host_id),
            {"scheduling_strategy": NodeAffinitySchedulingStrategy(host_id, soft=False)},
        )
        for name, port, control_port in zip(names, ports, control_ports, strict=True)
    ]


def planned_nodes(config: ClusterConfig, router_addresses: Sequence[str]) -> list[PlannedActor]:
    """The nodes p0, p1, ..., d0, d1, ..., and n0, n1, ..., which register at `router_addresses`."""
    return [
        planned_node(config, group, index, router_addresses) for group in config.groups for index in range(group.count)
    ]


def planned_node(config: ClusterConfig, group: NodeGroup, index: int, router_addresses: Sequence[str]) -> PlannedActor:
    """One node of a group, which registers at `router_addresses`."""
    host = LOCALHOST if config.ray.address is None else None
    return PlannedActor(
        NodeActor,
        (_named(group, index, router_addresses), host, own_niceness()),
        Demand(f"{group.node.name}{index}", _resources(group.placement)),
        _node_options(group.placement),
    )


def _named(group: NodeGroup, index: int, router_addresses: Sequence[str]) -> NodeConfig:
    return replace(group.node, name=f"{group.node.name}{index}", router_addresses=tuple(router_addresses))


def _resources(placement: Placement) -> dict[str, float]:
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    return {name: amount for name, amount in wanted.items() if amount}


def _node_options(placement: Placement) -> dict[str, Any]:
    options: dict[str, Any] = {"scheduling_strategy": STRATEGIES[placement.strategy]}
    if placement.num_gpus:
        options["runtime_env"] = {"env_vars": GPU_NODE_ENVIRONMENT}
    return options
