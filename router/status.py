"""The router's status: readiness, models, the cluster, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from headrace.wire.cache_updates import CACHE_CHANGES
from headrace.wire.node_messages import LinkStatus, Role
from router.cluster.cluster_index import ClusterIndex
from router.cluster.nodes import NodeEntry, NodeTable
from router.errors import ApiError, no_node
from router.metrics import RouterMetrics
from router.requests.admission import Admission
from router.requests.table import RequestTable
from router.routing.decisions import KEPT_REQUESTS, DecisionLog


class ClusterStatus:
    """Reads status from the router's tables at each call."""

    def __init__(
        self,
        router: str,
        model: str,
        nodes: NodeTable,
        table: RequestTable,
        admission: Admission,
        metrics: RouterMetrics,
        index: ClusterIndex,
        decisions: DecisionLog,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._model = model
        self._nodes = nodes
        self._table = table
        self._admission = admission
        self._metrics = metrics
        self._index = index
        self._decisions = decisions
        self._clock = clock
        self._created = int(time.time())

    def model(self, name: str | None = None) -> dict[str, Any]:
        """The entry of /v1/models; raises ApiError (404) for another model's name."""
        if name not in (None, self._model):
            message = f"model {name!r} is not served here; use {self._model!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        limit = self._nodes.max_model_tokens
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "headrace",
            "max_model_len": limit,
        }

    def check_ready(self) -> None:
        """Raises ApiError (503) until a node that generates answers is registered."""
        if not self._nodes.is_ready:
            raise no_node(Role.DECODE, self._nodes.awaited(Role.DECODE), self._clock())

    def metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._metrics.exposition()

    def explain(self, request_id: str) -> dict[str, Any]:
        """Routing decisions about a request, for each of its choices; raises ApiError (404) for an unknown one."""
        found = self._decisions.of(request_id)
        if not found:
            message = (
                f"no routing decision about request {request_id!r} is known: give its answer's id or x-request-id; a "
                f"router keeps its last {KEPT_REQUESTS} requests, and knows none of another router's"
            )
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="request_not_found")
        requests = [{"id": name, "decisions": [each.json() for each in decisions]} for name, decisions in found.items()]
        return {"requests": requests}

    def cluster(self) -> dict[str, Any]:
        """Nodes, links, requests and hits, for /cluster and the page."""
        now_s = self._clock()
        return {
            "router": self._router,
            "model": self._model,
            "ready": self._nodes.is_ready,
            "nodes": [_node(node) | {"index": _index(node, self._index)} for node in self._nodes.all()],
            "links": [_link(node, link) for node in self._nodes.all() for link in node.status.links],
            "phases": {phase.value: count for phase, count in self._table.counts().items()},
            "waiting": self._admission.waiting,
            "requests": list(self._table.rows(now_s)),
            "hits": [hit for node in self._nodes.all() for hit in _hits(node)],
        }


def _node(node: NodeEntry) -> dict[str, Any]:
    info, status = node.info, node.status
    return {
        "name": info.name,
        "role": node.role.value,
        "incarnation": str(info.incarnation),  # exceeds JavaScript's exact integers
        "address": info.address,
        "transfer_address": info.transfer_address,
        "pid": info.pid,
        "max_model_tokens": info.max_model_tokens,
        "state": _state(node),
        "running": status.running,
        "waiting": status.waiting,
        "calls": dict(status.calls),
        "orphans": len(status.orphans),
        "load": {
            "num_decoding": status.num_decoding,
            "context_tokens": status.context_tokens,
            "waiting_tokens": status.waiting_tokens,
            "waiting_lengths": list(status.waiting_lengths),
        },
        "costs": asdict(status.costs),
        "blocks": asdict(status.blocks),
        "slots": asdict(status.slots),
        "counters": dict(status.counters),
    }


def _state(node: NodeEntry) -> str:
    if node.draining:
        return "draining"
    return "stalled" if node.stalled else "suspect" if node.suspect else "live"


def _hits(node: NodeEntry) -> Iterator[dict[str, Any]]:
    """Hits of each cache group as the node has counted them; a decode node need not look its state group up."""
    counters = node.status.counters
    for group in ("attention", "state"):
        if counters.get(f"{group}/lookups"):
            yield {
                "node": node.info.name,
                "role": node.role.value,
                "group": group,
                "hit_tokens": int(counters[f"{group}/hit_tokens"]),
                "looked_up_tokens": int(counters[f"{group}/looked_up_tokens"]),
            }


def _link(node: NodeEntry, link: LinkStatus) -> dict[str, Any]:
    """A node's measurement of its link to a peer; figures are null before it, and if it failed."""
    measured = asdict(link)
    return {"from": node.info.name, "to": measured.pop("peer"), **measured}


def _index(node: NodeEntry, index: ClusterIndex) -> dict[str, Any] | None:
    """The router's copy of a node's cache index. `lag` is in changes, as of the node's last heartbeat."""
    known = index.get(node.id)
    if known is None:
        return None
    num_changes = int(node.status.counters.get(CACHE_CHANGES, 0))
    return {
        "blocks": known.num_blocks,
        "checkpoints": known.num_checkpoints,
        "sequence": known.sequence,
        "is_followed": known.is_followed,
        "lag": max(0, num_changes - (known.sequence or 0)),
    }
