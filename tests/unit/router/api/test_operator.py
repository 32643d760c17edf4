"""Routes with which an operator changes the cluster."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace.wire.node_messages import Role
from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

PATH = "/cluster/nodes/{name}/role"


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    return await start_router(fake_cluster(tokens.encode("The code."), decode=2))


async def roles_of(running: Running) -> dict[str, str]:
    return {node["name"]: node["role"] for node in (await running.http.get("/cluster")).json()["nodes"]}


async def test_a_switched_node_has_and_shows_its_new_role_at_once(running: Running):
    reply = await running.http.post("/cluster/nodes/d0/role", json={"role": "prefill"})
    assert (reply.status_code, reply.json()) == (200, {"node": "d0", "role": "prefill"})
    assert await roles_of(running) == {"d0": "prefill", "d1": "decode", "p0": "prefill"}
    assert [node.info.name for node in running.server.nodes.live(Role.DECODE)] == ["d1"]


@pytest.mark.parametrize(
    ("name", "body", "status", "message"),
    [
        ("d9", {"role": "both"}, 404, "no node 'd9' is registered"),
        ("d0", {"role": "decoder"}, 400, "role 'decoder'"),
        ("d0", {"rol": "both"}, 400, "role"),
        ("d0", {"role": "both", "when": "now"}, 400, "when"),
    ],
)
async def test_a_bad_switch_is_refused_with_its_cause(
    running: Running, name: str, body: dict[str, Any], status: int, message: str
):
    reply = await running.http.post(f"/cluster/nodes/{name}/role", json=body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]
    assert not any(node.switched_to for node in running.cluster.nodes.values())


async def test_a_page_of_another_site_cannot_switch_a_role(running: Running):
    """What a browser sends across sites without asking first: a body of one of three types, none of them JSON."""
    for given in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"content-type": given}
        reply = await running.http.post("/cluster/nodes/d0/role", content=b'{"role": "prefill"}', headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert (await running.http.options("/cluster/nodes/d0/role")).status_code == 405
    assert running.cluster.nodes["d0"].switched_to == []


async def test_the_document_describes_the_switch(running: Running):
    document = (await running.http.get("/openapi.json")).json()
    operation = document["paths"][PATH]["post"]
    read = operation["requestBody"]["content"]["application/json"]["schema"]
    Draft202012Validator({**read, "components": document["components"]}).validate({"role": "both"})
    assert set(operation["responses"]) == {"200", "400", "401", "403", "404", "409", "415", "503"}
    reply = await running.http.post("/cluster/nodes/d0/role", json={"role": "both"})
    written = operation["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator({**written, "components": document["components"]}).validate(reply.json())
    assert running.cluster.nodes["d0"].switched_to == [Role.BOTH]
