"""Structured output: what a body says of its answer's form, as a grammar.

Sources: OpenAI's `response_format`, vLLM's `structured_outputs` and the `guided_*` fields that it had before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from llguidance import StructTag
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import Field, ValidationError

from headrace.grammar import GrammarError, check_grammar, client_grammar, json_grammar, lark_grammar, regex_grammar
from router.api.body_schemas import Body, OwnBody
from router.errors import bad_request

MAX_GRAMMAR_BYTES = 256 << 10
"""The largest schema or grammar, as the nodes get it. Compiling that much takes llguidance up to 0.2 s."""
MAX_CHOICE_STRINGS = 4096

Schema = dict[str, Any] | bool


class JsonSchemaFormat(Body):
    """A schema as OpenAI has it."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[Schema, Field(alias="schema")] = True
    """The JSON schema; absent: any JSON."""
    strict: bool | None = None
    """The schema is held either way."""


class TagStructure(Body):
    """A tag and what follows it, in the form that vLLM and xgrammar had first."""

    begin: str
    json_schema: Annotated[Schema, Field(alias="schema")] = True
    end: str


class StructuralTag(Body):
    """Free text in which each trigger begins a structure."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    """For `json_schema`."""
    structures: list[TagStructure] | None = None
    """For `structural_tag`: free text in which each trigger begins one of these."""
    triggers: list[str] | None = None
    """For `structural_tag`."""

    def grammar(self) -> str | None:
        """The answer's grammar, None for free text; raises GrammarError."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return json_grammar({"type": "object"})
            case "json_schema":
                if self.json_schema is None:
                    raise GrammarError("json_schema is missing: give its schema there")
                return json_grammar(self.json_schema.json_schema)
            case "structural_tag":
                return _tag_grammar(self.structures or (), self.triggers or ())


class StructuredOutputs(OwnBody):
    """The form of the answer as vLLM has it: exactly one of the first six."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression that the whole answer matches, in the syntax of Rust's `regex`, without look-around."""
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_STRINGS)] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A grammar in llguidance's Lark syntax or in GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | None = None
    """A `response_format` of type `structural_tag` as text."""
    disable_any_whitespace: bool | None = None
    """True: no whitespace between the parts of a JSON document."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the parts of a JSON document."""
    disable_fallback: bool | None = None
    """Nothing falls back here."""
    disable_additional_properties: Literal[False] | None = None
    """Not supported: write `additionalProperties: false` into the schema."""

    def grammar_text(self) -> str:
        """The answer's grammar; raises GrammarError."""
        found = list(self._grammars())
        if len(found) != 1:
            raise GrammarError(
                "give exactly one of json, regex, choice, grammar, json_object and structural_tag; "
                f"there are {len(found)}"
            )
        return found[0]

    def _grammars(self) -> Iterator[str]:
        if self.json_ is not None:
            yield json_grammar(self._with_whitespace(_parsed(self.json_)))
        if self.json_object:
            yield json_grammar(self._with_whitespace({"type": "object"}))
        if self.regex is not None:
            yield regex_grammar(self.regex)
        if self.choice is not None:
            yield choice_grammar(self.choice)
        if self.grammar is not None:
            yield _free_grammar(self.grammar)
        if self.structural_tag is not None:
            try:
                tag = StructuralTag.model_validate_json(self.structural_tag)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                raise GrammarError(f"structural_tag: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
            yield _tag_grammar(tag.structures or (), tag.triggers or ())

    def _with_whitespace(self, schema: object) -> object:
        options: dict[str, Any] = {}
        if self.disable_any_whitespace:
            options["whitespace_flexible"] = False
        elif self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        if not options or not isinstance(schema, dict | bool):
            return schema
        return {**({} if schema is True else schema), "x-guidance": options} if schema is not False else schema


class FormFields(Body):
    """The fields of a body that give its answer a form; at most one of them."""

    response_format: ResponseFormat | None = None
    """The form of the answer: text, a JSON object, or JSON that satisfies a schema."""
    structured_outputs: StructuredOutputs | None = None
    """The same, with regular expressions, choices and grammars."""
    guided_json: Schema | str | None = None
    """As `structured_outputs.json`."""
    guided_regex: str | None = None
    """As `structured_outputs.regex`."""
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_STRINGS)] | None = None
    """As `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """As `structured_outputs.grammar`."""

    @property
    def has_form(self) -> bool:
        """True if a field asks for anything but text: a grammar will be compiled."""
        if not self.model_fields_set & _FORM_FIELDS:
            return False
        return any(getattr(self, name) is not None for name in FORM_FIELDS if name != "response_format") or (
            self.response_format is not None and self.response_format.type != "text"
        )

    def grammar_text(self) -> str | None:
        """The answer's grammar, None for free text; raises ApiError (400) for one that cannot be held."""
        if not self.model_fields_set & _FORM_FIELDS:
            return None
        given = [name for name in FORM_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise bad_request(f"{given[0]} and {given[1]} both give the answer a form: leave one out", given[1])
        for name in given:
            try:
                grammar = self._grammar(name)
                if grammar is not None:
                    check_size(grammar)
                    check_grammar(grammar)
                return grammar
            except GrammarError as error:
                raise bad_request(f"{name}: {error}", name, "grammar_not_supported") from error
        return None

    def _grammar(self, name: str) -> str | None:
        match name, getattr(self, name):
            case _, ResponseFormat() as form:
                return form.grammar()
            case _, StructuredOutputs() as form:
                return form.grammar_text()
            case "guided_json", schema:
                return json_grammar(_parsed(schema))
            case "guided_regex", str(regex):
                return regex_grammar(regex)
            case "guided_choice", list(strings):
                return choice_grammar(strings)
            case _, grammar:
                return _free_grammar(grammar)


FORM_FIELDS = tuple(FormFields.model_fields)
_FORM_FIELDS = frozenset(FORM_FIELDS)


def choice_grammar(strings: Sequence[str]) -> str:
    """The grammar of these strings. Raises GrammarError for an empty one, which no token would answer."""
    if "" in strings:
        raise GrammarError("an empty choice would be no answer; leave it out")
    return lark_grammar("start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in strings))


def check_size(grammar: str) -> None:
    """Raises GrammarError for more than a node should compile."""
    if (size := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"{size} bytes are more than {MAX_GRAMMAR_BYTES}: shorten it")


def _parsed(schema: Schema | str) -> object:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not valid JSON: {error}") from error


def _free_grammar(text: str) -> str:
    try:
        return client_grammar(any_to_lark(text))
    except Exception as error:  # the converter of GBNF raises whatever its parts raise
        raise GrammarError(f"neither Lark nor GBNF: {error}") from error


def _tag_grammar(structures: Sequence[TagStructure], triggers: Sequence[str]) -> str:
    """Free text in which each trigger begins a structure."""
    tags = []
    for structure in structures:
        trigger = next((each for each in triggers if each and structure.begin.startswith(each)), None)
        if trigger is None:
            raise GrammarError(f"begin {structure.begin!r:.80} starts with none of the triggers")
        schema = structure.json_schema
        if schema is False:
            raise GrammarError("a JSON schema must be an object, not false")
        tags.append(
            StructTag(
                trigger=trigger, begin=structure.begin, grammar={} if schema is True else schema, end=structure.end
            )
        )
    if not tags:
        raise GrammarError("structural_tag needs structures and triggers; other forms are not supported")
    return lark_grammar(StructTag.to_grammar(tags, assume_special=False))
