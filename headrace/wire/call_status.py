"""The `NodeError` that a caller gets for a gRPC call's status."""

from __future__ import annotations

import grpc

from headrace.wire.errors import (
    CRASH_DETAILS,
    STOP_DETAILS,
    CheckpointGone,
    DeadlineExceeded,
    InvalidLogits,
    NodeBusy,
    NodeCrashed,
    NodeError,
    NodeLost,
    NodeStopped,
    PrefixForgotten,
    RequestRefused,
    TransferBroken,
)

_ERRORS: dict[grpc.StatusCode, type[NodeError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: NodeBusy,
    grpc.StatusCode.ABORTED: TransferBroken,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.FAILED_PRECONDITION: RequestRefused,
    grpc.StatusCode.OUT_OF_RANGE: InvalidLogits,
    grpc.StatusCode.DATA_LOSS: PrefixForgotten,
    grpc.StatusCode.NOT_FOUND: CheckpointGone,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}

_TOO_LARGE = "message larger than max"  # in gRPC's details, whichever side measured it

# gRPC's messages for a connection that was accepted and then closed; they name no cause on the refused side.
_SIGNS_OF_TLS = ("Socket closed", "handshake failed", "Verification Check failed")


def node_error(node: str, code: grpc.StatusCode, details: str | None) -> NodeError:
    """Returns the `NodeError` for a call's status; an unknown code means that the node is lost."""
    details = details or f"the call is over: {code.name}"
    if _TOO_LARGE in details:  # under the status of a busy node, but every other node would refuse it, too
        return RequestRefused(node, f"{details}; shorten the prompt")
    if "failed to connect" in details and any(sign in details for sign in _SIGNS_OF_TLS):
        details += "; do both sides have tls, with certificates of one authority that name their hosts?"
    if is_crash(code, details):
        return NodeCrashed(node, details)
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(STOP_DETAILS):
        return NodeStopped(node, details)
    return _ERRORS.get(code, NodeLost)(node, details)


def is_crash(code: grpc.StatusCode, details: str | None) -> bool:
    """True if the node says that a step of this request's has failed."""
    return code is grpc.StatusCode.INTERNAL and details is not None and details.startswith(CRASH_DETAILS)
