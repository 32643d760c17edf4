"""Orders of `headrace` commands to the supervisor of a running cluster: one JSON line each way over a Unix socket.

The socket lies in the run's folder, which only this user can enter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from deploy.errors import DeployError, NotRunning, RequestFailed
from deploy.processes import run_folder
from headrace.config import ConfigError

log = logging.getLogger(__name__)

MAX_ORDER_BYTES = 1 << 16
ORDER_TIMEOUT_S = 5.0  # for the whole line: a command sends it at once
STOP_MARGIN_S = 120.0  # for a node's process to end, once it is drained
START_MARGIN_S = 3600.0  # for new nodes to start; the cluster's own `ray.start_timeout_s` ends that wait


class ControlSocket:
    """The supervisor's end."""

    def __init__(self, run_id: str) -> None:
        self._path = control_path(run_id)

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        self._socket.listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def serve(self, obey: Callable[[Mapping[str, Any]], Mapping[str, Any]], timeout_s: float) -> None:
        """Waits so long for a command, and answers it with what `obey` returns or with its DeployError."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(ORDER_TIMEOUT_S)
            answer: dict[str, Any]
            try:
                answer = {"done": obey(json.loads(_line(connection)))}
            except (DeployError, ConfigError) as error:
                answer = {"error": str(error)}
            except Exception as error:  # a defect, or a command that sends nonsense: the cluster goes on
                log.exception("an order failed")
                answer = {"error": f"the supervisor failed: {error!r}; see its log"}
            with contextlib.suppress(OSError):  # the command may be gone
                connection.sendall(json.dumps(answer).encode() + b"\n")


def order(run_id: str, wanted: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
    """Has the supervisor do something, and returns what it answers. Raises NotRunning, RequestFailed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(control_path(run_id)))
            connection.sendall(json.dumps(wanted).encode() + b"\n")
            answer = json.loads(_line(connection))
        except TimeoutError:
            raise RequestFailed(f"the supervisor has not answered within {timeout_s:g} s: see its log") from None
        except (OSError, ValueError) as error:
            raise NotRunning(f"the cluster's supervisor does not answer: {error}") from None
    if "error" in answer:
        raise RequestFailed(answer["error"])
    done: Mapping[str, Any] = answer["done"]
    return done


def control_path(run_id: str) -> Path:
    return run_folder(run_id) / "control"


def _line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.readline(MAX_ORDER_BYTES)
