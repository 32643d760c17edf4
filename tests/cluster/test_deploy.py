"""The `headrace` command as users run it: real processes, real Ray, and nothing left afterwards."""

import os
import re
import shutil
import signal

import grpc
import pytest

from deploy.demo import demo_chat
from deploy.ports import free_ports
from deploy.processes import is_alive
from headrace.host_process import own_niceness
from headrace.wire.generated.headrace_pb2 import DescribeRequest
from headrace.wire.generated.headrace_pb2_grpc import NodeStub
from tests.support.cluster.certificates import Authority
from tests.support.cluster.shell import (
    END_S,
    MODEL,
    START_S,
    Shell,
    answer_of,
    incarnation,
    is_listening,
    nodes_of,
    output_of,
    until,
)
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow


def test_a_cluster_in_the_background_from_up_to_down(shell):
    """Its file has certificates, whose paths are taken from the file's folder, though no process works there."""
    Authority.create(shell.folder).issue("member")
    file = shell.folder / "cluster.yaml"
    tls = "tls: {ca: ca.pem, cert: member.pem, key: %s}\n"
    file.write_text(f"model: {MODEL}\nrouter: {{port: 0}}\n" + tls % "ca.key")
    status, output = shell.run("up", "-c", file, "--detach")
    assert status == 1
    assert "tls.key" in output and "ca.key: not the private key of tls.cert" in output.replace("\n", " ")

    file.write_text(f"model: {MODEL}\nrouter: {{port: 0}}\n" + tls % "member.key")
    status, output = shell.run("up", "-c", file, "--detach")
    assert status == 0, output
    url = shell.record()["urls"][0]
    assert answer_of(url)
    assert set(nodes_of(url)) == {"p0", "d0"}
    for node in nodes_of(url).values():
        with grpc.insecure_channel(node["address"]) as channel, pytest.raises(grpc.RpcError, match="Socket closed"):
            NodeStub(channel).Describe(DescribeRequest(), timeout=PATIENCE_S)

    status, output = shell.run("status")
    assert status == 0
    assert all(name in output for name in ("p0", "d0", url))

    status, output = shell.run("up", "--model", MODEL, "--device", "cpu", "--port", 0)
    assert status == 1
    assert "headrace down default" in output

    status, output = shell.run("chat", "--report", "--max-tokens", "4", stdin="What is the code of Ada?\n/quit\n")
    assert status == 0
    assert "computed" in output and "generated" in output

    assert shell.run("down", timeout_s=END_S)[0] == 0
    assert not shell.processes()
    assert not list(shell.state.glob("*.json"))
    status, output = shell.run("down")
    assert status == 0
    assert "nothing to stop" in output
    assert shell.run("status")[0] == 1


def test_undivided_nodes_in_the_foreground_change_roles_and_stop_at_ctrl_c(shell):
    file = shell.folder / "cluster.yaml"
    file.write_text(f"model: {MODEL}\nrouter: {{port: 0, roles: fixed}}\n")
    process = shell.start("up", "-c", file, "--both", 2)
    until(lambda: list(shell.state.glob("*.json")) and shell.record()["urls"], START_S, "the cluster is ready")
    url = shell.record()["urls"][0]
    assert {name: node["role"] for name, node in nodes_of(url).items()} == {"n0": "both", "n1": "both"}
    assert answer_of(url)
    status, output = shell.run("role", "n1", "prefill")
    assert (status, output.strip()) == (0, "n1 has the role prefill now")
    assert nodes_of(url)["n1"]["role"] == "prefill"
    status, output = shell.run("role", "n0", "prefill")
    assert status == 1 and "no other node decodes than n0" in " ".join(output.split())
    status, output = shell.run("role", "n7", "both")
    assert status == 1 and "no node 'n7' is registered" in " ".join(output.split())
    assert answer_of(url)
    process.send_signal(signal.SIGINT)
    output = output_of(process)
    assert process.returncode == 0, output
    assert not shell.processes()


def test_killed_actors_come_back_and_a_killed_supervisor_takes_everything_with_it(shell):
    url = shell.up()
    first_answer = answer_of(url)
    before = nodes_of(url)
    os.kill(before["d0"]["pid"], signal.SIGKILL)
    until(lambda: incarnation(url, "d0") not in (None, before["d0"]["incarnation"]), START_S, "d0 is back")
    assert answer_of(url) == first_answer
    assert incarnation(url, "p0") == before["p0"]["incarnation"]

    (router_pid,) = [pid for pid, command in shell.processes().items() if command.startswith("ray::RouterActor")]
    os.kill(router_pid, signal.SIGKILL)
    until(lambda: not is_alive(router_pid), 5, "the router is dead")
    until(lambda: set(nodes_of(url)) == {"p0", "d0"}, START_S, "the router is back at its address, with its nodes")
    assert answer_of(url) == first_answer

    os.kill(shell.record()["pid"], signal.SIGKILL)
    until(lambda: not shell.processes(), END_S, "nothing is left")
    assert shell.run("status")[0] == 1
    assert shell.run("down")[0] == 0


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("gcs_server", signal.SIGINT),  # which Ray's start leaves alone
        ("gcs_server", signal.SIGTERM),  # which Ray's start takes over, sooner or later
        ("raylet", signal.SIGINT),
        ("raylet", signal.SIGTERM),
        ("ray::RouterActor", signal.SIGTERM),  # taken back: from here on both are one
        ("ray::NodeActor", signal.SIGINT),
    ],
    ids=str,
)
def test_a_stop_while_starting_leaves_nothing(shell, moment, number):
    process = shell.start("up", "-c", shell.never_ready())
    until(lambda: any(moment in command for command in shell.processes().values()), START_S, f"{moment} has started")
    process.send_signal(number)
    output = output_of(process)
    assert process.returncode == 1
    assert "stopped by a signal" in output
    assert not shell.processes()


