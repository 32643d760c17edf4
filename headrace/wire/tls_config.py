"""TLS settings of one process. Free of gRPC, which takes 0.15 s to import: every config holds one of these."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import not_empty, refuse


@dataclass(frozen=True)
class TlsConfig:
    """PEM files of one process of the cluster.

    ca           the cluster's certificate authority; with it the control plane uses mutual TLS
    cert         this process's certificate, for servers and clients, with the chain up to `ca` if there is one
    key          the certificate's private key, not encrypted
    server_name  name in every server's certificate; if left out, the host at which the server is reached
    """

    ca: str
    cert: str
    key: str
    server_name: str | None = None

    def __post_init__(self) -> None:
        refuse(not_empty(self, "ca", "cert", "key", remedy="give a PEM file"))
