"""Why a node does not serve a request, beyond what engine and transfer say."""

from __future__ import annotations


class CheckpointGone(Exception):
    """What a prefill node wants to fetch was evicted, or never was here: it computes instead."""


class NoRoom(Exception):
    """The cache had no room before the deadline: another node may, or this one later."""
