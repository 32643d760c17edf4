"""Ends of messages, beside the definition: the chat up to each message, rendered alone."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from router.errors import ApiError
from router.text.chat_template import ChatTemplate, Message
from router.text.message_ends import MAX_ENDS, message_ends
from tests.support.router.model_folder import CHAT_TEMPLATE

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "trims": CHAT_TEMPLATE.replace("message.content", "message.content | trim"),
    "counts": "{{ messages | length }}" + CHAT_TEMPLATE,
    "upper": CHAT_TEMPLATE.replace("message.content", "message.content | upper"),
    "quotes": CHAT_TEMPLATE.replace("message.content", "message.content | tojson"),
    "cuts": CHAT_TEMPLATE.replace("message.content", "message.content[:9]"),
    "twice": CHAT_TEMPLATE.replace("message.content", "message.content ~ message.content"),
    "alternates": "{% for m in messages %}{{ m.content }}{{ '!' if loop.index is odd else '?' }}{% endfor %}",
    "drops_thoughts": (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>') | last }}"
        "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
    ),
    "wants_a_question": (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no question') }}{% endif %}" + CHAT_TEMPLATE
    ),
    "skips_empty": "{% for m in messages if m.content %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
CONTENTS = [
    "hi",
    " the code of June \n",
    "",
    "471.",
    "thinking</think>471",
    "a long answer of many words",
    "\n\n",
    "é 世界",
]


def chat_of(length: int) -> list[dict[str, Any]]:
    contents = itertools.cycle(CONTENTS)
    roles = itertools.chain(["system"], itertools.cycle(["user", "assistant"]))
    return [{"role": next(roles), "content": next(contents)} for _ in range(length)]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("length", [1, 2, 5, 20, 2 * MAX_ENDS + 7])
def test_ends_are_those_of_shorter_chats_rendered_alone(name: str, length: int):
    template, messages = ChatTemplate(TEMPLATES[name], {}), chat_of(length)
    num_renderings = 0

    def render(part: Sequence[Message]) -> str:
        nonlocal num_renderings
        num_renderings += 1
        return template.render(part, add_generation_prompt=False)

    def end_of(count: int) -> int:
        try:
            prefix = template.render(messages[:count], add_generation_prompt=False)
        except ApiError:
            return 0
        return len(prefix) if text.startswith(prefix) else 0

    text = (render(messages) if length > 1 or name != "wants_a_question" else "") + "<|im_start|>assistant\n"
    counts = range(1, length + 1)
    expected = {end_of(count) for count in {*counts[:MAX_ENDS], *counts[-MAX_ENDS:]}} - {0}
    found = set(message_ends(render, messages, text))
    assert found >= expected
    # More are possible: where a template rewrites a shorter chat, and after a system prompt that needs a question.
    if name not in ("drops_thoughts", "wants_a_question"):
        assert found == expected
    assert num_renderings <= 2 * MAX_ENDS + 5


def test_a_chat_of_empty_messages_is_rendered_a_handful_of_times():
    template, counts = ChatTemplate(CHAT_TEMPLATE, {}), []

    def render(part: Sequence[Message]) -> str:
        counts.append(len(part))
        return template.render(part, add_generation_prompt=False)

    messages = [{"role": role, "content": ""} for _ in range(100) for role in ("user", "assistant")]
    assert len(message_ends(render, messages, render(messages))) == 2 * MAX_ENDS
    assert counts == [200, 200, 1, 2]
