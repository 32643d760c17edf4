"""A Ray cluster of three hosts, raylets in network namespaces of this machine, of which one fails under load."""

import asyncio
import contextlib
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from deploy.demo import MODEL
from tests.support.cluster.netns import Host, NamespacesUnavailable, switched_hosts
from tests.support.cluster.recall_clients import Habits
from tests.support.cluster.recall_load import RecallLoad
from tests.support.cluster.shell import END_S, nodes_of, until
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

RAY_PORT = 6379
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "120",  # two of them start on two busy cores
    # As docs/operations.md has it, Under Ray.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
CLUSTER = """
model: {model}
router: {{host: {router}, port: 0}}
prefill: &two
  count: 2
  placement: {{num_cpus: 0.5, resources: {{serves: 0.1}}, strategy: spread}}
  node: {{ucx: {{transports: tcp}}}}  # cma and posix work within one host only
decode: *two
ray: {{address: "{router}:{ray_port}"}}
"""


@contextlib.contextmanager
def ray_on(hosts, shell):
    """Ray on all hosts: the first is the head, which holds the router, and the others serve."""
    head = f"{hosts[0].address}:{RAY_PORT}"
    folder = Path("/tmp") / f"hr-{os.getpid()}"  # short: Unix sockets
    shell.env |= RAY_ENVIRONMENT
    common = ["start", "--block", "--disable-usage-stats", "--object-store-memory", 80 << 20, "--num-cpus", 2]
    as_head = ["--head", "--port", RAY_PORT, "--include-dashboard", "false", "--temp-dir", folder]
    as_other = ["--address", head, "--resources", '{"serves": 1}']
    try:

        def start(host, *own):
            arguments = (*common, "--node-ip-address", host.address, *own)
            return shell.start(*arguments, module="ray.scripts.scripts", inside=host.enter)

        await_joined(start(hosts[0], *as_head))
        for host in hosts[1:]:
            await_joined(start(host, *as_other))  # one by one: they name their sockets in one folder of this machine
        yield
    finally:
        for host in hosts:
            host.kill()
        until(lambda: not shell.processes(), END_S, "Ray is gone")
        shutil.rmtree(folder, ignore_errors=True)


def await_joined(ray_start):
    """Until it says that it has started Ray; the test's own timeout ends a wait in vain."""
    output = ""
    for line in ray_start.stdout:
        output += line
        if "block forever" in line:
            return
    pytest.fail(f"`ray start` ended: {output}")


@pytest.mark.parametrize("fail", [Host.kill, Host.unplug], ids=["killed", "cut off"])
async def test_nodes_of_a_lost_host_come_back_on_another_and_no_request_is_lost(fail, shell):
    with contextlib.ExitStack() as undo:
        try:
            hosts = undo.enter_context(switched_hosts(3))
        except NamespacesUnavailable as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        undo.enter_context(ray_on(hosts, shell))
        file = shell.folder / "cluster.yaml"
        file.write_text(CLUSTER.format(model=MODEL, router=hosts[0].address, ray_port=RAY_PORT))
        status, output = shell.run("up", "-c", file, "--detach", inside=hosts[0].enter, timeout_s=PATIENCE_S)
        assert status == 0, output
        (url,) = shell.record()["urls"]
        assert hosts_of(url, "p") == hosts_of(url, "d") == {hosts[1].address: 1, hosts[2].address: 1}  # spread

        load = await RecallLoad.against(url, MODEL)
        async with load.running(Habits(num_clients=2)):
            await load.answered(2)
            at_s = time.monotonic()
            fail(hosts[2])
            await load.served_again_s(at_s)
            served_s = time.monotonic() - at_s
            await asyncio.to_thread(until, lambda: are_all_on(url, hosts[1]), PATIENCE_S, "all nodes on one host")
            back_s = time.monotonic() - at_s
            print(f"host lost: first answer after {served_s:.1f} s, all nodes back after {back_s:.1f} s")
            await load.answered(2)
        assert load.wrong == [] and not load.errors
        assert shell.run("down", inside=hosts[0].enter, timeout_s=END_S)[0] == 0


def hosts_of(url, role):
    """How many nodes of a role each host has."""
    nodes = nodes_of(url)
    return Counter(node["address"].rpartition(":")[0] for name, node in nodes.items() if name.startswith(role))


def are_all_on(url, host):
    return hosts_of(url, "p") == hosts_of(url, "d") == {host.address: 2}
