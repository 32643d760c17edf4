"""Agents of two APIs over fake nodes that play a model's calls and reasoning: the real clients, three turns each."""

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import FakeCluster, fake_cluster
from tests.support.router.model_folder import STOP_ID, write_model_folder
from tests.support.router.tool_chats import ANSWER, CALL, playing
from tests.support.router.tool_template import TOOL_TEMPLATE
from tests.unit.router.conftest import Running, StartRouter

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
QUESTION = "How is the weather?"
INPUTS = [{"city": "Paris", "days": 3}, {"city": "Rome", "days": 3}]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "m"
    return write_model_folder(folder, chat_template=TOOL_TEMPLATE, added_tokens=("<think>", "</think>"))


@pytest.fixture(scope="module")
def tokens(model_folder: Path) -> ModelTokens:
    return ModelTokens(model_folder)


@pytest.fixture
def cluster(tokens: ModelTokens) -> FakeCluster:
    return playing(fake_cluster([], eos_id=STOP_ID), tokens, ANSWER)


@pytest.fixture
async def running(start_router: StartRouter, cluster: FakeCluster) -> Running:
    return await start_router(cluster)


def last_prompt(cluster: FakeCluster, tokens: ModelTokens) -> str:
    request = cluster.nodes["d0"].requests[-1]
    return tokens.decode(request.tokens[: request.num_prompt_tokens], skip_special_tokens=False)


def item_of(item: Any) -> dict[str, Any]:
    """An output item without its ids, and without what the package parses."""
    fields = {key: value for key, value in item.to_dict().items() if key not in ("id", "call_id", "parsed_arguments")}
    for part in fields.get("content", ()):
        part.pop("parsed", None)
    return fields


async def test_an_agent_of_the_messages_api_calls_tools_and_gets_its_answer(
    running: Running, cluster: FakeCluster, tokens: ModelTokens
):
    tools: Any = [{"name": "weather", "description": "", "input_schema": SCHEMA}]
    asked: Any = {
        "model": "m",
        "max_tokens": 400,
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 300},
    }
    url = running.server.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": QUESTION}]
        first = await client.messages.create(messages=messages, **asked)
        assert first.stop_reason == "tool_use"
        thinking, text, *calls = first.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert thinking.to_dict()["thinking"] == "I should look." and text.to_dict()["text"] == "Let me see."
        assert [call.to_dict()["input"] for call in calls] == INPUTS

        async with client.messages.stream(messages=messages, **asked) as stream:
            streamed = await stream.get_final_message()
        assert [block.to_dict() | {"id": 0} for block in streamed.content] == [
            block.to_dict() | {"id": 0} for block in first.content
        ]

        results = [{"type": "tool_result", "tool_use_id": call.to_dict()["id"], "content": "Sun."} for call in calls]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        playing(cluster, tokens, "Good.\n</think>\n\nSun in both.")
        second = await client.messages.create(messages=messages, **asked)
        prompt = last_prompt(cluster, tokens)
        assert f"<think>\nI should look.\n</think>\n\nLet me see.\n\n{CALL.format('Paris')}" in prompt
        assert prompt.count("<tool_response>\nSun.\n</tool_response>") == 2
        assert "max_tokens=300" in (cluster.nodes["d0"].requests[-1].sampling.grammar or "")
        assert (second.stop_reason, second.content[-1].to_dict()["text"]) == ("end_turn", "Sun in both.")

        messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Thanks."}]
        playing(cluster, tokens, "You are welcome.")
        third = await client.messages.create(messages=messages, **(asked | {"thinking": {"type": "disabled"}}))
        assert [block.to_dict() for block in third.content] == [{"type": "text", "text": "You are welcome."}]


