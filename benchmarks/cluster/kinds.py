"""Arrangements of two devices: which clusters they hold, and the settings of their nodes and routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster.processes import NodeSettings
from headrace.speculation.config import MTP
from headrace.wire.node_messages import Role

POLICY = "predicted"


@dataclass(frozen=True)
class Kind:
    """An arrangement of two devices: its clusters, the roles in each, and how they are simulated.

    roles   of each cluster's nodes, in the order of the devices that the cluster has
    """

    roles: Sequence[Sequence[str]]
    is_elastic: bool
    simulated: Mapping[str, int]


KINDS = {
    "undivided": Kind((("both",), ("both",)), False, {"both": 1}),
    "fixed 1P1D": Kind((("prefill", "decode"),), False, {"prefill": 1, "decode": 1}),
    "elastic": Kind((("prefill", "decode"),), True, {"prefill": 1, "decode": 1}),
}


@dataclass(frozen=True)
class Contender:
    """An arrangement whose nodes make up to so many drafts."""

    kind: str
    num_drafts: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.num_drafts} drafts pinned" if self.num_drafts else self.kind


@dataclass(frozen=True)
class Caches:
    """engine.cache_bytes of each node, and engine.state_share; a quarter of the states' slots is for drafts at most."""

    gib: float
    state_share: float | None


def node_settings(device: str, caches: Caches, chunk_tokens: int, num_drafts: int) -> dict[str, Any]:
    engine: dict[str, Any] = {"device": device, "cache_bytes": int(caches.gib * 2**30), "max_running": 128}
    if caches.state_share is not None:
        engine["state_share"] = caches.state_share
    if num_drafts:
        engine["speculation"] = {"drafter": MTP, "max_drafts": num_drafts, "count": "auto"}
    if device == "cpu":
        return {"engine": {**engine, "threads": 1, "max_step_tokens": chunk_tokens}}
    engine |= {"load_format": "dummy", "state_dtype": "bfloat16", "max_model_tokens": 102_400}
    return {"engine": engine | {"max_step_tokens": chunk_tokens}, "staging_buffers": 8, "max_message_bytes": 64 << 20}


@dataclass(frozen=True)
class Chunks:
    """engine.max_step_tokens of nodes of the role prefill, and of all others."""

    prefill: int
    others: int

    def of(self, role: str) -> int:
        return self.prefill if role == Role.PREFILL.value else self.others


def clusters_of(contender: Contender, devices: Sequence[str], caches: Caches, chunks: Chunks) -> list[NodeSettings]:
    """Each cluster's nodes; the devices go around."""
    left = iter(devices)
    return [
        {
            f"{role[0]}{number}": (role, node_settings(next(left), caches, chunks.of(role), contender.num_drafts))
            for number, role in enumerate(roles)
        }
        for roles in KINDS[contender.kind].roles
    ]


def router_settings(kind: Kind) -> dict[str, Any]:
    roles = "elastic" if kind.is_elastic else "fixed"
    return {"max_concurrent": 512, "max_queue": 512, "heartbeat_s": 0.5, "policy": POLICY, "roles": roles}
