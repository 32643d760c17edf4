"""A gRPC server that cannot listen says so, once, and leaves nothing behind."""

import subprocess
import sys

TWO_ON_ONE_PORT = """
import asyncio
import sys
from wire.server import ControlServer, ListenError

async def main():
    first, second, third = (ControlServer(["Registry"], lambda server: None) for _ in range(3))
    port = await first.start("127.0.0.1", 0)
    try:
        await second.start("127.0.0.1", port)
    except ListenError as error:
        print(error)
    for server in (first, second, third):
        await server.stop(0)
    return second, third

sys.kept = asyncio.run(main())  # to the end: a traceback, too, keeps what failed
"""


def test_a_taken_port_is_one_error_and_the_process_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_ON_ONE_PORT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "is the port taken?" in done.stdout
    assert "excepthook" not in done.stderr
