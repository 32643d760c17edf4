"""Network devices that UCX may use for a node: by default those that own its host's address, and none beside them.

Left to itself UCX takes any interface that is up, and its connections break when that one goes: on 127.0.0.1 it took a
veth pair of somebody else's.
"""

import ipaddress
import logging
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

ALL = "all"
WITHOUT_RDMA = frozenset({"tcp", "self", "sm", "shm", "posix", "sysv", "cma", "knem", "xpmem"})


def devices_for(host: str, transports: str, interfaces: Mapping[str, Iterable[str]], rdma: Iterable[str]) -> str:
    """UCX_NET_DEVICES for a node at `host`, an address or a name: the interfaces that own it.

    If the transports include RDMA, all RDMA devices of this machine come beside them: several rails serve one address.
    For an address of all interfaces (0.0.0.0), or of none here, UCX chooses.

    interfaces, rdma   of this machine, as the functions of these names return them
    """
    owners = interfaces_owning(_addresses(host), interfaces)
    if not owners:
        log.info("UCX may use all network devices: %s is the address of no single one; see ucx.net_devices", host)
        return ALL
    devices = [*owners, *(rdma if _include_rdma(transports) else ())]
    log.info("UCX uses %s, for %s; see ucx.net_devices", ",".join(devices), host)
    return ",".join(devices)


def interfaces_owning(wanted: Collection[str], interfaces: Mapping[str, Iterable[str]]) -> list[str]:
    """Names of the interfaces that have one of the wanted addresses; a loopback interface has all of 127.0.0.0/8.

    interfaces   name -> its addresses; the name may have a label (eth0:1), which UCX does not know
    """
    found = []
    for name, addresses in interfaces.items():
        own = {ipaddress.ip_address(address) for address in addresses}
        is_loopback = any(address.is_loopback for address in own)
        for address in map(ipaddress.ip_address, wanted):
            if address in own or (is_loopback and address.is_loopback):
                found.append(name.partition(":")[0])
    return list(dict.fromkeys(found))


def interfaces() -> dict[str, list[str]]:
    """IP addresses of this machine's interfaces, by name."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address for each in addresses if each.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }


def rdma_devices(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Ports of this machine's RDMA devices in UCX's words: mlx5_0:1."""
    return sorted(f"{port.parents[1].name}:{port.name}" for port in folder.glob("*/ports/*"))


def _addresses(host: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        return []  # listening there fails, too, and names it


def _include_rdma(transports: str) -> bool:
    return not WITHOUT_RDMA.issuperset(name for name in transports.split(",") if not name.startswith("cuda"))
