"""One node as a process, whose drafts are right as often as others publish: benchmarks/pinned_drafts.py.

python -m benchmarks.cluster.pinned_node -c FILE      # as `python -m node`
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.pinned_drafts import PinnedDrafts
from headrace.command_line import config_command, run_command
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.config import EngineConfig
from node.config import NODE_FLAGS, NodeConfig
from node.server import node_server
from node_runtime.process import run_node


def pinned_engine(model_path: str, config: EngineConfig, clock: Callable[[], float]) -> BuiltEngine:
    built = build_engine(model_path, config, clock)
    PinnedDrafts(built.engine._runner)
    return built


def run(config: NodeConfig) -> int:
    """Runs the node until SIGINT or SIGTERM; returns the exit status. Raises ConfigError."""
    return run_node(node_server(config, build=pinned_engine))


if __name__ == "__main__":
    sys.exit(run_command(config_command("node", NodeConfig, NODE_FLAGS, run), None, "node"))
