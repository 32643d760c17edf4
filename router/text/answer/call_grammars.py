"""Grammars of answers that must be tool calls, in the format that the model's parser reads.

Each is a Lark grammar of the markers that refers to one JSON schema for each tool, as `headrace.grammar` has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.grammar import GrammarError, check_grammar, json_grammar
from router.text.answer.parameters import ParameterTypes
from router.text.answer.reader import ReasoningMarkers
from router.text.answer.text_values import in_lark, texts_of

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
NEWLINE = "\n"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass
class Lark:
    """A grammar that is being written. `ids`: of the model's tokens that are no text, by their spelling."""

    ids: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)

    def text(self, *parts: str) -> str:
        """Parts of a text that follow each other: markers, each a token or text, and what is between them."""
        return " ".join(f"<[{self.ids[part]}]>" if part in self.ids else _quoted(part) for part in parts if part)

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that satisfies the schema; raises GrammarError."""
        name = f"json{len(self.schemas)}"
        (grammar,) = json.loads(json_grammar(schema))["grammars"]
        self.schemas.append({**grammar, "name": name})
        return f"@{name}"

    def rule(self, name: str, body: str) -> str:
        """Adds a rule, and returns its name."""
        self.rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def until(self, name: str, end: str) -> str:
        """Any text to the first `end`, and that."""
        if end in self.ids:
            return f"/(?s:.*)/ {self.text(end)}"
        return self.rule(f"{name}[lazy]", f"/(?s:.*)/ {_quoted(end)}")

    def grammar(self) -> str:
        """The grammar as nodes get it."""
        lark = {"lark_grammar": "\n".join(self.rules)}
        return json.dumps({"grammars": [lark, *self.schemas]}, ensure_ascii=False)


@dataclass(frozen=True)
class ReasoningPlace:
    """The reasoning before an answer: `is_open` says that the answer begins inside it; else it may lack.

    max_tokens   of the reasoning, whose end is forced then; the same for one that begins later, behind text. None: any.
                 Needs markers that are tokens
    """

    markers: ReasoningMarkers
    is_open: bool
    max_tokens: int | None = None

    def rule(self, lark: Lark) -> str:
        """The beginning of a grammar."""
        thought = self._thought(lark) + r" /\s{0,4}/"
        if self.is_open:
            return thought
        return lark.rule("reasoning", f"{lark.text(self.markers.start)} {thought}") + "?"

    def alone(self, lark: Lark) -> str:
        """A whole grammar: any tokens, with a bound on the reasoning wherever it begins."""
        start = lark.ids[self.markers.start]
        text, thought = lark.rule("text", f"<[^{start}]>*"), lark.rule("thinking", self._thought(lark))
        answer = f"{text} (<[{start}]> {thought} {text})*"
        return f"{thought} {answer}" if self.is_open else answer

    def _thought(self, lark: Lark) -> str:
        """Text to the end of the reasoning, and that."""
        if self.max_tokens is None:
            return lark.until("thought", self.markers.end)
        if not self.max_tokens:
            return lark.text(self.markers.end)
        thought = lark.rule(f"thought[max_tokens={self.max_tokens}]", "/(?s:.*)/")
        return f"{thought} {lark.text(self.markers.end)}"


def call_grammar(
    form: str,
    tools: Sequence[Mapping[str, Any]],
    ids: Mapping[str, int],
    *,
    is_required: bool,
    max_calls: int | None,
    reasoning: ReasoningPlace | None,
) -> str:
    """The grammar of an answer whose calls are calls of `tools`, with arguments that satisfy their schemas.

    is_required   the answer is nothing but calls, at least one; else it is text, and the schemas hold of the tools that
                  are `strict`

    Raises GrammarError for a strict tool that it cannot hold; the message names it. Of others, any object is admitted
    then: their schemas only describe them.
    """
    lark, writer = Lark(ids), WRITERS[form]
    options = []
    for number, tool in enumerate(tools):
        name, schema = _function(tool, is_required)
        if not is_strict(tool) and not _can_be_held(writer, ids, name, schema):
            schema = ANY_OBJECT
        try:
            options.append(lark.rule(f"call{number}", writer.one(lark, number, name, schema)))
        except GrammarError as error:
            raise GrammarError(f"tool {name}: {error}") from error
    lark.rule("call", " | ".join(options))
    rest = lark.rule("rest", writer.rest(lark, max_calls == 1))
    if is_required:
        start = f"{lark.text(writer.opening)} {rest}"
        if writer.separator and max_calls != 1:
            start += f" ({lark.text(writer.separator, writer.opening)} {rest})*"
    else:
        start = f"({lark.until('before', writer.opening)} {rest})* /(?s:.*)/"
    lark.rule("start", start if reasoning is None else f"{reasoning.rule(lark)} {start}")
    return lark.grammar()


def _can_be_held(writer: CallWriter, ids: Mapping[str, int], name: str, schema: Mapping[str, Any]) -> bool:
    lark = Lark(ids)
    try:
        lark.rule("start", writer.one(lark, 0, name, schema))
        check_grammar(lark.grammar())
    except GrammarError:
        return False
    return True


def after_reasoning(grammar: str, ids: Mapping[str, int], reasoning: ReasoningPlace) -> str:
    """The grammar of answers that obey `grammar` after their reasoning."""
    first, *others = json.loads(grammar)["grammars"]
    lark = Lark(ids, schemas=[{**first, "name": "answer"}, *others])
    lark.rule("start", f"{reasoning.rule(lark)} @answer")
    return lark.grammar()


def bounded_reasoning(ids: Mapping[str, int], reasoning: ReasoningPlace) -> str:
    """The grammar of answers that are free but for the most tokens of their reasoning."""
    lark = Lark(ids)
    lark.rule("start", reasoning.alone(lark))
    return lark.grammar()


def is_strict(tool: Mapping[str, Any]) -> bool:
    """True if the arguments of every call must satisfy the tool's schema."""
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") is True


