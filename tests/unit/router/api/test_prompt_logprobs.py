"""Prompts with logprobs over HTTP: limits, values that are no numbers, and rendering beside the event loop."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.request import PromptLogprobs, Request
from router.api.answer_writer import RenderedDelta
from router.api.completion_writer import CompletionWriter
from router.api.logprobs import SLICE_NUMBERS, num_logprobs
from router.text.text_stream import TextDelta
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

SCORED = {"max_tokens": 2, "echo": True, "logprobs": 5, "temperature": 0}


def asked(num_tokens: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": [token_id % 200 + 1 for token_id in range(num_tokens)], **SCORED, **changes}


async def events(running: Running, body: dict[str, Any]) -> list[Any]:
    answer = await running.http.post("/v1/completions", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_streamed_prompt_has_the_logprobs_of_the_whole_answer(start_router: StartRouter):
    running = await start_router(fake_cluster([70, 71, 72]))
    (choice,) = (await running.http.post("/v1/completions", json=asked(400))).json()["choices"]
    streamed = [each["choices"][0] for each in await events(running, asked(400))]
    for name, values in choice["logprobs"].items():
        assert [value for each in streamed if each["logprobs"] for value in each["logprobs"][name]] == values
        assert len(values) == 402
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -1.0]
    assert "".join(each["text"] for each in streamed) == choice["text"]


async def test_a_prompt_of_one_token_is_echoed_without_a_logprob(start_router: StartRouter):
    running = await start_router(fake_cluster([70, 71, 72]))
    (choice,) = (await running.http.post("/v1/completions", json=asked(1, max_tokens=0))).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] and choice["logprobs"]["top_logprobs"] == [None]


async def test_slices_are_rendered_one_at_a_time_beside_the_event_loop(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
):
    running = await start_router(fake_cluster([70, 71, 72]))
    threads: list[int] = []
    sizes: list[int] = []
    at_once = [0, 0]
    render = CompletionWriter.render

    def recorded(self: CompletionWriter, index: int, delta: TextDelta) -> RenderedDelta:
        size = num_logprobs(delta.tokens)
        if size > 64:
            threads.append(threading.get_ident())
        sizes.append(size)
        at_once[0] += 1
        at_once[1] = max(at_once)
        try:
            return render(self, index, delta)
        finally:
            at_once[0] -= 1

    def long_parts(request: Request) -> Iterator[PromptLogprobs]:
        """As an engine sends them: hundreds of tokens at a time."""
        end, num_top = request.num_prompt_tokens, request.sampling.prompt_logprobs or 0
        for start in range(1, end, 700):
            count = min(end - start, 700)
            yield PromptLogprobs(start, (-1.0,) * count, tuple(range(num_top)) * count, (-1.0,) * num_top * count)

    for node in running.cluster.nodes.values():
        monkeypatch.setattr(node, "prompt_logprobs", long_parts)
    monkeypatch.setattr(CompletionWriter, "render", recorded)
    bodies = [asked(1500, stream=stream, n=1) for stream in (False, True, False)]
    answers = await asyncio.gather(*(running.http.post("/v1/completions", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(answers[0].json()["choices"][0]["logprobs"]["tokens"]) == 1502
    assert max(sizes) <= SLICE_NUMBERS and sum(sizes) > 3 * 1500 * 6
    assert threads and threading.get_ident() not in threads
    assert at_once[1] == 1


async def test_more_logprobs_than_the_limit_are_refused_before_a_node_computes_them(start_router: StartRouter):
    running = await start_router(fake_cluster([70, 71, 72]), max_prompt_logprobs=100 * 6)
    fits = await running.http.post("/v1/completions", json=asked(100))
    assert fits.status_code == 200
    served = len(running.cluster.nodes["d0"].requests)
    for stream in (False, True):
        refused = await running.http.post("/v1/completions", json=asked(101, stream=stream))
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "606" in message and "at most 600" in message and "max_prompt_logprobs" in message
    both = {**asked(0), "prompt": [asked(50)["prompt"], asked(51)["prompt"]]}
    assert (await running.http.post("/v1/completions", json=both)).status_code == 400
    assert (await running.http.post("/v1/completions", json=asked(101, logprobs=4))).status_code == 200
    assert (await running.http.post("/v1/completions", json=asked(500, echo=False))).status_code == 200
    assert len(running.cluster.nodes["d0"].requests) == served + 2


async def test_an_answer_of_too_many_logprobs_is_given_up_unless_it_is_streamed(start_router: StartRouter):
    running = await start_router(fake_cluster([70, 71, 72, 73]), max_answer_logprobs=2 * 4 * 6)
    body = {**asked(50, echo=False), "max_tokens": 4, "n": 2}
    whole = await running.http.post("/v1/completions", json=body)
    assert [len(choice["logprobs"]["tokens"]) for choice in whole.json()["choices"]] == [4, 4]
    refused = await running.http.post("/v1/completions", json={**body, "n": 3})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "answer_too_large")
    assert "more than 48" in refused.json()["error"]["message"]
    rows = (await running.http.get("/cluster")).json()["requests"]
    assert len(rows) == 5 and all(row["phase"] in ("done", "failed") for row in rows), rows
    streamed = await running.http.post("/v1/completions", json={**body, "n": 3, "stream": True})
    assert streamed.status_code == 200 and "answer_too_large" not in streamed.text


async def test_logits_that_are_no_numbers_fail_their_request_alone(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
):
    running = await start_router(fake_cluster([70, 71, 72]))

    def broken(request: Request) -> Iterator[PromptLogprobs]:
        count = request.num_prompt_tokens - 1
        yield PromptLogprobs(1, (*[-1.0] * (count - 1), math.nan))

    for node in running.cluster.nodes.values():
        monkeypatch.setattr(node, "prompt_logprobs", broken)
    ordinary = {"prompt": [5] * 40, "max_tokens": 3}
    failed, fine = await asyncio.gather(
        running.http.post("/v1/completions", json=asked(40)), running.http.post("/v1/completions", json=ordinary)
    )
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "invalid_logits")
    assert failed.headers["x-should-retry"] == "false"
    assert fine.status_code == 200
    late = await events(running, asked(2000))  # broken after the first parts were sent
    assert late[-1]["error"]["code"] == "invalid_logits" and len(late) > 2
    assert all(node.open_calls == 0 for node in running.cluster.nodes.values())
    cluster = (await running.http.get("/cluster")).json()
    assert not [row for row in cluster["requests"] if row["phase"] not in ("done", "failed")]
