"""One decode node as a process: `headrace decode --model DIR --router HOST:PORT`, or `python -m decode_node`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_node.config import DecodeNodeConfig
from headrace.command_line import config_command, run_command
from node_runtime.config import NODE_FLAGS


def run(config: DecodeNodeConfig) -> int:
    """Runs the node until SIGINT or SIGTERM; returns the exit status. Raises ConfigError."""
    from decode_node.service import decode_node  # here: `--help` needs neither torch nor UCX
    from node_runtime.process import run_node

    return run_node(decode_node(config))


command = config_command("decode", DecodeNodeConfig, NODE_FLAGS, run, defaults={"name": "d0"})
command.__doc__ = "Run one decode node, without Ray."


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `python -m decode_node`; the exit status."""
    return run_command(command, argv, "decode_node")


if __name__ == "__main__":
    sys.exit(main())
