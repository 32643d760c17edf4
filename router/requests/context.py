"""The parts of a running router that its requests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.wire.messages import Role
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeTable
from router.cluster.policy import Policy
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.requests.table import RequestTable


@dataclass(frozen=True)
class RouterContext:
    """Made once, by `RouterServer`; each request's driver gets it.

    policies   one object a role, since each keeps its own turn
    clock      yields seconds
    """

    config: RouterConfig
    nodes: NodeTable
    table: RequestTable
    policies: Mapping[Role, Policy]
    metrics: RouterMetrics
    index: ClusterIndex
    clock: Callable[[], float]
