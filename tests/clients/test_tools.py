"""Tools and structured answers of unmodified clients, against nodes that play a model which calls tools."""

from collections.abc import Callable
from typing import Any

import agents
import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "How is the weather in Paris and in Rome?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
MODEL = "scripted"
DOCUMENT = {"city": "Paris", "days": 3}
LAST = "Sun in Paris, rain in Rome."


class Trip(BaseModel):
    city: str
    days: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


@pytest.fixture
def base_url(scripted_url: str) -> str:
    return f"{scripted_url}/v1"


def test_openai_calls_a_tool_twice_and_then_answers(base_url: str) -> None:
    client, messages, cities = openai.OpenAI(base_url=base_url, api_key="none"), list(MESSAGES), []
    for _ in range(2):
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        (call,) = message.tool_calls or ()
        cities.append(call.function.arguments)
        messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    assert cities == ['{"city": "Paris"}', '{"city": "Rome"}']
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == (LAST, "stop")


def test_openai_in_node_js_runs_tools_whole_and_streamed(base_url: str, node_js: Callable[..., Any]) -> None:
    assert node_js("tools.mjs", base_url, MODEL, QUESTION) == ["Paris", "Rome", LAST] * 2


def test_openai_parses_a_structured_answer(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none")
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Trip)
    assert answer.choices[0].message.parsed == Trip(city="Paris", days=3)


def test_langchain_binds_tools(base_url: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=MODEL).bind_tools([weather])
    first = chat.invoke([HumanMessage(QUESTION)])
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    second = chat.invoke([HumanMessage(QUESTION), first, result])
    assert second.tool_calls[0]["args"] == {"city": "Rome"}


def test_langchain_answers_in_a_structure(base_url: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=MODEL)
    assert chat.with_structured_output(Trip).invoke(QUESTION) == Trip(city="Paris", days=3)


def test_instructor_answers_in_a_structure(base_url: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
    assert client.create(model=MODEL, messages=MESSAGES, response_model=Trip).model_dump() == DOCUMENT


def test_litellm_streams_a_call(base_url: str) -> None:
    to = {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none"}
    chunks = litellm.completion(messages=MESSAGES, tools=TOOLS, stream=True, **to)
    answer = litellm.stream_chunk_builder(list(chunks))
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_of_openai_takes_three_turns(base_url: str, api: str) -> None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    asked: list[str] = []

    @agents.function_tool(name_override="weather")
    def look(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return f"sun in {city}"

    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="guide", tools=[look], model=kind(model=MODEL, openai_client=client))
    result = agents.Runner.run_sync(agent, QUESTION)
    assert (result.final_output, asked) == (LAST, ["Paris", "Rome"])
    assert len(result.raw_responses) == 3
