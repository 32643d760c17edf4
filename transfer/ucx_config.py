"""UCX's settings, in one place. Free of UCX itself: a node's config holds it before UCX is imported."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from headrace.config import at_least, not_empty, ports, refuse
from transfer.protocol.errors import TransportUnavailable


@dataclass(frozen=True, slots=True)
class UcxConfig:
    """One process's UCX. UCX reads its environment once, at its first import: `apply` must come before.

    host                  the address at which peers reach this process; UCX's own listener binds all interfaces
    port                  where peers come first; 0 takes a free one. UCX listens on free ones besides
    transports            UCX_TLS. `tcp`, on one host too; add `cuda_copy,cuda_ipc` for GPU memory. Naming
                          `posix,cma` changes nothing: UCX 1.21 excludes them under peer error handling. They can
                          be let in (UCX_POSIX_ERROR_HANDLING=y UCX_CMA_ERROR_HANDLING=y) and are twice as fast,
                          but then a receive from a killed or stopped peer never completes, not even when its
                          connection is force-closed, and its staging buffer is lost
    net_devices           UCX_NET_DEVICES, such as `eth0`; `all` lets UCX choose
    tcp_segment           UCX_TCP_{TX,RX}_SEG_SIZE: 256K doubled the speed of TCP against the default
    silence_s             a peer whose host acknowledges nothing for so long, from the kernel's second try on, is lost:
                          that is known half a second later. See `transfer.ucx.lifeline`
    cuda                  GPU memory moves, too. A node sets it by its engine's device
    cuda_transports       with `cuda`, added to the transports; a process in which one of them is missing does not
                          start, since UCX would go without and move GPU memory through TCP
    cuda_poll_s           with `cuda`, how long after the last sign of life operations are asked for in every turn of
                          the event loop rather than waited for: a wake-up costs as much as 16 MiB over NVLink
    """

    host: str = "127.0.0.1"
    port: int = 0
    transports: str = "tcp"
    net_devices: str = "all"
    tcp_segment: str = "256K"
    silence_s: float = 1.0
    cuda: bool = False
    cuda_transports: str = "cuda_copy,cuda_ipc"
    cuda_poll_s: float = 0.002

    def __post_init__(self) -> None:
        refuse(
            not_empty(self, "transports", remedy="name some, such as `tcp`"),
            ports(self, "port"),
            at_least(self, 0.5, "silence_s", remedy=", two lost packets would end a connection"),
            at_least(self, 0, "cuda_poll_s", remedy=", 0 waits for each operation"),
        )

    @property
    def required_transports(self) -> tuple[str, ...]:
        """Those that UCX skips without a word when a library of theirs is missing."""
        return tuple(self.cuda_transports.split(",")) if self.cuda else ()

    def environment(self) -> dict[str, str]:
        """The variables that UCX is to find."""
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
        """Write the variables to `environ` (`os.environ`); they replace what was there.

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
