"""The prefix hit of a prompt as a value, and the policies that decide how much of it is reused."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Match lengths of one prompt for each cache group, in tokens; all are multiples of the block size.

    attention_tokens   leading tokens whose attention blocks are cached
    state_tokens       position of the deepest checkpoint of the prompt; an absent state is no match
    resumable_tokens   position from which a local prefill can resume: both groups are cached there
    """

    attention_tokens: int
    state_tokens: int
    resumable_tokens: int


class HitPolicy(Protocol):
    """How one kind of request uses its hit. Picked once, by where the request's state will come from."""

    @property
    def state_arrives(self) -> bool:
        """True if a transfer will write the state: the request waits for it before it computes anything."""
        ...

    @property
    def is_lookup(self) -> bool:
        """True if the claim counts in the statistics: each prompt counts once, however often it is admitted."""
        ...

    def reuse_limit(self, num_tokens: int) -> int:
        """The most tokens of a prompt of `num_tokens` that may be reused."""
        ...

    def reusable_tokens(self, hit: PrefixHit) -> int:
        """Tokens whose attention blocks are shared instead of computed or received."""
        ...

    def computed_tokens(self, hit: PrefixHit, num_tokens: int) -> int:
        """Tokens of a prompt of `num_tokens` that are computed here."""
        ...

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        """Position of the checkpoint that the request reads first; None: it reads none."""
        ...

    def branch_point(self, hit: PrefixHit) -> int | None:
        """The position where the prompt leaves a known prefix that has no checkpoint; its prefill should leave one."""
        ...


class ResumeLocally:
    """Local prefill: the state is cached here or computed here, so both groups limit what is reused.

    At least one token is always computed, because the first new token needs the logits of the last prompt
    token.
    """

    state_arrives = False
    is_lookup = True

    def reuse_limit(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0)

    def reusable_tokens(self, hit: PrefixHit) -> int:
        return hit.resumable_tokens

    def computed_tokens(self, hit: PrefixHit, num_tokens: int) -> int:
        return num_tokens - hit.resumable_tokens

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        return hit.resumable_tokens or None

    def branch_point(self, hit: PrefixHit) -> int | None:
        return hit.attention_tokens if hit.attention_tokens > hit.resumable_tokens else None


class ResumeAgain(ResumeLocally):
    """Local prefill of a request that was preempted: most of its hit is its own earlier work, and does not count."""

    is_lookup = False


class ReceiveState:
    """Remote prefill: the state arrives by transfer and overwrites the slot; only attention limits reuse."""

    state_arrives = True
    is_lookup = True

    def reuse_limit(self, num_tokens: int) -> int:
        return num_tokens

    def reusable_tokens(self, hit: PrefixHit) -> int:
        return hit.attention_tokens

    def computed_tokens(self, hit: PrefixHit, num_tokens: int) -> int:
        return 0

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        return None

    def branch_point(self, hit: PrefixHit) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class FetchState:
    """Local prefill from a state that arrives: another node sends its cache of the first `num_tokens` tokens.

    Local blocks are reused up to that position; the rest of the prompt is computed from the received state. The prompt
    counts as looked up when that state has come: if it does not, the request is admitted again, by `ResumeLocally`.

    num_tokens   a multiple of the block size, and less than the prompt: at least one token is always computed
    """

    num_tokens: int
    state_arrives = True
    is_lookup = False

    def reuse_limit(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0)

    def reusable_tokens(self, hit: PrefixHit) -> int:
        return min(hit.attention_tokens, self.num_tokens)

    def computed_tokens(self, hit: PrefixHit, num_tokens: int) -> int:
        return num_tokens - self.num_tokens

    def resume_tokens(self, hit: PrefixHit) -> int | None:
        return None

    def branch_point(self, hit: PrefixHit) -> int | None:
        return hit.attention_tokens if hit.attention_tokens > self.num_tokens else None
