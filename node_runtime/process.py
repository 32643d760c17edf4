"""Runs one node as a process of its own: until SIGINT or SIGTERM, or until its engine crashes."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from headrace.config import ConfigError, load, read_yaml
from headrace.wire.tls import TlsError
from headrace.wire.tls_flags import add_tls_flags, tls_from_flags
from node_runtime.config import NodeConfig
from node_runtime.server import NodeServer
from transfer.protocol.errors import TransferError

Config = TypeVar("Config", bound=NodeConfig)

NODE_FLAGS = ("model_path", "name", "router_address", "host", "port")
ENGINE_FLAGS = ("device", "threads", "cache_bytes", "load_format")


def run_node(node: NodeServer) -> int:
    """Blocks until the node has ended; the process's exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_run(node))


async def _run(node: NodeServer) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await node.start()
    forget_start_up()
    print(f"ready {node.info.name} {node.info.address}", flush=True)
    ended = asyncio.create_task(node.wait_closed())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not ended.done():
        await node.stop()
    try:
        await ended
    except Exception as error:
        logging.getLogger(__name__).error("%s ended: %s", node.config.name, error)
        return 1
    return 0


def forget_start_up() -> None:
    """For a process that is a node: Python's collector never again walks what importing and loading left for good.

    A full collection holds every thread, the engine's too: after 160 prompts it takes 98 ms of processor time with
    these 200,000 objects and 6 without. An H200 has computed all that was launched ahead in 75 ms.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extension modules report all that the last collection leaves as leaked


def main(
    argv: Sequence[str] | None, config_type: type[Config], make_node: Callable[[Config], NodeServer], default_name: str
) -> int:
    """The command line of `python -m prefill_node` and `python -m decode_node`."""
    parser = argparse.ArgumentParser(description=(config_type.__doc__ or "").splitlines()[0])
    parser.add_argument("-c", "--config", type=Path, help="YAML file: what stands under `node` in a cluster file")
    parser.add_argument("--model", dest="model_path", help="folder with config.json, safetensors and tokenizer")
    parser.add_argument("--name", help=f"unique in the cluster; {default_name} if nobody says")
    parser.add_argument("--router", dest="router_address", help="host:port of the router's registry")
    parser.add_argument("--host", help="where router and other nodes reach this one")
    parser.add_argument("--port", type=int, help="of the gRPC service; 0: any free one")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", help="cpu, cuda or cuda:1")
    engine.add_argument("--threads", type=int, help="torch's CPU threads")
    engine.add_argument("--cache-bytes", type=int, help="budget of blocks and states together")
    engine.add_argument("--load-format", help="safetensors, or dummy: random weights")
    add_tls_flags(parser)
    arguments = parser.parse_args(argv)
    try:
        return run_node(make_node(node_config(config_type, arguments, default_name)))
    except (ConfigError, TlsError, TransferError, OSError) as error:
        print(f"{arguments.name or default_name}: {error}", file=sys.stderr)
        return 2


def node_config(config_type: type[Config], arguments: argparse.Namespace, default_name: str) -> Config:
    """A node's config from its file and the command line, which wins. Raises ConfigError, TlsError, OSError."""
    file: Path | None = arguments.config
    data = {} if file is None else read_yaml(file)
    engine = data.get("engine") or {}
    if isinstance(engine, dict):  # anything else is left for the loader to refuse
        engine = {**engine, **_said(arguments, ENGINE_FLAGS)}
    merged = {"name": default_name, **data, **_said(arguments, NODE_FLAGS), "engine": engine}
    if "model_path" not in merged:
        raise ConfigError("no model: give --model")
    config = load(config_type, merged, str(file or "command line"))
    tls = tls_from_flags(arguments)
    return config if tls is None else replace(config, tls=tls)


def _said(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, object]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
