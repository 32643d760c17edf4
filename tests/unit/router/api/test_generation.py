"""Generation requests built from bodies, and every refusal that needs no node."""

import json
from typing import Any

import pytest

from headrace.token_array import TokenArray
from router.api.body_schemas import parse_body
from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.generation import GenerationRequest, RequestBuilder
from router.api.operator_schemas import RoleBody
from router.api.unsupported_fields import FOR_CHATS
from router.errors import ApiError
from router.routing.plan import Objectives
from router.text.tokens import ModelTokens
from tests.support.router.template_counter import count_renderings

CHAT = {"messages": [{"role": "user", "content": "What is the code of June?"}]}


@pytest.fixture
def builder(tokens: ModelTokens) -> RequestBuilder:
    return RequestBuilder("little", tokens, lambda: 100, draw_seed=lambda: 2**64 - 1)


def chat(builder: RequestBuilder, **fields: Any) -> GenerationRequest:
    return builder.chat(parse_body(ChatBody, json.dumps(CHAT | fields).encode()))


def completion(builder: RequestBuilder, **fields: Any) -> GenerationRequest:
    return builder.completion(parse_body(CompletionBody, json.dumps({"prompt": "a code"} | fields).encode()))


def test_absent_fields_have_openais_defaults(builder: RequestBuilder):
    (request,) = chat(builder).requests
    sampling = request.sampling
    assert sampling.max_tokens == 100 - len(request.tokens)  # all that the model holds
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.seed == 2**64 - 1
    assert sampling.logprobs is None
    assert completion(builder).requests[0].sampling.max_tokens == 16


def test_every_field_arrives(builder: RequestBuilder):
    generation = chat(
        builder,
        max_completion_tokens=9, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, repetition_penalty=1.5,
        presence_penalty=-1, frequency_penalty=2, logprobs=True, top_logprobs=3, stop="x", stop_token_ids=[5],
        min_tokens=2, ignore_eos=True, stream=True, stream_options={"include_usage": True},
        headrace={"checkpoint_at": [3], "salt": "tenant", "objectives": {"token_gap_s": 0.01}, "priority": 3},
        user="someone", unknown_field={"a": 1},
    )  # fmt: skip
    (request,) = generation.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.0, 0.5, 0)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 2**64 - 1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logprobs) == (-1.0, 2.0, 3)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((5,), 2, True)
    assert request.salt == b"tenant"
    assert 3 in request.boundaries
    assert generation.stops == ("x",)
    assert (generation.objectives, generation.priority) == (Objectives(token_gap_s=0.01), 3)
    assert (generation.stream, generation.include_usage, generation.report) == (True, True, False)


def test_whole_numbers_may_be_written_with_a_point(builder: RequestBuilder):
    fields = b'"max_tokens": 4.0, "seed": 7.0, "stop_token_ids": [3.0], "n": 2.0, "headrace": {"checkpoint_at": [1.0]}'
    generation = builder.completion(parse_body(CompletionBody, b'{"prompt": "a code", ' + fields + b"}"))
    sampling = generation.requests[1].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.stop_token_ids) == (4, 8, (3,))
    assert all(type(number) is int for number in (sampling.max_tokens, *sampling.stop_token_ids))


def test_null_is_the_default(builder: RequestBuilder):
    generation = chat(builder, temperature=None, stop=None, seed=None, n=None, max_tokens=None, stream=None, tools=None)
    assert len(generation.requests) == 1


def test_choices_have_their_own_seeds_and_ids(builder: RequestBuilder):
    generation = completion(builder, prompt=["a", "b c"], n=2, seed=2**63 - 1)
    seeds = [request.sampling.seed for request in generation.requests]
    assert seeds == [2**63 - 1, 2**63, 2**63 + 1, 2**63 + 2]
    assert len({request.request_id for request in generation.requests}) == 4
    assert [generation.prompt_of(index).text for index in range(4)] == ["a", "a", "b c", "b c"]


