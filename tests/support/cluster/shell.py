"""The `headrace` command as users run it, in a state folder of its own, and what its cluster says over HTTP."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.processes import is_alive, working_folder
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tiny_models" / "headrace-tiny-qwen3.5"
START_S, END_S = 2 * PATIENCE_S, PATIENCE_S


class Shell:
    """Runs `headrace` commands in a state folder of their own, and knows every process that came of them.

    Commands start in `folder`, and their children there or in a run's folder: no process changes its own.
    """

    def __init__(self, folder):
        self.folder = folder
        self.state = folder / "headrace"
        self.ray_folder = Path("/tmp") / f"hr-{os.getpid()}"  # short: Unix sockets
        self.run_ids = set()
        self.env = {
            **os.environ,
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "PYTHONFAULTHANDLER": "1",  # see `output_of`
        }

    def start(self, *arguments, module="deploy", inside=()):
        """`inside` is put before the command: `ip netns exec NAME`, say."""
        return subprocess.Popen(
            [*inside, sys.executable, "-m", module, *map(str, arguments)],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's & ignores it
        )

    def run(self, *arguments, timeout_s=START_S, stdin=None, inside=()):
        """Exit status and output."""
        process = self.start(*arguments, inside=inside)
        output = output_of(process, stdin, timeout_s=timeout_s)
        return process.returncode, output

    def up(self, *arguments):
        """A cluster in the background; its HTTP address."""
        status, output = self.run("up", "--model", MODEL, "--device", "cpu", "--port", 0, "--detach", *arguments)
        assert status == 0, output
        return self.record()["urls"][0]

    def never_ready(self, start_timeout_s=START_S, join_timeout_s=START_S):
        """A cluster file whose decode node no host can hold; the start goes on while hosts may join."""
        file = self.folder / "cluster.yaml"
        ray = f"{{start_timeout_s: {start_timeout_s}, join_timeout_s: {join_timeout_s}}}"
        file.write_text(
            f"model: {MODEL}\nrouter: {{port: 0}}\nray: {ray}\n"
            "decode: {placement: {resources: {no_such_host: 1}}}\n"
        )
        return file

    def record(self, name="default"):
        return json.loads((self.state / f"{name}.json").read_text())

    def processes(self):
        """Command lines of the live processes that came of these commands."""
        for record in self.state.glob("*.json"):
            self.run_ids.add(json.loads(record.read_text())["run_id"])
        folders = {str(self.folder), *(str(working_folder(run_id)) for run_id in self.run_ids)}
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or not is_alive(int(entry.name)):
                continue
            try:
                if os.readlink(entry / "cwd").removesuffix(" (deleted)") in folders:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def actors(self):
        """Process ids of the live actors: the router and the nodes."""
        return [pid for pid, command in self.processes().items() if re.match(r"ray::\w+Actor", command)]

    def listener(self, url):
        """Process id of the actor that listens at an address."""
        port = int(url.rpartition(":")[2])
        (pid,) = [
            pid
            for pid in self.actors()
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
        return pid

    def log(self, name="default"):
        """The supervisor's log, with the lines of all actors."""
        return (self.state / f"{name}.log").read_text()

    def kill_everything(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def output_of(process, stdin=None, *, timeout_s=END_S):
    """All that a command has printed, once it has ended. One that hangs is aborted, and prints its threads' stacks."""
    try:
        return process.communicate(stdin, timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        try:
            output, _ = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired as expired:  # a child of the command holds the pipe open
            output = (expired.output or b"").decode(errors="replace")
        pytest.fail(f"{process.args} did not end within {timeout_s} s:\n{output}")


def until(condition, timeout_s, what):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"not within {timeout_s} s: {what}")


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def nodes_of(url):
    try:
        return {node["name"]: node for node in httpx.get(f"{url}/cluster", timeout=PATIENCE_S).json()["nodes"]}
    except httpx.HTTPError:
        return {}


def incarnation(url, name):
    """None while the router does not know it: it has forgotten a dead node when Ray takes long to start it again."""
    return nodes_of(url).get(name, {}).get("incarnation")


def answer_of(url, max_tokens=4):
    body = {"prompt": "The code of", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]
