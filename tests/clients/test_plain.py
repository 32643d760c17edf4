"""Chats, streams and errors of unmodified clients against a running 1P1D cluster."""

from collections.abc import Callable
from typing import Any, Literal

import anthropic
import instructor
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

MODEL = "headrace-tiny-qwen3.5"
QUESTION = "The code of June is 471. What is the code of June?"
MESSAGES = [{"role": "user", "content": QUESTION}]


class Code(BaseModel):
    month: Literal["May", "June"]
    code: Literal[470, 471]


@pytest.fixture
def client(cluster_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster_url}/v1", api_key="none", max_retries=0)


def test_openai_chats_and_streams_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert "471" in (whole.choices[0].message.content or "")
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


def test_openai_parses_an_answer_that_a_schema_holds(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Code, temperature=0)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and parsed.month in ("May", "June")


def test_openai_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert "471" in answer.output_text
    again = client.responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True)
    assert any(event.type == "response.completed" for event in again)


def test_openai_in_node_js(cluster_url: str, node_js: Callable[..., Any]) -> None:
    answers = node_js("chat.mjs", f"{cluster_url}/v1", MODEL, QUESTION)
    texts = [answers[name] for name in ("whole", "streamed", "response", "responseStreamed")]
    assert "471" in texts[0] and texts == [texts[0]] * 4
    assert answers["parsed"]["month"] in ("May", "June") and answers["parsed"]["code"] == 471


def test_anthropic(cluster_url: str) -> None:
    client = anthropic.Anthropic(base_url=cluster_url, api_key="none", max_retries=0)
    asked = {"model": MODEL, "max_tokens": 40, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked)
    assert "471" in answer.content[0].text
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
    used = answer.usage
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_langchain(cluster_url: str) -> None:
    chat = ChatOpenAI(base_url=f"{cluster_url}/v1", api_key="none", model=MODEL, temperature=0)
    answer = chat.invoke(QUESTION)
    assert "471" in answer.content
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == answer.content
    assert chat.with_structured_output(Code).invoke(QUESTION).code == 471


def test_instructor(client: openai.OpenAI) -> None:
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert asked.create(model=MODEL, messages=MESSAGES, response_model=Code, temperature=0).code == 471


def test_litellm_and_its_name_for_a_prompt_that_is_too_long(cluster_url: str) -> None:
    to = {"model": f"openai/{MODEL}", "api_base": f"{cluster_url}/v1", "api_key": "none", "num_retries": 0}
    answer = litellm.completion(messages=MESSAGES, temperature=0, **to)
    assert "471" in answer.choices[0].message.content
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 20_000}], **to)
