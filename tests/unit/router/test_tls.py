"""Access to the control plane over real connections: to a router's registry, and to a node's server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from headrace.wire.client import GrpcFetchClient, GrpcNodeClient, RegistryClient
from headrace.wire.errors import NodeLost, TransferBroken
from headrace.wire.generated import headrace_pb2_grpc as rpc
from headrace.wire.messages import FetchRequest, FetchSource, Reservation, Start
from headrace.wire.node_messages import Role
from headrace.wire.server import ControlServer
from headrace.wire.tls import Identity, load_identity
from headrace.wire.tls_config import TlsConfig
from router.__main__ import FLAGS, main
from router.config import RouterConfig
from tests.support.cluster.certificates import Authority
from tests.support.config.command_line import loaded
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import LAYOUT, fake_cluster, node_info, node_status
from tests.unit.router.conftest import StartRouter

HOST = "127.0.0.1"
TIMEOUT_S = PATIENCE_S


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsConfig]:
    """`trusting stranger`: a certificate of another authority, of a client that would believe ours."""
    authority = Authority.create(tmp_path_factory.mktemp("authority"))
    foreign = Authority.create(tmp_path_factory.mktemp("elsewhere"), "other").issue("foreign")
    member = authority.issue("member")
    return {
        "member": member,
        "another member": authority.issue("another"),
        "stranger": foreign,
        "trusting stranger": replace(foreign, ca=member.ca),
        "member by name": replace(authority.issue("named", names="DNS:node.headrace"), server_name="node.headrace"),
    }


@pytest.fixture(scope="module")
def identities(files: dict[str, TlsConfig]) -> dict[str, Identity | None]:
    """As they are read, without the check at start: a stranger makes none."""
    return {
        "nobody": None,
        **{
            name: Identity(*(Path(path).read_bytes() for path in (tls.ca, tls.cert, tls.key)), tls.server_name)
            for name, tls in files.items()
        },
    }


class AbortsRun(rpc.DecodeServicer):
    async def Run(self, request_iterator, context):  # type: ignore[no-untyped-def]
        await context.abort(grpc.StatusCode.ABORTED, "let in")
        yield


class AbortsFetch(rpc.NodeServicer):
    async def Fetch(self, request, context):  # type: ignore[no-untyped-def]
        await context.abort(grpc.StatusCode.ABORTED, "let in")


@asynccontextmanager
async def node_server(identity: Identity | None) -> AsyncIterator[str]:
    def add_services(server: Any) -> None:
        rpc.add_DecodeServicer_to_server(AbortsRun(), server)
        rpc.add_NodeServicer_to_server(AbortsFetch(), server)

    server = ControlServer(["Decode", "Node"], add_services, identity)
    port = await server.start(HOST, 0)
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(0)


async def call_as_router(address: str, identity: Identity | None) -> None:
    client = GrpcNodeClient("d0", address, identity)
    try:
        start = Start(Request("r", TokenArray.of((1,)), 1, Sampling(1, 0)))
        async with client.decode(start, timeout_s=TIMEOUT_S) as call:
            async for _ in call:
                pass
    finally:
        await client.close()


async def call_as_prefill_node(address: str, identity: Identity | None) -> None:
    client = GrpcFetchClient(FetchSource("d0", address, 16, 16), identity)
    try:
        reservation = Reservation(1, 0, 16, "p0:2", LAYOUT, 5.0, bytes(32))
        await client.fetch(FetchRequest(bytes(32), reservation), timeout_s=TIMEOUT_S)
    finally:
        await client.close()


@pytest.mark.parametrize("call", [call_as_router, call_as_prefill_node])
@pytest.mark.parametrize(
    ("server", "client", "is_let_in"),
    [
        ("nobody", "nobody", True),
        ("member", "member", True),
        ("member", "another member", True),
        ("member by name", "member by name", True),
        ("member", "nobody", False),  # plain text to TLS
        ("member", "stranger", False),
        ("member", "trusting stranger", False),
        ("nobody", "member", False),  # TLS to plain text
        ("stranger", "member", False),  # somebody took a node's address
        ("trusting stranger", "member", False),
        ("member by name", "another member", False),  # a certificate of ours, of another host
    ],
)
async def test_only_members_of_one_authority_reach_each_other(identities, call, server, client, is_let_in) -> None:
    async with node_server(identities[server]) as address:
        answer = (TransferBroken, "let in") if is_let_in else (NodeLost, "do both sides have tls, with certificates of")
        with pytest.raises(answer[0], match=answer[1]):
            await call(address, identities[client])


async def test_a_client_with_the_authority_and_without_a_certificate_is_refused(files, identities) -> None:
    """Server-side TLS alone would let it in."""
    ca = Path(files["member"].ca).read_bytes()
    async with node_server(identities["member"]) as address:
        credentials = grpc.ssl_channel_credentials(ca)
        async with grpc.aio.secure_channel(address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rpc.DecodeStub(channel).Run(timeout=TIMEOUT_S).read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nodes_register_over_tls_and_strangers_do_not(start_router: StartRouter, files, identities) -> None:
    running = await start_router(fake_cluster([1]), register=False, tls=files["member"])
    info = node_info("d0", Role.DECODE)
    for name, is_let_in in (("nobody", False), ("trusting stranger", False), ("another member", True)):
        registry = RegistryClient(running.server.control_address, identities[name])
        if is_let_in:
            await registry.register(info, node_status(), timeout_s=TIMEOUT_S)
        else:
            with pytest.raises(NodeLost):
                await registry.register(info, node_status(), timeout_s=TIMEOUT_S)
        assert bool(running.server.nodes.all()) is is_let_in
        await registry.close()


def test_a_router_reads_tls_from_flags_and_from_its_file(model_folder: Path, files, tmp_path: Path, capsys) -> None:
    model, tls = ["--model-path", str(model_folder)], files["member"]
    flags = ["--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key]
    assert loaded(RouterConfig, FLAGS, model).tls is None
    assert loaded(RouterConfig, FLAGS, [*model, *flags]).tls == tls
    file = tmp_path / "router.yaml"
    file.write_text(f"tls: {{ca: {tls.ca}, cert: {tls.cert}, key: /other, server_name: n}}")
    assert loaded(RouterConfig, FLAGS, [*model, "-c", str(file)]).tls == replace(tls, key="/other", server_name="n")
    assert loaded(RouterConfig, FLAGS, [*model, "-c", str(file), *flags]).tls == tls
    for text, status, message in (
        (f"tls: {{ca: {tls.ca}, cret: x}}", 2, "tls.cret is an unknown key: did you mean cert?"),
        (f"tls: {{ca: {tls.ca}}}", 2, "tls.cert is missing: add it"),
        (f"tls: {{ca: {tls.ca}, cert: {tls.cert}, key: /other}}", 2, "tls.key /other: No such file"),
    ):
        file.write_text(text)
        assert main([*model, "-c", str(file), "--port", "0", "--control-port", "0"]) == status
        assert message in capsys.readouterr().err


def test_a_stranger_is_no_identity_a_process_starts_with(files) -> None:
    with pytest.raises(Exception, match="its peers will refuse it"):
        load_identity(files["trusting stranger"], HOST)
