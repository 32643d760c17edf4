"""`python -m router`: one router process, from flags or a YAML file of `RouterConfig`'s fields."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from headrace.config import ConfigError, load, read_yaml
from headrace.wire.server import ListenError
from headrace.wire.tls import TlsError
from headrace.wire.tls_flags import add_tls_flags, tls_from_flags
from router.config import RouterConfig
from router.errors import RouterError
from router.server import RouterServer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGINT or SIGTERM; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        asyncio.run(_serve(_config(sys.argv[1:] if argv is None else argv)))
    except ConfigError as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
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
    values = {} if arguments.config is None else read_yaml(arguments.config)
    values |= {name: value for name, value in given.items() if value is not None}
    if "model_path" not in values:
        raise ConfigError("model_path is not set: give --model-path")
    return load(RouterConfig, values, str(arguments.config or "command line"))


if __name__ == "__main__":
    sys.exit(main())
