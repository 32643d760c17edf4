"""Certificate authorities and certificates for tests, made by the openssl command."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from headrace.wire.tls_config import TlsConfig
from tests.support.patience import PATIENCE_S


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=PATIENCE_S)


def _new_key(path: Path) -> Path:
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path)
    return path


@dataclass(frozen=True)
class Authority:
    """`Authority.create(folder, name)` signs certificates; all files are in `folder`."""

    folder: Path
    cert: Path
    key: Path

    @classmethod
    def create(cls, folder: Path, name: str = "ca") -> "Authority":
        cert, key = folder / f"{name}.pem", _new_key(folder / f"{name}.key")
        _openssl(
            "req", "-x509", "-new", "-key", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}",
            "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip
        return cls(folder, cert, key)

    def issue(
        self, name: str, *, names: str = "IP:127.0.0.1", days: int = 2, usage: str = "serverAuth,clientAuth"
    ) -> TlsConfig:
        """What a process with a certificate of this authority is told; days 0: it has expired when it is made."""
        request, cert = self.folder / f"{name}.csr", self.folder / f"{name}.pem"
        key, extensions = _new_key(self.folder / f"{name}.key"), self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
        _openssl("req", "-new", "-key", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial", "-out", cert,
            "-days", days, "-extfile", extensions,
        )  # fmt: skip
        return TlsConfig(str(self.cert), str(cert), str(key))
