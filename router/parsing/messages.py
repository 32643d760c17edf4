"""Messages between the router and its parsing workers: pickles behind their length, over a socket.

Parent and child are one program of one user, on one host. The first message is the `WorkerSettings`, answered with None
once the model is loaded; then each `ParseJob` gets its `ParseAnswer`.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker: its model, and what one job may take."""

    model_path: Path
    served_model_name: str
    parse_special_tokens: bool
    generation_config: bool
    cpu_s: float
    memory_bytes: int
    tool_format: str = "auto"
    reasoning_format: str = "auto"


@dataclass(frozen=True)
class ParseAnswer:
    """The answer to one job: what its reader returned, or the ApiError that it raised.

    is_spent   the worker holds much memory after it, and should be replaced
    """

    result: Any
    is_spent: bool


def frame(message: object) -> bytes:
    """A message as it travels."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data
