"""An index of all nodes' caches: the prefix keys that each node has reported, to find how much of a prompt it holds.

A hint, by design: the index lags behind the nodes, so a decision based on it must stay correct when it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from headrace.cache.conversion import BlockConversion
from headrace.cache.hits import PrefixHit
from headrace.cache.types import PrefixKey
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart, CacheUpdate
from router.cluster.key_holders import CacheTable, Mask, bits_of
from router.cluster.node_id import NodeId
from router.errors import MissedUpdates

NO_HIT = PrefixHit(0, 0, 0)


class NodeIndex:
    """One node's cache as far as its updates have arrived: its bit in a table that all nodes share.

    sequence       number of the last change applied; None before the first snapshot
    is_followed    False: the stream of updates broke and the index is stale
    bit            of its keys; another one with each snapshot
    """

    def __init__(self, incarnation: int, block_size: int, table: CacheTable | None = None) -> None:
        self.sequence: int | None = None
        self.is_followed = False
        self.block_size = block_size
        self.num_blocks = self.num_checkpoints = 0
        self._incarnation = incarnation
        self._table = table or CacheTable()
        self.bit = self._table.new_bit()
        self._arriving: _Arriving | None = None

    def apply(self, update: CacheUpdate) -> None:
        """Applies an update; a snapshot takes effect with its last part.

        Raises MissedUpdates if an update before this one is missing: subscribe again.
        """
        if update.incarnation != self._incarnation:
            raise MissedUpdates(f"update of incarnation {update.incarnation}, not {self._incarnation}")
        match update:
            case CacheSnapshotPart():
                self._take_part(update)
            case CacheChanges(_, first_sequence, changes):
                if self.sequence is None or not self.is_followed or first_sequence != self.sequence + 1:
                    raise MissedUpdates(f"change {first_sequence} follows on {self.sequence}")
                for kind, of_kind in groupby(changes, key=itemgetter(0)):
                    self._change(kind, map(itemgetter(1), of_kind))
                self.sequence += len(changes)
        self._table.sweep()

    def lost(self) -> None:
        """Marks the index as stale: the stream broke, and changes count again after a new snapshot."""
        self.is_followed = False
        if self._arriving is not None:
            self._table.retire(self._arriving.bit)
            if self._arriving.bit == self.bit:
                self.bit = self._table.new_bit()
            self._arriving = None

    def remove(self) -> None:
        """Takes the node out of the table."""
        self.lost()
        self._table.retire(self.bit)

    def match(self, keys: Sequence[PrefixKey], *, max_tokens: int, receiver_block_size: int = 1) -> PrefixHit:
        """The node's hit on the first `max_tokens` tokens of a prompt; `keys` are one chain.

        receiver_block_size   of the node that would fetch: only checkpoints that end a block there count
        """
        nodes = 0 if self.sequence is None else self.bit
        found = _match(self._table, keys, nodes, self.block_size, max_tokens, receiver_block_size)
        return found.get(self.bit, NO_HIT)

    def _take_part(self, part: CacheSnapshotPart) -> None:
        if self._arriving is None:
            self._arriving = _Arriving(self.bit if self.sequence is None else self._table.new_bit())
        arriving, table = self._arriving, self._table
        arriving.num_blocks += table.blocks.add(part.blocks, arriving.bit)
        arriving.num_checkpoints += table.checkpoints.add(part.checkpoints, arriving.bit)
        if part.is_last:
            if self.bit != arriving.bit:
                table.retire(self.bit)
            self.bit = arriving.bit
            self.num_blocks, self.num_checkpoints = arriving.num_blocks, arriving.num_checkpoints
            self._arriving = None
            self.sequence, self.is_followed = part.sequence, True
            table.generation += 1

    def _change(self, kind: CacheChange, keys: Iterable[PrefixKey]) -> None:
        table = self._table
        match kind:
            case CacheChange.BLOCK_STORED:
                self.num_blocks += table.blocks.add(keys, self.bit)
            case CacheChange.BLOCK_EVICTED:
                self.num_blocks -= table.blocks.discard(keys, self.bit)
            case CacheChange.CHECKPOINT_STORED:
                self.num_checkpoints += table.checkpoints.add(keys, self.bit)
            case CacheChange.CHECKPOINT_EVICTED:
                self.num_checkpoints -= table.checkpoints.discard(keys, self.bit)


class _Arriving:
    """A snapshot of which parts are missing."""

    def __init__(self, bit: Mask) -> None:
        self.bit = bit
        self.num_blocks = self.num_checkpoints = 0


class ClusterIndex:
    """Caches of all nodes that the router subscribes to."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, NodeIndex] = {}
        self._table = CacheTable()
        self._bits: Mapping[int, _Bits] = {}
        self._bits_of = -1  # the table's generation

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node_id: NodeId, block_size: int) -> NodeIndex:
        """Adds and returns an empty index for a node."""
        _, incarnation = node_id
        self._nodes[node_id] = NodeIndex(incarnation, block_size, self._table)
        return self._nodes[node_id]

    def get(self, node_id: NodeId) -> NodeIndex | None:
        return self._nodes.get(node_id)

    def remove(self, node_id: NodeId) -> None:
        self._nodes.pop(node_id).remove()

    @property
    def block_sizes(self) -> set[int]:
        """Block sizes in use in the cluster."""
        return {node.block_size for node in self._nodes.values()}

    def match(
        self, keys: Mapping[int, Sequence[PrefixKey]], *, max_tokens: int, receiver_block_size: int = 1
    ) -> Mapping[NodeId, PrefixHit]:
        """The hit on a prompt of each node that has any; `keys` are the prompt's for each of `block_sizes`."""
        if self._bits_of != self._table.generation:
            self._bits_of, self._bits = self._table.generation, _bits_by_size(self._nodes)
        found: dict[NodeId, PrefixHit] = {}
        for size, (all_bits, node_ids) in self._bits.items():
            if size in keys:
                hits = _match(self._table, keys[size], all_bits, size, max_tokens, receiver_block_size)
                found |= {node_ids[bit]: hit for bit, hit in hits.items()}
        return found


