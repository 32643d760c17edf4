"""Counts every HTTP answer by route, status and error code, refusals included."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError

CountResponse = Callable[[str, int, str], None]
_ERROR_CODE = "headrace.error_code"


def note_error(scope: Scope, error: ApiError) -> None:
    """Remembers the error that a request is answered with, for its count."""
    scope[_ERROR_CODE] = error.code or ""


class CountedApp:
    """Passes requests on to `app`; calls `count(route, status, code)` when an answer begins.

    The route is its path as declared, so that paths which clients make up share one name; the code is that of an
    ApiError, empty for a success. An error after the first event of a stream counts as the success that it began as.
    """

    def __init__(self, app: ASGIApp, count: CountResponse) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._count(route, message["status"], scope.get(_ERROR_CODE, ""))
            await send(message)

        await self._app(scope, receive, counted)