def test_a_node_that_cannot_start_ends_everything_and_says_why(shell, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(MODEL, broken)
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    status, output = shell.run("up", "--model", broken, "--device", "cpu", "--port", 0, "--detach")
    assert status == 1
    assert re.search(r"\b(p0|d0) did not start: ", output)  # both read the same file; either may fail first
    assert "is it truncated, or a Git LFS pointer? Copy the file again" in " ".join(output.split())
    assert "Traceback" not in output
    assert "Exception raised" not in output
    assert not shell.processes()
    assert not list(shell.state.glob("*.json"))


@pytest.fixture(scope="module")
def running_ray(tmp_path_factory):
    """A Ray that runs already, with an address; it outlives the clusters in it."""
    ray = Shell(tmp_path_factory.mktemp("ray"))
    (port,) = free_ports("127.0.0.1")
    ray.address = f"127.0.0.1:{port}"
    options = ["--head", "--block", "--port", port, "--num-cpus", 2, "--resources", '{"decode_host": 1}']
    options += ["--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", ray.ray_folder]
    token = ray.folder / "token"
    token.write_text("of this test")
    ray.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    host = ray.start("start", *options, module="ray.scripts.scripts")
    try:
        until(lambda: is_listening(port), START_S, "Ray listens")
        yield ray
        assert host.poll() is None
    finally:
        host.terminate()
        output_of(host)
        shutil.rmtree(ray.ray_folder, ignore_errors=True)
        try:
            until(lambda: not ray.processes(), END_S, "Ray is gone")
        finally:
            ray.kill_everything()


@pytest.fixture
def guest(shell, running_ray):
    """A shell whose commands may join the running Ray; none of its actors is left afterwards."""
    shell.env |= {name: running_ray.env[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    yield shell
    until(lambda: not running_ray.actors(), END_S, "no actor is left")


def test_nodes_that_no_host_can_hold_end_the_start_at_once(guest, running_ray):
    status, output = guest.run("up", "-c", guest.never_ready(join_timeout_s=0), "--address", running_ray.address)
    assert status == 1
    assert "d0 asks for 0.25 CPU, 1 no_such_host: no host has that" in output
    assert "RouterActor" not in output  # nothing was started
    assert not guest.processes()


def test_nodes_that_find_no_room_are_noted_and_end_the_start_at_its_deadline(guest, running_ray):
    status, output = guest.run("up", "-c", guest.never_ready(start_timeout_s=25), "--address", running_ray.address)
    assert status == 1
    assert "WARNING deploy.cluster: waiting for resources: d0 asks for" in output
    assert "d0 asks for 0.25 CPU, 1 no_such_host" in output
    assert re.search(r"Ray has, on 1 host: \d+ CPU \([\d.]+ free\)", output)
    assert not guest.processes()


def test_a_cluster_in_a_ray_that_runs_already_leaves_it_running(guest, running_ray):
    file = guest.folder / "cluster.yaml"
    file.write_text(
        f"name: joined\nmodel: {MODEL}\nrouter: {{port: 0}}\n"
        "decode: {placement: {resources: {decode_host: 0.5}, strategy: spread}}\n"
    )
    status, output = guest.run("up", "-c", file, "--address", running_ray.address, "--detach")
    assert status == 0, output
    url = guest.record("joined")["urls"][0]
    assert set(nodes_of(url)) == {"p0", "d0"}
    assert answer_of(url)
    # This Ray starts its workers at niceness 15.
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in running_ray.actors()} == {own_niceness()}
    assert guest.run("down", "joined", timeout_s=END_S)[0] == 0


def test_the_demo_answers_and_leaves_nothing(shell):
    status, output = shell.run("demo")
    assert status == 0, output
    assert "state received" in output
    assert f"model  {demo_chat().answer}" in output  # the second turn's, from a fact of the first
    assert 'call   order {"thing": "green rope", "count": 35}' in output
    assert not shell.processes()


def test_ctrl_c_stops_the_demo(shell):
    process = shell.start("demo")
    until(lambda: any("ray::" in command for command in shell.processes().values()), START_S, "an actor runs")
    process.send_signal(signal.SIGINT)
    output_of(process)
    assert process.returncode == 1
    assert not shell.processes()
