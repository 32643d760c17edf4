"""Parameters that are written as text: what their grammar admits, a parser reads as a value of the schema."""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headrace.grammar import GrammarError, Grammars, check_grammar
from router.text.answer.answer_format import AnswerFormat
from router.text.answer.call_grammars import call_grammar
from router.text.answer.parts import CallArguments
from router.text.answer.text_values import FORMATS
from router.text.tokens import ModelTokens
from tests.support.router.model_folder import END_ID, STOP_ID, VOCAB_SIZE

NULL: Any = {"type": "null"}
DEFINITIONS = {"Day": {"type": "string", "format": "date"}, "Unit": {"enum": ["km", "mile"], "title": "Unit"}}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"anyOf": [{"type": "string"}, NULL]}, ["Paris", "null", "5", "", "a\nb"], []),
    ({"type": ["string", "null"], "minLength": 6}, ["Geneva", "null"], ["Paris"]),
    ({"anyOf": [{"$ref": "#/$defs/Unit"}, NULL], "default": None}, ["km", "null"], ["metre", '"km"']),
    ({"allOf": [{"$ref": "#/$defs/Unit"}], "description": "Of length."}, ["mile"], ["metre"]),
    ({"$ref": "#/$defs/Day"}, ["2026-02-28"], ["2026-02-30", "today"]),
    ({"type": "string", "pattern": "^[a-z]{3}$"}, ["abc"], ["abcd", "ab"]),
    ({"type": "string", "pattern": r"a/b|^c|[|$]\$$"}, ["xa/bx", "cx", "x|$"], ["xc", "ab", "|"]),
    ({"type": "string", "minLength": 2, "maxLength": 3, "pattern": "[0-9]"}, ["a1", "1\nb"], ["1", "ab", "abc1"]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2**53 - 1}, ["a"], [""]),
    ({"const": "k"}, ["k"], ["l", "kk"]),
    ({"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}]}, ["a", "b"], ["c", ""]),
    ({"enum": ["a", None, 5, True]}, ["a", "null", "5", "true"], ["6", "false", "b"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]}, ["2", "two"], ["5", "-", "null"]),
    ({"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}]}, ["true", "tru"], ["longer", "5"]),
    ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}, ['["a"]', "a"], ["[1]", "(1,)"]),
    ({"type": "string", "maxLength": 99}, ["a </b> <c"], ["a</parameter>b", "a\n</function>b", "a\n<parameter=b"]),
]


def arguments_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFINITIONS}


def strict_grammar(schema: dict[str, Any]) -> str:
    function = {"name": "f", "parameters": arguments_schema(schema), "strict": True}
    tools = [{"type": "function", "function": function}]
    grammar = call_grammar("qwen3_coder", tools, {}, is_required=True, max_calls=1, reasoning=None)
    check_grammar(grammar)
    return grammar


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=[json.dumps(case[0])[:50] for case in CASES])
def test_a_text_is_admitted_if_it_is_read_as_a_value_of_the_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str], model_folder: Path, tokens: ModelTokens
):
    grammars = Grammars(model_folder / "tokenizer.json", VOCAB_SIZE, [END_ID, STOP_ID])
    grammar = strict_grammar(schema)

    def admits(call: str) -> bool:
        try:
            return grammars.answer(grammar, tokens.encode(call)).matcher.is_accepting()
        except GrammarError:
            return False

    for text in (*right, *wrong):
        call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert admits(call) == (text in right), text
        if text in right:
            parser = AnswerFormat("qwen3_coder", None, False, {"f": arguments_schema(schema)}, None).parser("{}".format)
            assert parser is not None
            parts = [*parser.push(call), *parser.finish()]
            read = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
            jsonschema.validate(read, arguments_schema(schema))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "not": {"const": "a"}}, r"parameter 'a': .*not"),
        ({"type": "string", "format": "nothing"}, "Unknown format: 'nothing'"),
        ({"type": "string", "format": {"a": 1}}, "Unknown format: {'a': 1}"),
        *(
            ({"type": "string", name: value}, f"{name} is .*: it must be a whole number")
            for name in ("minLength", "maxLength")
            for value in ("", [], None, True, -1, 1.5, math.nan, math.inf)
        ),
        ({"type": "string", "pattern": ["a"]}, "pattern must be text"),
        ({"type": "string", "pattern": "a(?=b)"}, r"pattern 'a\(\?=b\)': .*look-ahead"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf of several texts"),
        ({"enum": ["a"], "allOf": [{"enum": ["b"]}]}, "enum stands twice"),
        ({"type": "string", "enum": []}, "no value satisfies it"),
        ({"type": "string", "allOf": [{"$ref": "#/$defs/Nobody"}]}, "no schema that is known"),
    ],
)
def test_no_keyword_of_a_strict_text_is_ignored(schema: dict[str, Any], message: str):
    with pytest.raises(GrammarError, match=message):
        strict_grammar(schema)


EXAMPLES = {
    "date": ("2026-11-25", "2026-11-31"),
    "time": ("23:59:59.5+01:00", "24:00:00Z"),
    "date-time": ("2026-11-25T10:00:00Z", "2026-11-25"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "ipv4": ("192.168.0.255", "192.168.0.256"),
    "hostname": ("a-1.example", "-a.example"),
    "email": ("a.b+c@example.org", "a.@example.org"),
    "uri": ("https://example.org:80/a%20b?c=d#e", "https://exa mple.org"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_held(name: str, model_folder: Path, tokens: ModelTokens):
    right, wrong = EXAMPLES[name]
    grammars = Grammars(model_folder / "tokenizer.json", VOCAB_SIZE, [END_ID, STOP_ID])
    grammar = strict_grammar({"type": "string", "format": name})
    head, tail = "<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"
    assert grammars.answer(grammar, tokens.encode(f"{head}{right}{tail}")).matcher.is_accepting()
    with pytest.raises(GrammarError):
        grammars.answer(grammar, tokens.encode(f"{head}{wrong}{tail}"))
