"""One prefill node as a process: `headrace prefill --model DIR --router HOST:PORT`, or `python -m prefill_node`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.command_line import config_command, run_command
from node_runtime.config import NODE_FLAGS
from prefill_node.config import PrefillNodeConfig


def run(config: PrefillNodeConfig) -> int:
    """Runs the node until SIGINT or SIGTERM; returns the exit status. Raises ConfigError."""
    from node_runtime.process import run_node
    from prefill_node.service import prefill_node  # here: `--help` needs neither torch nor UCX

    return run_node(prefill_node(config))


command = config_command("prefill", PrefillNodeConfig, NODE_FLAGS, run, defaults={"name": "p0"})
command.__doc__ = "Run one prefill node, without Ray."


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `python -m prefill_node`; the exit status."""
    return run_command(command, argv, "prefill_node")


if __name__ == "__main__":
    sys.exit(main())
