"""The contract of the `openai` package's Responses API with a Headrace router, as a class of tests.

A test file derives from `ResponsesContract` and provides the fixture `router_url` of a running router: one file over
fake nodes, one over a real cluster. No test depends on the model's answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.patience import PATIENCE_S

GREEDY: Any = {"temperature": 0, "max_output_tokens": 12}
TOOL: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Looks a code up.",
    "parameters": {"type": "object", "properties": {"month": {"type": "string"}}},
    "strict": False,
}


class ResponsesContract:
    @pytest.fixture
    async def client(self, router_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(
            base_url=f"{router_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            yield client

    @pytest.fixture
    async def model(self, client: openai.AsyncOpenAI) -> str:
        return (await client.models.list()).data[0].id

    async def test_a_streamed_response_is_the_same_response(self, client: openai.AsyncOpenAI, model: str):
        asked: Any = {"model": model, "input": "What is the code of June?", "instructions": "Be brief.", **GREEDY}
        whole = await client.responses.create(**asked)
        assert whole.status in ("completed", "incomplete")
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == f"response.{whole.status}"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last: Any = events[-1]
        streamed = last.response
        assert streamed.output_text == whole.output_text
        assert streamed.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]
        assert (streamed.instructions, streamed.max_output_tokens) == ("Be brief.", 12)

    async def test_a_response_continues_a_stored_one(self, client: openai.AsyncOpenAI, model: str):
        first = await client.responses.create(model=model, input="The code of June is 471.", **GREEDY)
        second = await client.responses.create(
            model=model, input="What is it?", previous_response_id=first.id, metadata={"turn": "2"}, **GREEDY
        )
        items: Any = [
            {"role": "user", "content": "The code of June is 471."},
            *(item.to_dict() for item in first.output),
            {"role": "user", "content": "What is it?"},
        ]
        stateless = await client.responses.create(model=model, input=items, store=False, **GREEDY)
        assert second.usage is not None and stateless.usage is not None
        assert second.usage.input_tokens == stateless.usage.input_tokens
        assert second.output_text == stateless.output_text
        assert second.previous_response_id == first.id
        assert (await client.responses.retrieve(second.id)).to_dict() == second.to_dict()
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(stateless.id)
        with pytest.raises(openai.BadRequestError) as gone:
            await client.responses.create(model=model, input="And now?", previous_response_id=first.id)
        assert gone.value.code == "previous_response_not_found"
        third = await client.responses.create(model=model, input="And?", previous_response_id=second.id, **GREEDY)
        assert third.usage is not None and third.usage.input_tokens > second.usage.input_tokens

    async def test_turns_of_tools_and_reasoning_come_back(self, client: openai.AsyncOpenAI, model: str):
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "What is the code of June?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"month": "June"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "471"},
        ]
        answer = await client.responses.create(model=model, input=items, **GREEDY)
        alone = await client.responses.create(model=model, input=items[:1], **GREEDY)
        assert answer.usage is not None and alone.usage is not None
        assert answer.usage.input_tokens > alone.usage.input_tokens

    async def test_errors_are_the_packages_own(self, client: openai.AsyncOpenAI, model: str):
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            await client.responses.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="background") as refused:
            await client.responses.create(model=model, input="a", background=True)
        assert refused.value.param == "background"