def _function(tool: Mapping[str, Any], is_required: bool) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise GrammarError(f"tool {name!r:.80}: a function's name is 1 to 256 letters, digits, or characters of _ . -")
    schema = function.get("parameters")
    if not isinstance(schema, Mapping):
        return name, {"type": "object", "properties": {}}
    return name, schema if is_required or is_strict(tool) else ANY_OBJECT


# ---------------------------------------------------------------- formats


def _json_call(lark: Lark, number: int, name: str, schema: Mapping[str, Any]) -> str:
    head = f'{{"name": "{name}", "arguments": '
    return f"{lark.text(head)} {lark.json(schema)} {_quoted('}')}"


def _hermes_rest(lark: Lark, is_single: bool) -> str:
    return f"{_quoted(NEWLINE)} call {lark.text(NEWLINE, '</tool_call>')}"


def _list_to(closing: str) -> Callable[[Lark, bool], str]:
    def rest(lark: Lark, is_single: bool) -> str:
        more = "" if is_single else f"({_quoted(', ')} call)*"
        return f"{_quoted('[')} call {more} {lark.text(']', closing)}"

    return rest


def _kimi_call(lark: Lark, number: int, name: str, schema: Mapping[str, Any]) -> str:
    opening = lark.text("<|tool_call_begin|>", f"functions.{name}:")
    arguments = f"{lark.text('<|tool_call_argument_begin|>')} {lark.json(schema)}"
    return f"{opening} /[0-9]{{1,3}}/ {arguments} {lark.text('<|tool_call_end|>')}"


def _kimi_rest(lark: Lark, is_single: bool) -> str:
    return f"{'call' if is_single else 'call+'} {lark.text('<|tool_calls_section_end|>')}"


_XML_END = "\n</parameter>\n"
_XML_ENDS = r"</parameter>|\n<parameter=|\n</function>|\n</tool_call>"
_UNHELD_OF_OBJECTS = (
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
)  # fmt: skip


