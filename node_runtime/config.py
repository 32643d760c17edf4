"""Settings of a node that neither role adds."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.cache.layout import STATE_FORMATS
from headrace.config import addresses, at_least, not_empty, one_of, ports, positive, refuse
from headrace.engine.config import EngineConfig
from headrace.tracing import TracingConfig
from headrace.wire.connection_options import CONTROL_SILENCE_S
from headrace.wire.tls_config import TlsConfig
from transfer.ucx import UcxConfig

MIN_WATCHDOG_S = 3
HOST_MESSAGE_BYTES, GPU_MESSAGE_BYTES = 4 << 20, 32 << 20


@dataclass(frozen=True)
class FetchConfig:
    """When a node that computes a prompt fetches cached parts of it (answers of earlier turns) from another node.

    enabled         false: the node computes everything that its own cache lacks
    min_tokens      a fetch must save at least this many tokens
    max_time_ratio  largest estimated time of a fetch, as a share of the time to compute the same tokens, which counts
                    once for each prompt that is here; above 1 the node fetches even where computing is faster
    timeout_s       a fetch that has not landed by then is abandoned, and the node computes the prompt
    """

    enabled: bool = True
    min_tokens: int = 64
    max_time_ratio: float = 1.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "min_tokens", remedy="; enabled: false turns fetching off"),
            positive(self, "max_time_ratio", "timeout_s"),
        )


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings of one node; each role adds its own, and `NodeConfig` has all of them.

    name                 unique in the cluster; a restarted node takes its name over
    model_path           folder with config.json, safetensors and tokenizer
    router_addresses     host:port of each router's registry, with all of which the node registers; if left out, with
                         none
    host                 address at which the router and other nodes reach this one (gRPC and transfer)
    port                 port of the gRPC service; 0 takes a free one
    staging_buffers      messages of transfers that may be in flight at once in each direction, from and to this node
    max_message_bytes    largest message into which attention blocks are packed; if left out, 4 MiB on a host and 32 MiB
                         on a GPU, where short messages leave most of a link's bandwidth unused
                         (docs/benchmarks/transfers.md)
    state_wire_dtype     format in which recurrent states travel to this node: float32, bfloat16 or float16 (half the
                         bytes; the rounding stays), int8 or fp8 (a quarter, and a scale for each row); if left out,
                         this node's own, which rounds nothing
    fetch_from_others    when it fetches cached parts of a prompt from other nodes
    admission_timeout_s  how long a request may wait for blocks and a slot on the node that generates, before the router
                         asks another one. On the node that computes its prompt it waits as long as it has time, because
                         every prompt before it ends, and is refused at once when the measured speed says that it would
                         wait for too long; but no longer than this while requests that wait for prompts of other nodes
                         hold room there: such nodes could wait for each other
    control_silence_s    the router's setting of that name, for the connections to routers and other nodes
    watchdog_s           the process ends when its engine has stood still for so long: more than the longest step takes,
                         one that compiles kernels included (Ray, or whatever supervises it, starts it again)
    shutdown_grace_s     how long requests in flight may continue after a stop
    engine               the engine's own settings
    ucx                  the transport's own settings
    tls                  this node's certificate on the control plane; if left out, plain text, open to all
    tracing              where spans of routers' calls go; if left out, none are made
    """

    name: str
    model_path: str
    router_addresses: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    staging_buffers: int = 4
    max_message_bytes: int | None = None
    state_wire_dtype: str | None = None
    fetch_from_others: FetchConfig = field(default_factory=FetchConfig)
    admission_timeout_s: float = 5.0
    control_silence_s: float = CONTROL_SILENCE_S
    watchdog_s: float = 60.0
    shutdown_grace_s: float = 2.0
    engine: EngineConfig = field(default_factory=EngineConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    tls: TlsConfig | None = None
    tracing: TracingConfig | None = None

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> list[str]:
        """Settings out of range; each role's config adds its own."""
        return [
            *not_empty(self, "name", remedy="give each node its own, such as p0"),
            *ports(self, "port"),
            *addresses(self, "router_addresses"),
            *at_least(self, 1, "staging_buffers", "max_message_bytes"),
            *one_of(self, STATE_FORMATS, "state_wire_dtype"),
            *positive(self, "admission_timeout_s"),
            *at_least(self, MIN_WATCHDOG_S, "watchdog_s", remedy=": an idle engine sleeps for a second at a time"),
            *at_least(self, 0, "shutdown_grace_s"),
            *at_least(self, 0.5, "control_silence_s", remedy=", two lost packets would end a connection"),
        ]

    @property
    def message_bytes(self) -> int:
        """`max_message_bytes`, or the default of the engine's device."""
        return self.max_message_bytes or (HOST_MESSAGE_BYTES if self.engine.is_on_cpu else GPU_MESSAGE_BYTES)
