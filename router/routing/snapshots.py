"""Snapshots of the cluster for one request: what heartbeats and the cluster index say, as candidates. Pure.

A snapshot costs what has changed since the last one: candidates without hits are kept (`_Board`), and those of nodes
that have reported, or have other work by now, are made anew. What the prompt's hits are is added to a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.cache.types import PrefixKey
from headrace.step_costs import TIMED_STEPS, StepCosts
from headrace.wire.node_messages import NodeInfo, NodeStatus, Role, transfer_refusal
from router.cluster.cluster_index import ClusterIndex
from router.cluster.node_id import NodeId
from router.routing.candidates import NO_HIT, NO_LINKS, Candidate, LinkCosts
from router.routing.coming_hits import with_coming
from router.routing.fresh_costs import FreshCosts
from router.routing.ledger import Ledger
from router.routing.links import LinksOf, MeasuredLinks
from router.routing.reuse import NOTHING_KNOWN, CacheSize, MissRatioCurve

KNOWN_AFTER_STEPS = 32
"""A node that has timed fewer steps is taken to cost what others do: the fits to the first few vary by more than nodes
of one kind do."""


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

    def narrow(self, node: Candidate) -> Candidate:
        """The node, for what it may still do."""
        is_taken = self.is_reserved and node.name == self.decode
        may_prefill = node.may_prefill and self.prefill in (None, node.name) and not is_taken
        return node._replace(may_prefill=may_prefill, may_decode=node.may_decode and self.decode in (None, node.name))


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
        self._fresh_costs = FreshCosts()
        self._peers: dict[str, frozenset[str]] = {}
        self._doubtful: frozenset[str] = frozenset()
        self._board: _Board | None = None
        self._shortness: tuple[MissRatioCurve, Mapping[str, Role], bool] = (NOTHING_KNOWN, {}, False)
        self._reported: set[str] = set()  # since the board was made

    def heartbeat(self, info: NodeInfo, status: NodeStatus, now_s: float) -> None:
        """Takes over what a node reports of itself; it may be new."""
        known = self._facts.get(info.name)
        if known is not None and known.id[1] != info.incarnation:
            self._ledger.forget(info.name)
        self._ledger.heartbeat(info, status, now_s)
        costs = self._fresh_costs.heartbeat(info, status, now_s)
        facts = self._facts[info.name] = _Facts(info, status, costs, known)
        if known is None or known.id != facts.id or known.device != info.device:
            self._link()
            return
        is_same_link = facts.measured is known.measured
        facts.links = known.links if is_same_link else self._links_of(facts)
        self._reported.add(info.name)
        has_usual = self._board is not None and self._board.usual_costs
        if facts.measured.failed != known.measured.failed or facts.standing != known.standing or has_usual:
            self._board = None

    def keep(self, names: Collection[str]) -> None:
        """Forgets all other nodes."""
        if gone := self._facts.keys() - set(names):
            self._fresh_costs.keep(names)
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
    ) -> Sequence[Candidate]:
        """Candidates for a prompt of `num_tokens`, sorted by name.

        roles    of the nodes that may be given work, by name
        keys     the prompt's, for each block size in the index; empty: no hit is known
        avoided  nodes that have failed the request
        """
        board = self._current_board(roles, now_s)
        found = board.candidates.copy()
        if keys:
            hits = self._index.match(keys, max_tokens=num_tokens - 1)
            places = board.place_of_id
            found_at = {place: hit for node_id, hit in hits.items() if (place := places.get(node_id)) is not None}
            for name, coming_tokens in self._coming_tokens(keys, num_tokens - 1, now_s).items():
                if (place := board.place_of.get(name)) is not None:
                    found_at[place] = with_coming(found_at.get(place, NO_HIT), coming_tokens)
            for place, hit in found_at.items():
                found[place] = found[place].with_hit(hit)
        if avoided:
            found = [each for each in found if each.name not in avoided]
        return found if pins is ANYWHERE else [pins.narrow(each) for each in found]

    def caches_are_short(self, roles: Mapping[str, Role]) -> bool:
        """True if the nodes that are not meant for prompts have no room for the requests under way, or do not keep what
        comes back while all nodes together do.

        roles   of the nodes that may be given work, by name
        """
        if self.roles_are_fixed:
            return False
        curve = self._ledger.reuses.curve
        for_curve, for_roles, is_short = self._shortness
        if curve is not for_curve or roles != for_roles:
            sizes = {name: facts.cache_size for name in roles if (facts := self._facts.get(name)) is not None}
            others = [size for name, size in sizes.items() if roles[name] is not Role.PREFILL]
            is_short = len(others) < len(sizes) and curve.is_short(_sum(others), _sum(sizes.values()))
            self._shortness = curve, dict(roles), is_short
        return is_short

    def _current_board(self, roles: Mapping[str, Role], now_s: float) -> _Board:
        """The candidates of now, without hits."""
        board = self._board
        if board is None or board.roles != roles or board.roles_are_fixed != self.roles_are_fixed:
            board = self._board = self._new_board(roles)
        else:
            for name in self._reported:
                if (place := board.place_of.get(name)) is not None:
                    board.candidates[place] = self._without_load(board, name)
        self._reported.clear()
        candidates = board.candidates
        for place, load in enumerate(self._ledger.loads(board.place_of, now_s)):
            if candidates[place].load is not load:
                candidates[place] = candidates[place].with_load(load)
        return board

    def _new_board(self, roles: Mapping[str, Role]) -> _Board:
        names = [name for name in sorted(roles) if name in self._facts]
        live = [self._facts[name] for name in names]
        senders = [facts for facts in live if self._does(roles[facts.id[0]], Role.PREFILL)]
        self._mind_doubtful_links(senders)
        served = {facts.device for facts in senders}
        left_alone = {
            facts.device for facts in live if facts.device not in served and _is_out_of_reach(facts.device, served)
        }
        usual = {} if all(facts.is_known for facts in live) else _usual_costs(live)
        place_of_id = {facts.id: place for place, facts in enumerate(live)}
        place_of = {name: place for place, name in enumerate(names)}
        board = _Board(dict(roles), self.roles_are_fixed, place_of, place_of_id, left_alone, usual, [])
        board.candidates.extend(self._without_load(board, name) for name in names)
        return board

    def _without_load(self, board: _Board, name: str) -> Candidate:
        facts, role = self._facts[name], board.roles[name]
        is_left_alone = facts.device in board.left_alone
        layout = facts.layout
        return Candidate(
            name=name,
            role=role,
            costs=facts.costs if facts.is_known else board.usual_costs.get(facts.device, facts.costs),
            chunk_tokens=facts.chunk_tokens,
            block_size=layout.block_size,
            bytes_per_token=layout.block_bytes // layout.block_size,
            state_bytes=layout.state_bytes,
            links=NO_LINKS if is_left_alone else facts.links,
            may_prefill=is_left_alone or self._does(role, Role.PREFILL),
            may_decode=self._does(role, Role.DECODE),
        )

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
        for facts in self._facts.values():
            facts.links = self._links_of(facts)
        self._board = None

    def _links_of(self, facts: _Facts) -> LinksOf:
        return LinksOf(facts.id[0], self._peers[facts.device], facts.measured, self._doubtful)


def _usual_costs(nodes: Sequence[_Facts]) -> Mapping[str, StepCosts]:
    """The costs of the middle one of the nodes that are known, by device; of those that have timed any step where none
    is known. They stand for those of a node that is not: by its defaults it would seem to be sixty times as fast as a
    tiny model's CPU, and one that seems slow after a first step, for which the host was busy, would get no second."""
    usual: dict[str, StepCosts] = {}
    for device in {facts.device for facts in nodes}:
        timed = [facts for facts in nodes if facts.device == device and facts.timed_steps]
        costs = [facts.costs for facts in timed if facts.is_known] or [facts.costs for facts in timed]
        if costs:
            usual[device] = sorted(costs, key=lambda each: each.token_s)[(len(costs) - 1) // 2]
    return usual


def _sum(sizes: Collection[CacheSize]) -> CacheSize:
    return CacheSize(*map(sum, zip(*sizes, strict=True))) if sizes else CacheSize(0, 0, 0)


def _is_out_of_reach(device: str, kinds: Collection[str]) -> bool:
    return all(transfer_refusal(kind, device) is not None for kind in kinds)


@dataclass(frozen=True, slots=True)
class _Board:
    """All candidates as they were last, without hits.

    place_of      a node's place among them, by its name; in order
    left_alone    devices that no node which computes prompts can send to
    usual_costs   by device, for nodes that are not known by costs of their own
    """

    roles: Mapping[str, Role]
    roles_are_fixed: bool
    place_of: Mapping[str, int]
    place_of_id: Mapping[NodeId, int]
    left_alone: Collection[str]
    usual_costs: Mapping[str, StepCosts]
    candidates: list[Candidate]


class _Facts:
    """One node as its last heartbeat describes it, and its costs as far as they are fresh."""

    def __init__(self, info: NodeInfo, status: NodeStatus, costs: StepCosts, known: _Facts | None) -> None:
        self.id: NodeId = (info.name, info.incarnation)
        self.device = info.device
        self.reported_links = status.links
        # A tuple is compared link by link, be it the same one.
        is_old = known is not None and (status.links is known.reported_links or status.links == known.reported_links)
        self.measured: MeasuredLinks = (
            known.measured if known is not None and is_old else MeasuredLinks.of(status.links)
        )
        self.links: Mapping[str, LinkCosts] = NO_LINKS
        self.layout = info.layout
        self.chunk_tokens = info.max_step_tokens
        self.cache_size = CacheSize.of(info)
        self.costs = costs
        self.timed_steps = status.counters.get(TIMED_STEPS, 0)
        self.is_known = self.timed_steps >= KNOWN_AFTER_STEPS
        self.standing = (self.timed_steps > 0, self.is_known)
