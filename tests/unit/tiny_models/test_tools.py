"""Tool calls of the tiny models: templates, training documents, held-out questions and their scorer."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from router.text.answer.answer_format import ModelFormats
from router.text.chat_template import ChatTemplate
from tests.unit.tiny_models.test_shipped_models import CONVERSATION, FOLDERS
from tiny_models.chat import ASSISTANT, END, SYSTEM, render_chat
from tiny_models.facts import is_held_out
from tiny_models.tool_questions import ToolQuestion, held_out_tool_questions, is_right_call
from tiny_models.tools import FORMAT_OF_MODEL, TOOLS, CallFormat, call_text, chat_template, result_text, tools_text
from tiny_models.train.documents import Document, Loss
from tiny_models.train.rows import RowMaker
from tiny_models.train.tool_documents import NO_TOOL, call_document

FORMATS: list[CallFormat] = ["qwen3_coder", "hermes"]
either_format = pytest.mark.parametrize("call_format", FORMATS)
ASKED = {"role": "user", "content": "Ring Ada at 7."}
CALLS = [("ring", {"person": "Ada", "hour": 7}), ("find", {"person": "Bo"})]


def documents(call_format: CallFormat, count: int) -> list[Document]:
    rng = random.Random(1)
    return [call_document(rng, call_format, set()) for _ in range(count)]


def rendered(call_format: CallFormat, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"tools": [tool.as_json for tool in TOOLS], "add_generation_prompt": False} | options
    return ChatTemplate(chat_template(call_format), {}).render(messages, **options)


@either_format
def test_the_router_finds_the_format_by_the_template(call_format: CallFormat):
    assert ModelFormats.of(chat_template(call_format)) == ModelFormats(call_format, None)
    assert set(FORMAT_OF_MODEL.values()) == set(FORMATS)


@either_format
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_without_tools_chats_are_rendered_as_before(call_format: CallFormat, add_generation_prompt: bool):
    text = rendered(call_format, list(CONVERSATION), tools=None, add_generation_prompt=add_generation_prompt)
    assert text == render_chat(CONVERSATION, add_generation_prompt=add_generation_prompt)


@either_format
def test_the_template_renders_what_the_documents_train(call_format: CallFormat):
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in CALLS]
    messages = [
        {"role": "system", "content": "Be brief."},
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "It rang."},
        {"role": "tool", "content": "By the mill."},
    ]
    wanted = (
        f"{SYSTEM}Be brief.\n{tools_text(TOOLS)}{END}"
        + render_chat([ASKED])
        + f"{ASSISTANT}{call_text(call_format, *CALLS[0])}\n{call_text(call_format, *CALLS[1])}{END}"
        + result_text("It rang.")
        + result_text("By the mill.")
    )
    assert rendered(call_format, messages) == wanted
    assert rendered(call_format, messages, add_generation_prompt=True) == wanted + ASSISTANT
    assert rendered(call_format, messages[1:2]) == f"{SYSTEM}{tools_text(TOOLS)}{END}" + render_chat([ASKED])


@either_format
def test_every_history_with_calls_is_a_prefix_of_the_next(call_format: CallFormat):
    for question in held_out_tool_questions(9):
        texts = [
            rendered(call_format, list(question.messages[:length])) for length in range(1, len(question.messages) + 1)
        ]
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))


def test_training_and_held_out_questions_share_no_call():
    asked = {(each.name, json.dumps(each.arguments)) for each in held_out_tool_questions(200)}
    assert len(asked) > 150 and all(is_held_out(*each) for each in asked)
    text = "".join(segment.text for document in documents("hermes", 400) for segment in document)
    trained = {
        (call["name"], json.dumps(call["arguments"]))
        for call in map(json.loads, re.findall(r"<tool_call>\n(.*)\n</tool_call>", text))
    }
    assert len(trained) > 300 and not any(is_held_out(*each) for each in trained)


def test_the_same_seed_asks_the_same():
    assert held_out_tool_questions(5, seed=3) == held_out_tool_questions(5, seed=3)
    assert held_out_tool_questions(5, seed=3) != held_out_tool_questions(5, seed=4)


@either_format
def test_the_right_answer_is_right_and_others_are_not(call_format: CallFormat):
    for question in held_out_tool_questions(60):
        right = question.right_answer(call_format)
        assert is_right_call(question, right, call_format)
        assert is_right_call(question, f"{right}\n", call_format)
        assert not is_right_call(question, right + right, call_format)
        assert not is_right_call(question, right[:-30], call_format)
        assert not is_right_call(question, "", call_format)
        assert not is_right_call(question, NO_TOOL, call_format)
        other = call_text(call_format, "other", question.arguments)
        assert not is_right_call(question, other, call_format)
        (name, value), *_ = question.arguments.items()
        wrong = question.arguments | {name: value + 1 if isinstance(value, int) else f"{value}s"}  # type: ignore[operator]
        assert not is_right_call(question, call_text(call_format, question.name, wrong), call_format)


def test_questions_offer_the_tool_that_they_ask_for():
    questions = held_out_tool_questions(60)
    assert {len(each.messages) for each in questions} == {1, 2, 5}
    for each in questions:
        assert each.name in {tool.name for tool in each.tools} and 2 <= len(each.tools) <= 5
        assert all(str(value) in each.messages[-1]["content"] for value in each.arguments.values())


@either_format
def test_documents_count_what_the_model_says_and_are_some_of_each_kind(call_format: CallFormat):
    made = documents(call_format, 300)
    for document in made:
        said = {place + step for place, each in enumerate(document) if each.text == ASSISTANT for step in (1, 2)}
        assert {place for place, each in enumerate(document) if each.loss is Loss.ANSWER} == said
    texts = ["".join(segment.text for segment in document) for document in made]
    for part, least in {"<tool_call>": 200, "<tool_response>": 120, NO_TOOL: 20, '{"subject": ': 30}.items():
        assert sum(part in text for text in texts) >= least
    assert sum("</tool_call>\n<tool_call>" in text for text in texts) >= 10


@either_format
def test_segments_of_a_document_encode_apart_as_they_do_together(call_format: CallFormat):
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[0])
    for document in documents(call_format, 30):
        apart = [token for segment in document for token in tokenizer.encode(segment.text, add_special_tokens=False)]
        text = "".join(segment.text for segment in document)
        assert apart == tokenizer.encode(text, add_special_tokens=False)
        assert len(apart) < 1024


def test_rows_hold_their_share_of_calls():
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[0])
    books = ["The rain fell slowly on the hill. " * 200]

    def calls(share: float) -> int:
        maker = RowMaker(lambda text: tokenizer.encode(text, add_special_tokens=False), books, "hermes", share)
        rng = random.Random(0)
        return sum(tokenizer.decode(maker.row(rng, 0.5, 512)[0]).count("<tool_call>") for _ in range(12))

    assert calls(0.0) == 0 and calls(0.9) > 12


def test_a_prompt_is_the_templates(tmp_path: Path):
    (question,) = held_out_tool_questions(1)
    assert isinstance(question, ToolQuestion)
    prompt = question.prompt_text("hermes")
    assert prompt.startswith(f"{SYSTEM}Tools:\n{question.tools[0].name}(") and prompt.endswith(f"{END}{ASSISTANT}")
