"""`python -m router`: one router process, from flags or a YAML file of `RouterConfig`'s fields."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from headrace.wire.server import ListenError
from headrace.wire.tls import TlsConfig, TlsError
from headrace.wire.tls_flags import add_tls_flags, tls_from_flags
from router.config import RouterConfig
from router.errors import ConfigError, RouterError
from router.server import RouterServer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGINT or SIGTERM; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(_serve(_config(sys.argv[1:] if argv is None else argv)))
    except (RouterError, ListenError, TlsError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: RouterConfig) -> None:
    server = RouterServer(config)
    wanted_end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, wanted_end.set)
    await server.start()
    print(f"router {server.url} (nodes register at {server.control_address})", flush=True)
    await wanted_end.wait()
    await server.stop()


def _config(argv: Sequence[str]) -> RouterConfig:
    """Flags win over the file."""
    hints = get_type_hints(RouterConfig)
    parser = argparse.ArgumentParser(prog="router", description=RouterConfig.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-c", "--config", type=Path, help="YAML file with these fields")
    add_tls_flags(parser)
    for field in fields(RouterConfig):
        if field.name == "tls":
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if hints[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, dest=field.name)
        else:
            parser.add_argument(flag, type=hints[field.name], default=None, dest=field.name)
    arguments = parser.parse_args(argv)
    given = {name: value for name, value in vars(arguments).items() if name in hints} | {
        "tls": tls_from_flags(arguments)
    }
    values = {} if arguments.config is None else _read_yaml(arguments.config)
    values |= {name: value for name, value in given.items() if value is not None}
    if "model_path" not in values:
        raise ConfigError("model_path is not set: give --model-path")
    return RouterConfig(**values)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected fields and their values")
    _refuse_unknown(file, values, RouterConfig)
    if isinstance(values.get("tls"), dict):
        _refuse_unknown(file, values["tls"], TlsConfig)
        try:
            values["tls"] = TlsConfig(**values["tls"])
        except TypeError as error:
            raise ConfigError(f"{file}: tls needs ca, cert and key: {error}") from None
    return values


def _refuse_unknown(file: Path, values: dict[str, Any], config: type) -> None:
    known = [field.name for field in fields(config)]
    for name in values:
        if name not in known:
            nearest = get_close_matches(str(name), known, n=1, cutoff=0)[0]
            raise ConfigError(f"{file}: unknown field {name!r}: did you mean {nearest!r}?")


if __name__ == "__main__":
    sys.exit(main())
