"""Failed attempts of one request, and the suspicion that the request itself ends nodes. Pure values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from headrace.wire.errors import NodeBusy, NodeCrashed, NodeError, NodeLost, NodeStopped
from headrace.wire.node_messages import Role
from router.errors import ApiError, from_node, node_crashed

SUSPICIOUS_LOSSES = 2
"""Nodes in a row that may be lost while they compute one request: it is given to one more node, and to no third. Each
counts for itself: after the first, NodeSearch asks no node that may be dying with the first one's host. A node out of
reach for a moment was not lost: it is asked (`router/requests/inquest.py`) before a request ends for it."""
CRASHES = 3
"""Nodes that may crash with one request in all, whatever progress it makes between two of them."""


@dataclass(frozen=True)
class Failures:
    """Failures of one request since a decode node last sent a token of it.

    prefills, decodes   failed attempts at either role. A busy node is no failure
    suspicious_losses   nodes that crashed with the request in their step, or were lost without a word while they
                        computed it and had sent no token of it
    unproven            names of those of these nodes of which only the connection was lost: they may have outlived it
    crashes             nodes that crashed with it in their step, since its start
    """

    prefills: int = 0
    decodes: int = 0
    suspicious_losses: int = 0
    unproven: tuple[str, ...] = ()
    crashes: int = 0

    @property
    def is_suspect(self) -> bool:
        """True while the request may be what ended a node: the next one that it costs is its last."""
        return self.suspicious_losses > 0

    @property
    def await_judgement(self) -> bool:
        """True if the request ends, unless a node has outlived its loss."""
        return self.suspicious_losses >= SUSPICIOUS_LOSSES and bool(self.unproven)

    def after_progress(self) -> Failures:
        """A decode node computed the request and lived: earlier losses were not its doing, or need not be."""
        if self.prefills or self.decodes or self.suspicious_losses or self.unproven:
            return Failures(crashes=self.crashes)
        return self  # asked at each token: comparing with a new value took 2 % of the router's time for one

    def after_failure(self, role: Role, cause: NodeError, *, was_computing: bool) -> Failures:
        """`was_computing`: the node computed the request when it failed, and had sent no token of it."""
        if isinstance(cause, NodeBusy):
            return self
        is_crash = isinstance(cause, NodeCrashed)
        is_silent_loss = isinstance(cause, NodeLost) and not isinstance(cause, NodeStopped)
        is_suspicious = is_crash or (was_computing and is_silent_loss)
        is_unproven = is_suspicious and type(cause) is NodeLost
        return replace(
            self,
            prefills=self.prefills + (role is Role.PREFILL),
            decodes=self.decodes + (role is Role.DECODE),
            suspicious_losses=self.suspicious_losses + is_suspicious,
            unproven=(*self.unproven, cause.node) if is_unproven else self.unproven,
            crashes=self.crashes + is_crash,
        )

    def after_judgement(self, outlived: Collection[str]) -> Failures:
        """`outlived`: names of nodes which live, although the connection to them was lost."""
        taken_back = sum(node in outlived for node in self.unproven)
        return replace(self, suspicious_losses=self.suspicious_losses - taken_back, unproven=())

    def verdict(self, cause: NodeError, max_attempts: int) -> ApiError | None:
        """The error with which the request ends after `cause`, its last failure; None: it is tried again, or judged."""
        if self.await_judgement and self.crashes < CRASHES:
            return None
        if self.suspicious_losses >= SUSPICIOUS_LOSSES or self.crashes >= CRASHES:
            return node_crashed(cause)
        if max(self.prefills, self.decodes) >= max_attempts:
            return from_node(cause)
        return None
