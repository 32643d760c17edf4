"""Plain data (parsed YAML) to frozen dataclasses: unknown keys and wrong types are errors with a remedy.

Generic over dataclasses: pydantic checks and converts the types, each class checks its values in `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.engine.config import ConfigError

T = TypeVar("T")


def load_dataclass(kind: type[T], data: object, source: str) -> T:
    """`data` as a `kind`; `source` names its origin. Raises ConfigError that lists every fault found."""
    faults = list(_unknown_keys(kind, data, ()))
    if faults:
        raise ConfigError(_report(source, faults))
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise ConfigError(_report(source, [_describe(fault) for fault in error.errors()])) from None


def _unknown_keys(kind: Any, data: object, path: tuple[str, ...]) -> Iterator[str]:
    dataclass = _dataclass_in(kind)
    if dataclass is None or not isinstance(data, Mapping):
        return
    types = typing.get_type_hints(dataclass)
    known = [field.name for field in dataclasses.fields(dataclass)]
    for key, value in data.items():
        here = (*path, str(key))
        if key in known:
            yield from _unknown_keys(types[key], value, here)
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        yield f"{'.'.join(here)}: unknown key; {remedy}"


def _dataclass_in(kind: Any) -> Any | None:
    """The dataclass that `kind` is, or that its union holds."""
    for candidate in (kind, *typing.get_args(kind)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _describe(fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"]) or "the file"
    if fault["type"] == "missing":
        return f"{path}: missing; add it"
    if fault["type"] == "value_error":  # a dataclass's own check, which names field, value and remedy
        return f"{path}: {fault['ctx']['error']}"
    if fault["type"] == "dataclass_type":
        return f"{path}: {fault['input']!r} is not a mapping of keys to values"
    return f"{path}: {fault['input']!r}: {fault['msg'].lower()}"


def _report(source: str, faults: list[str]) -> str:
    return f"{source}: {faults[0]}" if len(faults) == 1 else "\n  ".join([f"{source}:", *faults])
