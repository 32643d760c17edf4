"""API keys: who may ask, and as whom. Configs and files hold hashes of keys, never keys."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headrace.config import ConfigError, at_least, load, read_yaml, refuse

log = logging.getLogger(__name__)

Access = Literal["generate", "view", "operate"]

KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile("[0-9a-fA-F]{64}")
_PREFIX = "hr-"
FILE_CHECK_S = 1.0


@dataclass(frozen=True)
class ApiKey:
    """The rights of one key's holder.

    hash               the key's SHA-256 as 64 hexadecimal digits; `headrace key` makes a key and its hash
    tenant             requests share cached prefixes with those of the same tenant alone; empty: with this key's alone
    access             generate: the routes below /v1/ and their like; view: /cluster and /metrics, and nothing else;
                       operate: everything, and to change roles and drain nodes
    priority           number of its requests where they name none; they may ask for higher ones, which wait longer
    tokens_per_minute  prompt tokens that had to be computed and answer tokens, beyond which it gets 429 until it has
                       made up for them; null: no limit
    """

    hash: str
    tenant: str = ""
    access: Access = "generate"
    priority: int = 0
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        refuse(self._faults(), at_least(self, 1, "tokens_per_minute"))

    def _faults(self) -> Iterator[str]:
        if not _HASH.fullmatch(self.hash):  # it may be a key: not to be shown
            yield f"hash of {len(self.hash)} characters: must be 64 hexadecimal digits; `headrace key` makes one"
        if self.tenant and not KEY_NAME.fullmatch(self.tenant):
            yield f"tenant {self.tenant!r}: at most 64 letters, digits, or . _ -"
        if not -(2**31) <= self.priority < 2**31:
            yield f"priority {self.priority}: must lie in -2147483648..2147483647"


@dataclass(frozen=True)
class KeyFile:
    """The content of `api_keys_file`: keys by name, in the form of the config's own `api_keys`."""

    api_keys: Mapping[str, ApiKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse(key_faults(self.api_keys))


def key_faults(keys: Mapping[str, ApiKey]) -> Iterator[str]:
    """Faults of names, and of keys that have two."""
    names: dict[str, str] = {}
    for name, key in keys.items():
        if not KEY_NAME.fullmatch(name):
            yield f"api_keys {name!r}: at most 64 letters, digits, or . _ -"
        other = names.setdefault(key.hash.lower(), name)
        if other != name:
            yield f"api_keys {name}: has the hash of {other}; give each name a key of its own"


def new_key() -> str:
    """A key that nobody guesses: 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """A key's hash, as configs hold it. A plain SHA-256 will do: a random key cannot be guessed, as passwords can."""
    return _digest(key).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The keys of a router, found by what a client presents.

    The time of a look-up tells nothing about a key: the dictionary's own keys are hashes under a secret of this
    process, so that a client knows neither what it looks up nor what that is compared with.
    """

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._secret = secrets.token_bytes(32)
        self._found = {self._mark(bytes.fromhex(key.hash)): (name, key) for name, key in keys.items()}

    def find(self, presented: str) -> tuple[str, ApiKey] | None:
        """Name and rights of a key; None for one that is not known."""
        return self._found.get(self._mark(_digest(presented)))

    def _mark(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()


class KeySource:
    """The keys of a config and of its file, which is read again when it changes.

    own     keys of the config itself
    file    further ones; None: there is no file

    Raises ConfigError for a file that cannot be used at the start.
    """

    def __init__(self, own: Mapping[str, ApiKey], file: Path | None) -> None:
        self._own = own
        self._file = file
        self._version = self._stamp()
        self.keys = self._read()

    @property
    def is_on(self) -> bool:
        """True if clients need a key; an empty file means that none has one."""
        return bool(self._own) or self._file is not None

    async def watch(self, changed: Callable[[Mapping[str, ApiKey]], None]) -> None:
        """Calls `changed` with all keys each time that the file has others. A file that cannot be used is logged, and
        the keys stay those of before."""
        while self._file is not None:
            await asyncio.sleep(FILE_CHECK_S)
            try:
                keys = await asyncio.to_thread(self._changed_keys)
            except ConfigError as error:
                log.error("the API keys stay as they were: %s", error)
                continue
            if keys is not None:
                self.keys = keys
                changed(keys)
                log.info("%s is read again: %d API keys", self._file, len(keys))

    def _changed_keys(self) -> Mapping[str, ApiKey] | None:
        version = self._stamp()
        if version == self._version:
            return None
        self._version = version
        return self._read()

    def _read(self) -> Mapping[str, ApiKey]:
        if self._file is None:
            return self._own
        keys = load(KeyFile, read_yaml(self._file), str(self._file)).api_keys
        if twice := sorted(keys.keys() & self._own.keys()):
            raise ConfigError(f"{self._file}: api_keys {twice[0]}: is in the config too; name each key once")
        whole = {**keys, **self._own}
        refuse(key_faults(whole))
        return whole

    def _stamp(self) -> tuple[int, ...]:
        """Unlike before once the file has changed, or another one has its name."""
        if self._file is None:
            return ()
        try:
            stat = os.stat(self._file)
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
