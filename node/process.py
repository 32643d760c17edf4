"""Runs one node as a process of its own: until SIGINT or SIGTERM, or until its engine crashes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from engine.config import ConfigError
from node.chassis import Node
from node.config import NodeConfig

Config = TypeVar("Config", bound=NodeConfig)


def run_node(node: Node) -> int:
    """Blocks until the node has ended; the process's exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_run(node))


async def _run(node: Node) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await node.start()
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


def main(
    argv: Sequence[str] | None, config_type: type[Config], make_node: Callable[[Config], Node], default_name: str
) -> int:
    """The command line of `python -m prefill_node` and `python -m decode_node`."""
    parser = argparse.ArgumentParser(description=(config_type.__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with config.json, safetensors and tokenizer")
    parser.add_argument("--name", default=default_name, help="unique in the cluster")
    parser.add_argument("--router", help="host:port of the router's registry")
    parser.add_argument("--host", default="127.0.0.1", help="where router and other nodes reach this one")
    parser.add_argument("--port", type=int, default=0, help="of the gRPC service; 0: any free one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch's CPU threads")
    parser.add_argument("--cache-bytes", type=int, help="budget of blocks and states together")
    args = parser.parse_args(argv)
    try:
        config = config_type(
            name=args.name, model_path=args.model, router_address=args.router, host=args.host, port=args.port
        )
        engine = replace(config.engine, device=args.device, threads=args.threads, cache_bytes=args.cache_bytes)
        return run_node(make_node(replace(config, engine=engine)))
    except (ConfigError, OSError) as error:
        print(f"{args.name}: {error}", file=sys.stderr)
        return 2
