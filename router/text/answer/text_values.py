"""Grammars of string parameters that a format writes as plain text, without JSON's quotes, up to a marker.

A regular expression for each string schema; `None` of Python and JSON's `null` need no quotes either.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.grammar import GrammarError, check_grammar, regex_grammar
from router.text.answer.parameters import MAX_SCHEMAS, ParameterTypes

REFUSED = frozenset({"not", "if", "then", "else", "$dynamicRef"})
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id"}
)
MOST_CHARACTERS = 2**31 - 1  # that a regular expression counts; no answer has as many
NO_TEXTS = r"\s*([\-0-9\[{(](?s:.*)|(true|false|null|True|False|None)\s*)"
"""Texts that the parser takes for another value than a string, where the schema admits one."""

_DAY = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([Zz]|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_URI_CHARACTER = r"([a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
FORMATS: Mapping[str, str] = {
    "date": _DAY,
    "time": _TIME,
    "date-time": rf"{_DAY}[Tt]{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[a-zA-Z0-9_+\-]+(\.[a-zA-Z0-9_+\-]+)*@{_LABEL}(\.{_LABEL})*",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.\-]*://{_LABEL}(\.{_LABEL})*(:[0-9]{{1,5}})?"
    rf"(/{_URI_CHARACTER}*)*(\?({_URI_CHARACTER}|[/?])*)?(#({_URI_CHARACTER}|[/?])*)?",
}
"""Each admits nothing else than its format, but not all of it: no 29th of February, no URI without a host."""


def texts_of(types: ParameterTypes, schema: Mapping[str, Any]) -> tuple[list[str] | None, list[dict[str, Any]]]:
    """The texts that satisfy a schema which admits strings, as alternatives of a Lark terminal, None for any text; and
    the schemas of the values that are JSON. Raises GrammarError for a keyword that it cannot hold."""
    texts: list[str] = []
    words: list[str] = []
    others: list[dict[str, Any]] = []
    is_free, is_mixed = False, False
    for each in _alternatives(types, schema):
        kind, constant = each.get("type"), each.get("const")
        is_mixed |= kind not in ("string", "null")
        if kind == "string":
            text = _text(each)
            is_free |= text is None
            texts += [] if text is None else [text]
        elif kind == "null":
            words.append('"null"')
        elif kind == "boolean" or isinstance(constant, bool):
            words += [json.dumps(json.dumps(value)) for value in ([True, False] if constant is None else [constant])]
        else:
            others.append(each)
    if is_free and not is_mixed:
        return None, []
    texts = ["/(?s:.*)/"] if is_free else texts
    if is_mixed:
        texts = [f"({text} & ~/{in_lark(NO_TEXTS)}/)" for text in texts]
    if not texts and not words and not others:
        raise GrammarError("no value satisfies it")
    return [*texts, *words], others


def _alternatives(types: ParameterTypes, schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas of one type each, any of which a value may satisfy."""
    pending = [dict(schema)]
    for _ in range(MAX_SCHEMAS):
        if not pending:
            return
        found = _with_references(types, pending.pop(0))
        for refused in sorted(REFUSED.intersection(found)):
            raise GrammarError(f'Unimplemented keys: ["{refused}"], of text')
        name = next((each for each in ("anyOf", "oneOf") if each in found), None)
        if name is not None:
            inner = found.pop(name)
            if not isinstance(inner, list) or not inner:
                raise GrammarError(f"{name} must be a list of schemas")
            merged = [_merged(found, each) for each in inner]
            num_texts = sum(each.get("type", "string") == "string" for each in merged)
            if name == "oneOf" and num_texts > 1 and not all("const" in each for each in merged):
                raise GrammarError("oneOf of several texts: use anyOf")
            pending += merged
        elif isinstance(kinds := found.get("type"), list):
            pending += [{**found, "type": kind} for kind in kinds]
        elif "enum" in found or "const" in found:
            yield from _values(found)
        else:
            yield found
    if pending:
        raise GrammarError(f"more than {MAX_SCHEMAS} alternatives of one parameter")


