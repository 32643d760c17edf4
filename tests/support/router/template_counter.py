"""Counts renderings of a chat template: most of a chat's cost in the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from router.text.chat_template import ChatTemplate, Message


def count_renderings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of messages of each rendering from now on, in a list that grows."""
    counts: list[int] = []
    render = ChatTemplate.render

    def counted(template: ChatTemplate, messages: Sequence[Message], **options: Any) -> str:
        counts.append(len(messages))
        return render(template, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    return counts
