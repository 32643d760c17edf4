"""The demo's conversation, and how it is printed."""

import io
import json
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from deploy.api import ChatAnswer
from deploy.demo import MODEL, DemoChat, ask_two_questions, demo_chat, order_a_call, shortened
from deploy.stop_request import StopRequest
from tiny_models.facts import is_held_out
from tiny_models.tools import TOOLS

ORDERED = {"thing": "green rope", "count": 35}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


class Api:
    """Answers every question alike, and keeps the messages."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def chat(self, messages, *, max_tokens, on_text, tools=()) -> ChatAnswer:
        self.asked.append([message["content"] for message in messages])
        if tools:
            return ChatAnswer("", USAGE, 0.01, 0.02, ((tools[-1]["function"]["name"], '{"count": 7}'),))
        on_text("It is [7].")
        return ChatAnswer("It is [7].", USAGE, 0.01, 0.02)


def printed(chat: DemoChat, part: Callable[..., None] = ask_two_questions) -> tuple[str, list[list[str]]]:
    api, output = Api(), io.StringIO()
    part(api, chat, StopRequest(), Console(file=output, width=100, markup=False))
    return output.getvalue(), api.asked


def chat_of(first: str) -> DemoChat:
    return replace(demo_chat(), first=first, second="two?", answer="Right.")


def test_the_second_question_comes_with_the_first_and_its_answer() -> None:
    text, asked = printed(chat_of("one?"))
    assert asked == [["one?"], ["one?", "It is [7].", "two?"]]
    assert text.count("model  It is [7].") == 2
    assert "The right answer to the last question: Right." in text


def test_a_long_message_is_shortened_without_markup_in_sight() -> None:
    text, _ = printed(chat_of("word " * 100))
    assert " ... 68 words ... " in " ".join(text.split())
    assert "[dim]" not in text and "[/dim]" not in text
    assert str(shortened("a short one")) == "a short one"


def test_the_chat_states_the_fact_that_its_second_turn_asks_for() -> None:
    chat = demo_chat()
    assert chat.answer in chat.first and chat.answer not in chat.second
    assert chat.first.endswith("?") and chat.second.endswith("?")


def test_the_call_is_shown_as_the_model_makes_it() -> None:
    text, asked = printed(demo_chat(), order_a_call)
    assert asked == [[demo_chat().order]]
    assert 'call   order {"count": 7}' in text


def test_the_order_is_one_that_training_never_made() -> None:
    chat = demo_chat()
    known = {tool.name: tool for tool in TOOLS}
    assert chat.order == known["order"].asked[0].format(**ORDERED)
    assert is_held_out("order", json.dumps(ORDERED))
    assert [tool.as_json(name) for name, tool in chat.tools.items()] == [known[name].as_json for name in chat.tools]


def test_the_model_is_beside_the_command() -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in MODEL.iterdir()}
