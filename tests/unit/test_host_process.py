"""The log lines and the niceness of a server's process."""

import re
import subprocess
import sys

from headrace.host_process import machine_id, own_niceness
from tests.support.patience import PATIENCE_S

THREADED = """
import os, sys, threading
from headrace.host_process import log_to_stderr, take_niceness

log_to_stderr()
os.nice(3)  # as Ray starts its workers
started, done = threading.Event(), threading.Event()
def work():
    started.set()
    done.wait()
    print("thread", os.getpriority(os.PRIO_PROCESS, 0))
thread = threading.Thread(target=work)
thread.start()
started.wait()
if "unprivileged" in sys.argv and os.getuid() == 0:
    os.setuid(65534)
take_niceness(int(sys.argv[1]))
done.set()
thread.join()
print("main", os.getpriority(os.PRIO_PROCESS, 0))
"""


def run(niceness: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", THREADED, str(niceness), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)


def test_every_thread_takes_the_niceness() -> None:
    wanted = own_niceness() + 5  # raising it takes no privilege
    assert run(wanted).stdout.split("\n")[:2] == [f"thread {wanted}", f"main {wanted}"]


def test_a_process_that_may_not_lower_its_niceness_logs_the_remedy() -> None:
    own = own_niceness()
    done = run(own, "unprivileged")
    assert done.stdout.split("\n")[:2] == [f"thread {own + 3}", f"main {own + 3}"]
    assert f"runs at niceness {own + 3} instead of {own}" in done.stderr
    assert "RAY_worker_niceness=0" in done.stderr


def test_a_log_line_begins_with_its_time() -> None:
    line = run(own_niceness(), "unprivileged").stderr
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING headrace\.host_process: ", line)


def test_processes_of_a_machine_agree_on_its_id():
    other = subprocess.run(
        [sys.executable, "-c", "from headrace.host_process import machine_id; print(machine_id())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == machine_id() != ""
