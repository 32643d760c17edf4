"""Responses kept in memory for `previous_response_id`: bounded in number, bytes and time, in all and by tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from router.api.responses_api.limits import StoredLimits

ITEM_BYTES = 64  # of a bytes object, beside its contents
ENTRY_BYTES = 1024  # of a response, beside its contents


@dataclass(frozen=True)
class StoredResponse:
    """One response that has ended.

    resource   its JSON, as it was answered
    items      JSON of all items of its chat: its previous ones, its input, its output
    """

    resource: bytes
    items: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """About its memory. Items that several responses of a chat share count for each."""
        return ENTRY_BYTES + len(self.resource) + sum(ITEM_BYTES + len(item) for item in self.items)


@dataclass
class _Tenant:
    num_bytes: int = 0
    count: int = 0


class StoredResponses:
    """The responses of one router, by tenant and id. The least recently used go first: of a tenant that exceeds its
    part, its own; beyond the whole, anybody's. One that is larger than a tenant's part is not kept."""

    def __init__(self, limits: StoredLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, float]] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Keeps a response until `stored_response_s` after its last use; one with the same id is replaced."""
        self.delete(tenant, response_id)
        self._expire()
        limits, size = self._limits, response.num_bytes
        if size > min(limits.max_stored_bytes, limits.max_stored_bytes_per_client):
            return
        self._kept[tenant, response_id] = response, self._clock() + limits.stored_response_s
        part = self._tenants.setdefault(tenant, _Tenant())
        part.num_bytes += size
        part.count += 1
        self.num_bytes += size
        while (
            part.num_bytes > limits.max_stored_bytes_per_client or part.count > limits.max_stored_responses_per_client
        ):
            self._drop(next(key for key in self._kept if key[0] == tenant))
        while self.num_bytes > limits.max_stored_bytes or len(self._kept) > limits.max_stored_responses:
            self._drop(next(iter(self._kept)))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A tenant's response, which then stays longer; None for one that is not kept, or is another tenant's."""
        self._expire()
        key = (tenant, response_id)
        if key not in self._kept:
            return None
        response, _ = self._kept[key]
        self._kept[key] = response, self._clock() + self._limits.stored_response_s
        self._kept.move_to_end(key)
        return response

    def delete(self, tenant: str, response_id: str) -> bool:
        """Drops a tenant's response; False if it is not kept."""
        key = (tenant, response_id)
        if key not in self._kept:
            return False
        self._drop(key)
        return True

    def _expire(self) -> None:
        """Order of use is order of expiry: each use gives the same time."""
        while self._kept and next(iter(self._kept.values()))[1] <= self._clock():
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[str, str]) -> None:
        response, _ = self._kept.pop(key)
        part = self._tenants[key[0]]
        part.num_bytes -= response.num_bytes
        part.count -= 1
        self.num_bytes -= response.num_bytes
        if not part.count:
            del self._tenants[key[0]]
