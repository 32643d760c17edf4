"""The demo's conversation, and how it is printed."""

import io

from rich.console import Console

from deploy.api import ChatAnswer
from deploy.demo import MODEL, DemoChat, ask_two_questions, demo_chat, shortened
from deploy.stop_request import StopRequest

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


class Api:
    """Answers every question alike, and keeps the messages."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def chat(self, messages, *, max_tokens, on_text) -> ChatAnswer:
        self.asked.append([message["content"] for message in messages])
        on_text("It is [7].")
        return ChatAnswer("It is [7].", USAGE, 0.01, 0.02)


def printed(chat: DemoChat) -> tuple[str, list[list[str]]]:
    api, output = Api(), io.StringIO()
    ask_two_questions(api, chat, StopRequest(), Console(file=output, width=100, markup=False))  # type: ignore[arg-type]
    return output.getvalue(), api.asked


def test_the_second_question_comes_with_the_first_and_its_answer() -> None:
    text, asked = printed(DemoChat("one?", "two?", "Right."))
    assert asked == [["one?"], ["one?", "It is [7].", "two?"]]
    assert text.count("model  It is [7].") == 2
    assert "The right answer to the last question: Right." in text


def test_a_long_message_is_shortened_without_markup_in_sight() -> None:
    text, _ = printed(DemoChat("word " * 100, "two?", "Right."))
    assert " ... 68 words ... " in " ".join(text.split())
    assert "[dim]" not in text and "[/dim]" not in text
    assert str(shortened("a short one")) == "a short one"


def test_the_chat_states_the_fact_that_its_second_turn_asks_for() -> None:
    chat = demo_chat()
    assert chat.answer in chat.first and chat.answer not in chat.second
    assert chat.first.endswith("?") and chat.second.endswith("?")


def test_the_model_is_beside_the_command() -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in MODEL.iterdir()}
