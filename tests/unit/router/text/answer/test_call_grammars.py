"""Grammars of calls: what they admit, a parser reads as a call that satisfies the schema."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.grammar import GrammarError, Grammars, check_grammar, json_grammar
from router.text.answer.answer_format import REASONING_FORMATS
from router.text.answer.call_grammars import WRITERS, ReasoningPlace, after_reasoning, bounded_reasoning, call_grammar
from router.text.tokens import ModelTokens
from tests.support.router.answers import JSON_PARIS, PARIS, SCHEMAS, XML_PARIS, Sample, as_sample, parsed
from tests.support.router.model_folder import END_ID, STOP_ID, VOCAB_SIZE

TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
INSIDE, MAYBE = (ReasoningPlace(REASONING_FORMATS["think"], is_open) for is_open in (True, False))
JSON_LIST = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
KIMI_PARIS = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
CALLS = {
    "qwen3_coder": XML_PARIS,
    "hermes": JSON_PARIS,
    "granite": f"<|tool_call|>{JSON_LIST}",
    "nemotron": f"<TOOLCALL>{JSON_LIST}</TOOLCALL>",
    "lfm2": f"<|tool_call_start|>{JSON_LIST}<|tool_call_end|>",
    "kimi": f"<|tool_calls_section_begin|>{KIMI_PARIS}<|tool_calls_section_end|>",
}
IDS = {"<think>": 384}  # of the little model: a token that is no text to llguidance, but is to the tokenizer
WRITE = "<tool_call>\n<function=write>\n<parameter=path>\na\n<b>\n</parameter>\n<parameter=tags>\n[1]\n</parameter>\n"
WRITE += "</function>\n</tool_call>"


class Admitted:
    """Whether a grammar admits a text as a whole answer."""

    def __init__(self, folder: Path, tokens: ModelTokens) -> None:
        self._grammars = Grammars(folder / "tokenizer.json", VOCAB_SIZE, [END_ID, STOP_ID])
        self._tokens = tokens

    def __call__(self, grammar: str, text: str) -> bool:
        check_grammar(grammar)
        try:
            return self._grammars.answer(grammar, self._tokens.encode(text)).matcher.is_accepting()
        except GrammarError:
            return False


@pytest.fixture(scope="module")
def admits(model_folder: Path, tokens: ModelTokens) -> Admitted:
    return Admitted(model_folder, tokens)


def grammar_of(form: str, tools: list[dict[str, Any]] = TOOLS, **changes: Any) -> str:
    options: dict[str, Any] = {"is_required": True, "max_calls": None, "reasoning": None}
    return call_grammar(form, tools, IDS, **(options | changes))


@pytest.mark.parametrize("form", WRITERS)
def test_a_required_call_is_all_of_the_answer(form: str, admits: Admitted):
    grammar, call = grammar_of(form), CALLS[form]
    assert as_sample(Sample(form, call), parsed(Sample(form, call), [call])).calls == (PARIS,)
    assert admits(grammar, call)
    for wrong in (
        "",
        "Text.",
        f"Text.{call}",
        f"{call}Text.",
        call.replace("weather", "walk"),
        call.replace("P", "P\x00"),
    ):
        assert not admits(grammar, wrong) or (form == "qwen3_coder" and "\x00" in wrong), wrong


@pytest.mark.parametrize("form", WRITERS)
def test_reasoning_comes_before_a_required_call(form: str, admits: Admitted):
    grammar, call = grammar_of(form, reasoning=INSIDE), CALLS[form]
    assert admits(grammar, f"Hm {call}\n</think>\n\n{call}")
    assert not admits(grammar, call)
    optional = grammar_of(form, reasoning=MAYBE)
    assert admits(optional, call) and admits(optional, f"<think>\nHm.\n</think>\n\n{call}")


def test_several_calls_are_admitted_unless_there_may_be_one(admits: Admitted):
    for form, two in (
        ("hermes", f"{JSON_PARIS}\n{JSON_PARIS}"),
        ("qwen3_coder", f"{XML_PARIS}\n{WRITE}"),
        ("granite", f"<|tool_call|>{JSON_LIST[:-1]}, {JSON_LIST[1:]}"),
    ):
        assert admits(grammar_of(form), two)
        assert not admits(grammar_of(form, max_calls=1), two)


def test_parameters_in_tags_have_the_types_of_the_schema(admits: Admitted):
    grammar = grammar_of("qwen3_coder")
    assert admits(grammar, WRITE)
    assert not admits(grammar, WRITE.replace("[1]", "[1"))
    assert not admits(grammar, WRITE.replace("tags", "flag"))


@pytest.mark.parametrize("form", WRITERS)
def test_strict_tools_leave_text_free(form: str, admits: Admitted):
    grammar, call = grammar_of(form, STRICT, is_required=False), CALLS[form]
    for text in ("", "Text.", call, f"Text. {call}\n", f"{call}\n{call} and more"):
        assert admits(grammar, text), text
    assert not admits(grammar, f"Text. {call.replace('weather', 'walk')}")
    loose = grammar_of(form, TOOLS, is_required=False)
    other = call.replace('"city"', '"town"').replace("=city", "=town")
    assert admits(loose, other)
    assert form == "qwen3_coder" or admits(grammar, other), "the schema admits other properties"


def test_a_marker_that_is_a_token_is_written_as_such(tokens: ModelTokens):
    assert tokens.marker_ids["<think>"] == tokens.encode("<think>")[0] == IDS["<think>"]
    text = call_grammar("granite", TOOLS, {"<|tool_call|>": 7}, is_required=True, max_calls=1, reasoning=None)
    assert "start: <[7]> rest" in json.loads(text)["grammars"][0]["lark_grammar"]


def test_a_form_holds_after_the_reasoning(admits: Admitted):
    grammar = after_reasoning(json_grammar({"type": "object"}), IDS, INSIDE)
    assert admits(grammar, 'Hm {.\n</think>\n\n{"a": 1}')
    assert not admits(grammar, '{"a": 1}') and not admits(grammar, "Hm.\n</think>\n\nText")


MARKED = {"<think>": 384, "</think>": END_ID}
"""As in models whose markers are both tokens."""


@pytest.mark.parametrize("thought", ["", "ab"])
@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_ends_after_its_most_tokens(is_open: bool, thought: str, model_folder: Path, tokens: ModelTokens):
    begun = [*([] if is_open else [384]), *tokens.encode(thought)]
    place = ReasoningPlace(REASONING_FORMATS["think"], is_open, max_tokens=len(thought))
    grammars = Grammars(model_folder / "tokenizer.json", VOCAB_SIZE, [STOP_ID])
    free, formed = bounded_reasoning(MARKED, place), after_reasoning(json_grammar({"type": "object"}), MARKED, place)
    for grammar in (free, formed):
        answer = grammars.answer(grammar, begun)
        assert answer.forced() == [END_ID]
        assert not answer.allowed(tokens.encode("c"))
    shorter = grammars.answer(free, [*begun[:-1], END_ID] if thought else [*begun, END_ID])
    anything = [*tokens.encode(f"Text.\n<think>{thought}"), END_ID, *tokens.encode("{")]
    assert shorter.allowed(anything) == anything
    shorter.append(anything)
    assert shorter.matcher.is_accepting()


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("before", ["\n", "Let me see. ", "<think>a</think>So. "])
def test_reasoning_behind_text_ends_after_its_most_tokens(
    before: str, is_open: bool, model_folder: Path, tokens: ModelTokens
):
    grammar = bounded_reasoning(MARKED, ReasoningPlace(REASONING_FORMATS["think"], is_open, max_tokens=2))
    begun = [*tokens.encode("a"), END_ID] if is_open else []
    for number, text in enumerate(before.split("</think>")):
        begun += [*([END_ID] if number else []), *tokens.encode(text)]
    answer = Grammars(model_folder / "tokenizer.json", VOCAB_SIZE, [STOP_ID]).answer(grammar, begun)
    assert answer.matcher.is_accepting()
    assert answer.allowed([384, *tokens.encode("abc")]) == [384, *tokens.encode("ab")]
    answer.append([384, *tokens.encode("ab")])
    assert answer.forced() == [END_ID]


def test_an_answer_without_reasoning_is_free(model_folder: Path, tokens: ModelTokens):
    grammar = bounded_reasoning(MARKED, ReasoningPlace(REASONING_FORMATS["think"], is_open=False, max_tokens=1))
    text = tokens.encode("A whole answer.")
    answer = Grammars(model_folder / "tokenizer.json", VOCAB_SIZE, [STOP_ID]).answer(grammar, text)
    assert answer.matcher.is_accepting()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"name": "a b"}, "letters, digits"),
        ({}, "letters, digits"),
        ({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "wrong"}}}}, "wrong"),
        ({"name": "f", "parameters": {"properties": {"a\n": {}}}}, "tag cannot have"),
        ({"name": "f", "parameters": {"properties": 3}}, "must be an object"),
        ({"name": "f", "parameters": {"required": "a"}}, "required a list of names"),
        ({"name": "f", "parameters": {"required": ["a", 3]}}, "required has 3, which is no name"),
        ({"name": "f", "parameters": {"required": [[]]}}, r"required has \[\], which is no name"),
        ({"name": "f", "parameters": {"properties": {"a": False}}}, "parameter 'a': no value"),
        ({"name": "f", "parameters": {"properties": {}, "not": {}}}, '"not".*of all arguments'),
        ({"name": "f", "parameters": {"$ref": "#/$defs/A"}}, r'"\$ref".*of all arguments'),
    ],
)
def test_a_strict_tool_that_cannot_be_held_is_named(function: dict[str, Any], message: str):
    with pytest.raises(GrammarError, match=message):
        check_grammar(grammar_of("qwen3_coder", [{"type": "function", "function": {**function, "strict": True}}]))


@pytest.mark.parametrize("form", WRITERS)
def test_a_tool_that_is_not_strict_is_called_although_its_schema_cannot_be_held(form: str, admits: Admitted):
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "Rome"}}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    assert admits(grammar_of(form, [tool]), CALLS[form])


def test_tags_hold_what_the_schema_of_all_arguments_says(admits: Admitted):
    def grammar(**schema: Any) -> str:
        function = {"name": "weather", "parameters": schema, "strict": True}
        return grammar_of("qwen3_coder", [{"type": "function", "function": function}])

    none = XML_PARIS.replace("<parameter=city>\nParis\n</parameter>\n", "")
    assert admits(grammar(required=["city"]), XML_PARIS)
    assert not admits(grammar(required=["city"]), none)
    assert admits(grammar(additionalProperties=False), none)
    assert not admits(grammar(additionalProperties=False), XML_PARIS)
    referred = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"city": {"const": "Paris"}}, "required": ["city"]}}}
    assert admits(grammar(**referred), XML_PARIS)
    assert not admits(grammar(**referred), XML_PARIS.replace("Paris", "Rome"))
