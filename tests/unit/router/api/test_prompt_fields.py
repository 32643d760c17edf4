"""Fields that shape the prompt: where it ends, what of it is kept, and its log-probabilities."""

import json
from typing import Any

import pytest

from headrace.token_array import TokenArray
from router.api.body_schemas import parse_body
from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.generation import GenerationRequest, RequestBuilder
from router.errors import ApiError
from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import fake_cluster
from tests.support.router.model_folder import write_model_folder
from tests.unit.router.conftest import StartRouter

ASKED = [{"role": "user", "content": "What is the code of June?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "The code of "}]


@pytest.fixture
def builder(tokens: ModelTokens) -> RequestBuilder:
    return RequestBuilder("little", tokens, lambda: 100)


def chat(builder: RequestBuilder, **fields: Any) -> GenerationRequest:
    return builder.chat(parse_body(ChatBody, json.dumps({"messages": ASKED} | fields).encode()))


def completion(builder: RequestBuilder, **fields: Any) -> GenerationRequest:
    return builder.completion(parse_body(CompletionBody, json.dumps({"prompt": "a code"} | fields).encode()))


def prompt_text(tokens: ModelTokens, generation: GenerationRequest) -> str:
    return tokens.decode(generation.requests[0].tokens, skip_special_tokens=False)


def test_a_begun_answer_is_continued_with_its_last_space(builder: RequestBuilder, tokens: ModelTokens):
    going_on = chat(builder, messages=BEGUN, continue_final_message=True, add_generation_prompt=False)
    text = prompt_text(tokens, going_on)
    assert text.endswith("The code of ")
    asked = prompt_text(tokens, chat(builder, messages=ASKED, add_generation_prompt=False))
    assert text.startswith(asked)
    assert all(boundary < len(going_on.requests[0].tokens) for boundary in going_on.requests[0].boundaries)


def test_without_a_generation_prompt_the_prompt_ends_with_the_last_message(
    builder: RequestBuilder, tokens: ModelTokens
):
    without, with_it = (
        prompt_text(tokens, chat(builder, add_generation_prompt=value, messages=ASKED)) for value in (False, True)
    )
    assert with_it.startswith(without) and len(with_it) > len(without)


def test_continuing_and_a_generation_prompt_exclude_each_other(builder: RequestBuilder):
    with pytest.raises(ApiError, match="needs add_generation_prompt: false") as error:
        chat(builder, messages=BEGUN, continue_final_message=True, add_generation_prompt=True)
    assert error.value.param == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_continue_it(tmp_path):
    folder = write_model_folder(tmp_path / "m", chat_template="{{ messages[0].content }}")
    with pytest.raises(ApiError, match="does not show the last message once"):
        chat(RequestBuilder("m", ModelTokens(folder), lambda: 100), messages=BEGUN, continue_final_message=True)


def test_documents_reach_the_template(tmp_path):
    folder = write_model_folder(tmp_path / "m", chat_template="{% for d in documents %}{{ d.text }};{% endfor %}")
    tokens = ModelTokens(folder)
    made = chat(RequestBuilder("m", tokens, lambda: 100), documents=[{"text": "one"}, {"text": "two"}])
    assert prompt_text(tokens, made) == "one;two;"


async def test_a_chats_own_template_is_rendered_in_a_parsing_process(start_router: StartRouter, tokens: ModelTokens):
    running = await start_router(fake_cluster([5, 0], eos_id=0), trust_request_chat_template=True, parse_processes=1)
    own = {"messages": ASKED, "chat_template": "Q: {{ messages[0].content }} A:"}
    counted = await running.http.post("/tokenize", json=own)
    assert tokens.decode(counted.json()["tokens"]) == "Q: What is the code of June? A:"
    answered = await running.http.post("/v1/chat/completions", json=own | {"max_tokens": 2})
    assert answered.json()["usage"]["prompt_tokens"] == counted.json()["count"]
    refused = await running.http.post("/tokenize", json=own | {"chat_template": "{{ 1 / 0 }}"})
    assert refused.status_code == 400
    assert len(running.server._parsing._workers) == 1


@pytest.mark.parametrize("kept", [3, 1, 1000])
def test_a_prompt_is_cut_to_its_last_tokens(builder: RequestBuilder, kept: int):
    whole, cut = (chat(builder, **fields).requests[0] for fields in ({}, {"truncate_prompt_tokens": kept}))
    assert cut.tokens == whole.tokens[-kept:] and cut.num_prompt_tokens == len(cut.tokens)
    num_cut = len(whole.tokens) - len(cut.tokens)
    assert cut.boundaries == tuple(each - num_cut for each in whole.boundaries if each > num_cut)


def test_minus_one_keeps_what_fits_beside_the_answer(builder: RequestBuilder):
    made = completion(builder, prompt=list(range(5, 305)), truncate_prompt_tokens=-1, max_tokens=10)
    assert made.requests[0].tokens == TokenArray.of(range(215, 305))
    text = completion(builder, prompt="word " * 3000, truncate_prompt_tokens=-1, max_tokens=10, echo=True)
    assert len(text.requests[0].tokens) == 90 and len(text.prompts[0].text) < 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_is_refused(builder: RequestBuilder, fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as error:
        completion(builder, **fields)
    assert error.value.param == param


async def test_prompt_logprobs_have_vllms_shape(start_router: StartRouter, tokens: ModelTokens):
    running = await start_router(fake_cluster([*tokens.encode("a code"), 0], eos_id=0))
    ids = tokens.encode("a code, and more")
    body = {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 2}
    (choice,) = (await running.http.post("/v1/completions", json=body)).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for token_id, entry in zip(ids[1:], others, strict=True):
        own = {"logprob": -1.0, "rank": None, "decoded_token": tokens.decode([token_id])}
        assert next(iter(entry)) == str(token_id)
        assert {"0", "1"} <= set(entry) and entry["1"]["rank"] == 2
        assert token_id in (0, 1) or entry[str(token_id)] == own
    assert choice["logprobs"] is None and choice["text"] == "a code"
    body = {"messages": ASKED, "prompt_logprobs": 0, "max_tokens": 2, "n": 2}
    answer = (await running.http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a code"] * 2
