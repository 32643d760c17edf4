"""Configs are frozen dataclasses: this module builds them from plain data (parsed YAML, flags) and checks their ranges.

`load` checks names and types; each dataclass checks its own values in `__post_init__`, with the range checks below.
Every fault is one line: the field, its value, the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


NAME_MAX, PATH_MAX = 255, 4096  # bytes, of Linux
PATH_WANTED = f"a path without NUL, of fewer than {PATH_MAX:,} bytes and at most {NAME_MAX} between two slashes"


class ConfigError(ValueError):
    """Settings that cannot work. Each argument is one fault: field, value and remedy."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


# ---------------------------------------------------------------- plain data to dataclasses


def load(kind: type[T], data: object, source: str) -> T:
    """`data` as a `kind`; `source` names its origin. Raises ConfigError with every fault and its path."""
    config, faults = build(kind, data)
    if config is None:
        raise error_in(source, faults)
    return config


def error_in(source: str, faults: Iterable[str]) -> ConfigError:
    """One error for all faults of a file or a command line."""
    faults = list(faults)
    return ConfigError(f"{source}: {faults[0]}" if len(faults) == 1 else "\n  ".join([f"{source}:", *faults]))


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping. Raises ConfigError."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a YAML file that this user can read") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: {data!r} must be a mapping of keys to values")
    return data


def build(kind: type[T], data: object, path: tuple[str, ...] = ()) -> tuple[T | None, list[str]]:
    """The config and no fault, or None and every fault of `data`."""
    if isinstance(data, kind):
        return data, []
    if not isinstance(data, Mapping):
        return None, [f"{_dotted(path)} {data!r}: must be a mapping of keys to values"]
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    types = typing.get_type_hints(kind)
    faults = [_unknown_key((*path, str(key)), fields) for key in data if key not in fields]
    values: dict[str, Any] = {}
    faulty = [name for name, field in fields.items() if name not in data and _is_required(field)]
    faults += [f"{_dotted((*path, name))} is missing: add it" for name in faulty]
    for name in (name for name in fields if name in data):
        values[name], found = _value(types[name], data[name], (*path, name))
        faults += found
        if found:
            faulty.append(name)
    config, found = _construct(kind, values, faulty)
    faults += [_dotted((*path, fault)) for fault in found]
    return (None, faults) if faults else (config, [])


def override(data: dict[str, Any], path: str, value: object) -> None:
    """Sets `path` (engine.device) in a file's data; a section that is no mapping is left for `build` to refuse."""
    *sections, name = path.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            return
    data[name] = value


def field_descriptions(kind: type) -> dict[str, str]:
    """Field -> its description in the docstring of the dataclass or a base: lines `field  text`, continued indented."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        name = None
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            if start := re.match(r"(\w+)  +(\S.*)", line):
                name = start[1]
                found[name] = start[2]
            elif name and line.startswith("  "):
                found[name] += f" {line.strip()}"
            else:
                name = None
    return found


def _construct(kind: type[T], values: dict[str, Any], faulty: list[str]) -> tuple[T | None, list[str]]:
    """The dataclass, or what its own checks find.

    With faults already found there is no config to return, but the sound fields are still checked, beside the defaults
    of the faulty ones: a user sees all faults of a file at once.
    """
    required = {field.name for field in dataclasses.fields(kind) if _is_required(field)}  # type: ignore[arg-type]
    sound = {name: value for name, value in values.items() if name not in faulty}
    try:
        return kind(**sound, **{name: None for name in faulty if name in required}), []
    except ConfigError as error:
        return None, [fault for fault in error.args if fault.split()[0] not in faulty]
    except (TypeError, AttributeError):
        if not faulty:
            raise
        return None, []  # a check that needs a faulty field


def _value(hint: Any, value: object, path: tuple[str, ...]) -> tuple[Any, list[str]]:
    """One field's value as its type `hint`, and its faults."""
    if typing.get_origin(hint) is Mapping and dataclasses.is_dataclass(typing.get_args(hint)[1]):
        return _named_values(typing.get_args(hint)[1], value, path)
    section = dataclass_in(hint)
    if section is not None:
        if value is None and type(None) in typing.get_args(hint):
            return None, []
        return build(section, {} if value is None else value, path)  # a section that is empty in the file
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # here: `headrace --help` needs none of its 0.1 s

    wrong = [f"{_dotted(path)} {value!r}: must be {_wanted(hint)}"]
    if _has_boolean(value) and bool not in (hint, *typing.get_args(hint)):
        return None, wrong  # pydantic would take true for 1
    try:
        found = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return None, wrong
    if isinstance(found, Path) and not can_be_a_file(found):
        return None, [f"{_dotted(path)} {value!r:.100}: must be {PATH_WANTED}"]
    return found, []


