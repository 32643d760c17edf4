"""A node whose heartbeats do not arrive serves as long as it answers; one that is stopped or killed does not."""

import signal
import time

import pytest

from headrace.wire.client import GrpcNodeClient, RegistryClient
from router.cluster.liveness import ANSWER_TIMEOUT_S
from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import SHORT_SILENCE_S, Cluster, wait_until
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

MISSED_S = 3.0
"""Three heartbeats of the test clusters."""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_only_a_node_that_does_not_answer_is_taken_for_dead(how, tiny_checkpoint, tmp_path) -> None:
    model = tiny_checkpoint("granite")
    with Cluster(
        model, tmp_path, num_prefill=0, num_decode=0, decode={"router_addresses": ()}, silence_s=SHORT_SILENCE_S
    ) as cluster:
        node = GrpcNodeClient("d0", cluster.start_node("d0").ready["address"])
        registry = RegistryClient(cluster.processes["router"].ready["control_address"])
        try:
            info, status = await node.describe(timeout_s=PATIENCE_S)
            await registry.register(info, status, timeout_s=PATIENCE_S)  # its only heartbeat
            registered_s = time.monotonic()
            prompt = random_prompt(70)
            while time.monotonic() < registered_s + 2 * MISSED_S:
                (answer,) = await ask_all(cluster.url, [prompt], at_once=1)
                assert answer.tokens == greedy(model, prompt, 64)
            assert cluster.nodes()["d0"]["counters"]["sampled_tokens"] > 0, "its answers bring its status"
            cluster.processes["d0"].kill(how)
            stopped_s = time.monotonic()
            wait_until(lambda: not cluster.nodes(), "the node is gone from /cluster")
            assert time.monotonic() - stopped_s < ANSWER_TIMEOUT_S, "the connection told, not the question's deadline"
        finally:
            await node.close()
            await registry.close()
            cluster.processes["d0"].kill()
            cluster.processes.pop("d0").wait()
