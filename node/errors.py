"""Why a node does not serve a request, beyond what engine and transfer say."""

from __future__ import annotations


class NoRoom(Exception):
    """The cache had no room before the deadline: another node may, or this one later."""
