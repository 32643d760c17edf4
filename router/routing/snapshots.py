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
from router.routing.candidates import Candidate, LinkCosts, Load
from router.routing.coming_hits import with_coming
from router.routing.ledger import Ledger
from router.routing.links import LinksOf, MeasuredLinks

NO_HIT = PrefixHit(0, 0, 0)
NO_LINKS: Mapping[str, LinkCosts] = {}


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
        self._doubtful: frozenset[str] = frozenset()

    def heartbeat(self, info: NodeInfo, status: NodeStatus, now_s: float) -> None:
        """Takes over what a node reports of itself; it may be new."""
        known = self._facts.get(info.name)
        if known is not None and known.id[1] != info.incarnation:
            self._ledger.forget(info.name)
        self._ledger.heartbeat(info, status, now_s)
        facts = self._facts[info.name] = _Facts(info, status)
        if known is None or known.device != info.device:
            self._link()
        else:
            facts.links = LinksOf(info.name, self._peers[info.device], facts.measured, self._doubtful)

    def keep(self, names: Collection[str]) -> None:
        """Forgets all other nodes."""
        if gone := self._facts.keys() - set(names):
            for name in gone:
                del self._facts[name]
                self._ledger.forget(name)
            self._link()

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
        live = [(name, self._facts[name], roles[name]) for name in sorted(roles) if name in self._facts]
        senders = [facts for _, facts, role in live if self._does(role, Role.PREFILL)]
        self._mind_doubtful_links(senders)
        served_kinds = {facts.device for facts in senders}
        usual = {} if all(facts.has_measured for _, facts, _ in live) else _usual_costs([facts for _, facts, _ in live])
        found = []
        for name, facts, role in live:
            if name in avoided:
                continue
            is_left_alone = facts.device not in served_kinds and _is_out_of_reach(facts.device, served_kinds)
            hit = hits.get(facts.id, NO_HIT)
            if name in coming:
                hit = with_coming(hit, coming[name])
            may_prefill = is_left_alone or self._does(role, Role.PREFILL)
            may_decode = self._does(role, Role.DECODE)
            if pins is not ANYWHERE:
                may_prefill, may_decode = may_prefill and pins.may_prefill(name), may_decode and pins.may_decode(name)
            load = self._ledger.load(name, now_s)
            links = NO_LINKS if is_left_alone else facts.links
            costs = facts.costs if facts.has_measured else usual.get(facts.device, facts.costs)
            found.append(facts.candidate(role, hit, load, costs, links, may_prefill=may_prefill, may_decode=may_decode))
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

    def _mind_doubtful_links(self, senders: Sequence[_Facts]) -> None:
        """A receiver that no sender reaches by the last link checks is tried all the same: they may be out of date."""
        failed = {receiver for facts in senders for receiver in facts.measured.failed}
        doubtful = frozenset(
            receiver for receiver in failed if not any(self._reaches(facts, receiver) for facts in senders)
        )
        if doubtful != self._doubtful:
            self._doubtful = doubtful
            self._link()

    def _reaches(self, facts: _Facts, receiver: str) -> bool:
        """True unless the last check failed, or there can be no link."""
        is_other = receiver != facts.id[0] and receiver in self._peers[facts.device]
        return is_other and receiver not in facts.measured.failed

    def _link(self) -> None:
        """Works out who can send to whom, after any change of that."""
        kinds = {facts.device for facts in self._facts.values()}
        self._peers = {
            kind: frozenset(name for name, facts in self._facts.items() if transfer_refusal(kind, facts.device) is None)
            for kind in kinds
        }
        for name, facts in self._facts.items():
            facts.links = LinksOf(name, self._peers[facts.device], facts.measured, self._doubtful)


def _usual_costs(nodes: Sequence[_Facts]) -> Mapping[str, StepCosts]:
    """The costs of the middle one of the nodes that have computed prompts, by device. They stand for those of a node
    that has not yet: by its defaults it would seem to be sixty times as fast as a tiny model's CPU."""
    measured: dict[str, list[StepCosts]] = {}
    for facts in nodes:
        if facts.has_measured:
            measured.setdefault(facts.device, []).append(facts.costs)
    return {device: sorted(costs, key=lambda each: each.token_s)[len(costs) // 2] for device, costs in measured.items()}


def _is_out_of_reach(device: str, kinds: Collection[str]) -> bool:
    return all(transfer_refusal(kind, device) is not None for kind in kinds)


class _Facts:
    """One node as its last heartbeat describes it, and the last candidate made of it: of most nodes in a large cluster
    nothing has changed since, and they hold nothing of the prompt."""

    def __init__(self, info: NodeInfo, status: NodeStatus) -> None:
        self.id: NodeId = (info.name, info.incarnation)
        self.device = info.device
        self.measured = MeasuredLinks.of(status.links)
        self.links: Mapping[str, LinkCosts] = NO_LINKS
        self._layout = info.layout
        self._chunk_tokens = info.max_step_tokens
        self.costs = status.costs
        self.has_measured = status.counters.get("computed_tokens", 0) > 0
        self._last: Candidate | None = None

    def candidate(
        self,
        role: Role,
        hit: PrefixHit,
        load: Load,
        costs: StepCosts,
        links: Mapping[str, LinkCosts],
        *,
        may_prefill: bool,
        may_decode: bool,
    ) -> Candidate:
        last = self._last
        if (
            last is not None
            and last.load is load
            and last.hit is hit
            and last.costs is costs
            and last.links is links
            and last.role is role
            and last.may_prefill is may_prefill
            and last.may_decode is may_decode
        ):
            return last
        layout = self._layout
        made = Candidate(
            name=self.id[0],
            role=role,
            hit=hit,
            load=load,
            costs=costs,
            chunk_tokens=self._chunk_tokens,
            block_size=layout.block_size,
            bytes_per_token=layout.block_bytes // layout.block_size,
            state_bytes=layout.state_bytes,
            links=links,
            may_prefill=may_prefill,
            may_decode=may_decode,
        )
        self._last = made
        return made
