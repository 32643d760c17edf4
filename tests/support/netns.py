"""Two hosts on one machine: two network namespaces joined by a veth pair, removed again whatever happens.

    with two_namespaces() as (left, right):
        subprocess.run([*left.enter, "ping", "-c1", right.address], timeout=10)

Linux only, and it takes the right to create namespaces (CAP_NET_ADMIN and CAP_SYS_ADMIN).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

COMMAND_TIMEOUT_S = 10


class NamespacesUnavailable(Exception):
    """Why this machine cannot make two network namespaces."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One host: `address` is its IP on `device`; a command behind `enter` runs in it."""

    name: str
    device: str
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


@contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Raises `NamespacesUnavailable`, with the reason, before anything was made or after undoing it."""
    if shutil.which("ip") is None:
        raise NamespacesUnavailable("no `ip` command: install iproute2")
    # Device names hold 15 characters; the process id keeps test runs side by side apart.
    pid = os.getpid()
    left = Namespace(f"hr{pid}a", f"hr{pid}a0", "10.213.77.1")
    right = Namespace(f"hr{pid}b", f"hr{pid}b0", "10.213.77.2")
    try:
        _ip("netns", "add", left.name)
        _ip("netns", "add", right.name)
        _ip(
            "link", "add", left.device, "netns", left.name,
            "type", "veth", "peer", "name", right.device, "netns", right.name,
        )  # fmt: skip
        for side in (left, right):
            _ip("-n", side.name, "address", "add", f"{side.address}/30", "dev", side.device)
            _ip("-n", side.name, "link", "set", side.device, "up")
            _ip("-n", side.name, "link", "set", "lo", "up")
        yield left, right
    finally:
        for side in (left, right):  # deleting a namespace deletes its end of the pair, and with it the other
            with suppress(NamespacesUnavailable):
                _ip("netns", "delete", side.name)


def _ip(*arguments: str) -> None:
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NamespacesUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
