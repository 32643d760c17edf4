"""Runs one node as a process, until SIGINT or SIGTERM or until its engine crashes."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import torch

from headrace.command_line import START_FAILED_STATUS
from headrace.host_process import log_to_stderr
from headrace.models.config import ModelError
from headrace.pauses import keep_pauses_short
from headrace.wire.tls import TlsError
from node_runtime.server import NodeServer
from transfer.protocol.errors import TransferError

START_ERRORS = (ModelError, TlsError, TransferError, OSError)
"""Errors of a node's start that its user can mend, beside ConfigError."""


def run_node(node: NodeServer) -> int:
    """Blocks until the node has ended; returns the process's exit status. Raises ConfigError.

    A node that cannot start prints one line: its name and the cause.
    """
    log_to_stderr()
    try:
        return asyncio.run(_run(node))
    except START_ERRORS as error:
        cause = str(error)
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        cause = f"{node.config.model_path} does not fit {node.config.engine.device}: {first_line}"
    print(f"{node.config.name}: {cause}", file=sys.stderr)
    return START_FAILED_STATUS


async def _run(node: NodeServer) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await node.start()
    keep_pauses_short()
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
