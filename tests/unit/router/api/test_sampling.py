"""Sampling from a body's fields: defaults of the model, biases, bad words."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.request import BadWord, Sampling
from router.api.body_schemas import parse_body
from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.sampling import sampling_of
from router.errors import ApiError, ModelFolderError
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import write_model_folder


def sampling(tokens: ModelTokens, **fields: Any) -> Sampling:
    return sampling_of(parse_body(CompletionBody, json.dumps({"prompt": "a"} | fields).encode()), tokens, 16)


def folder_with(folder: Path, **generation_config: Any) -> Path:
    write_model_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def test_biases_and_allowed_tokens_arrive(tokens: ModelTokens):
    made = sampling(tokens, logit_bias={"5": 1, "7": -100}, allowed_token_ids=[5, 9])
    assert dict(zip(made.bias_ids, made.bias_values, strict=True)) == {5: 1.0, 7: -100.0}
    assert made.allowed_token_ids == (5, 9)


def test_a_bad_word_is_one_at_a_beginning_and_one_after_a_space_that_is_a_token_as_well(tokens: ModelTokens):
    words = {word.tokens for word in sampling(tokens, bad_words=[" code"]).bad_words}
    alone, spaced = (tuple(tokens.encode(text, add_special_tokens=False)) for text in ("code", " code"))
    assert words == ({alone, spaced} if len(alone) == len(spaced) else {alone})


def test_allowed_tokens_that_bad_words_end_with_are_not_enough(tokens: ModelTokens):
    (*_, last) = tokens.encode("code", add_special_tokens=False)
    with pytest.raises(ApiError, match="leave none of these") as error:
        sampling(tokens, bad_words=["code"], allowed_token_ids=[last])
    assert error.value.param == "allowed_token_ids"
    assert (
        BadWord(tuple(tokens.encode("code", add_special_tokens=False)))
        in sampling(tokens, bad_words=["code"], allowed_token_ids=[last, 5]).bad_words
    )


def test_defaults_are_those_of_the_models_generation_config(tmp_path: Path):
    config = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "eos_token_id": 0,
    }
    folder = folder_with(tmp_path / "model", **config)
    made = sampling(ModelTokens(folder))
    assert (made.temperature, made.top_p, made.top_k) == (0.6, 0.95, 20)
    assert (made.min_p, made.repetition_penalty) == (0.1, 1.05)
    given = sampling(ModelTokens(folder), temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
    plain = sampling(ModelTokens(folder, generation_config=False), temperature=0)
    assert given == plain and (plain.top_p, plain.top_k) == (1.0, 0)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": 1.5}, {"top_p": "high"}, {"repetition_penalty": 0}])
def test_a_default_that_no_request_may_have_is_named(tmp_path: Path, wrong: dict[str, Any]):
    folder = folder_with(tmp_path / "model", **wrong)
    (name,) = wrong
    with pytest.raises(ModelFolderError, match=rf"generation_config.json: {name} .* must lie in"):
        ModelTokens(folder)
    ModelTokens(folder, generation_config=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"headrace": {"salt": 1}}, "headrace"),
        ({"functions": [{}]}, "functions"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
    ],
)
def test_an_error_about_a_field_names_it_as_its_param(fields: dict[str, Any], param: str):
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    with pytest.raises(ApiError) as error:
        parse_body(ChatBody, json.dumps(body).encode())
    assert error.value.param == param
