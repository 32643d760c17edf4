"""What a prompt finds in the cache, as a value, and the policies that decide how much of it is reused."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Match lengths of one prompt, in tokens, for each cache group; all are multiples of the block size.

    attention_tokens   leading tokens whose attention blocks are cached
    state_tokens       position of the deepest checkpoint of the prompt; an absent state is no match
    resumable_tokens   position from which a local prefill can go on: both groups are cached there
    """

    attention_tokens: int
    state_tokens: int
    resumable_tokens: int


class HitPolicy(Protocol):
    """How one kind of request uses its hit. Picked once, by where the request's state will come from."""

    @property
    def state_arrives(self) -> bool:
        """Whether a transfer will write the state: the request waits for it before it computes anything."""
        ...

    @property
    def is_lookup(self) -> bool:
        """Whether what is found counts as a hit: each prompt is looked up once, however often it is admitted."""
        ...

    def reuse_limit(self, num_tokens: int) -> int:
        """The most tokens of a prompt of `num_tokens` that may be reused."""
        ...

    def reusable_tokens(self, hit: PrefixHit) -> int:
        """Tokens whose attention blocks are shared instead of computed or received."""
        ...

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        """Position of the checkpoint that the request reads first; None: it reads none."""
        ...

    def junction(self, hit: PrefixHit) -> int | None:
        """Where the prompt leaves a known prefix that has no checkpoint; its own prefill should leave one."""
        ...


class ResumeLocally:
    """Local prefill: the state is here or is computed here, so both groups limit what is reused.

    At least one token is always computed, because the first new token needs the logits of the last prompt
    token.
    """

    state_arrives = False
    is_lookup = True

    def reuse_limit(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0)

    def reusable_tokens(self, hit: PrefixHit) -> int:
        return hit.resumable_tokens

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        return hit.resumable_tokens or None

    def junction(self, hit: PrefixHit) -> int | None:
        return hit.attention_tokens if hit.attention_tokens > hit.resumable_tokens else None


class ResumeAgain(ResumeLocally):
    """A request goes on that was admitted before: preempted, or waiting for a state that did not come.

    What it finds now is mostly what it left itself.
    """

    is_lookup = False


class ReceiveState:
    """Remote prefill: the state arrives by transfer and overwrites the slot; only attention limits reuse."""

    state_arrives = True
    is_lookup = True

    def reuse_limit(self, num_tokens: int) -> int:
        return num_tokens

    def reusable_tokens(self, hit: PrefixHit) -> int:
        return hit.attention_tokens

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        return None

    def junction(self, hit: PrefixHit) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class FetchState:
    """Local prefill from a state that arrives: another node sends what it has of the first `num_tokens` tokens.

    What is here counts up to there, since the rest of the prompt is computed from that state on.

    num_tokens   a multiple of the block size, and less than the prompt: at least one token is always computed
    """

    num_tokens: int
    state_arrives = True
    is_lookup = True

    def reuse_limit(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0)

    def reusable_tokens(self, hit: PrefixHit) -> int:
        return min(hit.attention_tokens, self.num_tokens)

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        return None

    def junction(self, hit: PrefixHit) -> int | None:
        return hit.attention_tokens if hit.attention_tokens > self.num_tokens else None
