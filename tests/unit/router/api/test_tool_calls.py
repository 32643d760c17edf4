"""Tool calls and reasoning as the `openai` package gets them, over fake nodes that play a model's tokens."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from router.api.chat_grammar import chat_grammar
from router.api.chat_schemas import ChatBody
from router.errors import ApiError
from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import FakeCluster, fake_cluster
from tests.support.router.model_folder import STOP_ID, write_model_folder
from tests.support.router.tool_chats import ANSWER, playing
from tests.support.router.tool_template import TOOL_TEMPLATE
from tests.unit.router.api.test_openapi import Document
from tests.unit.router.conftest import Running, StartRouter

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
QUESTION: Any = {"role": "user", "content": "How is the weather?"}
CHAT: Any = {"model": "m", "messages": [QUESTION], "tools": TOOLS}


def called(call: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message with this call."""
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("tools") / "m", chat_template=TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def tokens(model_folder: Path) -> ModelTokens:
    return ModelTokens(model_folder)


@pytest.fixture
def cluster(tokens: ModelTokens) -> FakeCluster:
    return playing(fake_cluster([], eos_id=STOP_ID), tokens, ANSWER)


@pytest.fixture
async def running(start_router: StartRouter, cluster: FakeCluster) -> Running:
    return await start_router(cluster)


@pytest.fixture
async def client(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{running.server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_calls_and_reasoning_come_apart_and_go_back_in_the_next_turn(
    client: openai.AsyncOpenAI, cluster: FakeCluster, tokens: ModelTokens
):
    first = await client.chat.completions.create(**CHAT)
    (choice,) = first.choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "Let me see.")
    assert message.model_extra == {"reasoning_content": "I should look."}
    assert message.tool_calls is not None
    functions = [call.function for call in message.tool_calls if call.type == "function"]
    assert [json.loads(each.arguments) for each in functions] == [
        {"city": "Paris", "days": 3},
        {"city": "Rome", "days": 3},
    ]
    ids = [call.id for call in message.tool_calls]
    assert len({*ids}) == 2 and all(each.startswith("call_") for each in ids)
    assert first.usage is not None and first.usage.completion_tokens_details is not None
    assert first.usage.completion_tokens_details.reasoning_tokens == len(tokens.encode("I should look.\n</think"))

    playing(cluster, tokens, "I know now.\n</think>\n\nIt rains.")
    results: Any = [{"role": "tool", "tool_call_id": each, "content": "Rain."} for each in ids]
    history: Any = [QUESTION, message.model_dump(), *results]
    second = await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It rains.")
    before, after = (node.requests[-1].tokens for node in cluster.nodes.values())
    assert before == after
    assert tokens.decode(before).count(ANSWER) == 1


async def test_a_stream_has_the_same_calls(client: openai.AsyncOpenAI):
    async with client.chat.completions.stream(**CHAT) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    whole = await client.chat.completions.create(**CHAT)
    assert final.choices[0].finish_reason == "tool_calls"
    streamed, sent = final.choices[0].message, whole.choices[0].message
    assert streamed.content == sent.content
    assert streamed.tool_calls is not None and sent.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in streamed.tool_calls] == [
        (call.function.name, call.function.arguments) for call in sent.tool_calls if call.type == "function"
    ]
    deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "I should look."
    kinds = [(delta.model_fields_set | {*(delta.model_extra or {})}) - {"role"} for delta in deltas]
    assert all(len(each) <= 1 for each in kinds), "clients look at one kind of text in a chunk"
    assert sum("tool_calls" in each for each in kinds) > 10, "arguments come as they are written"


async def test_tokens_are_those_of_the_whole_answer(running: Running, tokens: ModelTokens):
    body = {**CHAT, "return_token_ids": True, "logprobs": True, "stream": True}
    lines = (await running.http.post("/v1/chat/completions", json=body)).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert ids == [*tokens.encode(ANSWER), STOP_ID]


