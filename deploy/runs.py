"""Run records: one small file for each running cluster of this user, by which other commands find it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from deploy.errors import AlreadyRunning, FolderUnusable, NotRunning
from deploy.processes import is_alive, started_at_s


@dataclass(frozen=True)
class RunRecord:
    """A cluster and the supervisor process that owns it.

    urls            the routers' HTTP addresses; none until the cluster is ready
    api_key         opens everything at its routers; empty: they need none
    started_s       start of the supervisor: a later process may have the same pid
    stop_timeout_s  time that its nodes get to end their requests: `headrace down` waits longer
    """

    name: str
    run_id: str
    pid: int
    started_s: float
    stop_timeout_s: float
    urls: tuple[str, ...] = ()
    ray_address: str | None = None
    api_key: str = field(default="", repr=False)

    def is_alive(self) -> bool:
        return is_alive(self.pid, self.started_s)


class RunDirectory:
    """The folder of run records and logs. Raises NotRunning, AlreadyRunning and FolderUnusable, with the remedy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls, environ: Mapping[str, str]) -> RunDirectory:
        """$XDG_STATE_HOME/headrace, by default ~/.local/state/headrace."""
        try:
            state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".local/state"
        except RuntimeError as error:  # a user without a home, in a container
            raise FolderUnusable(f"no folder for run records: {error} Set XDG_STATE_HOME") from None
        return cls(Path(state) / "headrace")

    def log_path(self, name: str) -> Path:
        """The log of a supervisor in the background, in a folder that is there by now."""
        with self._usable():
            self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{name}.log"

    def open_log(self, name: str) -> BinaryIO:
        """Opens that log, and empties it."""
        with self._usable():
            return self.log_path(name).open("wb")

    def find(self, name: str) -> RunRecord | None:
        """The record of this name, whether its supervisor still runs or was killed."""
        path = self._path(name)
        with self._usable():
            try:
                fields = json.loads(path.read_text())
                return RunRecord(**{**fields, "urls": tuple(fields["urls"])})
            except FileNotFoundError:
                return None
            except (ValueError, TypeError, KeyError):
                raise FolderUnusable(f"{path}: not a run record of this release; remove it") from None

    def running(self, name: str) -> RunRecord:
        record = self.find(name)
        if record is None or not record.is_alive():
            raise NotRunning(f"no cluster {name!r} runs here: start one with `headrace up`")
        return record

    def ready(self, name: str) -> RunRecord:
        """The record of a running cluster whose routers answer."""
        record = self.running(name)
        if not record.urls:
            raise NotRunning(f"cluster {name!r} is still starting: try again in a moment")
        return record

    def require_free(self, name: str) -> None:
        """Raises AlreadyRunning if a cluster of this name runs here."""
        existing = self.find(name)
        if existing is not None and existing.is_alive():
            raise AlreadyRunning(
                f"cluster {name!r} runs already (pid {existing.pid}): "
                f"`headrace down {name}`, or give this one another name"
            )

    @contextlib.contextmanager
    def claim(self, name: str, run_id: str, stop_timeout_s: float, api_key: str = "") -> Iterator[RunRecord]:
        """Holds the name for this process: a record that is not ready yet, removed at the end."""
        self.require_free(name)
        record = RunRecord(name, run_id, os.getpid(), started_at_s(os.getpid()), stop_timeout_s, api_key=api_key)
        self._write(record)
        try:
            yield record
        finally:
            self.remove(record)

    def publish(self, record: RunRecord, urls: Sequence[str], ray_address: str) -> None:
        """Marks the cluster as ready at `urls`."""
        self._write(replace(record, urls=tuple(urls), ray_address=ray_address))

    def remove(self, record: RunRecord) -> None:
        """Removes a run's record, unless another run has its name by now."""
        current = self.find(record.name)
        if current is not None and current.run_id == record.run_id:
            with self._usable():
                self._path(record.name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _write(self, record: RunRecord) -> None:
        with self._usable():
            self._folder.mkdir(parents=True, exist_ok=True)
            whole = self._folder / f".{record.name}.{record.pid}"
            whole.touch(mode=0o600)  # it may hold a key
            whole.write_text(json.dumps(asdict(record), indent=2))
            whole.replace(self._path(record.name))

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FolderUnusable(
                f"{error.filename or self._folder}: {error.strerror}; `headrace` keeps its run records there: make the "
                "folder writable, or set XDG_STATE_HOME to another one"
            ) from None