def _xml_call(lark: Lark, number: int, name: str, schema: Mapping[str, Any]) -> str:
    schema = _object_schema(schema)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise GrammarError("properties must be an object and required a list of names")
    if unnamed := [key for key in required if not isinstance(key, str)]:
        raise GrammarError(f"required has {unnamed[0]!r:.80}, which is no name")
    properties = {**properties, **{key: {"type": "string"} for key in required if key not in properties}}
    parts = [lark.text(f"<function={name}>\n")]
    if not properties and "properties" not in schema and schema.get("additionalProperties", True) is True:
        value = lark.until(f"value{number}", _XML_END)
        any_one = f'"<parameter=" /[^<>\\n]{{1,256}}/ ">" {_quoted(NEWLINE)} {value}'
        parts.append(lark.rule(f"parameter{number}", any_one) + "*")
    for place, (key, inner) in enumerate(properties.items()):
        if re.search(r"[<>\n]", key):
            raise GrammarError(f"parameter {key!r:.80} has a character that its tag cannot have")
        try:
            value = _xml_value(lark, f"value{number}x{place}", schema, key, inner)
        except GrammarError as error:
            raise GrammarError(f"parameter {key!r:.80}: {error}") from error
        parameter = lark.rule(f"parameter{number}x{place}", f"{lark.text(f'<parameter={key}>' + NEWLINE)} {value}")
        parts.append(parameter if key in required else f"{parameter}?")
    return " ".join([*parts, lark.text("</function>\n")])


def _object_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of the arguments, or the one that it refers to; raises GrammarError for what tags cannot hold."""
    if "$ref" in schema:
        found = ParameterTypes.of(schema).referred(schema["$ref"])
        schema = {**(found if isinstance(found, Mapping) else {"$ref": None}), **_definitions(schema)}
    for name in _UNHELD_OF_OBJECTS:
        if name in schema:
            raise GrammarError(f'Unimplemented keys: ["{name}"], of all arguments')
    return schema


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _xml_value(lark: Lark, rule: str, schema: Mapping[str, Any], key: str, inner: Any) -> str:
    """A parameter's value and its end: text for a string, JSON of its schema for all others."""
    if inner is False:
        raise GrammarError("no value satisfies it")
    types, end = ParameterTypes.of(schema), lark.text(_XML_END)
    if "string" not in types.of_parameter(key) or not isinstance(inner, Mapping):
        return f"{lark.json(_with_definitions(inner, schema))} {end}"
    texts, others = texts_of(types, inner)
    if texts is None:
        return lark.until(rule, _XML_END)
    options = [f"{lark.json(_with_definitions(each, schema))} {end}" for each in others]
    if texts:
        # A text must not hold what the parser takes for its end.
        text = f"(({' | '.join(texts)}) & ~/(?s:.*)({in_lark(_XML_ENDS)})(?s:.*)/)"
        options.append(lark.rule(f"{rule}[lazy]", f"{text} {_quoted(_XML_END)}"))
    return f"({' | '.join(options)})"


def _with_definitions(inner: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**inner, **_definitions(schema)} if isinstance(inner, Mapping) else {}


def _xml_rest(lark: Lark, is_single: bool) -> str:
    return f"{_quoted(NEWLINE)} call {lark.text('</tool_call>')}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class CallWriter:
    """The grammar of one format.

    one         rule of one call: from its number, its name and its arguments' schema
    rest        rule of what follows the opening marker, around the rule `call`; its last argument: only one call
    separator   between two of these; empty: a list has all calls
    """

    one: Callable[[Lark, int, str, Mapping[str, Any]], str]
    opening: str
    rest: Callable[[Lark, bool], str]
    separator: str = ""


WRITERS: Mapping[str, CallWriter] = {
    "qwen3_coder": CallWriter(_xml_call, "<tool_call>", _xml_rest, NEWLINE),
    "hermes": CallWriter(_json_call, "<tool_call>", _hermes_rest, NEWLINE),
    "granite": CallWriter(_json_call, "<|tool_call|>", _list_to("")),
    "nemotron": CallWriter(_json_call, "<TOOLCALL>", _list_to("</TOOLCALL>")),
    "lfm2": CallWriter(_json_call, "<|tool_call_start|>", _list_to("<|tool_call_end|>")),
    "kimi": CallWriter(_kimi_call, "<|tool_calls_section_begin|>", _kimi_rest),
}
