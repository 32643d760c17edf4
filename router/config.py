"""How a router runs: every setting, validated when the config is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.wire.tls import TlsConfig
from router.errors import ConfigError


@dataclass(frozen=True)
class RouterConfig:
    """Durations are in seconds, sizes in bytes; port 0 means any free port.

    model_path          folder with config.json and tokenizer.json; the weights are not read
    host, port          where HTTP clients connect
    control_host, control_port  where nodes register (gRPC)
    served_model_name   the name in /v1/models and in requests; empty: the folder's name
    fetch_from_decode   a prefill node fetches from a decode node what that one knows more of a prompt: its blocks
                        and the checkpoint that its answer left, so that a chat's next turn computes only what is new
    max_concurrent      requests given to nodes at a time (a prompt of a list, or one of `n`, is a request)
    max_queue           requests that may wait for their turn; beyond that clients get 429
    request_timeout_s   a request's whole life, its wait included; beyond that clients get 504
    busy_timeout_s      how long a request looks for a node with room; beyond that clients get 503
    landing_timeout_s   how long what a prefill node has handed over may take to land; it is then prefilled once more
    max_attempts        prefills tried for one request, and decode nodes tried, before it fails
    max_body_bytes      of an HTTP request
    heartbeat_s         how often nodes must say that they live; after three missed they count as dead
    shutdown_grace_s    what requests in flight are given at a stop
    tls                 this router's certificate on the control plane; None: plain text, whoever reaches it may use it
    """

    model_path: Path
    host: str = "127.0.0.1"
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int = 8001
    served_model_name: str = ""
    fetch_from_decode: bool = True
    max_concurrent: int = 64
    max_queue: int = 256
    request_timeout_s: float = 600.0
    busy_timeout_s: float = 30.0
    landing_timeout_s: float = 5.0
    max_attempts: int = 3
    max_body_bytes: int = 32 << 20
    heartbeat_s: float = 2.0
    shutdown_grace_s: float = 10.0
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_path", Path(self.model_path))
        if not (self.model_path / "config.json").is_file():
            raise ConfigError(f"model_path {self.model_path}: no config.json there; give a checkpoint's folder")
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", self.model_path.resolve().name)
        for name in ("port", "control_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name} {getattr(self, name)}: use 0 (any free port) to 65535")
        for name in ("max_concurrent", "max_attempts", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue {self.max_queue}: must be at least 0")
        for name in ("request_timeout_s", "busy_timeout_s", "landing_timeout_s", "heartbeat_s", "shutdown_grace_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)}: must be a positive number of seconds")
