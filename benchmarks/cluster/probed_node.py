"""One node as a process, which prints at its end what its steps took: benchmarks/engine/step_probe.py.

python -m benchmarks.cluster.probed_node -c FILE      # as `python -m node`
"""

from __future__ import annotations

import sys

import node_runtime.server
from benchmarks.engine.step_probe import (
    StepProbe,
    phases_header,
    phases_row,
    slowest_header,
    slowest_rows,
    summary_header,
    summary_row,
)
from headrace.command_line import config_command, run_command
from headrace.engine.loop import EngineLoop
from node.config import NODE_FLAGS, NodeConfig
from node.server import node_server
from node_runtime.process import run_node

SLOWEST = 10


class ProbedLoop(EngineLoop):
    """An engine's loop whose steps are recorded from its start on."""

    started: ProbedLoop | None = None

    def start(self) -> None:
        self.probe = StepProbe(self.engine, self, self.engine._runner.memory.device)
        self.probe.is_recording = True
        ProbedLoop.started = self
        super().start()

    def report(self, name: str) -> str:
        """The tables of a node's steps: those with answers, those of prompts alone, and the slowest of the first."""
        records, costs = self.probe.take(), self.engine.cost_fit.costs
        answers = [record for record in records if record.shape.num_decoding]
        prompts = [record for record in records if not record.shape.num_decoding]
        kinds = {f"{name}, with answers": answers, f"{name}, prompts alone": prompts}
        kinds = {kind: of_kind for kind, of_kind in kinds.items() if of_kind}
        return "\n".join(
            [
                summary_header(),
                *(summary_row(kind, of_kind, (), costs) for kind, of_kind in kinds.items()),
                "",
                phases_header(),
                *(phases_row(kind, of_kind) for kind, of_kind in kinds.items()),
                "",
                slowest_header(),
                *slowest_rows(name, answers, costs, SLOWEST),
            ]
        )


def run(config: NodeConfig) -> int:
    """Runs the node until SIGINT or SIGTERM, and prints its tables; returns the exit status. Raises ConfigError."""
    node_runtime.server.EngineLoop = ProbedLoop  # type: ignore[attr-defined]
    status = run_node(node_server(config))
    if status == 0 and ProbedLoop.started is not None:
        print(ProbedLoop.started.report(config.name), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(run_command(config_command("node", NodeConfig, NODE_FLAGS, run), None, "node"))
