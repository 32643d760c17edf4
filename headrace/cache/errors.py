"""Errors of the cache. A full cache is no error: calls return `None` or `False`."""


class CacheError(Exception):
    """Root of every error that this package raises on purpose."""


class CorruptCache(CacheError):
    """An invariant that `check()` asserts does not hold: a bug in this package or in its caller's ids."""


class NotHeld(CacheError):
    """A block, slot or claim was used or given back by a caller that does not hold it."""


class MisplacedState(CacheError):
    """A state was offered under a key, or at a position, where it does not belong."""


class BadTokens(CacheError, ValueError):
    """Tokens that cannot be cached: fewer keys than computed blocks."""


class UnknownEvictionPolicy(CacheError, ValueError):
    """No eviction policy has the configured name; the message lists those that exist."""


class UnknownCheckpointPolicy(CacheError, ValueError):
    """No checkpoint policy has the configured name; the message lists those that exist."""
