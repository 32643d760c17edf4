"""A cluster on hosts whose nodes say that they run on other devices than they do."""

from dataclasses import dataclass, field, replace
from typing import Any

from decode_node.config import DecodeNodeConfig
from decode_node.service import decode_node
from headrace.wire.messages import NodeInfo
from node_runtime.server import NodeServer
from prefill_node.config import PrefillNodeConfig
from prefill_node.service import prefill_node
from tests.support.cluster.cluster import Cluster


@dataclass(frozen=True)
class NodeThatSays:
    config: PrefillNodeConfig | DecodeNodeConfig
    device: str


def node_that_says(told: NodeThatSays) -> NodeServer:
    config = told.config
    node = prefill_node(config) if isinstance(config, PrefillNodeConfig) else decode_node(config)
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
