"""Choices of one prompt: the first computes it, the others follow and share its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from router.cluster.node_id import NodeId
from router.cluster.nodes import NodeEntry
from router.requests.admission import AdmissionPermit
from router.requests.prompt_keys import PromptKeys


class Siblings:
    """Requests of one prompt, with what they share. A single request is its own only sibling.

    followers   permits of all but the first, held back until the prompt's blocks can be found on `nodes`
    keys        the prompt's keys, hashed once
    nodes       those that computed the prompt and that generate; None: not known
    """

    def __init__(self, followers: Sequence[AdmissionPermit] = ()) -> None:
        self._followers = followers
        self.keys = PromptKeys()
        self.nodes: tuple[NodeId | None, NodeId | None] = (None, None)

    def prompt_computed(self, prefill: NodeEntry | None = None, decode: NodeEntry | None = None) -> None:
        """Lets the followers run, on these nodes first. Also when the first has failed. Later calls change nothing."""
        followers, self._followers = self._followers, ()
        if followers:
            self.nodes = (prefill.id if prefill else None, decode.id if decode else None)
        for permit in followers:
            permit.may_run()
