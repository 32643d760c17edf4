"""The links of a node as its last heartbeat has measured them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from headrace.wire.node_messages import LinkStatus
from router.routing.candidates import LinkCosts

UNMEASURED = LinkCosts()


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """A node's report of its links.

    costs    by receiver; one that is missing is still to be measured
    failed   receivers whose last check failed, which may be out of date
    """

    costs: Mapping[str, LinkCosts] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, links: Collection[LinkStatus]) -> MeasuredLinks:
        measured = {
            link.peer: LinkCosts(link.round_trip_s, link.bytes_per_s)
            for link in links
            if link.error is None and link.round_trip_s is not None and link.bytes_per_s
        }
        return cls(measured, frozenset(link.peer for link in links if link.error is not None))


@dataclass(frozen=True, slots=True, eq=False)
class LinksOf(Mapping[str, LinkCosts]):
    """One node's links to the peers that it can send to, without a copy for each node: in a cluster of a thousand they
    would be a million.

    peers      all nodes on its kind of device, itself included
    doubtful   receivers that nobody reaches by the last checks: they are tried all the same
    """

    name: str
    peers: Collection[str]
    measured: MeasuredLinks
    doubtful: Collection[str] = ()

    def __contains__(self, receiver: object) -> bool:
        if receiver == self.name or receiver not in self.peers:
            return False
        return receiver not in self.measured.failed or receiver in self.doubtful

    def __getitem__(self, receiver: str) -> LinkCosts:
        if receiver not in self:
            raise KeyError(receiver)
        return self.measured.costs.get(receiver, UNMEASURED)

    def __iter__(self) -> Iterator[str]:
        return (peer for peer in self.peers if peer in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
