"""Anthropic's messages as a chat, and its cache marks as boundaries."""

import json
from typing import Any

import pytest

from router.api.anthropic.chats import read_count, read_messages
from router.parsing.body_parser import ServedModel
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import write_model_folder

MARK = {"cache_control": {"type": "ephemeral"}}
SHOWING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{{ m.tool_call_id or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' if enable_thinking else '<no>' }}{% endif %}"
)


def served(tokens: ModelTokens) -> ServedModel:
    return ServedModel("little", tokens, 2048)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "little", "max_tokens": 5} | fields).encode()


@pytest.fixture(scope="module")
def showing(tmp_path_factory: pytest.TempPathFactory) -> ModelTokens:
    """Tokens of a model whose template shows all that it gets."""
    return ModelTokens(write_model_folder(tmp_path_factory.mktemp("showing") / "little", chat_template=SHOWING))


def prompt(tokens: ModelTokens, **fields: Any) -> str:
    (request,) = read_messages(body(**fields), served(tokens)).requests
    return tokens.decode(request.tokens, skip_special_tokens=False)


def test_blocks_become_the_turns_of_a_chat(showing: ModelTokens):
    text = prompt(
        showing,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "And kind."}],
        messages=[
            {"role": "user", "content": "June?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "One moment."},
                    {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"month": "June"}},
                    {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "471"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "noon"}]},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert "system\n|Be brief.\nAnd kind.<" in text
    assert 'assistant\nHm.|One moment.[look_up {"month": "June"}][now {}]<' in text
    assert "tool\n|471c1<" in text and "tool\n|noonc2<" in text
    assert "user\n|Well?<" in text
    assert text.endswith("assistant\n")


def test_an_answer_goes_on_with_the_assistants_last_message(showing: ModelTokens):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The code"}]
    assert prompt(showing, messages=messages).endswith("assistant\n|The code")


def test_thinking_is_off_unless_asked_for(showing: ModelTokens):
    assert prompt(showing, messages=[{"role": "user", "content": "a"}]).endswith("<no>")


def test_tools_reach_the_template_unless_none_may_be_called(showing: ModelTokens):
    tool = {"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object"}}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    assert '"name": "look_up"' in prompt(showing, **chat)
    assert "look_up" not in prompt(showing, **chat, tool_choice={"type": "none"})


def test_a_cache_mark_inside_a_message_is_a_boundary_that_another_prompt_shares(tokens: ModelTokens):
    def request(question: str, **last: Any) -> Any:
        blocks = [{"type": "text", "text": "The stream falls over stones. " * 5, **MARK}]
        content = [*blocks, {"type": "text", "text": question, **last}]
        data = body(messages=[{"role": "user", "content": content}])
        return read_messages(data, served(tokens)).requests[0]

    first, second = request("Where does it fall?", **MARK), request("seven birds")
    (shared, *_), (same, *_) = first.boundaries, second.boundaries
    assert shared == same
    assert first.tokens[:shared] == second.tokens[:shared]
    text = tokens.decode(first.tokens[:shared], skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nThe stream falls") and len(text) > 5 * 29
    without = read_messages(body(messages=[{"role": "user", "content": "a"}]), served(tokens)).requests[0]
    assert len(first.boundaries) == len(without.boundaries) + 1


def test_a_count_needs_no_max_tokens(tokens: ModelTokens):
    chat = {"model": "little", "messages": [{"role": "user", "content": "The code."}]}
    answer = json.loads(read_count(json.dumps(chat).encode(), served(tokens)))
    generation = read_messages(json.dumps(chat | {"max_tokens": 1}).encode(), served(tokens))
    assert answer == {"input_tokens": len(generation.requests[0].tokens)}