def _values(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema for each value of `enum` or `const` that is of the schema's type, if it names one."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or ("const" in schema and schema["const"] not in values):
        raise GrammarError("enum must be a list of values, with const among them")
    kind = schema.get("type")
    for value in [schema["const"]] if "const" in schema else values:
        if isinstance(value, str):
            if kind in (None, "string"):
                rest = {name: each for name, each in schema.items() if name not in ("enum", "const")}
                yield {**rest, "type": "string", "const": value}
        elif value is None:
            if kind in (None, "null"):
                yield {"type": "null"}
        elif kind != "string":
            yield {"const": value} if kind is None else {"const": value, "type": kind}


def _with_references(types: ParameterTypes, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with all that its `$ref` and `allOf` say."""
    for _ in range(MAX_SCHEMAS):
        inner = [types.referred(schema.pop("$ref"))] if "$ref" in schema else schema.pop("allOf", None)
        if inner is None:
            return schema
        for each in inner if isinstance(inner, list) else [None]:
            schema = _merged(schema, each)
    raise GrammarError("references lead too deep")


def _merged(schema: Mapping[str, Any], other: Any) -> dict[str, Any]:
    """Both schemas in one; raises GrammarError for a keyword that both have, with other values."""
    if not isinstance(other, Mapping):
        raise GrammarError(f"{json.dumps(other):.80} is no schema that is known here")
    for name in sorted((schema.keys() & other.keys()) - ANNOTATIONS):
        if schema[name] != other[name]:
            raise GrammarError(f"{name} stands twice: write one")
    return {**other, **schema}


def _text(schema: Mapping[str, Any]) -> str | None:
    """The texts that satisfy a schema of strings; None: any."""
    low, high = _length(schema, "minLength"), _length(schema, "maxLength")
    parts = []
    if low or high is not None:
        parts.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
    if "pattern" in schema:
        parts.append(f"/{in_lark(_pattern(schema['pattern']))}/")
    if "format" in schema:
        form = schema["format"]
        if not isinstance(form, str) or form not in FORMATS:
            raise GrammarError(f"Unknown format: {form!r:.80}; leave it out, or use {', '.join(FORMATS)}")
        parts.append(f"/{in_lark(FORMATS[form])}/")
    if "const" in schema:
        parts.append(json.dumps(schema["const"], ensure_ascii=False))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else f"({' & '.join(parts)})"


def _length(schema: Mapping[str, Any], name: str) -> int | None:
    """The number of characters that a keyword of the schema names, which JSON may write as 3.0; None: it has none."""
    if name not in schema:
        return None
    value = schema[name]
    if type(value) not in (int, float) or not 0 <= value < math.inf or value != int(value):
        raise GrammarError(f"{name} is {value!r:.80}: it must be a whole number")
    return min(int(value), MOST_CHARACTERS)


def _pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise GrammarError("pattern must be text")
    regex = found_in(pattern)
    try:
        check_grammar(regex_grammar(regex))
    except ValueError as error:
        raise GrammarError(f"pattern {pattern!r:.80}: {error!s:.200}") from error
    return regex


def found_in(pattern: str) -> str:
    """The regular expression of all texts in which JSON Schema finds `pattern`: anywhere, but for its anchors."""
    whole = []
    for each in _branches(pattern):
        begin = "" if each.startswith("^") else "(?s:.*)"
        each = each.removeprefix("^")
        has_end = each.endswith("$") and (len(each) - len(each[:-1].rstrip("\\"))) % 2 == 1
        whole.append(f"{begin}({each[:-1] if has_end else each}){'' if has_end else '(?s:.*)'}")
    return "|".join(whole)


def _branches(pattern: str) -> Sequence[str]:
    """The alternatives of a regular expression, outside of its groups."""
    branches, depth, in_class, start = [], 0, False, 0
    for found in re.finditer(r"\\.|[\[\]()|]", pattern, re.DOTALL):
        match found[0]:
            case "[":
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
            case "|" if not in_class and not depth:
                branches.append(pattern[start : found.start()])
                start = found.end()
    return [*branches, pattern[start:]]


def in_lark(regex: str) -> str:
    """A regular expression as Lark has it between two slashes."""
    text = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL)
    return text.replace("\n", r"\n")
