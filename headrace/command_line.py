"""Commands whose settings are a config dataclass: flags override a YAML file, and both go through one loader.

A command lists its flags with the field that each one sets; help, defaults and types come from the dataclass.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import typer

from headrace.config import ConfigError, build, error_in, field_descriptions, override, read_yaml

T = TypeVar("T")

START_FAILED_STATUS = 2
"""Exit status of a process that never ran: a setting, a certificate or an address will not do. A crash later is 1."""
METAVARS = {int: "INTEGER", float: "NUMBER"}
FILE = Annotated[Path | None, typer.Option("-c", "--config", help="YAML file with these settings, and all others")]


def field_flags(config_type: type, section: str = "") -> dict[str, str]:
    """A flag for every field of a dataclass, which is itself the field `section` of a config: --tls-ca -> tls.ca."""
    names = [f"{section}.{field.name}".removeprefix(".") for field in dataclasses.fields(config_type)]
    return {f"--{name.replace('.', '-').replace('_', '-')}": name for name in names}


def config_command(
    name: str,
    config_type: type[T],
    flags: Mapping[str, str],
    run: Callable[[T], int],
    *,
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Callable[..., None]:
    """A typer command that loads a `config_type` and exits with the status that `run` returns.

    `flags` maps each flag to the field that it sets (engine.device); the file and the flags override `defaults`.
    A ConfigError, of the loader or of `run`, is printed after the command's `name`; the status is then 2.
    """
    fields = {flag.lstrip("-").replace("-", "_"): path for flag, path in flags.items()}

    def command(config: Path | None, **values: Any) -> None:
        given = {fields[parameter]: _entries(value) for parameter, value in values.items() if value not in (None, [])}
        try:
            status = run(_load(config_type, config, given, defaults, flags))
        except ConfigError as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = START_FAILED_STATUS
        raise typer.Exit(status)

    types = {"config": FILE} | {
        parameter: _option(config_type, flag, flags[flag]) for parameter, flag in zip(fields, flags, strict=True)
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(each, keyword, default=None, annotation=types[each]) for each in types]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = types
    return command


def run_command(command: Callable[..., None], argv: Sequence[str] | None, name: str) -> int:
    """Runs one command as a whole program; the exit status."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    try:
        app(argv, prog_name=name)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _entries(value: Any) -> Any:
    """A flag's value; that of a list as one list, however often the flag comes and however many commas it has."""
    return [entry for part in value for entry in part.split(",")] if isinstance(value, list) else value


def _load(
    config_type: type[T],
    file: Path | None,
    given: Mapping[str, object],
    defaults: Mapping[str, object],
    flags: Mapping[str, str],
) -> T:
    data = {**defaults, **(read_yaml(file) if file else {})}
    if any(path.startswith("tls.") for path in given):
        data.pop("tls", None)  # authority, certificate and key belong together
    for path, value in given.items():
        override(data, path, value)
    config, faults = build(config_type, data)
    if config is None:
        for flag, path in flags.items():
            remedy = f"add it, or give {flag}" if file else f"give {flag}"
            missing = f"{path} is missing: add it"
            faults = [f"{path} is missing: {remedy}" if fault == missing else fault for fault in faults]
        raise error_in(str(file or "command line"), faults)
    return config


def _option(config_type: type, flag: str, path: str) -> Any:
    """The annotation of one flag. All but switches are texts: the loader converts them and names the field at fault."""
    kind: Any = config_type
    *sections, name = path.split(".")
    for section in sections:
        kind = next(part for part in _parts(kind, section) if dataclasses.is_dataclass(part))
    (default,) = (field.default for field in dataclasses.fields(kind) if field.name == name)
    text = field_descriptions(kind)[name]
    if default not in (None, "", (), dataclasses.MISSING):
        text += f" (default {str(default).lower() if isinstance(default, bool) else default})"
    parts = _parts(kind, name)
    if bool in parts:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text)]
    if any(typing.get_origin(part) is tuple for part in parts):
        return Annotated[list[str] | None, typer.Option(flag, metavar="TEXT", help=f"{text}; also several times")]
    metavar = next((METAVARS[part] for part in parts if part in METAVARS), "TEXT")
    return Annotated[str | None, typer.Option(flag, metavar=metavar, help=text)]


def _parts(kind: type, name: str) -> tuple[Any, ...]:
    """A field's type, and those in its union."""
    hint = typing.get_type_hints(kind)[name]
    return (hint, *typing.get_args(hint))
