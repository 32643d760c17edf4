"""The process around a node."""

import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S

COLLECTED = """
import gc
from types import SimpleNamespace
from node_runtime.process import run_node

class Node:
    config = info = SimpleNamespace(name="p0", address="here")

    async def start(self):
        self.weights = [[] for _ in range(100_000)]

    async def wait_closed(self):
        self.requests = [[] for _ in range(1_000)]
        print("collected", sum(isinstance(each, list) for each in gc.get_objects()))

run_node(Node())
"""


def test_a_collection_walks_what_came_after_the_start() -> None:
    # In a process of its own: what is set aside stays so.
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED], cwd=root, capture_output=True, timeout=PATIENCE_S, check=True
    )
    assert 1_000 <= int(done.stdout.rsplit(b"collected", 1)[1]) < 5_000
