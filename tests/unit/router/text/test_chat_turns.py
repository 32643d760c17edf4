"""Turns as templates take them, and the prompts of a chat with tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.token_array import TokenArray
from router.errors import ApiError
from router.text.answer.answer_format import AnswerFormat
from router.text.answer.parts import CallArguments, CallStart, ContentText, ReasoningText
from router.text.chat_template import ChatTemplate
from router.text.chat_turns import turns_for
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import write_model_folder
from tests.support.router.tool_template import TOOL_TEMPLATE

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tool_tokens(tmp_path_factory: pytest.TempPathFactory) -> ModelTokens:
    return ModelTokens(write_model_folder(tmp_path_factory.mktemp("tools") / "m", chat_template=TOOL_TEMPLATE))


def turn(source: str, **message: Any) -> dict[str, Any]:
    (found,) = turns_for(ChatTemplate(source, {}), [message])
    return found


def asked(arguments: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def given(arguments: Any, source: str = "") -> Any:
    return turn(source, **asked(arguments))["tool_calls"][0]["function"]["arguments"]


def test_arguments_are_objects_where_they_parse():
    assert given('{"city": "Paris"}') == {"city": "Paris"}
    assert given({"city": "Paris"}) == {"city": "Paris"}
    assert given("") == {}
    assert given(None) == {}


@pytest.mark.parametrize("broken", ['{"city": "Pa', "[1]", "7", '{"a": ' * 100 + "1" + "}" * 100, "[" * 100_000])
def test_broken_arguments_stay_text_where_the_template_takes_text(broken: str):
    assert given(broken, "{{ arguments is string }}") == broken
    assert given(broken) == {}


def test_null_fields_are_absent_and_odd_calls_are_left_alone():
    assert turn("", role="user", content="a", name=None, tool_calls=None) == {"role": "user", "content": "a"}
    odd = [7, {"function": "f"}, {"function": {"name": "f", "arguments": 3}}]
    assert turn("", role="assistant", content="", tool_calls=odd)["tool_calls"] == odd


def test_a_developer_is_the_system_where_the_template_knows_none():
    assert turn("", role="developer", content="a")["role"] == "system"
    assert turn("{{ role == 'developer' }}", role="developer", content="a")["role"] == "developer"


def test_reasoning_has_both_of_its_names():
    for name in ("reasoning", "reasoning_content"):
        found = turn("", role="assistant", content="a", **{name: "b"})
        assert (found["reasoning"], found["reasoning_content"]) == ("b", "b")


def test_a_broken_call_does_not_end_the_chat(tool_tokens: ModelTokens):
    messages = [{"role": "user", "content": "?"}, asked('{"city": "Pa'), {"role": "tool", "content": "broken"}]
    assert tool_tokens.render_chat(messages, tools=TOOLS).tokens
    with pytest.raises(ApiError, match="unknown role"):
        tool_tokens.render_chat([{"role": "wizard", "content": "?"}])


@pytest.mark.parametrize("content", ["", "I look."])
def test_every_turn_of_a_chat_with_tools_continues_the_prompt_and_answer_before_it(
    tool_tokens: ModelTokens, content: str
):
    """So its blocks are found, and the message's end is a position where a checkpoint may lie."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
    before = TokenArray()
    for number in range(5):
        chat = tool_tokens.render_chat(messages, tools=TOOLS)
        assert chat.tokens[: len(before)] == before
        assert not before or max(chat.boundaries()) >= len(before)
        text = f"So {number}.\n</think>\n\n{content}" + ("\n\n" if content else "")
        text += f"<tool_call>\n<function=weather>\n<parameter=city>\nParis {number}\n</parameter>\n"
        text += "</function>\n</tool_call>"
        before = chat.tokens.followed_by(tool_tokens.encode(text + "<|im_end|>"))
        answer = _answer(tool_tokens, chat.opens_reasoning, text)
        assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"city": f"Paris {number}"}
        messages += [answer, {"role": "tool", "tool_call_id": f"id{number}", "content": "Rain."}]


def _answer(tokens: ModelTokens, opens_reasoning: bool, text: str) -> dict[str, Any]:
    parser = AnswerFormat(tokens.formats.calls, tokens.formats.reasoning, opens_reasoning).parser("id{}".format)
    assert parser is not None
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for part in [*parser.push(text), *parser.finish()]:
        match part:
            case ContentText(text):
                message["content"] += text
            case ReasoningText(text):
                message["reasoning_content"] += text
            case CallStart(_, call_id, name):
                message["tool_calls"].append({"id": call_id, "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                message["tool_calls"][index]["function"]["arguments"] += text
    return message


def test_special_tokens_that_mark_calls_are_seen(tmp_path: Path):
    folder = write_model_folder(tmp_path / "m")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"][1]["content"] = "<|tool_call|>"
    document["model"]["vocab"]["<|tool_call|>"] = document["model"]["vocab"].pop("<|im_start|>")
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokens = ModelTokens(folder, tool_format="granite")
    ids = tokens.encode("I loök.<|tool_call|>[]")
    seen = tokens.detokenizer(shown=AnswerFormat("granite").markers)
    assert "".join([*map(seen.push, ids), seen.finish()]) == "I loök.<|tool_call|>[]"
    cut = tokens.detokenizer(shown=["<|tool_call|>"])
    assert cut.push(tokens.encode("ö")[0]) == "" and cut.push(1) == "\ufffd<|tool_call|>"
    hidden = tokens.detokenizer()
    assert "".join([*map(hidden.push, ids), hidden.finish()]) == "I loök.[]"
