"""Certificates at the edge: what a process refuses to start with, and says of it."""

import logging
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.wire.tls import TlsError, load_identity
from headrace.wire.tls_config import TlsConfig
from tests.support.cluster.certificates import Authority
from tests.support.patience import PATIENCE_S

HOST = "127.0.0.1"
NAMED = "DNS:node.headrace"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> TlsConfig:
    return authority.issue("good")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    return Authority.create(tmp_path_factory.mktemp("elsewhere")).issue("foreign")


@pytest.mark.parametrize("host", [HOST, "0.0.0.0", "::"])
def test_a_good_certificate_is_taken_where_its_host_is_named_or_any(good: TlsConfig, host: str, caplog):
    with caplog.at_level(logging.INFO):
        assert load_identity(good, host) is not None
    assert f"TLS is on at {host}, for peers with a certificate of {good.ca}" in caplog.text


def test_one_name_for_all_hosts_is_taken_anywhere(authority: Authority):
    named = replace(authority.issue("named", names=NAMED), server_name="node.headrace")
    assert load_identity(named, "10.1.2.3") is not None


@pytest.mark.parametrize(
    ("host", "level"), [(HOST, logging.INFO), ("localhost", logging.INFO), ("::1", logging.INFO),
                        ("10.1.2.3", logging.WARNING), ("0.0.0.0", logging.WARNING), ("head", logging.WARNING)],
)  # fmt: skip
def test_without_tls_a_line_says_so_louder_where_others_can_reach(host: str, level: int, caplog):
    with caplog.at_level(logging.INFO):
        assert load_identity(None, host) is None
    (record,) = caplog.records
    assert record.levelno == level
    assert f"TLS is off at {host}: whoever reaches this port can use it" in record.getMessage()


Change = Callable[[TlsConfig, TlsConfig], TlsConfig]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good, _: replace(good, ca="/nowhere"), "tls.ca /nowhere: No such file.*at this path on this host"),
        (lambda good, _: replace(good, key="/nowhere"), "tls.key /nowhere: No such file"),
        (lambda good, _: replace(good, cert="/"), "tls.cert /: Is a directory"),
        (lambda good, _: replace(good, ca=good.key), "tls.ca .*good.key: no PEM certificate in it"),
        (lambda good, _: replace(good, cert=good.key), "tls.cert .*good.key: no PEM certificate in it"),
        (lambda good, _: replace(good, key=good.cert), "tls.key .*good.pem: not the private key of tls.cert .*good"),
        (lambda good, other: replace(good, key=other.key), "foreign.key: not the private key of tls.cert .*good.pem"),
        (lambda good, other: replace(good, ca=other.ca), "good.pem: its peers will refuse it: .*signed by tls.ca"),
    ],
)
def test_a_file_that_will_not_do_is_named_with_the_remedy(
    good: TlsConfig, foreign: TlsConfig, change: Change, message: str
):
    with pytest.raises(TlsError, match=message):
        load_identity(change(good, foreign), HOST)


@pytest.mark.parametrize(
    ("name", "issue", "host", "message"),
    [
        ("expired", {"days": 0}, HOST, "certificate has expired"),
        ("client", {"usage": "clientAuth"}, HOST, "unsuitable certificate purpose.*for servers and clients"),
        ("server", {"usage": "serverAuth"}, HOST, "unsuitable certificate purpose.*for servers and clients"),
        ("other-ip", {"names": "IP:10.9.9.9"}, HOST, "not valid for '127.0.0.1'; .*name 127.0.0.1 .or set"),
        ("named-only", {"names": NAMED}, "10.1.2.3", "not valid for '10.1.2.3'"),
    ],
)
def test_a_certificate_that_peers_would_refuse_is_refused_at_start(
    authority: Authority, name: str, issue: dict[str, object], host: str, message: str
):
    with pytest.raises(TlsError, match=rf"tls.cert .*{name}.pem: its peers will refuse it: .*{message}"):
        load_identity(authority.issue(name, **issue), host)  # type: ignore[arg-type]


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_passphrase(good: TlsConfig, tmp_path: Path):
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", good.key, "-out", encrypted, "-passout", "pass:x"],
        check=True,
        timeout=PATIENCE_S,
    )
    with pytest.raises(TlsError, match=r"encrypted\.key: .*without a passphrase"):
        load_identity(replace(good, key=str(encrypted)), HOST)


def test_no_key_is_in_a_repr(good: TlsConfig):
    assert repr(load_identity(good, HOST)).startswith("<headrace.wire.tls.Identity object")