@pytest.mark.parametrize("fields", [{}, {"include_usage": True}], ids=str)
async def test_each_chunk_has_the_usage_so_far(running: Running, tokens: ModelTokens, fields: dict[str, bool]):
    options = {"stream_options": {"continuous_usage_stats": True, **fields}, "return_token_ids": True}
    reply = await running.http.post("/v1/chat/completions", json={**CHAT, **options, "stream": True, "n": 2})
    lines = reply.text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    num_tokens = [0, 0]
    for chunk in chunks[: -1 if fields else None]:
        (choice,) = chunk["choices"]
        num_tokens[choice["index"]] += len(choice.get("token_ids", ()))
        so_far, prompt = num_tokens[choice["index"]], chunks[0]["usage"]["prompt_tokens"]
        assert chunk["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": so_far, "total_tokens": prompt + so_far
        }  # fmt: skip
    assert num_tokens == [len(tokens.encode(ANSWER)) + 1] * 2
    if fields:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == sum(num_tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_as_documented(running: Running, stream: bool):
    api = Document((await running.http.get("/openapi.json")).json())
    options = {"stream_options": {"include_usage": True}} if stream else {}
    api.check(await running.http.post("/v1/chat/completions", json={**CHAT, **options, "stream": stream}))


async def test_one_call_is_enough_without_parallel_calls(client: openai.AsyncOpenAI, tokens: ModelTokens):
    answer = await client.chat.completions.create(**CHAT, parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 1
    assert answer.usage is not None and answer.usage.completion_tokens < len(tokens.encode(ANSWER))


async def test_without_tools_a_call_is_text(client: openai.AsyncOpenAI):
    for fields in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        answer = await client.chat.completions.create(**{**CHAT, **fields})
        message = answer.choices[0].message
        assert message.tool_calls is None
        assert message.content is not None and message.content.endswith("</tool_call>")
        assert message.model_extra == {"reasoning_content": "I should look."}


async def test_a_cut_call_has_finish_reason_length(client: openai.AsyncOpenAI, tokens: ModelTokens):
    cut = len(tokens.encode(ANSWER[: ANSWER.index("aris")]))
    answer = await client.chat.completions.create(**CHAT, max_tokens=cut)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "function" and call.function.arguments.startswith('{"city": "')


async def test_reasoning_is_turned_off_by_the_template(
    client: openai.AsyncOpenAI, cluster: FakeCluster, tokens: ModelTokens
):
    playing(cluster, tokens, "It rains.")
    off: Any = ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"})
    for fields in off:
        answer = await client.chat.completions.create(model="m", messages=[QUESTION], **fields)
        assert answer.choices[0].message.content == "It rains."
    only = await client.chat.completions.create(model="m", messages=[QUESTION])
    assert only.choices[0].message.content is None
    assert only.choices[0].message.model_extra == {"reasoning_content": "It rains."}
    with pytest.raises(openai.BadRequestError, match="reasoning_effort 'high'"):
        await client.chat.completions.create(model="m", messages=[QUESTION], reasoning_effort="high")


async def test_formats_may_be_turned_off(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster, tool_format="none", reasoning_format="none")
    answer = (await running.http.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": ANSWER}
    assert answer["finish_reason"] == "stop"


async def test_required_and_named_calls_are_held_by_a_grammar(
    running: Running, client: openai.AsyncOpenAI, cluster: FakeCluster
):
    other = {"type": "function", "function": {"name": "walk", "parameters": {"type": "object"}}}
    named: Any = {"type": "function", "function": {"name": "walk"}}
    for choice, held in (("required", ("weather", "walk")), (named, ("walk",))):
        await client.chat.completions.create(**{**CHAT, "tools": [*TOOLS, other]}, tool_choice=choice)
        grammar = cluster.nodes["d0"].requests[-1].sampling.grammar
        assert grammar is not None
        assert [name in grammar for name in ("weather", "walk")] == [name in held for name in ("weather", "walk")]
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    await client.chat.completions.create(**{**CHAT, "tools": strict})
    assert cluster.nodes["d0"].requests[-1].sampling.grammar is not None
    await client.chat.completions.create(**CHAT)
    assert cluster.nodes["d0"].requests[-1].sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice 'required' without tools: give"),
        ({"tools": [{"type": "function"}]}, "tools: {'type': 'function'} names no function: give"),
        ({"tools": [{"function": {"name": 7}}]}, "names no function: give"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools: parameters [] must be an object"),
        ({"messages": [called({"id": "a", "type": "function"})]}, "messages.0.tool_calls: {'id': 'a', 'type'"),
        ({"messages": [called({"function": {"name": None}})]}, "names no function: give"),
        ({"messages": [called({"function": {"name": "f", "arguments": [1]}})]}, "arguments [1] must be JSON"),
        ({"tool_choice": {"type": "function", "function": {"name": "walk"}}}, "there is no such tool"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice {'type': 'allowed_tools'}: must be"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "leave one out"),
        ({"tool_choice": "required", "bad_words": ["a"]}, "leave one out"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "a b"}}]}, "letters, digits"),
    ],
)
async def test_tools_and_calls_that_cannot_be_held_are_refused(running: Running, fields: dict[str, Any], message: str):
    reply = await running.http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


async def test_a_form_holds_after_the_reasoning(running: Running, cluster: FakeCluster):
    body = {"model": "m", "messages": [QUESTION], "response_format": {"type": "json_object"}}
    assert (await running.http.post("/v1/chat/completions", json=body)).status_code == 200
    grammar = cluster.nodes["d0"].requests[-1].sampling.grammar
    assert grammar is not None and "</think>" in grammar


def test_a_budget_of_thinking_bounds_the_reasoning_of_any_answer(tokens: ModelTokens, monkeypatch: pytest.MonkeyPatch):
    def grammar(**more: Any) -> str | None:
        body = ChatBody.model_validate({"model": "m", "messages": [QUESTION], "thinking_token_budget": 9, **more})
        return chat_grammar(body, tokens, True, body.grammar_text)

    monkeypatch.setitem(vars(tokens), "marker_ids", {"<think>": 384, "</think>": 7})
    for more in ({}, {"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}):
        assert "max_tokens=9" in (grammar(**more) or "")
    assert grammar(thinking_token_budget=None) is None
    with pytest.raises(ApiError, match="leave one out"):
        grammar(bad_words=["a"])


async def test_a_budget_of_thinking_needs_markers_that_are_tokens(running: Running):
    body = {"model": "m", "messages": [QUESTION], "thinking_token_budget": 9}
    refused = await running.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "no tokens that mark its reasoning" in refused.json()["error"]["message"]


async def test_a_budget_of_messages_is_refused_where_that_of_a_chat_is(running: Running, cluster: FakeCluster):
    body = {"model": "m", "messages": [QUESTION], "max_tokens": 30, "thinking": {"type": "enabled", "budget_tokens": 9}}
    refused = await running.http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert "no tokens that mark its reasoning" in refused.json()["error"]["message"]
    adaptive = await running.http.post("/v1/messages", json=body | {"thinking": {"type": "adaptive"}})
    assert adaptive.status_code == 200


async def test_a_choice_of_tools_needs_a_known_format(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(cluster, tool_format="none")
    reply = await running.http.post("/v1/chat/completions", json={**CHAT, "tool_choice": "required"})
    assert "set tool_format" in reply.json()["error"]["message"]