async def test_an_agent_of_the_responses_api_calls_tools_and_gets_its_answer(
    running: Running, cluster: FakeCluster, tokens: ModelTokens
):
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    asked: Any = {"model": "m", "max_output_tokens": 400, "tools": tools}
    url = f"{running.server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        first = await client.responses.create(input=QUESTION, **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output[0].to_dict()["content"] == [{"type": "reasoning_text", "text": "I should look."}]
        assert first.output_text == "Let me see."
        calls = [item.to_dict() for item in first.output if item.type == "function_call"]
        assert [json.loads(call["arguments"]) for call in calls] == INPUTS  # type: ignore[arg-type]
        assert first.usage is not None and first.usage.output_tokens_details.reasoning_tokens > 0

        async with client.responses.stream(input=QUESTION, **asked) as stream:
            streamed = await stream.get_final_response()
        assert [item_of(item) for item in streamed.output] == [item_of(item) for item in first.output]

        outputs: Any = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "Sun."} for call in calls
        ]
        playing(cluster, tokens, "Good.\n</think>\n\nSun in both.")
        second = await client.responses.create(input=outputs, previous_response_id=first.id, **asked)
        prompt = last_prompt(cluster, tokens)
        assert f"<think>\nI should look.\n</think>\n\nLet me see.\n\n{CALL.format('Paris')}" in prompt
        assert prompt.count("<tool_response>\nSun.\n</tool_response>") == 2
        assert second.output_text == "Sun in both."

        playing(cluster, tokens, "You are welcome.")
        third = await client.responses.create(
            input="Thanks.", previous_response_id=second.id, reasoning={"effort": "none"}, **asked
        )
        assert [item.type for item in third.output] == ["message"]
        assert "Sun in both." in last_prompt(cluster, tokens)


async def test_the_cases_of_open_responses_hold(running: Running, cluster: FakeCluster, tokens: ModelTokens):
    """As openresponses/openresponses checks them (src/lib/compliance-tests.ts): status, item types, required fields."""
    required = {
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
        *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation"),
        *("parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs"),
        *("temperature", "reasoning", "user", "usage", "max_output_tokens", "max_tool_calls", "store", "background"),
        *("service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
    }

    def message(role: str, content: object) -> dict[str, object]:
        return {"type": "message", "role": role, "content": content}

    asks = message("user", "How is the weather?")
    tool = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA}
    cases: dict[str, tuple[dict[str, Any], str, str]] = {
        "basic": ({"input": [asks]}, "</think>\n\nFine.", "message"),
        "system prompt": ({"input": [message("system", "A pirate."), asks]}, "</think>\n\nAhoy.", "message"),
        "multi-turn": (
            {"input": [message("user", "I am Alice."), message("assistant", "Hello!"), asks]},
            "</think>\n\nAlice.",
            "message",
        ),
        "tool calling": ({"input": [asks], "tools": [tool]}, ANSWER, "function_call"),
    }
    for name, (body, answer, kind) in cases.items():
        playing(cluster, tokens, answer)
        for stream in (False, True):
            reply = await running.http.post("/v1/responses", json=body | {"model": "m", "stream": stream})
            if stream:
                *events, end, _ = reply.text.split("\n\n")
                assert end == "data: [DONE]"
                response = json.loads(events[-1].partition("data: ")[2])["response"]
            else:
                response = reply.json()
            assert required <= set(response), name
            assert response["status"] == "completed", name
            assert kind in [item["type"] for item in response["output"]], name
    image = {"type": "input_image", "image_url": "data:image/png;base64,aa"}
    refused = await running.http.post("/v1/responses", json={"input": [message("user", [image])]})
    assert refused.status_code == 400 and "input_image" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "choice", "is_held"),
    [
        ("/v1/messages", {"type": "any"}, True),
        ("/v1/messages", {"type": "tool", "name": "weather"}, True),
        ("/v1/messages", {"type": "auto"}, False),
        ("/v1/responses", "required", True),
        ("/v1/responses", {"type": "function", "name": "weather"}, True),
        ("/v1/responses", "auto", False),
    ],
)
async def test_a_required_call_is_held_by_a_grammar_in_both_apis(
    running: Running, cluster: FakeCluster, path: str, choice: Any, is_held: bool
):
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {
            "max_tokens": 400,
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
        },
        "/v1/responses": {
            "input": QUESTION,
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        },
    }
    reply = await running.http.post(path, json=bodies[path] | {"model": "m", "tool_choice": choice})
    assert reply.status_code == 200, reply.text
    assert (cluster.nodes["d0"].requests[-1].sampling.grammar is not None) == is_held
