"""Snapshots of the cluster for one request: what heartbeats and the cluster index say, as candidates. Pure.

What a heartbeat changes is worked out when it comes, so that a snapshot costs little for each node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.cache.hits import PrefixHit
from headrace.cache.types import PrefixKey
from headrace.step_costs import StepCosts
from headrace.wire.messages import NodeInfo, NodeStatus, Role, transfer_refusal
from router.cluster.cluster_index import ClusterIndex
from router.cluster.node_id import NodeId
from router.routing.candidates import Candidate
from router.routing.coming_hits import with_coming
from router.routing.ledger import Ledger
from router.routing.links import LinksOf, MeasuredLinks

NO_HIT = PrefixHit(0, 0, 0)


@dataclass(frozen=True)
class Pins:
    """The nodes that must serve a request, by name; None: any may.

    prefill      nobody else computes the prompt
    decode       nobody else generates
    is_reserved  the decode node has reserved for a transfer: it does not compute the prompt itself
    """

    prefill: str | None = None
    decode: str | None = None
    is_reserved: bool = False

    def may_prefill(self, name: str) -> bool:
        return self.prefill in (None, name) and not (self.is_reserved and name == self.decode)

    def may_decode(self, name: str) -> bool:
        return self.decode in (None, name)


ANYWHERE = Pins()


class Snapshots:
    """The facts about each node by its name, and snapshots of them.

    roles_are_fixed   a node does the work of its role alone; only a decode node that nobody can send to computes its
                      prompts
    """

    def __init__(self, index: ClusterIndex, ledger: Ledger, *, roles_are_fixed: bool = True) -> None:
        self._index = index
        self._ledger = ledger
        self.roles_are_fixed = roles_are_fixed
        self._facts: dict[str, _Facts] = {}
        self._peers: dict[str, frozenset[str]] = {}

    def heartbeat(self, info: NodeInfo, status: NodeStatus, now_s: float) -> None:
        """Takes over what a node reports of itself; it may be new."""
        known = self._facts.get(info.name)
        if known is not None and known.id[1] != info.incarnation:
            self._ledger.forget(info.name)
        self._ledger.heartbeat(info, status, now_s)
        self._facts[info.name] = _Facts.of(info, status)
        if known is None or known.device != info.device:
            self._find_peers()

    def keep(self, names: Collection[str]) -> None:
        """Forgets all other nodes."""
        if gone := self._facts.keys() - set(names):
            for name in gone:
                del self._facts[name]
                self._ledger.forget(name)
            self._find_peers()

    def take(
        self,
        roles: Mapping[str, Role],
        keys: Mapping[int, Sequence[PrefixKey]],
        num_tokens: int,
        now_s: float,
        *,
        avoided: Collection[str] = (),
        pins: Pins = ANYWHERE,
    ) -> tuple[Candidate, ...]:
        """Candidates for a prompt of `num_tokens`, sorted by name.

        roles    of the nodes that may be given work, by name
        keys     the prompt's, for each block size in the index; empty: no hit is known
        avoided  nodes that have failed the request
        """
        hits = self._index.match(keys, max_tokens=num_tokens - 1) if keys else {}
        coming = self._coming_tokens(keys, num_tokens - 1, now_s)
        live = {name: self._facts[name] for name in sorted(roles) if name in self._facts}
        senders = {name: facts for name, facts in live.items() if self._does(roles[name], Role.PREFILL)}
        doubtful = self._unreached(senders)
        served_kinds = {facts.device for facts in senders.values()}
        found = []
        for name, facts in live.items():
            if name in avoided:
                continue
            is_left_alone = all(transfer_refusal(kind, facts.device) for kind in served_kinds)
            peers = frozenset[str]() if is_left_alone else self._peers[facts.device]
            found.append(
                Candidate(
                    name=name,
                    role=roles[name],
                    hit=with_coming(hits.get(facts.id, NO_HIT), coming.get(name, 0)),
                    load=self._ledger.load(name, now_s),
                    costs=facts.costs,
                    chunk_tokens=facts.chunk_tokens,
                    block_size=facts.block_size,
                    bytes_per_token=facts.bytes_per_token,
                    state_bytes=facts.state_bytes,
                    links=LinksOf(name, peers, facts.links, doubtful),
                    may_prefill=(name in senders or is_left_alone) and pins.may_prefill(name),
                    may_decode=self._does(roles[name], Role.DECODE) and pins.may_decode(name),
                )
            )
        return tuple(found)

    def _coming_tokens(
        self, keys: Mapping[int, Sequence[PrefixKey]], max_tokens: int, now_s: float
    ) -> Mapping[str, int]:
        """The part of the prompt that each node will hold soon, by name."""
        return {
            name: position * block_size
            for block_size, of_size in keys.items()
            for name, position in self._ledger.coming.match(of_size, max_tokens // block_size, now_s).items()
        }

    def _does(self, role: Role, work: Role) -> bool:
        """The one place where fixed roles forbid anything."""
        return role.includes(work) or not self.roles_are_fixed

    def _unreached(self, senders: Mapping[str, _Facts]) -> frozenset[str]:
        """Receivers that no sender reaches by the last link checks, which may be out of date."""
        reports = [facts.links.failed for facts in senders.values() if facts.links.failed]
        return frozenset(
            receiver
            for receiver in frozenset().union(*reports)
            if all(
                receiver in facts.links.failed or receiver == name or receiver not in self._peers[facts.device]
                for name, facts in senders.items()
            )
        )

    def _find_peers(self) -> None:
        kinds = {facts.device for facts in self._facts.values()}
        self._peers = {
            kind: frozenset(name for name, facts in self._facts.items() if transfer_refusal(kind, facts.device) is None)
            for kind in kinds
        }


@dataclass(frozen=True, slots=True)
class _Facts:
    """One node as its last heartbeat describes it."""

    id: NodeId
    device: str
    chunk_tokens: int
    block_size: int
    bytes_per_token: int
    state_bytes: int
    costs: StepCosts
    links: MeasuredLinks

    @classmethod
    def of(cls, info: NodeInfo, status: NodeStatus) -> _Facts:
        layout = info.layout
        return cls(
            id=(info.name, info.incarnation),
            device=info.device,
            chunk_tokens=info.max_step_tokens,
            block_size=layout.block_size,
            bytes_per_token=layout.block_bytes // layout.block_size,
            state_bytes=layout.state_bytes,
            costs=status.costs,
            links=MeasuredLinks.of(status.links),
        )
