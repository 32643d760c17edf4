"""Ends of messages, and marked places inside them, in a rendered chat, from a handful of renderings."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from router.errors import ApiError, bad_request
from router.text.chat_template import Message

MAX_ENDS = 32
"""Messages whose ends are searched at a chat's beginning, and as many at its end.

Chats share early ends (system prompt, examples); the next turn, or another try at this one, continues at a late end.
The nodes' checkpoint policy finds a branch point between them by itself.
"""
QUESTION: Message = {"role": "user", "content": "?"}
"""Some templates refuse a chat without one."""
FEW_MESSAGES = 6  # each is rendered: marks would cost as much

Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class Mark:
    """A place that the client has marked: behind `content`, the beginning of the `count`-th message's content."""

    count: int
    content: str


def marked_places(render: Render, messages: Sequence[Message], text: str, marks: Sequence[Mark]) -> Iterator[int]:
    """Positions in `text`, the whole chat, up to which a chat that ends at each mark is rendered alike."""
    for mark in marks:
        cut = [*messages[: mark.count - 1], {**messages[mark.count - 1], "content": mark.content}]
        yield _num_common(_render_or_nothing(render, cut) or _render_or_nothing(render, [*cut, QUESTION]), text)


def message_ends(render: Render, messages: Sequence[Message], text: str) -> list[int]:
    """Positions in `text`, the whole chat, where its first and last `MAX_ENDS` messages end.

    A message ends where the chat up to it, rendered alone, ends; a template may render a shorter chat differently: such
    a message has no end that another prompt shares. Rendering that for every message is most of a long chat's cost.
    So one rendering with marks shows where contents end, and one shorter chat for each kind of message shows the text
    that follows a content; other messages of that kind end with the same text after theirs. Messages without a mark,
    and all of a kind whose first one has no end, are rendered each.
    Some templates refuse a chat without a question, so the system prompt is also tried with another question.
    """
    counts = range(1, len(messages) + 1)
    searched = sorted({*counts[:MAX_ENDS], *counts[-MAX_ENDS:]})
    content_ends = _content_ends(render, messages, text) if len(searched) > FEW_MESSAGES else {}
    tails: dict[tuple[str, ...], str] = {}
    ends: list[int] = []
    is_refused = False  # the first message alone
    for count in searched:
        kind, content_end = _kind(messages[count - 1]), content_ends.get(count)
        tail = tails.get(kind)
        if content_end is not None and tail is not None and text.startswith(tail, content_end):
            ends.append(content_end + len(tail))
            continue
        prefix = _render_or_nothing(render, messages[:count])
        if prefix and text.startswith(prefix):
            ends.append(len(prefix))
            if content_end is not None:
                tails[kind] = prefix[content_end:]
        is_refused = is_refused or (count == 1 and not prefix)
    if messages[0].get("role") == "system" and is_refused:
        probe = _render_or_nothing(render, [messages[0], QUESTION])
        ends.append(_num_common(probe, text))
    return sorted({*ends} - {0})


def _content_ends(render: Render, messages: Sequence[Message], text: str) -> dict[int, int]:
    """Number of a message -> position in `text` after its content; without messages that cannot be marked."""
    nonce = str(10**19 + secrets.randbelow(9 * 10**19))
    for marks_empty in (True, False):  # some templates render an empty content differently
        marked = [
            _marked(message, f"{nonce}{count:09d}", marks_empty=marks_empty)
            for count, message in enumerate(messages, 1)
        ]
        first, *others = _render_or_nothing(render, marked).split(nonce)
        texts = [first, *(other[9:] for other in others)]
        counts = [int(other[:9]) for other in others if other[:9].isdecimal()]
        if len(counts) == len({*counts}) == len(others) and text.startswith("".join(texts)):
            return dict(zip(counts, accumulate(map(len, texts)), strict=False))
    return {}


def _marked(message: Message, mark: str, *, marks_empty: bool) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    stripped = content.rstrip()  # templates trim: the mark comes before the spaces
    return {**message, "content": f"{stripped}{mark}{content[len(stripped) :]}"} if stripped or marks_empty else message


def _kind(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Messages of one kind are rendered alike: the role, and the fields that are set."""
    return (str(message.get("role")), *sorted(name for name, value in message.items() if value))


def _num_common(one: str, other: str) -> int:
    """Length of the common beginning."""
    for length, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return length
    return min(len(one), len(other))


def _render_or_nothing(render: Render, messages: Sequence[Message]) -> str:
    try:
        return render(messages)
    except ApiError:
        return ""


def rendered_into_last(render: Render, messages: Sequence[Message]) -> str:
    """The chat up to the end of its last message's content; raises ApiError (400) where a template hides that."""
    mark = str(10**29 + secrets.randbelow(9 * 10**29))
    *before, last = messages
    before_mark, *rest = render([*before, {**last, "content": f"{last['content']}{mark}"}]).split(mark)
    if len(rest) != 1:
        raise bad_request(
            "continue_final_message: the chat template does not show the last message once; render the chat yourself "
            "and use /v1/completions",
            "continue_final_message",
        )
    return before_mark
