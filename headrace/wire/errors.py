"""Errors of calls to a node, as one tree; gRPC status codes stay within headrace/wire/ and */service.py."""

from __future__ import annotations

CRASH_DETAILS = "the engine crashed: "
"""How the details of a status INTERNAL begin when they mean NodeCrashed: gRPC itself uses that code, too."""

STOP_DETAILS = "the engine ended: "
"""How the details of a status UNAVAILABLE begin when they mean NodeStopped."""


class NodeError(Exception):
    """A call to a node failed. `node` is its name or address."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(f"{node}: {message}")
        self.node = node
        self.message = message


class NodeLost(NodeError):
    """The node died or cannot be reached: another may do the work."""


class NodeCrashed(NodeLost):
    """The node died of the engine step that computed this request: the request may be what ended it."""


class NodeStopped(NodeLost):
    """The node was stopped, or died of a step without this request: the request did not end it."""


class NodeStalled(NodeLost):
    """The node is there, but does not go on with the call: its engine stands still, or it sends nothing."""


class NodeBusy(NodeError):
    """The node has no capacity for the request: another may, or the same one later."""


class TransferBroken(NodeError):
    """The prefill node's transfer failed: the decode node's reservation can be renewed."""


class RequestRefused(NodeError):
    """The node refuses this request, and so would every other one."""


class InvalidLogits(RequestRefused):
    """The model's logits for this request are NaN, and would be on any node: it has no next token."""


class PrefixForgotten(NodeError):
    """The request's logits were NaN, perhaps because of a cached prefix, which the node has forgotten: another attempt
    may succeed."""


class CheckpointGone(NodeError):
    """The node does not hold the requested checkpoint, or no longer does."""


class DeadlineExceeded(NodeError):
    """The request's own deadline has passed."""
