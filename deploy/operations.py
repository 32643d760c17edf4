"""Orders that a running cluster's supervisor obeys: other numbers of nodes, and nodes that are drained."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from deploy.cluster import RunningCluster
from deploy.config import ClusterConfig
from deploy.errors import DeployError, RayFailed, first_line
from deploy.scaling import GROUPS, scaling
from deploy.stop_request import StopRequest

log = logging.getLogger(__name__)


class Operations:
    """Changes the nodes of one running cluster, an order at a time."""

    def __init__(self, config: ClusterConfig, cluster: RunningCluster, stop: StopRequest) -> None:
        self._config = config
        self._cluster = cluster
        self._stop = stop

    def obey(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """Does what the order says; raises DeployError or ConfigError. See `scale` and `drain` in deploy/cli.py."""
        try:
            return self._obey(order)
        except RayError as error:
            raise RayFailed(f"Ray: {first_line(error)}") from error

    def _obey(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        match order:
            case {"order": "scale", "counts": dict() as counts, "timeout_s": int() | float() as timeout_s}:
                return self._scale({name: int(count) for name, count in counts.items()}, timeout_s)
            case {"order": "drain", "node": str() as node, "timeout_s": int() | float() as timeout_s}:
                return self._drain(node, timeout_s)
        raise DeployError(f"the supervisor does not know the order {order}: is it of another release?")

    def _scale(self, counts: Mapping[str, int], timeout_s: float) -> Mapping[str, Any]:
        plan = scaling(self._config, [member.name for member in self._cluster.nodes], counts)
        self._cluster.add_nodes(plan.config, plan.added, self._stop)
        self._config = plan.config
        drained = [self._drain(name, timeout_s) for name in plan.removed]
        added = [f"{group.node.name}{number}" for group, number in plan.added]
        return {"added": added, "drained": drained, "nodes": [member.name for member in self._cluster.nodes]}

    def _drain(self, name: str, timeout_s: float) -> Mapping[str, Any]:
        """Empties the node by every router, then ends its process, which Ray would start again by itself."""
        self._cluster.require_node(name)
        reports = [api.drain(name, timeout_s=timeout_s, keep=True) for api in self._cluster.apis]
        self._cluster.remove_node(name, self._config.ray.stop_timeout_s)
        log.info("%s is drained and has stopped: %s", name, reports)
        sums = {key: sum(report[key] for report in reports) for key in ("moved", "recomputed", "ended")}
        return {"node": name, **sums, "seconds": max(report["seconds"] for report in reports)}


def counts_of(prefill: int | None, decode: int | None, both: int | None) -> dict[str, int]:
    """The numbers that were given, by group. Raises DeployError when none was."""
    given = dict(zip(GROUPS, (prefill, decode, both), strict=True))
    counts = {name: count for name, count in given.items() if count is not None}
    if not counts:
        raise DeployError("give a number of nodes: --prefill, --decode or --both")
    return counts
