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

from router.text.tokens import ModelTokens

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
    chat_template: Path | None = None
    trust_request_chat_template: bool = False

    def load_tokens(self, *, loads_literal: bool = True) -> ModelTokens:
        """The model's tokenizer and chat template, as in each process that parses; raises ModelFolderError."""
        return ModelTokens(
            self.model_path,
            parse_special_tokens=self.parse_special_tokens,
            generation_config=self.generation_config,
            loads_literal=loads_literal,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
            chat_template=self.chat_template,
            trust_request_chat_template=self.trust_request_chat_template,
        )


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
