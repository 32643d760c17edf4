"""Choices of one prompt: the first computes it, the others follow and share its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.wire.messages import Role
from router.cluster.fetch_sources import PromptKeys
from router.cluster.nodes import NodeEntry, NodeId
from router.requests.admission import AdmissionPermit


class Siblings:
    """Requests of one prompt, with what they share. A single request is its own only sibling.

    followers   permits of all but the first, held back until the prompt's blocks can be found on `nodes`
    keys        the prompt's keys, hashed once
    """

    def __init__(self, followers: Sequence[AdmissionPermit] = ()) -> None:
        self._followers = followers
        self.keys = PromptKeys()
        self.nodes: dict[Role, NodeId] = {}

    def prompt_computed(self, *nodes: NodeEntry | None) -> None:
        """Lets the followers run, on these nodes first. Also when the first has failed. Later calls change nothing."""
        followers, self._followers = self._followers, ()
        if followers:
            self.nodes = {node.info.role: node.id for node in nodes if node is not None}
        for permit in followers:
            permit.may_run()