def can_be_a_file(path: Path) -> bool:
    """False for what every call of the system refuses, and not as a file that is missing."""
    raw = bytes(path)
    return b"\0" not in raw and len(raw) < PATH_MAX and all(len(part) <= NAME_MAX for part in raw.split(b"/"))


def _named_values(kind: Any, value: object, path: tuple[str, ...]) -> tuple[Any, list[str]]:
    """A mapping of names to dataclasses, and the faults of all of them."""
    value = {} if value is None else value
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        return None, [f"{_dotted(path)} {value!r}: must be a mapping of names to mappings"]
    built = {str(name): build(kind, {} if each is None else each, (*path, str(name))) for name, each in value.items()}
    faults = [fault for _, found in built.values() for fault in found]
    return (None if faults else {name: config for name, (config, _) in built.items()}), faults


def _has_boolean(value: object) -> bool:
    return any(isinstance(part, bool) for part in (value.values() if isinstance(value, Mapping) else (value,)))


def _wanted(hint: Any) -> str:
    """A value of this type, described for users."""
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text", Path: "a path"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if type(None) in arguments:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return f"{_wanted(inner)}, or left out"
    if origin is tuple:
        return f"a list, each {_wanted(arguments[0])}"
    if origin is Mapping:
        return f"a mapping of names to values, each {_wanted(arguments[1])}"
    return words[hint]


def _unknown_key(path: tuple[str, ...], known: Iterable[str]) -> str:
    near = difflib.get_close_matches(path[-1], known := list(known), n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"{_dotted(path)} is an unknown key: {remedy}"


def dataclass_in(hint: Any) -> Any | None:
    """The dataclass that `hint` is, or that its union with None holds."""
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


# ---------------------------------------------------------------- range checks, for `__post_init__`


def refuse(*groups: Iterable[str]) -> None:
    """Raises ConfigError with all faults that the checks found, if there are any."""
    faults = [fault for group in groups for fault in group]
    if faults:
        raise ConfigError(*faults)


def at_least(config: object, least: float, *names: str, remedy: str = "") -> Iterator[str]:
    """Faults of numbers below `least`; None is a field that is left out."""
    for name, value in _given(config, names):
        if not least <= value < math.inf:
            yield f"{name} {value}: must be at least {least}{remedy}"


def positive(config: object, *names: str) -> Iterator[str]:
    """Faults of numbers that are 0, negative or not finite: durations, ratios."""
    for name, value in _given(config, names):
        if not 0 < value < math.inf:
            yield f"{name} {value}: must be a finite number above 0"


def ports(config: object, *names: str) -> Iterator[str]:
    """Faults of TCP ports."""
    for name, value in _given(config, names):
        if not 0 <= value <= 65535:
            yield f"{name} {value}: must lie in 0..65535, 0 takes a free one"


def addresses(config: object, *names: str) -> Iterator[str]:
    """Faults of lists of host:port: entries of another form, and those that come twice."""
    for name, values in _given(config, names):
        for value in values:
            host, _, port = value.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
                yield f"{name} {value!r}: must be host:port, such as 10.0.0.1:8001"
        yield from (
            f"{name} {value!r}: comes twice, name each once" for value in set(values) if values.count(value) > 1
        )


def one_of(config: object, choices: Iterable[str], *names: str) -> Iterator[str]:
    """Faults of names that are not among `choices`."""
    choices = list(choices)
    for name, value in _given(config, names):
        if value not in choices:
            yield f"{name} {value!r}: must be one of {', '.join(choices)}"


def not_empty(config: object, *names: str, remedy: str) -> Iterator[str]:
    """Faults of empty texts."""
    for name, value in _given(config, names):
        if not value:
            yield f"{name} {value!r}: must not be empty, {remedy}"


def checkpoint_folders(config: object, *names: str) -> Iterator[str]:
    """Faults of folders without a model's config.json."""
    for name, value in _given(config, names):
        file = Path(value) / "config.json"
        if not (can_be_a_file(file) and file.is_file()):
            yield f"{name} {value}: no config.json there; give a checkpoint's folder"


def _given(config: object, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name in names if (value := getattr(config, name)) is not None)
