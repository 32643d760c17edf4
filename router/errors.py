"""The router's errors. Clients see an `ApiError`: its HTTP status and OpenAI's JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from headrace.wire.errors import DeadlineExceeded, InvalidLogits, NodeBusy, NodeError, RequestRefused
from headrace.wire.node_messages import Role

if TYPE_CHECKING:
    from router.cluster.lost_nodes import LostNode


class RouterError(Exception):
    """Root of the router's errors."""


class ModelFolderError(RouterError):
    """A file of the model's folder is missing or unreadable."""


class RegistrationRefused(RouterError):
    """A node does not fit this cluster; the message has the cause and the remedy."""


class LayoutRefused(RegistrationRefused):
    """A node's cache layout differs from the cluster's."""


class NameTaken(RegistrationRefused):
    """Another process registered under a node's name after it did."""


class MissedUpdates(RouterError):
    """A node's cache update does not follow the last one: updates between them were lost."""


class IllegalEvent(RouterError):
    """A request got an event that the protocol does not allow in its state."""


class ApiError(RouterError):
    """An HTTP error response.

    retry_after_s   the Retry-After header
    may_retry       False: a client should not send the same request again by itself
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        may_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.may_retry = may_retry

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response. OpenAI's clients repeat any 5xx twice unless `x-should-retry` forbids it."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers if self.may_retry else headers | {"x-should-retry": "false"}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles whole: bodies are parsed in other processes."""
        return ApiError.__new__, (ApiError, self.message), self.__dict__

    @property
    def type(self) -> str:
        """The kind of error in OpenAI's terms."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"

    def json(self) -> str:
        """The response's body, and the last event of a stream that breaks."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, allow_nan=False)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client must change its request."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def internal_error() -> ApiError:
    """500: a defect of the router, which logs it."""
    message = "the router failed; its log has the cause"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")


def invalid_logits(message: str) -> ApiError:
    """500: the model's logits for the request are no distribution, on any node."""
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="invalid_logits", may_retry=False)


def overloaded(message: str, *, retry_after_s: int = 1) -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="no_node_available", retry_after_s=retry_after_s)


def too_many_requests(message: str, *, code: str, retry_after_s: float) -> ApiError:
    """429: the line is too long. `retry_after_s`: an estimate, of which clients get at least a second."""
    wait_s = max(1, math.ceil(retry_after_s))
    message = f"{message}; try again in {wait_s} s"
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code=code, retry_after_s=wait_s)


def objectives_missed(
    first_token_s: float | None, token_gap_s: float | None, *, first_token_in_s: float | None, relief_s: float
) -> ApiError:
    """429: no node can serve the request within its objectives, by prediction; `relief_s` until one may."""
    wanted = [f"first_token_s {first_token_s:g}"] if first_token_s is not None else []
    wanted += [f"token_gap_s {token_gap_s:g}"] if token_gap_s is not None else []
    expected = "" if first_token_in_s is None else f"; its first token would come in {first_token_in_s:.2f} s"
    return too_many_requests(
        f"no node keeps the objectives {' and '.join(wanted)}{expected}",
        code="objectives_missed",
        retry_after_s=relief_s,
    )


def no_node(role: Role, awaited: Sequence[LostNode], now_s: float) -> ApiError:
    """503: no node does the work of this role. `awaited`: those that may come back, the next one first."""
    work = "generates answers" if role is Role.DECODE else "computes prompts"
    if not awaited:
        return overloaded(
            f"no node that {work} is registered, and none is known to come back; see /cluster", retry_after_s=2
        )
    node = awaited[0]
    wait_s = max(1, math.ceil(node.expected_at_s - now_s))
    message = (
        f"no node that {work} is there: {node.info.name} was lost {now_s - node.at_s:.0f} s ago, its last start took "
        f"{node.info.start_s:.0f} s; it is expected in {wait_s} s"
    )
    return overloaded(message, retry_after_s=wait_s)


def deadline_passed(timeout_s: float) -> ApiError:
    """504: the request took longer than the router allows."""
    message = f"the request did not finish within {timeout_s:g} s (request_timeout_s)"
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, code="deadline_exceeded")


NODE_CRASHED = "node_crashed"


def node_crashed(error: NodeError) -> ApiError:
    """500: the nodes that computed the request were lost, one after the other, and no other node is tried."""
    message = f"the nodes that computed this request were lost with it, so no other node gets it; last {error}"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code=NODE_CRASHED, may_retry=False)


def from_node(error: NodeError) -> ApiError:
    """The ApiError for a node's error that could not be repaired."""
    match error:
        case InvalidLogits():  # a subclass of the next
            return invalid_logits(str(error))
        case RequestRefused():
            return bad_request(f"refused by node {error}")
        case DeadlineExceeded():
            return ApiError(HTTPStatus.GATEWAY_TIMEOUT, str(error), code="deadline_exceeded")
        case NodeBusy():
            return overloaded(f"every node is busy, last {error}")
    return overloaded(f"no node could finish the request, last {error}")
