"""UCX's settings, and how a process opens its transport with them. Importing this module does not import UCX."""

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.config import at_least, not_empty, ports, refuse
from transfer.protocol.errors import TransportUnavailable
from transfer.ucx.devices import devices_for, interfaces, rdma_devices

if TYPE_CHECKING:
    from transfer.ucx.transport import UcxTransport


AUTO = "auto"


@dataclass(frozen=True, slots=True)
class UcxConfig:
    """UCX settings of one process. UCX reads its environment once, at its first import: `apply` must come before.

    host                  the address at which peers reach this process; UCX's own listener binds all interfaces
    port                  of the keepalive server, to which peers connect first; 0 takes a free port. UCX's listener
                          takes another free port
    transports            UCX_TLS. `tcp`, also within one host; `cuda` adds those for GPU memory. Naming `posix,cma`
                          changes nothing: UCX 1.21 excludes them under peer error handling. They can be enabled
                          (UCX_POSIX_ERROR_HANDLING=y UCX_CMA_ERROR_HANDLING=y) and are twice as fast, but then a
                          receive from a killed or stopped peer never completes, not even when its connection is
                          force-closed, and its staging buffer is lost
    net_devices           UCX_NET_DEVICES, such as `eth0` or `eth0,eth1`; `auto`: the interface that owns `host`, and
                          all RDMA devices if RDMA is among the transports; `all` lets UCX take any interface
    tcp_segment           UCX_TCP_{TX,RX}_SEG_SIZE: 256K doubled the speed of TCP against the default
    silence_s             a peer whose host acknowledges nothing for this long, counted from the kernel's second try, is
                          lost; detected half a second later. See `transfer.ucx.keepalive`
    cuda                  GPU memory moves, too. A node sets it by its engine's device
    cuda_transports       with `cuda`, added to the transports; a process that lacks one of them does not start, because
                          UCX would move GPU memory through TCP without a warning
    cuda_poll_s           with `cuda`, how long after the last activity operations are polled in every turn of the event
                          loop rather than waited for: a wake-up costs as much as 16 MiB over NVLink
    """

    host: str = "127.0.0.1"
    port: int = 0
    transports: str = "tcp"
    net_devices: str = AUTO
    tcp_segment: str = "256K"
    silence_s: float = 1.0
    cuda: bool = False
    cuda_transports: str = "cuda_copy,cuda_ipc"
    cuda_poll_s: float = 0.002

    def __post_init__(self) -> None:
        refuse(
            not_empty(self, "transports", remedy="name some, such as `tcp`"),
            not_empty(self, "net_devices", remedy="name some, such as `eth0`, or leave it out"),
            ports(self, "port"),
            at_least(self, 0.5, "silence_s", remedy=", two lost packets would end a connection"),
            at_least(self, 0, "cuda_poll_s", remedy=", 0 waits for each operation"),
        )

    @property
    def required_transports(self) -> tuple[str, ...]:
        """Transports that UCX would silently skip when one of their libraries is missing."""
        return tuple(self.cuda_transports.split(",")) if self.cuda else ()

    def environment(self) -> dict[str, str]:
        """UCX's environment variables for these settings, once `open_transport` has settled `net_devices`."""
        return {
            "UCX_TLS": ",".join((self.transports, *self.required_transports)),
            "UCX_NET_DEVICES": self.net_devices,
            "UCX_TCP_TX_SEG_SIZE": self.tcp_segment,
            "UCX_TCP_RX_SEG_SIZE": self.tcp_segment,
            "UCX_KEEPALIVE_INTERVAL": "1s",  # of lanes that have no keepalive of their own: RDMA
            "UCX_WARN_UNUSED_ENV_VARS": "n",
            "UCX_LOG_FILE": "stderr",  # its default is stdout, where a node's answers may go
        }

    def apply(self, environ: MutableMapping[str, str], loaded_modules: Mapping[str, object]) -> None:
        """Writes the variables to `environ` (`os.environ`), over any earlier values.

        Raises `TransportUnavailable` when UCX is loaded already (`sys.modules`) with other settings.
        """
        wanted = self.environment()
        differing = {name: environ.get(name) for name, value in wanted.items() if environ.get(name) != value}
        if differing and "ucxx" in loaded_modules:
            raise TransportUnavailable(
                f"ucxx was imported before its settings were: {differing} should be {wanted}; "
                "one process has one UcxConfig, applied first"
            )
        environ.update(wanted)


def open_transport(config: UcxConfig) -> "UcxTransport":
    """This process's UCX transport, listening. Call it once, inside the event loop that will use it.

    Raises `TransportUnavailable` when UCX cannot start, or was started with other settings.
    """
    if config.net_devices == AUTO:
        config = replace(config, net_devices=devices_for(config.host, config.transports, interfaces(), rdma_devices()))
    config.apply(os.environ, sys.modules)
    try:
        from transfer.ucx.transport import UcxTransport
    except ImportError as error:
        raise TransportUnavailable(f"ucxx cannot be imported: {error}; pip install ucxx-cu13") from error
    return UcxTransport(config)
