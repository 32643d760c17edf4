"""Two hosts on one machine: two network namespaces joined by a veth pair, removed again whatever happens.

    with two_namespaces() as (left, right):
        subprocess.run([*left.enter, "ping", "-c1", right.address], timeout=PATIENCE_S)

Linux only, and it takes the right to create namespaces (CAP_NET_ADMIN and CAP_SYS_ADMIN).
"""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.support.patience import PATIENCE_S

COMMAND_TIMEOUT_S = PATIENCE_S
CLONE_NEWNS, CLONE_NEWNET, MS_SLAVE_OF_ALL, MNT_DETACH = 0x20000, 0x40000000, 0x84000, 2


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


def enter(name: str) -> None:
    """Moves this process, of one thread, into a namespace, as `ip netns exec` does: /sys shows that one."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"no way into namespace {name}")

    namespace = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    checked(libc.setns(namespace, CLONE_NEWNET))
    os.close(namespace)
    checked(libc.unshare(CLONE_NEWNS))
    checked(libc.mount(b"", b"/", b"none", ctypes.c_ulong(MS_SLAVE_OF_ALL), None))
    libc.umount2(b"/sys", MNT_DETACH)
    checked(libc.mount(name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))


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
        for side in (left, right):
            _ip("netns", "add", side.name)
            _ip("-n", side.name, "link", "set", "lo", "up")
        _link(left.name, left.device, f"{left.address}/30", right.name, right.device, f"{right.address}/30")
        for side in (left, right):
            _wait_until_up(side)
        yield left, right
    finally:
        for side in (left, right):  # deleting a namespace deletes its end of the pair, and with it the other
            with suppress(NamespacesUnavailable):
                _ip("netns", "delete", side.name)


@dataclass(frozen=True, slots=True)
class Cut:
    """The host between two hosts: what it does not forward is lost in silence, as behind a cable that was cut."""

    name: str

    def sever(self) -> None:
        self._forward(0)

    def mend(self) -> None:
        self._forward(1)

    def _forward(self, is_on: int) -> None:
        _ip("netns", "exec", self.name, "sysctl", "-qw", f"net.ipv4.ip_forward={is_on}")


@contextmanager
def routed_namespaces() -> Iterator[tuple[Namespace, Namespace, Cut]]:
    """Two hosts and a third between them. The left one is reached from this process, too.

    Raises `NamespacesUnavailable`, as `two_namespaces` does.
    """
    if shutil.which("ip") is None or shutil.which("sysctl") is None:
        raise NamespacesUnavailable("no `ip` or no `sysctl` command: install iproute2 and procps")
    pid = os.getpid()
    nets = f"10.{1 + pid % 200}"  # one of them is in this process's own namespace, beside those of other test runs
    left, right = (Namespace(f"hr{pid}{s}", f"hr{pid}{s}0", f"{nets}.{net}.1") for s, net in (("l", 78), ("r", 79)))
    middle, here = f"hr{pid}m", f"hr{pid}h"
    try:
        for name in (left.name, middle, right.name):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for side in (left, right):
            net = side.address.rpartition(".")[0]
            near = f"{side.device}m"
            _link(side.name, side.device, f"{side.address}/24", middle, near, f"{net}.254/24")
            _ip("-n", side.name, "route", "add", f"{nets}.0.0/16", "via", f"{net}.254", "dev", side.device)
        _ip("link", "add", here, "type", "veth", "peer", "name", f"{here}l", "netns", left.name)
        _ip("address", "add", f"{nets}.80.2/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", left.name, "address", "add", f"{nets}.80.1/30", "dev", f"{here}l")
        _ip("-n", left.name, "link", "set", f"{here}l", "up")
        _ip("route", "add", f"{left.address}/32", "via", f"{nets}.80.1", "dev", here)
        for side in (left, right):
            _wait_until_up(side)
        cut = Cut(middle)
        cut.mend()
        yield left, right, cut
    finally:
        with suppress(NamespacesUnavailable):
            _ip("link", "delete", here)  # at once, with its routes: a namespace takes its devices along when it can
        for name in (left.name, middle, right.name):
            with suppress(NamespacesUnavailable):
                _ip("netns", "delete", name)


@dataclass(frozen=True, slots=True)
class StrayLink:
    """A link of somebody else's on a host whose processes talk over its loopback interface."""

    host: str
    device: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.host)

    def vanish(self) -> None:
        _ip("-n", self.host, "link", "delete", self.device)


