"""Prompts that wait for a prefix which another one is computing, instead of computing the same again. Pure.

A *follower* holds nothing while it waits. Its *leader* leaves a checkpoint where both prompts part. The follower waits
until that checkpoint is there, or until the leader no longer computes, because it was aborted, preempted or paused, or
has failed.

A follower waits only if it will be done no later than if it computed everything itself. Both are counted in tokens of
prompts that the engine computes until then. It stops waiting when the engine has computed as many tokens as the prompt
would have needed alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.cache.types import PrefixKey

if TYPE_CHECKING:
    from headrace.engine.sequence import Sequence as EngineSequence


@dataclass(frozen=True)
class Following:
    """A wait for the first `num_tokens` tokens, which `leader` computes."""

    leader: EngineSequence
    num_tokens: int

    def is_over(self, running: Collection[EngineSequence]) -> bool:
        """True once the tokens are there, or nobody computes them any more."""
        leader = self.leader
        return leader not in running or leader.is_paused or leader.num_computed >= self.num_tokens


def shared_blocks(keys: Sequence[PrefixKey], others: Sequence[PrefixKey]) -> int:
    """Returns the number of leading blocks that two prompts have in common: a key names all that comes before it."""
    most = min(len(keys), len(others))
    if not most or keys[0] != others[0]:
        return 0
    return bisect_left(range(most), True, key=lambda i: keys[i] != others[i])


def best_following(sequence: EngineSequence, running: Iterable[EngineSequence], block_size: int) -> Following | None:
    """Returns the wait for the running sequence that computes most of what `sequence` begins with; of equals for the
    one that is farthest. None: nobody computes any of it.
    """
    limit = (sequence.prefill_length - 1) // block_size
    best, best_place = None, (0, 0)
    for other in running:
        if other.is_paused or not other.is_prefilling:
            continue
        shared = min(shared_blocks(sequence.keys, other.keys), limit, other.prefill_length // block_size) * block_size
        place = (shared, other.num_computed)
        if shared > other.num_computed and place > best_place:
            best, best_place = Following(other, shared), place
    return best


def cost_alone(
    sequence: EngineSequence,
    following: Following,
    cached_tokens: int,
    tokens_before: Callable[[EngineSequence, int], int],
) -> int | None:
    """Returns how many tokens of prompts are computed until the sequence is done if it does not wait.

    None: it should not wait, because the leader saves it nothing, or because it would be done later behind the leader.

    cached_tokens   leading tokens that it could begin with at once
    tokens_before   tokens of other prompts that are computed before a sequence has computed so many of its own
    """
    leader, rest = following.leader, sequence.prefill_length - following.num_tokens
    own, left = sequence.prefill_length - cached_tokens, following.num_tokens - leader.num_computed
    alone, after_leader = tokens_before(sequence, own) + own, tokens_before(leader, left) + left + rest
    return alone if own > rest and after_leader <= alone else None
