"""What both kinds of node are told at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.cache.layout import DTYPE_BYTES
from headrace.engine.config import ConfigError, EngineConfig
from headrace.wire.tls import TlsConfig
from transfer.ucx_config import UcxConfig

HOST_MESSAGE_BYTES, GPU_MESSAGE_BYTES = 4 << 20, 32 << 20


@dataclass(frozen=True)
class NodeConfig:
    """One node. A role's own config adds to it.

    name                unique in the cluster; a restarted node takes its name over
    model_path          folder with config.json, safetensors and tokenizer
    router_address      host:port of the router's registry; None: the node registers nowhere
    host                the address at which router and nodes reach this one (gRPC and transfer)
    port                of its gRPC service; 0 takes a free one
    staging_buffers     messages of requests' hand-overs that may be on their way at once; what prefill nodes fetch from
                        decode nodes has 2 buffers of its own at both
    max_message_bytes   attention blocks are packed up to this; None: 4 MiB on a host, 32 MiB on a GPU, where short
                        messages leave most of a link's bandwidth unused (docs/benchmarks.md)
    state_wire_dtype    of recurrent states on their way to this node: float32, bfloat16 or float16 (half the bytes, and
                        what is rounded stays rounded); None: as this node keeps them, which rounds nothing
    admission_timeout_s how long a request may wait for blocks and a slot before another node is asked
    shutdown_grace_s    how long requests in flight may go on after a stop
    tls                 this node's certificate on the control plane; None: plain text, whoever reaches it may use it
    """

    name: str
    model_path: str
    router_address: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    staging_buffers: int = 4
    max_message_bytes: int | None = None
    state_wire_dtype: str | None = None
    admission_timeout_s: float = 5.0
    shutdown_grace_s: float = 2.0
    engine: EngineConfig = field(default_factory=EngineConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name is empty: give each node one of its own, such as p0")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port}: must lie in 0..65535, 0 takes a free one")
        for name in ("staging_buffers", "max_message_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} {value}: must be at least 1")
        if self.state_wire_dtype not in (None, *DTYPE_BYTES):
            raise ConfigError(
                f"state_wire_dtype {self.state_wire_dtype!r}: use one of {', '.join(DTYPE_BYTES)}, or leave it out"
            )
        if self.admission_timeout_s <= 0:
            raise ConfigError(f"admission_timeout_s {self.admission_timeout_s}: must be above 0")
        if self.shutdown_grace_s < 0:
            raise ConfigError(f"shutdown_grace_s {self.shutdown_grace_s}: must not be negative")

    @property
    def message_bytes(self) -> int:
        """`max_message_bytes`, or what suits the engine's device."""
        return self.max_message_bytes or (HOST_MESSAGE_BYTES if self.engine.is_on_cpu else GPU_MESSAGE_BYTES)
