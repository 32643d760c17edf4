"""Arrangements of devices: which clusters they hold, and the settings of their nodes and routers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from benchmarks.cluster.processes import NodeSettings
from headrace.speculation.config import MTP
from headrace.wire.node_messages import Role

POLICY = "predicted"


@dataclass(frozen=True)
class Kind:
    """An arrangement of devices.

    roles       of nodes, which repeat until each device has one
    is_divided  all nodes are one cluster; else each set of `roles` is one
    """

    roles: Sequence[str]
    is_divided: bool
    is_elastic: bool

    def clusters(self, num_devices: int) -> list[Sequence[str]]:
        """The roles in each cluster. Raises BadParameter where the devices do not come out even."""
        parts, left = divmod(num_devices, len(self.roles))
        if left or not parts:
            raise typer.BadParameter(
                f"{num_devices} nodes, one on each device, for sets of {len(self.roles)}: give a multiple of that"
            )
        return [[*self.roles] * parts] if self.is_divided else [self.roles] * parts


KINDS = {
    "undivided": Kind(("both",), is_divided=False, is_elastic=False),
    "fixed": Kind(("prefill", "decode"), is_divided=True, is_elastic=False),
    "elastic": Kind(("prefill", "decode"), is_divided=True, is_elastic=True),
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
    """Each cluster's nodes, one on each device."""
    left = iter(devices)
    return [
        {
            f"{role[0]}{number}": (role, node_settings(next(left), caches, chunks.of(role), contender.num_drafts))
            for number, role in enumerate(roles)
        }
        for roles in KINDS[contender.kind].clusters(len(devices))
    ]


def router_settings(kind: Kind) -> dict[str, Any]:
    roles = "elastic" if kind.is_elastic else "fixed"
    return {"max_concurrent": 512, "max_queue": 512, "heartbeat_s": 0.5, "policy": POLICY, "roles": roles}
