"""A node in a process of its own whose engine breaks at a request with a POISON token."""

import ctypes
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.engine.runner import ModelRunner
from node.config import NodeConfig
from node.server import node_server
from node_runtime.server import NodeServer

POISON = 499
HANG_S = 600.0


@dataclass(frozen=True)
class BrokenNode:
    """fault   what a step with POISON among its tokens does: it raises, finds too little memory, or does not return,
    without the GIL or with it
    """

    config: NodeConfig
    fault: Literal["raises", "no memory", "hangs", "keeps the GIL"]


def broken_node(node: BrokenNode) -> NodeServer:
    launch = ModelRunner.launch

    def launch_or_break(self: ModelRunner, inputs: Any, *others: Any) -> Any:
        if any(POISON in entry.tokens for entry in inputs):
            match node.fault:
                case "raises":
                    raise RuntimeError("an illegal memory access\nwith a second line")
                case "no memory":
                    raise torch.OutOfMemoryError("Tried to allocate 8.14 GiB")
                case "hangs":
                    time.sleep(HANG_S)
                case "keeps the GIL":
                    ctypes.PyDLL(None).pause()
        return launch(self, inputs, *others)

    vars_of_runner: Any = ModelRunner
    vars_of_runner.launch = launch_or_break
    config = node.config
    return node_server(config)