class _Bits(NamedTuple):
    """The nodes of one block size whose caches are known: all their bits, and the node of each."""

    together: Mask
    nodes: Mapping[Mask, NodeId]


def _bits_by_size(nodes: Mapping[NodeId, NodeIndex]) -> Mapping[int, _Bits]:
    by_size: dict[int, dict[Mask, NodeId]] = {}
    for node_id, node in nodes.items():
        if node.sequence is not None:
            by_size.setdefault(node.block_size, {})[node.bit] = node_id
    return {size: _Bits(sum(of_size), of_size) for size, of_size in by_size.items()}


def _match(
    table: CacheTable,
    keys: Sequence[PrefixKey],
    nodes: Mask,
    block_size: int,
    max_tokens: int,
    receiver_block_size: int,
) -> Mapping[Mask, PrefixHit]:
    """The hits of those of these nodes that have any, by their bits."""
    limit = min(len(keys), max_tokens // block_size)
    depths = sorted(table.blocks.prefix_lengths(keys, limit, nodes), key=lambda each: -each[1])
    if not depths:
        return {}
    step = BlockConversion(block_size, receiver_block_size).boundary_tokens // block_size
    states = _deepest_states(table, keys, depths, step)
    hits: dict[Mask, PrefixHit] = {}
    for those, depth in depths:
        by_state: dict[int, PrefixHit] = {}  # one value for all nodes that hold the same
        for bit in bits_of(those):
            state = states.get(bit, 0)
            if (hit := by_state.get(state)) is None:
                hit = by_state[state] = PrefixHit(depth * block_size, state * block_size, state * block_size)
            hits[bit] = hit
    return hits


def _deepest_states(
    table: CacheTable, keys: Sequence[PrefixKey], depths: Sequence[tuple[Mask, int]], step: int
) -> Mapping[Mask, int]:
    """The position of each node's deepest checkpoint among the blocks that it holds, deepest blocks first.

    step   only multiples of it count
    """
    states: dict[Mask, int] = {}
    num_reached, position, unknown = 0, depths[0][1], 0
    while (position := table.checkpoints.deepest_held(keys, position - position % step)) > 0:
        while num_reached < len(depths) and depths[num_reached][1] >= position:
            unknown |= depths[num_reached][0]
            num_reached += 1
        if position % step == 0 and (found := table.checkpoints.holders(keys[position - 1]) & unknown):
            states.update(dict.fromkeys(bits_of(found), position))
            unknown &= ~found
        if unknown:
            position -= 1
        elif num_reached < len(depths):
            position = depths[num_reached][1]
        else:
            break
    return states
