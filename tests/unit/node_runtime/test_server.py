"""A node that cannot start leaves nothing open, and one that starts says what it holds."""

import json
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from node.config import NodeConfig
from node.server import node_server
from tests.support.engine.driving import SMALL
from tests.support.patience import PATIENCE_S

START_ON_A_TAKEN_PORT = """
import asyncio, json, sys, threading

from node.config import NodeConfig
from node.server import node_server
from headrace.engine.config import EngineConfig
from headrace.wire.server import ListenError


async def main(model, taken):
    config = NodeConfig("d0", model, port=taken, engine=EngineConfig(cache_bytes=8 << 20, threads=1))
    node = node_server(config)
    try:
        await node.start()
    except ListenError as error:
        said = str(error)
    engines = [thread.name for thread in threading.enumerate() if thread.name == "engine"]
    is_open = asyncio.get_running_loop().remove_reader(node.runtime.transport.progress.worker.epoll_file_descriptor)
    tasks = len(asyncio.all_tasks()) - 1
    print(json.dumps({"said": said, "engines": engines, "transport": is_open, "tasks": tasks}), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_a_taken_port_ends_the_engine_and_the_transport(tiny_checkpoint) -> None:
    model: Path = tiny_checkpoint("granite")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", START_ON_A_TAKEN_PORT, str(model), str(port)]
        done = subprocess.run(
            command, capture_output=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[3], check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    assert f"cannot listen on 127.0.0.1:{port}" in found["said"]
    assert (found["engines"], found["transport"], found["tasks"]) == ([], False, 0)


async def test_a_node_registers_the_slots_of_its_packed_checkpoints(tiny_checkpoint) -> None:
    node = node_server(NodeConfig("n0", tiny_checkpoint("granite"), engine=replace(SMALL, checkpoint_dtype="int8")))
    await node.start()
    try:
        stats = node.runtime.built.engine.cache.stats()
        assert stats.packed is not None
        assert node.info.num_packed_slots == stats.packed.free > 0
    finally:
        await node.stop()
