"""Rows of `gpu-engine`: the prefills and decode steps of shared/anchors/h200.md's first table, and shorter prefills."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

BLOCK_SIZE = 16
DECODE_STEPS = 32  # timed together


@dataclass(frozen=True)
class Work:
    """One row."""

    name: str
    num_sequences: int


@dataclass(frozen=True)
class Prefill(Work):
    """Prompts of `num_tokens`, the first `num_cached` of them cached, from start to first token.

    `num_checkpoints` states are kept in each prompt on the way. Steps are replays of graphs where a pass takes them,
    unless `is_launched` kernel by kernel.
    """

    num_tokens: int = 0
    num_checkpoints: int = 1
    num_cached: int = 0
    is_launched: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens that are computed."""
        return self.num_sequences * (self.num_tokens - self.num_cached)

    @property
    def num_blocks(self) -> int:
        """Blocks of each sequence."""
        return -(-self.num_tokens // BLOCK_SIZE)

    @property
    def num_slots(self) -> int:
        return self.num_sequences + self.num_checkpoints - 1


@dataclass(frozen=True)
class Decode(Work):
    """One step in which each sequence has `context` tokens behind it."""

    context: int = 256

    @property
    def num_rows(self) -> int:
        return self.num_sequences

    @property
    def num_blocks(self) -> int:
        return -(-(self.context + DECODE_STEPS) // BLOCK_SIZE)

    @property
    def num_slots(self) -> int:
        return self.num_sequences


def turns(num_sequences: int, num_new: int, num_cached: int, is_launched: bool) -> Prefill:
    """Later turns of chats, in one step: of each `num_new` tokens are computed."""
    times = "" if num_sequences == 1 else f"{num_sequences} x "
    name = f"prefill {times}{num_new:,} behind {num_cached:,}{', launched' if is_launched else ''}"
    return Prefill(name, num_sequences, num_cached + num_new, num_cached=num_cached, is_launched=is_launched)


WORKS: tuple[Prefill | Decode, ...] = (
    Prefill("prefill 2,048", 1, num_tokens=2048),
    Prefill("prefill 8,192", 1, num_tokens=8192),
    Prefill("prefill 32,768", 1, num_tokens=32768),
    Prefill("prefill 32,768, 64 checkpoints", 1, num_tokens=32768, num_checkpoints=64),
    Prefill("prefill 16 x 4,096", 16, num_tokens=4096),
    *(turns(1, num_new, 8176, launched) for num_new in (16, 64, 256, 512, 1024, 2048) for launched in (False, True)),
    *(turns(1, num_new, 16368, False) for num_new in (256, 512, 1024)),
    *(turns(4, 964, 14336, launched) for launched in (False, True)),
    Decode("decode batch 1", 1),
    Decode("decode batch 16", 16),
    Decode("decode batch 64", 64),
    Decode("decode batch 256", 256),
    Decode("decode batch 64, context 8,192", 64, context=8192),
)


def named(patterns: Sequence[str]) -> list[Prefill | Decode]:
    """Rows whose whole names match one of `patterns`, in which * stands for anything; all rows if there is none.

    Raises ValueError for a pattern that no name matches.
    """
    for pattern in patterns:
        if not any(fnmatchcase(work.name, pattern) for work in WORKS):
            raise ValueError(f"no row is named {pattern}: {'; '.join(work.name for work in WORKS)}")
    return [work for work in WORKS if not patterns or any(fnmatchcase(work.name, each) for each in patterns)]


def shrunk_works(works: Sequence[Prefill | Decode]) -> list[Prefill | Decode]:
    """Works of a thirty-second of the tokens, and of four sequences at most."""
    return [_shrunk_work(work) for work in works]


def _shrunk_work(work: Prefill | Decode) -> Prefill | Decode:
    num_sequences = min(work.num_sequences, 4)
    if isinstance(work, Decode):
        return replace(work, num_sequences=num_sequences, context=work.context // 32)
    num_cached = work.num_cached // 32 // BLOCK_SIZE * BLOCK_SIZE
    return replace(work, num_sequences=num_sequences, num_tokens=work.num_tokens // 32, num_cached=num_cached)
