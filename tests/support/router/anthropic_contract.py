"""The contract of the `anthropic` package with a Headrace router, as a class of tests.

A test file derives from `AnthropicContract` and provides the fixture `router_url` of a running router: one file over
fake nodes, one over a real cluster. No test depends on the model's answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.support.patience import PATIENCE_S

QUESTION: Any = [{"role": "user", "content": "What is the code of June?"}]
GREEDY: Any = {"max_tokens": 12, "system": "Be brief.", "extra_body": {"temperature": 0}}


class AnthropicContract:
    @pytest.fixture
    async def client(self, router_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
        async with anthropic.AsyncAnthropic(
            base_url=router_url, api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            yield client

    @pytest.fixture
    async def model(self, client: anthropic.AsyncAnthropic) -> str:
        return (await client.models.list()).data[0].id

    async def test_a_streamed_message_is_the_same_message(self, client: anthropic.AsyncAnthropic, model: str):
        whole = await client.messages.create(model=model, messages=QUESTION, **GREEDY)
        assert (whole.type, whole.role, whole.model) == ("message", "assistant", model)
        assert whole.stop_reason in ("end_turn", "max_tokens")
        async with client.messages.stream(model=model, messages=QUESTION, **GREEDY) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
        assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]

    async def test_counted_tokens_are_those_of_the_usage(self, client: anthropic.AsyncAnthropic, model: str):
        blocks: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        chat: Any = {"model": model, "system": blocks, "messages": QUESTION}
        counted = await client.messages.count_tokens(**chat)
        usage = (await client.messages.create(max_tokens=1, **chat)).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
        assert usage.output_tokens == 1

    async def test_turns_of_tools_and_thinking_come_back(self, client: anthropic.AsyncAnthropic, model: str):
        turns: Any = [
            *QUESTION,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I must look it up.", "signature": "x"},
                    {"type": "text", "text": "One moment."},
                    {"type": "tool_use", "id": "call-1", "name": "look_up", "input": {"month": "June"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "471"}]},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ]
        answer = await client.messages.create(model=model, messages=turns, **GREEDY)
        first = await client.messages.count_tokens(model=model, messages=QUESTION, system="Be brief.")
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > first.input_tokens + 10

    async def test_errors_are_the_packages_own(self, client: anthropic.AsyncAnthropic, model: str):
        with pytest.raises(anthropic.NotFoundError, match="is not served here") as missing:
            await client.messages.create(model="other", messages=QUESTION, **GREEDY)
        body: Any = missing.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        image: Any = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}]
        with pytest.raises(anthropic.BadRequestError, match="image"):
            await client.messages.create(model=model, messages=[{"role": "user", "content": image}], **GREEDY)
        with pytest.raises(anthropic.BadRequestError, match="model's length"):
            await client.messages.create(model=model, messages=QUESTION, max_tokens=10**9)