@contextmanager
def host_with_a_stray_link() -> Iterator[StrayLink]:
    """Raises `NamespacesUnavailable`, as `two_namespaces` does."""
    if shutil.which("ip") is None:
        raise NamespacesUnavailable("no `ip` command: install iproute2")
    pid = os.getpid()
    name, device = f"hr{pid}s", f"hr{pid}s0"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _link(name, device, "10.213.77.1/30", name, f"{device}p", "10.213.77.2/30")
        yield StrayLink(name, device)
    finally:
        with suppress(NamespacesUnavailable):
            _ip("netns", "delete", name)


def _link(name: str, device: str, address: str, other_name: str, other_device: str, other_address: str) -> None:
    _ip(
        "link", "add", device, "netns", name, "type", "veth", "peer", "name", other_device, "netns", other_name,
    )  # fmt: skip
    for namespace, end, its_address in ((name, device, address), (other_name, other_device, other_address)):
        _ip("-n", namespace, "address", "add", its_address, "dev", end)
        _ip("-n", namespace, "link", "set", end, "up")


def _wait_until_up(side: Namespace) -> None:
    """A device that was set up runs a moment later, on a busy machine up to a second, and UCX sees only what runs."""
    deadline_s = time.monotonic() + PATIENCE_S
    while " state UP " not in (shown := _ip("-n", side.name, "-o", "link", "show", "dev", side.device)):
        assert time.monotonic() < deadline_s, f"{side.device} is not up after {PATIENCE_S:g} s: {shown}"
        time.sleep(0.01)


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NamespacesUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Host(Namespace):
    """One of several hosts at a switch."""

    def unplug(self) -> None:
        """Cuts its link: it goes on alone, and the others hear nothing of it, not even that its sockets are closed."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def kill(self) -> None:
        """Ends all its processes at once, as a host that loses power, but for its kernel, which closes its sockets."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def switched_hosts(count: int) -> Iterator[list[Host]]:
    """Hosts in one network. The first is reached from this process, too.

    At the end all their processes are killed. Raises `NamespacesUnavailable`, as `two_namespaces` does.
    """
    if shutil.which("ip") is None:
        raise NamespacesUnavailable("no `ip` command: install iproute2")
    pid = os.getpid()
    nets = f"10.{1 + pid % 200}"
    switch, here = f"hr{pid}s", f"hr{pid}h"
    hosts = [Host(f"hr{pid}n{index}", f"hr{pid}n{index}0", f"{nets}.81.{index + 1}") for index in range(count)]
    try:
        for name in (switch, *(host.name for host in hosts)):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            port = f"{host.device}s"
            _ip("link", "add", host.device, "netns", host.name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
        first = hosts[0]
        _ip("link", "add", here, "type", "veth", "peer", "name", f"{here}l", "netns", first.name)
        _ip("address", "add", f"{nets}.80.2/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", first.name, "address", "add", f"{nets}.80.1/30", "dev", f"{here}l")
        _ip("-n", first.name, "link", "set", f"{here}l", "up")
        _ip("route", "add", f"{first.address}/32", "via", f"{nets}.80.1", "dev", here)
        for host in hosts:
            _wait_until_up(host)
        yield hosts
    finally:
        for host in hosts:
            with suppress(NamespacesUnavailable):
                host.kill()
        with suppress(NamespacesUnavailable):
            _ip("link", "delete", here)
        for name in (switch, *(host.name for host in hosts)):
            with suppress(NamespacesUnavailable):
                _ip("netns", "delete", name)
