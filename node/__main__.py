"""One node as a process: `headrace node --role decode --model DIR --router HOST:PORT`, or `python -m node`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.command_line import config_command, run_command
from node.config import NODE_FLAGS, NodeConfig


def run(config: NodeConfig) -> int:
    """Runs the node until SIGINT or SIGTERM; returns the exit status. Raises ConfigError."""
    from node.server import node_server
    from node_runtime.process import run_node  # here: `--help` needs neither torch nor UCX

    return run_node(node_server(config))


command = config_command("node", NodeConfig, NODE_FLAGS, run, defaults={"name": "n0"})
command.__doc__ = "Run one node, without Ray."


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `python -m node`; the exit status."""
    return run_command(command, argv, "node")


if __name__ == "__main__":
    sys.exit(main())
