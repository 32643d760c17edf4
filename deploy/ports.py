"""Ports that are chosen now and listened on later, by another process."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST, LAST = 20_000, 29_999
"""Below what Linux gives by itself (32768 and up, if nobody changed that) and Kubernetes' node ports; above Ray's."""
TRIES = 100


def free_ports(*hosts: str) -> list[int]:
    """One port for each host, no two alike: free now, and such that the kernel gives them nobody who asks for any.

    One of the kernel's own would now and then be somebody's by the time it is listened on: until then a process must
    start, or start again, and meanwhile every connection and every server of the host takes such ports.
    """
    with contextlib.ExitStack() as held:
        return [held.enter_context(_bound(host)).getsockname()[1] for host in hosts]


def _bound(host: str) -> socket.socket:
    given_away = _given_away()
    own = [port for port in range(FIRST, LAST + 1) if port not in given_away]
    for port in random.sample(own, min(TRIES, len(own))):
        with contextlib.suppress(OSError):  # it is taken
            return _bound_to(host, port)
    return _bound_to(host, 0)  # a kernel that gives all of them away


def _bound_to(host: str, port: int) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


def _given_away() -> range:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # not Linux
        return range(0)
    return range(int(first), int(last) + 1)
