"""The `openai` and `anthropic` packages against a real cluster: the contracts that also hold over fake nodes."""

from collections.abc import Iterator
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.support.cluster.cluster import Cluster
from tests.support.router.anthropic_contract import AnthropicContract
from tests.support.router.openai_contract import OpenAIContract
from tests.support.router.responses_contract import ResponsesContract


@pytest.fixture(scope="module")
def router_url(tiny_checkpoint, tmp_path_factory) -> Iterator[str]:
    with Cluster(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("clients")) as cluster:
        yield cluster.url


@pytest.fixture(scope="module")
def openai_url(router_url: str) -> str:
    return f"{router_url}/v1"


class TestOpenAIOverCluster(OpenAIContract):
    pass


class TestResponsesOverCluster(ResponsesContract):
    pass


class TestAnthropicOverCluster(AnthropicContract):
    pass


class Report(BaseModel):
    """A form that a model without any training fills in a few tokens."""

    is_known: bool
    month: Literal["May", "June"]


async def test_parsed_answers_keep_to_their_schema(router_url: str):
    async with openai.AsyncOpenAI(base_url=f"{router_url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        response = await client.responses.parse(model=model, input="June?", text_format=Report, max_output_tokens=200)
        assert response.output_parsed is not None
        assert response.output_parsed.month in ("May", "June")
    async with anthropic.AsyncAnthropic(base_url=router_url, api_key="none", max_retries=0) as claude:
        message = await claude.messages.parse(
            model=model, messages=[{"role": "user", "content": "June?"}], output_format=Report, max_tokens=200
        )
        assert message.parsed_output is not None
        assert message.parsed_output.month in ("May", "June")
