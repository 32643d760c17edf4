"""The `openai` package against a router over fake nodes."""

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
