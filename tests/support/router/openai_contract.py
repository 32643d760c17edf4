"""The contract of the `openai` package with a Headrace router, as a class of tests.

A test file derives from `OpenAIContract` and provides the fixture `openai_url`, the `/v1` address of a running router:
one file over fake nodes, one over a real cluster. No test depends on the model's answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.support.patience import PATIENCE_S

QUESTION: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the code of June?"},
]
GREEDY: Any = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


class OpenAIContract:
    @pytest.fixture
    async def client(self, openai_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(base_url=openai_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield client

    @pytest.fixture
    async def model(self, client: openai.AsyncOpenAI) -> str:
        return (await client.models.list()).data[0].id

    async def test_chat(self, client: openai.AsyncOpenAI, model: str):
        answer = await client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
        (choice,) = answer.choices
        assert answer.object == "chat.completion"
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens is not None

    async def test_a_streamed_chat_is_the_same_chat(self, client: openai.AsyncOpenAI, model: str):
        whole = await client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        *others, last = chunks
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 12
        assert all(chunk.usage is None for chunk in others)
        assert others[0].choices[0].delta.role == "assistant"
        assert others[-1].choices[0].finish_reason == "length"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in others)
        assert text == whole.choices[0].message.content
        assert len({chunk.id for chunk in chunks}) == 1

    async def test_no_usage_unless_asked(self, client: openai.AsyncOpenAI, model: str):
        stream = await client.chat.completions.create(model=model, messages=QUESTION, stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)

    async def test_chat_logprobs(self, client: openai.AsyncOpenAI, model: str):
        answer = await client.chat.completions.create(
            model=model, messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert len(logprobs.content) == 12
        for token in logprobs.content:
            assert token.bytes is not None
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2
            assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob

    async def test_completions_from_text_and_tokens(self, client: openai.AsyncOpenAI, model: str):
        answer = await client.completions.create(model=model, prompt="The code of", **GREEDY)
        assert answer.object == "text_completion"
        assert answer.choices[0].text
        tokens: Any = [[300, 301, 302], [303]]
        two = await client.completions.create(model=model, prompt=tokens, **GREEDY)
        assert [choice.index for choice in two.choices] == [0, 1]
        assert two.usage is not None
        assert (two.usage.prompt_tokens, two.usage.completion_tokens) == (4, 24)

    async def test_completion_logprobs(self, client: openai.AsyncOpenAI, model: str):
        answer = await client.completions.create(model=model, prompt="The code of", logprobs=2, **GREEDY)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == len(logprobs.text_offset or ()) == 12
        for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
            assert token in top and len(top) in (2, 3), "a token is among its own alternatives"

    @pytest.mark.parametrize("max_tokens", [0, 1])
    async def test_echo_scores_the_prompt(self, client: openai.AsyncOpenAI, model: str, max_tokens: int):
        answer = await client.completions.create(
            model=model, prompt=["The code of", "June is"], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 * max_tokens
        total = 0
        for choice, prompt in zip(answer.choices, ("The code of", "June is"), strict=True):
            assert choice.text.startswith(prompt)
            logprobs = choice.logprobs
            assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
            assert logprobs.token_logprobs[0] is None
            assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
            scored = logprobs.tokens[: len(logprobs.tokens) - max_tokens]
            assert "".join(scored) == prompt
            assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
            total += len(scored)
        assert answer.usage.prompt_tokens == total

    async def test_stop_strings_are_left_out(self, client: openai.AsyncOpenAI, model: str):
        whole = (await client.completions.create(model=model, prompt="The code of", **GREEDY)).choices[0].text
        stop = whole[len(whole) // 2 :][:3]
        cut = await client.completions.create(model=model, prompt="The code of", stop=[stop], **GREEDY)
        assert cut.choices[0].text == whole[: whole.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        stream = await client.completions.create(model=model, prompt="The code of", stop=stop, stream=True, **GREEDY)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == cut.choices[0].text

    async def test_a_seed_repeats_an_answer(self, client: openai.AsyncOpenAI, model: str):
        async def sample(seed: int) -> str:
            answer = await client.completions.create(
                model=model, prompt="The", seed=seed, temperature=1, max_tokens=12, extra_body={"ignore_eos": True}
            )
            return answer.choices[0].text

        assert await sample(-(2**63)) == await sample(-(2**63))
        assert await sample(7) == await sample(7)

    async def test_several_choices(self, client: openai.AsyncOpenAI, model: str):
        answer = await client.chat.completions.create(model=model, messages=QUESTION, n=3, **GREEDY)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in answer.choices}) == 1  # greedy
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 36
        stream = await client.chat.completions.create(model=model, messages=QUESTION, n=2, stream=True, **GREEDY)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert set(texts.values()) == {answer.choices[0].message.content}

    async def test_min_tokens_and_max_completion_tokens(self, client: openai.AsyncOpenAI, model: str):
        answer = await client.chat.completions.create(
            model=model, messages=QUESTION, max_completion_tokens=9, extra_body={"min_tokens": 9}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 9

    async def test_the_report(self, client: openai.AsyncOpenAI, model: str):
        body = {"headrace": {"report": True}, "ignore_eos": True}
        answer = await client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=8, temperature=0, extra_body=body
        )
        assert answer.usage is not None
        report = answer.usage.model_extra["headrace"]  # type: ignore[index]
        names = {"path", "prefill", "decode", "transfer", "checkpoints", "migrations", "moves", "routing"}
        assert set(report) == names
        assert report["path"] in ("remote", "local")
        assert report["decode"]["state"] in ("received", "resumed", "computed")
        assert report["migrations"] == 0
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=8, temperature=0, stream=True, extra_body=body
        )
        last = [chunk async for chunk in stream][-1]
        assert last.usage is not None
        assert set(last.usage.model_extra["headrace"]) == set(report)  # type: ignore[index]

    async def test_errors_are_the_packages_own(self, client: openai.AsyncOpenAI, model: str):
        with pytest.raises(openai.NotFoundError, match="is not served here") as missing:
            await client.chat.completions.create(model="other", messages=QUESTION)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            await client.chat.completions.create(model=model, messages=QUESTION, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="prompt is empty"):
            await client.completions.create(model=model, prompt="", stream=True)
        with pytest.raises(openai.BadRequestError, match="exceed the model's length") as long:
            await client.completions.create(model=model, prompt="a", max_tokens=10**9)
        assert long.value.code == "context_length_exceeded"
