"""`headrace chat` with a router that fails."""

import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from deploy.api import ChatAnswer, RouterApi
from deploy.chat import converse
from deploy.errors import RequestFailed


class FailsOnce(RouterApi):
    """Its first answer is an error that looks like markup."""

    def __init__(self) -> None:
        self._answers: Iterator[ChatAnswer | RequestFailed] = iter(
            [RequestFailed("HTTP 400: [/x] is no [red]role[/red]"), ChatAnswer("Hello.", {}, 0.1, 0.2)]
        )
        self.asked: list[str] = []

    def chat(self, messages: Any, **_: Any) -> ChatAnswer:
        self.asked.append(messages[-1]["content"])
        answer = next(self._answers)
        if isinstance(answer, RequestFailed):
            raise answer
        return answer


def test_an_error_is_shown_as_it_stands_and_the_chat_goes_on(monkeypatch) -> None:
    lines = iter(["first", "second", "/quit"])
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    console, api = Console(file=io.StringIO(), width=120), FailsOnce()
    converse(api, console, max_tokens=4, temperature=0.0, report=False)
    assert "HTTP 400: [/x] is no [red]role[/red]" in console.file.getvalue()
    assert api.asked == ["first", "second"]
