"""What a cluster's processes use, and what its requests hold."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.support.patience import PATIENCE_S

OVER = ("done", "failed")
"""Phases of requests that /cluster shows for information only."""


@dataclass(frozen=True)
class Usage:
    """One process's."""

    rss_kib: int
    open_files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        process = psutil.Process(pid)
        return cls(process.memory_info().rss >> 10, process.num_fds(), process.num_threads())


def processor_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor time so far, by the processes' names; that of the children that each has or had by NAME's children."""
    spent: dict[str, float] = {}
    for name, pid in pids.items():
        process = psutil.Process(pid)
        times = process.cpu_times()
        spent[name] = times.user + times.system
        children_s = times.children_user + times.children_system
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                children_s += times.user + times.system
        if children_s:
            spent[f"{name}'s children"] = children_s
    return spent


def usages(pids: Mapping[str, int]) -> dict[str, Usage]:
    """By the processes' names."""
    return {name: Usage.of(pid) for name, pid in pids.items()}


def held(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """What requests hold, in the router's table and on the nodes, by the answer of /cluster; empty if nothing is."""
    found: dict[str, Any] = {}
    if open_ones := [row["id"] for row in cluster["requests"] if row["phase"] not in OVER]:
        found["requests"] = open_ones
    if cluster["waiting"]:
        found["waiting"] = cluster["waiting"]
    for node in cluster["nodes"]:
        counts = (node["blocks"]["in_use"], node["slots"]["in_use"], node["running"], node["waiting"])
        if any(counts):
            found[node["name"]] = dict(zip(("blocks", "slots", "running", "waiting"), counts, strict=True))
    return found


def settled(url: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    """What is still held when nothing changes any more, or at the end of the time: empty is what should come."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        still = held(httpx.get(f"{url}/cluster", timeout=PATIENCE_S, verify=False).json())
        if not still or time.monotonic() > deadline_s:
            return still
        time.sleep(0.1)