def test_a_prompt_is_text_token_ids_or_a_list_of_either(builder: RequestBuilder, tokens: ModelTokens):
    text = tokens.encode("a code")
    for prompt in ("a code", ["a code"], text, [text], list(map(float, text)), [list(map(float, text))]):
        assert [r.tokens for r in completion(builder, prompt=prompt).requests] == [TokenArray.of(text)]
    assert len(completion(builder, prompt=[[5], [6, 7]]).requests) == 2


def test_echo_asks_for_the_prompts_logprobs(builder: RequestBuilder):
    (request,) = completion(builder, echo=True, logprobs=2, max_tokens=0).requests
    assert request.sampling.prompt_logprobs == 2
    assert completion(builder, logprobs=2).requests[0].sampling.prompt_logprobs is None


def test_content_parts_are_joined_by_newlines(builder: RequestBuilder):
    parts = [{"type": "text", "text": "What is the code"}, {"type": "text", "text": "of June?"}]
    as_parts, as_text = ([{"role": "user", "content": each}] for each in (parts, "What is the code\nof June?"))
    assert chat(builder, messages=as_parts).requests[0].tokens == chat(builder, messages=as_text).requests[0].tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": "hi"}, "messages 'hi': Input should be a valid array"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "this model takes text only, no images"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content 5: Input should be a valid string"),
        ({"temperature": "hot"}, "temperature 'hot': Input should be a valid number"),
        ({"temperature": 2.5}, "temperature 2.5: Input should be less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature nan: Input should be a finite number"),
        ({"top_p": float("inf")}, "top_p inf: Input should be"),
        ({"top_p": 0}, "top_p 0: Input should be greater than 0"),
        ({"top_k": 1.5}, "top_k 1.5: "),
        ({"n": 0}, "n 0: Input should be greater than or equal to 1"),
        ({"n": True}, "n True: Input should be a valid integer"),
        ({"n": 129}, "n 129: "),
        ({"max_tokens": -1}, "max_tokens -1: "),
        ({"max_tokens": 0}, "max_tokens 0: a chat must have at least 1"),
        ({"max_tokens": 100}, r"messages of \d+ tokens and max_tokens 100 exceed the model's length of 100"),
        ({"max_tokens": 10**30}, "maximum context length is 100 tokens; shorten messages or lower max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is more than max_tokens 4"),
        ({"seed": 2**63}, "seed 9223372036854775808: "),
        ({"stop": ["a"] * 17}, "17 stop strings: at most 16"),
        ({"stop": ""}, "an empty stop string"),
        ({"stop": ["a", "b" * 1025]}, "a stop string of 1025 characters: at most 1024"),
        ({"stop": [1]}, "stop.0 1: Input should be a valid string"),
        ({"stop_token_ids": [512]}, "stop_token_ids: token id 512 is outside the vocabulary; use 0 to 511"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs 21: "),
        ({"logit_bias": {"5": 101}}, "logit_bias 101: Input should be less than or equal to 100"),
        ({"logit_bias": {"the": 1}}, "logit_bias: 'the' is no token id; use ids as /tokenize lists them, as strings"),
        ({"logit_bias": {"512": 1}}, "logit_bias: token id 512 is outside the vocabulary"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias: 1025 biases: at most 1024"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids: token id 512 is outside the vocabulary"),
        ({"allowed_token_ids": []}, "allowed_token_ids: List should have at least 1 item"),
        ({"allowed_token_ids": [0], "min_tokens": 2}, "bad_words and min_tokens leave none of these"),
        ({"bad_words": ["x" * 999]}, r"bad_words 'x+: has \d+ tokens; use 1 to 64"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "knows no tools"),
        ({"headrace": {"reprot": True}}, "headrace: unknown key 'reprot': did you mean 'report'?"),
        (
            {"headrace": {"objectives": {"token_gap": 1}}},
            "headrace.objectives: unknown key 'token_gap': did you mean 'token_gap_s'?",
        ),
        ({"headrace": {"objectives": {"first_token_s": 0}}}, "headrace.objectives.first_token_s 0"),
        ({"headrace": {"priority": 2**31}}, "headrace.priority 2147483648"),
        ({"headrace": {"checkpoint_at": [0]}}, "headrace.checkpoint_at.0 0: "),
        ({"headrace": {"checkpoint_at": [99]}}, "checkpoint_at 99 lies beyond the prompt"),
    ],
)
def test_a_bad_chat_is_refused_with_its_cause(builder: RequestBuilder, fields: dict[str, Any], message: str):
    with pytest.raises(ApiError, match=message) as refused:
        chat(builder, **fields)
    assert refused.value.status == 400


