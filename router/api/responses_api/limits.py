"""Limits of stored responses. docs/security.md has them in one table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.config import at_least, positive, refuse


@dataclass(frozen=True, kw_only=True)
class StoredLimits:
    """Limits of the responses that a router keeps in memory for `previous_response_id`. A client is a key's tenant, or
    as `client_header` says.

    max_stored_responses             kept responses of all clients; beyond that the least recently used go; 0: none
    max_stored_responses_per_client  the same of one client
    max_stored_bytes                 their bytes, of all clients
    max_stored_bytes_per_client      the same of one client; a larger response is not kept
    stored_response_s                seconds after its last use for which a response is kept
    """

    max_stored_responses: int = 8192
    max_stored_responses_per_client: int = 1024
    max_stored_bytes: int = 256 << 20
    max_stored_bytes_per_client: int = 64 << 20
    stored_response_s: float = 3600.0

    def __post_init__(self) -> None:
        refuse(self._stored_faults())

    def _stored_faults(self) -> Iterator[str]:
        yield from at_least(self, 0, "max_stored_responses")
        yield from at_least(
            self, 1, "max_stored_responses_per_client", "max_stored_bytes", "max_stored_bytes_per_client"
        )
        yield from positive(self, "stored_response_s")
