"""Limits of reading requests: JSON, chat templates and tokenizers. docs/security.md has them in one table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.config import at_least, positive, refuse

MIN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ParseLimits:
    """Limits of the processes that parse, render and tokenize requests beyond a few KiB.

    parse_processes       processes that read requests; started when they are first needed. Clients take turns, and
                          one client has all but one of them at a time: the last is for the others
    max_parsing           requests in these processes and waiting for them; beyond that the client with the most of them
                          gets 429
    parse_cpu_s           processor time for one request; beyond that its process ends, and the client gets 413
    parse_memory_bytes    memory for one request, beside the tokenizer's; beyond that the same
    parse_special_tokens  special tokens in messages and tools of a chat count as such; otherwise they are text, so that
                          no content can forge a turn. In a completion's prompt, the model's input itself, they count
    trust_request_chat_template  a chat may bring a template of its own (`chat_template`), a program that runs in these
                          processes, sandboxed and under their limits; otherwise such a chat gets 400
    """

    parse_processes: int = 3
    max_parsing: int = 320
    parse_cpu_s: float = 30.0
    parse_memory_bytes: int = 2 << 30
    parse_special_tokens: bool = False
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        refuse(self._parse_faults())

    def _parse_faults(self) -> Iterator[str]:
        yield from at_least(self, 1, "parse_processes", "max_parsing")
        yield from at_least(self, MIN_MEMORY_BYTES, "parse_memory_bytes")
        yield from positive(self, "parse_cpu_s")
