"""The form of an answer, from the fields of a body to the grammar that nodes get, and what is refused."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.grammar import NOT_DRAFTED, GrammarError
from router.api.body_schemas import parse_body
from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.generation import RequestBuilder
from router.api.structured_output import StructuredOutputs
from router.errors import ApiError
from router.text.literal_tokens import NotLoaded
from router.text.tokens import ModelTokens

CHAT = {"messages": [{"role": "user", "content": "What is the code of June?"}]}
SCHEMA = {"type": "object", "properties": {"code": {"type": "integer"}}, "required": ["code"]}
CLOSED = SCHEMA | {"additionalProperties": False}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<call=sum>", "schema": CLOSED, "end": "</call>"}],
    "triggers": ["<call="],
}


def schema_format(schema: object, **more: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.fixture
def builder(tokens: ModelTokens) -> RequestBuilder:
    return RequestBuilder("little", tokens, lambda: 100)


@pytest.fixture(scope="module")
def tokenizer(model_folder) -> LLTokenizer:
    return LLTokenizer((model_folder / "tokenizer.json").read_text(), n_vocab=512, eos_token=0)


def grammar(builder: RequestBuilder, **fields: Any) -> str | None:
    (request,) = builder.chat(parse_body(ChatBody, json.dumps(CHAT | fields).encode())).requests
    return request.sampling.grammar


def admits(grammar: str | None, text: str, tokenizer: LLTokenizer) -> bool:
    assert grammar is not None
    matcher, ids = LLMatcher(tokenizer, grammar, log_level=0), tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"response_format": schema_format(CLOSED, strict=True)}, '{"code":\n  4}', '{"code": "4"}'),
        ({"response_format": schema_format(SCHEMA)}, '{"code": 4, "more": 5}', '{"more": 5}'),
        ({"response_format": schema_format(True)}, "[null]", "nul"),
        ({"response_format": TAGS}, 'So <call=sum>{"code": 4}</call>.', "So <call=sum>4</call>."),
        ({"structured_outputs": {"json": CLOSED}}, '{"code": 4}', "{}"),
        ({"structured_outputs": {"json": json.dumps(CLOSED)}}, '{"code": 4}', "{}"),
        ({"structured_outputs": {"json": CLOSED, "disable_any_whitespace": True}}, '{"code":4}', '{"code": 4}'),
        ({"structured_outputs": {"json": True, "whitespace_pattern": "-"}}, "[-1]", "[ 1]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"structured_outputs": {"regex": r"\d{3}/[a-c]+"}}, "471/abc", "471/abd"),
        ({"structured_outputs": {"choice": ['yes "sir"', "né\n"]}}, 'yes "sir"', "yes"),
        ({"structured_outputs": {"choice": ["a", "né\n"]}}, "né\n", "n"),
        ({"structured_outputs": {"grammar": 'start: "a" b*\nb: /[0-9]/'}}, "a12", "1"),
        ({"structured_outputs": {"grammar": 'root ::= "a" num*\nnum ::= [0-9]'}}, "a12", "1"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "nothing to call", "<call=other>"),
        ({"guided_json": CLOSED}, '{"code": 4}', "{}"),
        ({"guided_regex": "a+"}, "aa", "b"),
        ({"guided_choice": ["a", "b"]}, "b", "ab"),
        ({"guided_grammar": 'start: "x"'}, "x", "y"),
    ],
)
def test_a_form_becomes_a_grammar(fields, right: str, wrong: str, builder: RequestBuilder, tokenizer: LLTokenizer):
    text = grammar(builder, **fields)
    assert admits(text, right, tokenizer)
    assert not admits(text, wrong, tokenizer)


def test_nodes_are_told_which_grammars_clients_wrote(builder: RequestBuilder):
    lark = 'start: "a" b*\nb: /[0-9]/'
    clients = [{"structured_outputs": {"grammar": lark}}, {"guided_grammar": 'root ::= "a"'}]
    own = [{"response_format": TAGS}, {"response_format": schema_format(SCHEMA)}, {"guided_choice": ["a", "b"]}]
    assert [NOT_DRAFTED in (grammar(builder, **each) or "") for each in clients + own] == [True] * 2 + [False] * 3


def test_endless_whitespace_is_no_json_here(builder: RequestBuilder, tokenizer: LLTokenizer):
    text = grammar(builder, response_format=schema_format(CLOSED))
    assert admits(text, '{\n        "code": 4\n}', tokenizer)
    assert not admits(text, '{"code":' + " " * 50 + "4}", tokenizer)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_no_form_is_no_grammar(fields, builder: RequestBuilder):
    assert grammar(builder, **fields) is None


def test_a_completions_answers_have_a_form_too(builder: RequestBuilder):
    body = {"prompt": ["a", "b"], "n": 2, "structured_outputs": {"choice": ["yes", "no"]}}
    generation = builder.completion(parse_body(CompletionBody, json.dumps(body).encode()))
    assert {request.sampling.grammar is None for request in generation.requests} == {False}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"response_format": schema_format({"not": {"type": "string"}})},
            r'response_format: Unimplemented keys: \["not"\]',
            "response_format",
        ),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, 'keys: ["uniqueItems"]', "guided_json"),
        ({"guided_json": {"not": {}, "x-guidance": {"lenient": True}}}, 'keys: ["not"]', "guided_json"),
        ({"guided_json": {"type": "strin"}}, "Invalid type: strin", "guided_json"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "look-around", "guided_json"),
        ({"guided_json": "{"}, "not valid JSON", "guided_json"),
        ({"guided_json": "[]"}, "a JSON schema must be an object, not []", "guided_json"),
        ({"guided_json": {"$ref": "http://example.org/s"}}, "http://example.org/s", "guided_json"),
        ({"guided_json": False}, "must be an object, not false", "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing", "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type 'xml'", "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "needs structures and triggers", "response_format"),
        ({"response_format": TAGS | {"triggers": ["<f"]}}, "starts with none of the triggers", "response_format"),
        ({"guided_regex": "(a"}, "unclosed group", "guided_regex"),
        ({"guided_choice": [""]}, "an empty choice", "guided_choice"),
        ({"guided_choice": []}, "guided_choice: List should have at least 1 item", "guided_choice"),
        ({"guided_grammar": 'start: "a" b'}, 'unknown name: "b"', "guided_grammar"),
        ({"guided_grammar": 'root ::= "a'}, "neither Lark nor GBNF", "guided_grammar"),
        ({"structured_outputs": {}}, "give exactly one of json, regex", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "there are 2", "structured_outputs"),
        ({"structured_outputs": {"jsn": {}}}, "unknown key 'jsn': did you mean 'json'?", "structured_outputs"),
        (
            {"structured_outputs": {"structural_tag": '{"type": "structural_tag", "format": {}}'}},
            "needs structures",
            "structured_outputs",
        ),
        ({"structured_outputs": {"structural_tag": '{"structures": 5}'}}, "structural_tag", "structured_outputs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex both", "guided_regex"),
        ({"guided_json": {}, "bad_words": ["a"]}, "bad_words beside a form of the answer", "bad_words"),
        ({"guided_json": {}, "allowed_token_ids": [5]}, "could leave no token", "allowed_token_ids"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "bytes are more than 262144: shorten it", "guided_json"),
    ],
)
def test_a_form_that_cannot_be_held_is_refused_with_what_is_wrong(
    fields, message: str, param: str, builder: RequestBuilder
):
    with pytest.raises(ApiError) as refused:
        grammar(builder, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert message.replace("\\", "") in refused.value.json().replace("\\", "")


def test_a_form_of_a_small_body_is_compiled_in_a_worker(model_folder):
    """Not on the event loop, where it would hold others up."""
    here = ModelTokens(model_folder, loads_literal=False)
    with pytest.raises(NotLoaded):
        grammar(RequestBuilder("little", here, lambda: 100), guided_regex="a")


def test_a_structural_tag_as_text_needs_no_type():
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
    with_type = StructuredOutputs(structural_tag=json.dumps({"type": "structural_tag", **tag}))
    assert StructuredOutputs(structural_tag=json.dumps(tag)).grammar_text() == with_type.grammar_text()
    with pytest.raises(GrammarError, match="structural_tag: type"):
        StructuredOutputs(structural_tag='{"type": "json_object"}').grammar_text()
