"""Tools of unmodified clients against a running 1P1D cluster: the tiny model calls them, and repeats their results.

It was trained to: a sentence asks for one call, and what the call returned is the answer (tiny_models/tools.py).
"""

from collections.abc import Callable
from typing import Any

import agents
import anthropic
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MODEL = "headrace-tiny-qwen3.5"
QUESTION = "How is the weather at the harbour?"
NEXT_QUESTION = "How is the weather at the castle?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}]
REPORT = "The rain fell slowly by the river."
NEXT_REPORT = "The sun was warm on the hill."
REPORTS = {"harbour": REPORT, "castle": NEXT_REPORT}


@tool
def weather(place: str) -> str:
    """The weather at a place."""
    return REPORTS[place]


@pytest.fixture
def base_url(cluster_url: str) -> str:
    return f"{cluster_url}/v1"


def test_openai_calls_a_tool_answers_and_calls_again(base_url: str) -> None:
    client, messages = openai.OpenAI(base_url=base_url, api_key="none"), []

    def turn() -> Any:
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0).choices[0]
        messages.append(answer.message.to_dict())
        return answer

    for question, arguments, report in (
        (QUESTION, '{"place": "harbour"}', REPORT),
        (NEXT_QUESTION, '{"place": "castle"}', NEXT_REPORT),
    ):
        messages.append({"role": "user", "content": question})
        asked = turn()
        (call,) = asked.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", arguments)
        assert asked.finish_reason == "tool_calls"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": report})
        told = turn()
        assert (told.message.content, told.finish_reason) == (report, "stop")


def test_openai_in_node_js_runs_tools_whole_and_streamed(base_url: str, node_js: Callable[..., Any]) -> None:
    assert node_js("tools.mjs", base_url, MODEL, QUESTION, REPORT) == ["harbour", REPORT] * 2


def test_langchain_binds_tools(base_url: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, temperature=0).bind_tools([weather])
    first = chat.invoke([HumanMessage(QUESTION)])
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"place": "harbour"})
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.invoke([HumanMessage(QUESTION), first, result]).content == REPORT


def test_litellm_streams_a_call(base_url: str) -> None:
    to = {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none", "temperature": 0}
    chunks = litellm.completion(messages=MESSAGES, tools=TOOLS, stream=True, **to)
    answer = litellm.stream_chunk_builder(list(chunks))
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"place": "harbour"}'


def test_anthropic_uses_a_tool(cluster_url: str) -> None:
    client, messages = anthropic.Anthropic(base_url=cluster_url, api_key="none"), list(MESSAGES)
    tools = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]
    to = {"model": MODEL, "max_tokens": 200, "tools": tools, "extra_body": {"temperature": 0}}
    first = client.messages.create(messages=messages, **to)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, use.name, use.input) == ("tool_use", "weather", {"place": "harbour"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": REPORT}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=messages, **to)
    assert (last.content[0].text, last.stop_reason) == (REPORT, "end_turn")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_of_openai_with_a_tool_takes_turns(base_url: str, api: str) -> None:
    """Two questions in one conversation: call, answer, call, answer."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    asked: list[str] = []

    @agents.function_tool(name_override="weather")
    def look(place: str) -> str:
        """The weather at a place."""
        asked.append(place)
        return REPORTS[place]

    agents.set_tracing_disabled(True)
    model, settings = kind(model=MODEL, openai_client=client), agents.ModelSettings(temperature=0)
    agent = agents.Agent(name="guide", tools=[look], model=model, model_settings=settings)
    first = agents.Runner.run_sync(agent, QUESTION)
    assert (first.final_output, asked, len(first.raw_responses)) == (REPORT, ["harbour"], 2)
    more = [*first.to_input_list(), {"role": "user", "content": NEXT_QUESTION}]
    second = agents.Runner.run_sync(agent, more)
    assert (second.final_output, asked, len(second.raw_responses)) == (NEXT_REPORT, ["harbour", "castle"], 2)
