"""A cluster whose control plane is in mutual TLS: router to nodes and back, prefill node to decode node."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.wire.errors import NodeLost
from headrace.wire.tls import Identity, load_identity
from headrace.wire.tls_config import TlsConfig
from node.config import NodeConfig
from node_runtime.config import FetchConfig
from tests.support.cluster.asking import ask_all
from tests.support.cluster.certificates import Authority
from tests.support.cluster.cluster import SMALL, Cluster, Process
from tests.support.cluster.nodes import decode_alone, node_client, until_the_router_knows
from tests.support.engine.driving import request
from tests.support.engine.oracle import greedy, random_prompt
from tests.support.patience import PATIENCE_S

HOST = "127.0.0.1"
LEARN = FetchConfig(min_tokens=1, max_time_ratio=1e9)
ANSWER_TOKENS = 40


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def foreign(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    """Of another authority."""
    return Authority.create(tmp_path_factory.mktemp("elsewhere"), "other").issue("foreign")


@pytest.fixture(scope="module")
def cluster(
    authority: Authority, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings: dict[str, Any] = {
        "router": {"tls": authority.issue("router")},
        "prefill": {"tls": authority.issue("p0"), "fetch_from_others": LEARN},
        "decode": {"tls": authority.issue("d0")},
    }
    with Cluster(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("tls"), **settings) as running:
        yield running


@pytest.fixture(scope="module")
def member(authority: Authority) -> Identity:
    identity = load_identity(authority.issue("operator"), HOST)
    assert identity is not None
    return identity


async def test_a_chat_goes_over_every_link(cluster: Cluster, member: Identity) -> None:
    """The second turn is fetched from the decode node: the call between nodes is in TLS, too."""
    prompt = random_prompt(100, seed=41)
    (first,) = await ask_all(cluster.url, [prompt], at_once=1, num_tokens=ANSWER_TOKENS)
    assert first.report["path"] == "remote"
    assert first.tokens == greedy(cluster.model, prompt, ANSWER_TOKENS)
    await until_the_router_knows(cluster, member)
    longer = [*prompt, *first.tokens, *random_prompt(20, seed=42)]
    (second,) = await ask_all(cluster.url, [longer], at_once=1, num_tokens=ANSWER_TOKENS)
    assert second.report["prefill"]["fetched_tokens"] > 0
    assert second.tokens == greedy(cluster.model, longer, ANSWER_TOKENS)
    logs = cluster.logs()
    assert "TLS is off" not in logs
    for process in cluster.processes.values():
        assert "TLS is on at 127.0.0.1" in process.log.read_text()


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_nodes_answer_no_stranger(cluster: Cluster, member: Identity, foreign: TlsConfig, name: str) -> None:
    address = cluster.processes[name].ready["address"]
    for identity in (None, load_identity(foreign, HOST)):
        async with node_client(name, address, identity) as client:
            with pytest.raises(NodeLost, match="do both sides have tls"):
                async with client.cache_updates() as call:
                    await anext(aiter(call))
    async with node_client(name, address, member) as client, client.cache_updates() as call:
        await anext(aiter(call))


async def test_a_node_of_another_authority_or_without_tls_is_never_registered(
    cluster: Cluster, foreign: TlsConfig, tmp_path: Path
) -> None:
    """It goes on trying, and its log says what to look at."""
    for name, tls in (("d8", None), ("d9", foreign)):
        config = NodeConfig(
            name, str(cluster.model), (cluster.processes["router"].ready["control_address"],), engine=SMALL, tls=tls
        )
        process = Process.start(name, config, tmp_path)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while "is not registered" not in process.log.read_text():
                    await asyncio.sleep(0.05)
            assert "do both sides have tls, with certificates of one authority" in process.log.read_text()
            assert sorted(cluster.nodes()) == ["d0", "p0"]
        finally:
            process.stop()


def test_a_node_whose_certificate_will_not_do_does_not_start(cluster: Cluster, authority: Authority) -> None:
    other = authority.issue("other-host", names="IP:10.9.9.9")
    flags = ["--tls-ca", other.ca, "--tls-cert", other.cert, "--tls-key", other.key]
    for arguments, message in (
        (flags, "other-host.pem: its peers will refuse it: IP address mismatch"),
        ([*flags, "--tls-key", "/nowhere"], "tls.key /nowhere: No such file"),
        (flags[:4], "tls.key is missing: give --tls-key"),
    ):
        command = [sys.executable, "-m", "node", "--model", str(cluster.model), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 2
        assert message in done.stderr


async def test_a_node_comes_back_over_tls_after_its_death(cluster: Cluster, member: Identity) -> None:
    cluster.processes["d0"].kill()
    cluster.processes["d0"].wait()
    cluster.processes["d0"].stop()
    cluster.start_node("d0")
    cluster.wait_for_nodes(2)
    prompt = random_prompt(60, seed=43)
    async with node_client("d0", cluster.processes["d0"].ready["address"], member) as client:
        assert await decode_alone(client, request(prompt)) == greedy(cluster.model, prompt, 16)
    (answer,) = await ask_all(cluster.url, [prompt], at_once=1, num_tokens=16)
    assert answer.tokens == greedy(cluster.model, prompt, 16)
