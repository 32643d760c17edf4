"""Mutual TLS on the control plane: servers require a certificate from their clients, and clients verify the server's.

One certificate authority signs the certificates of one cluster, router and nodes alike, and no others: a certificate
from it proves membership. Files are read once, at start. docs/security.md explains how to make them.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from pathlib import Path

import grpc

from headrace.wire.tls_config import TlsConfig

log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::", "[::]")  # as a listening address they do not name the host


class TlsError(Exception):
    """The TLS files cannot be used; the message names the file and the remedy."""


class Identity:
    """This process's certificate and the authority that it trusts. The repr does not show the key."""

    def __init__(self, ca: bytes, cert: bytes, key: bytes, server_name: str | None) -> None:
        self._ca = ca
        self._cert = cert
        self._key = key
        self._server_name = server_name

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials of a server that requires certificates of the same authority from its clients."""
        return grpc.ssl_server_credentials([(self._key, self._cert)], self._ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        return () if self._server_name is None else (("grpc.ssl_target_name_override", self._server_name),)


def load_identity(config: TlsConfig | None, host: str) -> Identity | None:
    """Returns the identity of a process whose peers reach it at `host`; None without TLS, which is logged.

    Raises TlsError, also for certificates that peers would refuse: of another authority or host, or expired.
    """
    if config is None:
        level = logging.INFO if is_loopback(host) else logging.WARNING
        log.log(level, "TLS is off at %s: whoever reaches this port can use it; see tls in docs/security.md", host)
        return None
    ca, cert, key = (_read(name, getattr(config, name)) for name in ("ca", "cert", "key"))
    name = config.server_name or host
    _check(config, None if name in WILDCARDS else name)
    log.info("TLS is on at %s, for peers with a certificate of %s", host, config.ca)
    return Identity(ca, cert, key, config.server_name)


def is_loopback(host: str) -> bool:
    """True for an address that only this host reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(
            f"tls.{name} {path}: {error.strerror}; it must be at this path on this host, readable by this user"
        ) from error


def _check(config: TlsConfig, name: str | None) -> None:
    """Does a TLS handshake with itself in memory: a certificate that fails here would fail at every peer."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    client.check_hostname = name is not None
    for context in (server, client):
        _load(config, context)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_side=False, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        waiting = True
        while waiting:
            waiting = not all([_is_through(end) for end in ends])
    except ssl.SSLError as error:
        why = str(getattr(error, "verify_message", None) or error.reason).rstrip(".")
        raise TlsError(
            f"tls.cert {config.cert}: its peers will refuse it: {why}; it must be signed by tls.ca {config.ca}, for "
            f"servers and clients, and name {name or 'its host'} (or set tls.server_name)"
        ) from error


def _load(config: TlsConfig, context: ssl.SSLContext) -> None:
    for name in ("ca", "cert"):  # the certificate too, to check that it is one
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(getattr(config, name))
        except ssl.SSLError as error:
            raise TlsError(f"tls.{name} {getattr(config, name)}: no PEM certificate in it; give one") from error
    context.load_verify_locations(config.ca)
    try:
        context.load_cert_chain(config.cert, config.key, password="")  # else OpenSSL asks on the terminal
    except ssl.SSLError as error:
        raise TlsError(
            f"tls.key {config.key}: not the private key of tls.cert {config.cert}, or encrypted "
            f"({error.reason or 'not PEM'}); give the key that the certificate was made for, without a passphrase"
        ) from error


def _is_through(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
