"""JSON types of a tool's parameters, and plain text as JSON of such a type."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SCHEMAS = 64  # that one parameter's type is looked for in: references and alternatives
MAX_LITERAL = 16 << 10  # characters: Python's parser takes 1 ms for 5,000
STRING = frozenset({"string"})

_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array",
}  # fmt: skip


@dataclass(frozen=True)
class ParameterTypes:
    """The types that a tool's schema gives its parameters; of a schema that is broken, none."""

    schema: Mapping[str, Any]

    @classmethod
    def of(cls, schema: Any) -> ParameterTypes:
        return cls(schema if isinstance(schema, Mapping) else {})

    def of_parameter(self, name: str) -> frozenset[str]:
        """The JSON types of a parameter: `string` if the schema does not know it, empty if any value will do."""
        properties = self.schema.get("properties")
        if not isinstance(properties, Mapping) or name not in properties:
            return STRING
        found: set[str] = set()
        pending = [properties[name]]
        for _ in range(MAX_SCHEMAS):
            if not pending:
                return frozenset(found)
            types, others = self._types(pending.pop())
            if not types and not others:
                break
            found |= types
            pending += others
        return frozenset()

    def _types(self, schema: Any) -> tuple[set[str], Sequence[Any]]:
        """The types that a schema names itself, or the schemas that do."""
        if not isinstance(schema, Mapping):
            return set(), ()
        if "$ref" in schema:
            return set(), [self.referred(schema["$ref"])]
        declared = schema.get("type")
        if isinstance(declared, str | list):
            names = [declared] if isinstance(declared, str) else declared
            return {each for each in names if isinstance(each, str)}, ()
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return {_TYPES[type(each)] for each in values if type(each) in _TYPES}, ()
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(others := schema.get(name), list):
                return set(), others[:MAX_SCHEMAS]
        return {"object"} if "properties" in schema else set(), ()

    def referred(self, reference: Any) -> Any:
        """The schema at a reference such as `#/$defs/City`."""
        found: Any = self.schema
        for name in str(reference).removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def as_json(text: str, types: frozenset[str]) -> str:
    """Plain text as JSON of one of the types, if it can be read as such; else as a JSON string."""
    value = text.strip()
    if (kind := _kind_of_json(value)) and _fits(kind, types):
        return value
    if (literal := _literal(value)) is not None and _fits(literal[0], types):
        return literal[1]
    return json.dumps(text, ensure_ascii=False)


def _fits(kind: str, types: frozenset[str]) -> bool:
    if not types:
        return True
    return kind != "string" and (kind in types or (kind == "integer" and "number" in types))


def _kind_of_json(text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if type(value) is float and value.is_integer():
        return "integer"  # 3.0 is an integer in JSON schemas
    return _TYPES[type(value)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _literal(text: str) -> tuple[str, str] | None:
    """The type and the JSON of a Python literal, which some models write: None, True, lists with single quotes."""
    if len(text) > MAX_LITERAL or not text.startswith(("[", "{", "(", "None", "True", "False")):
        return None
    try:
        value = ast.literal_eval(text)
        return _TYPES[type(value)], json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, KeyError, MemoryError, RecursionError):
        return None
