"""`TlsConfig` on a command line: the same flags for every process of a cluster."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from headrace.wire.tls import TlsConfig, TlsError

_FLAGS = {
    "ca": "PEM file of the cluster's certificate authority: turns mutual TLS on",
    "cert": "PEM file of this process's certificate",
    "key": "PEM file of its private key",
    "server_name": "the name in every server's certificate, instead of the host at which it is reached",
}


def add_tls_flags(parser: ArgumentParser) -> None:
    for name, text in _FLAGS.items():
        parser.add_argument(f"--tls-{name.replace('_', '-')}", metavar="NAME" if "name" in name else "FILE", help=text)


def tls_from_flags(arguments: Namespace) -> TlsConfig | None:
    """None when no flag is given. Raises TlsError when one is missing."""
    given = {name: getattr(arguments, f"tls_{name}") for name in _FLAGS}
    if not any(given.values()):
        return None
    for name in ("ca", "cert", "key"):
        if not given[name]:
            raise TlsError(f"--tls-{name} is missing: TLS needs --tls-ca, --tls-cert and --tls-key")
    return TlsConfig(**given)
