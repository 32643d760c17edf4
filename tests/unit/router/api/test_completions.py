"""The `openai` package against a router over fake nodes."""

import json

import pytest

from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import fake_cluster
from tests.support.router.openai_contract import OpenAIContract
from tests.unit.router.conftest import StartRouter

TEXT = "The code of June is 471. A channel carries the stream over stones."


class TestOverFakeNodes(OpenAIContract):
    @pytest.fixture
    async def openai_url(self, start_router: StartRouter, tokens: ModelTokens) -> str:
        running = await start_router(fake_cluster([*tokens.encode(TEXT), 0], eos_id=0, resumed_tokens=1))
        return f"{running.server.url}/v1"


async def test_an_echoed_prompt_is_no_part_of_the_usage_so_far(start_router: StartRouter, tokens: ModelTokens):
    running = await start_router(fake_cluster([*tokens.encode(TEXT), 0], eos_id=0))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "The code", "echo": True, "logprobs": 0, "stream": True, "stream_options": options}
    lines = (await running.http.post("/v1/completions", json=body)).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert chunks[0]["choices"][0]["text"].startswith("The code") and so_far[0] == 0
    assert so_far == sorted(so_far) and so_far[-2:] == [16, 16], "16 tokens by default, all of them in the last chunk"