def test_a_chat_that_is_too_long_is_refused_before_the_ends_of_its_messages_are_searched(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
):
    renderings = count_renderings(monkeypatch)
    with pytest.raises(ApiError, match=r"messages of at least \d+ tokens exceed the model's length of 100"):
        chat(builder, messages=CHAT["messages"] * 200)
    assert len(renderings) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt is empty: give at least one token"),
        ({"prompt": []}, "prompt is empty: give at least one token"),
        ({"prompt": [[]]}, "prompt is empty: give at least one token"),
        ({"prompt": ["a", ""]}, "prompt is empty: give at least one token"),
        ({"prompt": None}, "prompt: give text, token ids, or a list of either"),
        ({"prompt": [1, "a"]}, "prompt: give text, token ids, or a list of either"),
        ({"prompt": [True]}, "prompt: give text, token ids, or a list of either"),
        ({"prompt": [512]}, "prompt: token id 512 is outside the vocabulary; use 0 to 511"),
        ({"prompt": [-1]}, "prompt: token id -1 is outside the vocabulary"),
        ({"prompt": [10**40]}, "is outside the vocabulary"),
        ({"prompt": [5] * 100}, "prompt of 100 tokens and max_tokens 16 exceed the model's length of 100"),
        ({"prompt": ["a"] * 129}, "129 prompts; at most 128"),
        ({"prompt": ["a"] * 65, "n": 2}, "n 2 for 65 prompts: at most 128 choices"),
        ({"max_tokens": 0}, "max_tokens 0: needs echo"),
        ({"logprobs": 21}, "logprobs 21: "),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of other than n is not supported"),
    ],
)
def test_a_bad_completion_is_refused_with_its_cause(builder: RequestBuilder, fields: dict[str, Any], message: str):
    with pytest.raises(ApiError, match=message) as refused:
        completion(builder, **fields)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1,2]", b"null", b'"x"', b'{"messages":', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 10_000,
     b'{"prompt": "\\ud800"}', b'{"prompt": 1' + b"0" * 10_000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(builder: RequestBuilder, data: bytes):
    with pytest.raises(ApiError) as refused:
        builder.completion(parse_body(CompletionBody, data))
    assert refused.value.status == 400
    assert json.loads(refused.value.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("functions", [{"name": "f"}], "use tools"),
        ("function_call", {"name": "f"}, "use tools"),
        ("ebnf", "root ::= 'a'", "structured_outputs"),
        ("xtc_probability", False, "use temperature"),
        ("cache_salt", "tenant", r"headrace\.salt"),
        ("modalities", ["text", "audio"], "text alone"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_with_its_name_and_a_remedy(
    builder: RequestBuilder, field: str, value: Any, remedy: str
):
    with pytest.raises(ApiError, match=f"^{field} .* is not supported: .*{remedy}") as refused:
        chat(builder, **{field: value})
    assert (refused.value.status, refused.value.param) == (400, field)


def test_an_unsupported_field_that_asks_for_nothing_and_an_unknown_one_are_ignored(builder: RequestBuilder):
    for name, field in FOR_CHATS.items():
        for value in (*field.absent, *field.harmless):
            chat(builder, **{name: value})
    chat(builder, user="someone", metadata={"a": "b"}, store=True, service_tier="auto", never_heard_of=1)


def test_the_error_names_the_field(builder: RequestBuilder):
    with pytest.raises(ApiError, match=r"^x-not-a-name 42: Extra") as odd:
        parse_body(RoleBody, b'{"role": "both", "x-not-a-name": 42}')
    assert odd.value.param == "x-not-a-name"
    with pytest.raises(ApiError) as refused:
        chat(builder, temperature=9)
    assert refused.value.param == "temperature"
