"""A cluster on hosts whose nodes say that they run on other devices than they do."""

from dataclasses import dataclass, field, replace
from typing import Any

from headrace.wire.node_messages import NodeInfo
from node.config import NodeConfig
from node.server import node_server
from node_runtime.server import NodeServer
from tests.support.cluster.cluster import Cluster


@dataclass(frozen=True)
class NodeThatSays:
    config: NodeConfig
    device: str


def node_that_says(told: NodeThatSays) -> NodeServer:
    config = told.config
    node = node_server(config)
    describe = node._describe

    def describe_otherwise(address: str, *, start_s: float) -> NodeInfo:
        return replace(describe(address, start_s=start_s), device=told.device)

    vars(node)["_describe"] = describe_otherwise
    return node


@dataclass
class DeviceCluster(Cluster):
    """devices: what nodes say, by name; those that are not named say the truth."""

    devices: dict[str, str] = field(default_factory=dict)

    def config_of(self, name: str) -> Any:
        config = super().config_of(name)
        return NodeThatSays(config, self.devices[name]) if name in self.devices else config
