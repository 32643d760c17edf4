"""A process that parses bodies for the router: `python -m router.parsing.worker`, its standard input a socket."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import signal
import socket
from pathlib import Path
from typing import Any

from headrace.host_process import log_to_stderr
from router.errors import ApiError, internal_error
from router.parsing.body_parser import BodyParser, ParseJob
from router.parsing.messages import LENGTH, ParseAnswer, WorkerSettings, frame

NICENESS = 5
"""Above the router's: large bodies are parsed here, and wait for a core rather than the answers that are streamed."""

log = logging.getLogger(__name__)


def main() -> None:
    """Serves one parent until it closes the socket. SIGPROF or a failed allocation ends the process, by design."""
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    os.nice(NICENESS)
    parent = socket.socket(fileno=0)
    stream = parent.makefile("rb")
    settings: WorkerSettings = _read(stream)
    parser = BodyParser(settings.served_model_name, settings.load_tokens())
    pages, resident = _memory_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (pages + settings.memory_bytes,) * 2)
    parent.sendall(frame(None))
    while (job := _read(stream)) is not None:
        signal.setitimer(signal.ITIMER_PROF, settings.cpu_s)  # its default action ends the process, also in Rust
        result = _result(parser, job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_spent = _memory_bytes()[1] - resident > settings.memory_bytes // 4
        parent.sendall(frame(ParseAnswer(result, is_spent)))


def _result(parser: BodyParser, job: ParseJob[Any]) -> Any:
    try:
        return parser.parse(job)
    except ApiError as error:
        return error
    except MemoryError:
        raise  # ends the process: the router knows what that means
    except Exception:
        log.exception("a request could not be parsed")
        return internal_error()


def _read(stream: Any) -> Any:
    """The next message; None when the parent is gone."""
    head = stream.read(LENGTH.size)
    return pickle.loads(stream.read(*LENGTH.unpack(head))) if len(head) == LENGTH.size else None


def _memory_bytes() -> tuple[int, int]:
    """This process's address space, and what of it is in memory."""
    size, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()
