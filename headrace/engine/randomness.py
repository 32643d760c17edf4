"""One uniform number for each (seed, position): the same on any node, in any batch, after any migration."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection of 64 bits in which each input bit
    flips each output bit with probability close to one half."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 random bits. `position` is that of the token to be drawn, counted from the prompt's first."""
    return (_mix(_mix(seed) ^ position) >> 11) * 2.0**-53
