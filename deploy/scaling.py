"""Nodes to add and to drain when a running cluster gets other numbers of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from deploy.config import ClusterConfig, NodeGroup
from deploy.errors import DeployError

GROUPS = ("prefill", "decode", "both")
Target = tuple[NodeGroup, int]
"""A group, and the number of one of its nodes: the node's name is the group's prefix with it."""


@dataclass(frozen=True)
class Scaling:
    """The difference between the nodes there are and those that are wanted.

    config   with the new numbers
    added    nodes to start
    removed  names of the nodes to drain, the newest first
    """

    config: ClusterConfig
    added: tuple[Target, ...]
    removed: tuple[str, ...]


def scaling(config: ClusterConfig, running: Collection[str], wanted: Mapping[str, int]) -> Scaling:
    """Compares the names of running nodes with the numbers wanted by group; groups that it lacks stay as they are.

    New nodes take the lowest numbers that are free. Raises ConfigError if the new numbers make no cluster, DeployError
    for an unknown group.
    """
    added: list[Target] = []
    removed: list[str] = []
    groups = {name: getattr(config, name) for name in GROUPS}
    for name, count in wanted.items():
        if name not in GROUPS:
            raise DeployError(f"no group {name!r}: there are {', '.join(GROUPS)}")
        group: NodeGroup = getattr(config, name)
        groups[name] = replace(group, count=count)
        prefix = group.node.name
        there = sorted(int(node.removeprefix(prefix)) for node in running if is_of(node, prefix))
        free = (number for number in range(count + len(there)) if number not in there)
        added += [(group, next(free)) for _ in range(count - len(there))]
        removed += [f"{prefix}{number}" for number in reversed(there[count:])]
    scaled = replace(config, prefill=groups["prefill"], decode=groups["decode"], both=groups["both"])
    return Scaling(scaled, tuple(added), tuple(removed))


def is_of(node: str, prefix: str) -> bool:
    return node.startswith(prefix) and node.removeprefix(prefix).isdecimal()
