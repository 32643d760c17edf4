"""An index of all nodes' caches: the prefix keys that each node has reported, to find how much of a prompt it holds.

A hint, by design: the index lags behind the nodes, so a decision based on it must stay correct when it is wrong. A key
is 32 bytes; a set of a million of them takes about 140 MB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from headrace.cache.conversion import BlockConversion
from headrace.cache.hits import PrefixHit
from headrace.cache.types import PrefixKey
from headrace.wire.cache_updates import CacheChange, CacheChanges, CacheSnapshotPart, CacheUpdate
from router.cluster.node_id import NodeId
from router.errors import MissedUpdates


class NodeIndex:
    """One node's cache as far as its updates have arrived.

    sequence       number of the last change applied; None before the first snapshot
    is_followed    False: the stream of updates broke and the index is stale
    """

    def __init__(self, incarnation: int, block_size: int) -> None:
        self.sequence: int | None = None
        self.is_followed = False
        self._incarnation = incarnation
        self._block_size = block_size
        self._blocks: set[PrefixKey] = set()
        self._checkpoints: set[PrefixKey] = set()
        self._arriving: tuple[set[PrefixKey], set[PrefixKey]] = (set(), set())

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

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
                for kind, key in changes:
                    self._change(kind, key)
                self.sequence += len(changes)

    def lost(self) -> None:
        """Marks the index as stale: the stream broke, and changes count again after a new snapshot."""
        self.is_followed = False
        self._arriving = (set(), set())

    @property
    def block_size(self) -> int:
        return self._block_size

    def match(self, keys: Sequence[PrefixKey], *, max_tokens: int, receiver_block_size: int = 1) -> PrefixHit:
        """The node's hit on the first `max_tokens` tokens of a prompt; `keys` are one chain.

        receiver_block_size   of the node that would fetch: only checkpoints that end a block there count
        """
        # A node's blocks are prefix-closed, so that bisection finds the longest match.
        limit = min(len(keys), max_tokens // self._block_size)
        num_blocks = bisect_left(keys, True, hi=limit, key=lambda key: key not in self._blocks)
        step = BlockConversion(self._block_size, receiver_block_size).boundary_tokens // self._block_size
        ends = range(num_blocks // step * step, 0, -step)
        state_tokens = next((i for i in ends if keys[i - 1] in self._checkpoints), 0) * self._block_size
        return PrefixHit(num_blocks * self._block_size, state_tokens, resumable_tokens=state_tokens)

    def _take_part(self, part: CacheSnapshotPart) -> None:
        blocks, checkpoints = self._arriving
        blocks.update(part.blocks)
        checkpoints.update(part.checkpoints)
        if part.is_last:
            self._blocks, self._checkpoints = blocks, checkpoints
            self._arriving = (set(), set())
            self.sequence, self.is_followed = part.sequence, True

    def _change(self, kind: CacheChange, key: PrefixKey) -> None:
        match kind:
            case CacheChange.BLOCK_STORED:
                self._blocks.add(key)
            case CacheChange.BLOCK_EVICTED:
                self._blocks.discard(key)
            case CacheChange.CHECKPOINT_STORED:
                self._checkpoints.add(key)
            case CacheChange.CHECKPOINT_EVICTED:
                self._checkpoints.discard(key)


class ClusterIndex:
    """Caches of all nodes that the router subscribes to."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, NodeIndex] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node_id: NodeId, block_size: int) -> NodeIndex:
        """Adds and returns an empty index for a node."""
        _, incarnation = node_id
        self._nodes[node_id] = NodeIndex(incarnation, block_size)
        return self._nodes[node_id]

    def get(self, node_id: NodeId) -> NodeIndex | None:
        return self._nodes.get(node_id)

    def remove(self, node_id: NodeId) -> None:
        del self._nodes[node_id]

    @property
    def block_sizes(self) -> set[int]:
        """Block sizes in use in the cluster."""
        return {node.block_size for node in self._nodes.values()}

    def match(
        self, keys: Mapping[int, Sequence[PrefixKey]], *, max_tokens: int, receiver_block_size: int = 1
    ) -> Mapping[NodeId, PrefixHit]:
        """Each node's hit on a prompt; `keys` are the prompt's for each of `block_sizes`."""
        return {
            node_id: node.match(keys[node.block_size], max_tokens=max_tokens, receiver_block_size=receiver_block_size)
            for node_id, node in self._nodes.items()
            if node.block_size in keys
        }
