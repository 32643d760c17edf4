"""`headrace chat`: a conversation in the terminal, through the router's HTTP interface."""

from __future__ import annotations

from rich.console import Console

from deploy.api import Message, RouterApi
from deploy.errors import RequestFailed
from deploy.show import report_table

LEAVE = {"/quit", "/exit"}


def converse(api: RouterApi, console: Console, *, max_tokens: int, temperature: float, report: bool) -> None:
    """Reads questions and prints answers until the input ends or /quit; /new starts a new conversation."""
    console.print("/new starts over, /quit leaves", style="dim")
    messages: list[Message] = []
    while (line := _read_line(console)) is not None:
        if not line:
            continue
        if line == "/new":
            messages.clear()
            continue
        question: Message = {"role": "user", "content": line}
        try:
            answer = api.chat(
                [*messages, question], max_tokens=max_tokens, temperature=temperature, on_text=_writer(console)
            )
        except RequestFailed as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            continue
        console.print()
        if report:
            console.print(report_table(answer))
        messages += [question, {"role": "assistant", "content": answer.text}]


def _read_line(console: Console) -> str | None:
    """The next line, or None when the user leaves."""
    try:
        line = console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in LEAVE else line


def _writer(console: Console):
    """A function that prints a piece of an answer unchanged: no markup, no wrapping, no newline."""
    return lambda text: console.out(text, end="", highlight=False)
