"""One router as a process: `headrace router --model DIR`, or `python -m router`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.command_line import START_FAILED_STATUS, config_command, field_flags, run_command
from headrace.host_process import log_to_stderr
from headrace.pauses import keep_pauses_short
from headrace.tracing import TracingConfig
from headrace.wire.tls_config import TlsConfig
from router.config import RouterConfig
from router.routing.plan import Objectives

if TYPE_CHECKING:
    from router.server import RouterServer

SECTIONS = {"objectives": Objectives, "tracing": TracingConfig, "tls": TlsConfig}
FLAGS = {"--model": "model_path", **field_flags(RouterConfig)}  # --model as `up` and `node` have it
for section, kind in SECTIONS.items():
    del FLAGS[f"--{section}"]
    FLAGS |= field_flags(kind, section)
del FLAGS["--api-keys"], FLAGS["--priorities"]  # mappings: a file has them


def run(config: RouterConfig) -> int:
    """Runs until SIGINT or SIGTERM; the process's exit status."""
    import uvloop  # here: `--help` needs neither the loop, nor gRPC, nor the tokenizers

    from router.server import START_ERRORS, RouterServer

    log_to_stderr()
    try:
        uvloop.run(_serve(RouterServer(config)))  # as Ray's actors do
    except START_ERRORS as error:
        print(f"router: {error}", file=sys.stderr)
        return START_FAILED_STATUS
    return 0


async def _serve(server: RouterServer) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.start()
    keep_pauses_short()
    print(f"router {server.url} (nodes register at {server.control_address})", flush=True)
    await stopped.wait()
    await server.stop()


command = config_command("router", RouterConfig, FLAGS, run)
command.__doc__ = "Run the router, without Ray."


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of `python -m router`; the exit status."""
    return run_command(command, argv, "router")


if __name__ == "__main__":
    sys.exit(main())
