"""TCP ports chosen now for another process, which listens on them later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST, LAST = 20_000, 29_999
"""Below Linux's ephemeral ports (32768 and up by default) and Kubernetes' node ports; above Ray's ports."""
TRIES = 100


def free_ports(*hosts: str) -> list[int]:
    """One port for each host, all different: free now, and outside the kernel's ephemeral range.

    An ephemeral port would sometimes be taken before the other process listens on it: that process must first start, or
    restart, and meanwhile every connection and every server of the host takes such ports.
    """
    with contextlib.ExitStack() as held:
        return [held.enter_context(_bound(host)).getsockname()[1] for host in hosts]


def _bound(host: str) -> socket.socket:
    ephemeral = _ephemeral_ports()
    own = [port for port in range(FIRST, LAST + 1) if port not in ephemeral]
    for port in random.sample(own, min(TRIES, len(own))):
        with contextlib.suppress(OSError):  # the port is taken
            return _bound_to(host, port)
    return _bound_to(host, 0)  # every port is in the kernel's ephemeral range


def _bound_to(host: str, port: int) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


def _ephemeral_ports() -> range:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # not Linux
        return range(0)
    return range(int(first), int(last) + 1)
