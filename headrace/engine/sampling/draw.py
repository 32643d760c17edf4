"""One token to sample, as a value: its settings, its position and its random number. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.cache.tails import BehindCheck
from headrace.request import Sampling

COLDEST = 1e-5  # at and below this temperature the best token is taken: dividing by less overflows


class Draw(NamedTuple):
    """One token to sample. A tuple, as steps make one for each sequence: a frozen dataclass takes three times as long.

    position     of the token to be drawn, counted from the prompt's first; nothing to one that is greedy
    banned       ids that may not be drawn: the stop tokens while `min_tokens` is not reached
    counts_row   its sequence's row in the device's `TokenCounts`; None: no penalties
    bias_row     its sequence's row in the device's `TokenBiases`; None: no biases
    banned_after  (p, id): the id may not be drawn if the token before it, draw `pending` of the last launch, is p
    mask_row     its row in the step's masks, which refuse what its grammar does not allow; None: no grammar
    behind       the check that it stands behind: `position` is further on by as many tokens as that accepts drafts
    """

    sampling: Sampling
    position: int
    banned: Sequence[int] = ()
    counts_row: int | None = None
    bias_row: int | None = None
    banned_after: Sequence[tuple[int, int]] = ()
    pending: int | None = None
    mask_row: int | None = None
    behind: BehindCheck | None = None

    def with_rows(self, counts_row: int | None, bias_row: int | None, mask_row: int | None) -> Draw:
        """The same draw with its rows. `_replace` takes twice as long, for each token."""
        return Draw(
            self.sampling,
            self.position,
            self.banned,
            counts_row,
            bias_row,
            self.banned_after,
            self.pending,
            mask_row,
            self.behind,
        )

    @property
    def is_greedy(self) -> bool:
        """True if the token is the best one of the unchanged logits."""
        sampling, _, banned, counts_row, bias_row, banned_after, _, mask_row, _ = self
        is_changed = bool(banned or banned_after) or mask_row is not None
        return not is_changed and counts_row is None and bias_row is None and sampling.temperature <= COLDEST


@dataclass(frozen=True)
class PromptRows:
    """Rows of a step that predict a prompt's own tokens: row `first_row` + i predicts targets[i].

    first_row   counted over the logit rows of all the step's inputs
    start       position in the prompt of targets[0]
    num_top     alternatives to report for each
    """

    first_row: int
    start: int
    targets: Sequence[int]
    num_top: int


_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1), 53 random bits: the same on any node, in any batch, after any migration.

    `position` is that of the token to be drawn, counted from the prompt's first.
    """
    return (_mix(_mix(seed) ^ position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64 bits in which each input bit
    flips each output bit with probability close to one half."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
