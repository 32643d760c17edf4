"""Clients of HTTP requests: with API keys, a gateway's header, or an address."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.clients import access_needed
from router.keys import ApiKey, hash_of, new_key
from router.text.tokens import ModelTokens
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import FakeCluster, fake_cluster
from tests.unit.router.conftest import Running, StartRouter

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ANN, ANNS_OTHER, BOB, EYE, OPS = (new_key() for _ in range(5))
KEYS = {
    "ann": ApiKey(hash_of(ANN), tenant="acme"),
    "ann2": ApiKey(hash_of(ANNS_OTHER), tenant="acme"),
    "bob": ApiKey(hash_of(BOB), priority=4, tokens_per_minute=60),
    "eye": ApiKey(hash_of(EYE), access="view"),
    "ops": ApiKey(hash_of(OPS), access="operate"),
}


@pytest.fixture
def cluster(tokens: ModelTokens) -> FakeCluster:
    return fake_cluster([*tokens.encode("The code."), 0], eos_id=0, resumed_tokens=1)


@pytest.fixture
async def running(start_router: StartRouter, cluster: FakeCluster) -> Running:
    return await start_router(cluster, api_keys=KEYS)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chat(running: Running, key: str, **own: Any) -> httpx.Response:
    return await running.http.post("/v1/chat/completions", json=CHAT | {"headrace": own}, headers=bearer(key))


def salts(running: Running) -> list[bytes]:
    return [request.salt for request in running.cluster.nodes["d0"].requests]


@pytest.mark.parametrize(
    "headers",
    [bearer(ANN), {"authorization": f"bearer  {ANN}"}, {"x-api-key": ANN}],
)
async def test_a_known_key_opens_in_either_header(running: Running, headers: dict[str, str]):
    assert (await running.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        bearer("sk-wrong"),
        bearer(hash_of(ANN)),
        {"authorization": f"Basic {ANN}"},
        {"x-api-key": "é"},
    ],
)
async def test_without_a_known_key_it_is_401_in_openais_shape(running: Running, headers: dict[str, str]):
    encoded = {name: value.encode() for name, value in headers.items()}
    reply = await running.http.post("/v1/chat/completions", json=CHAT, headers=encoded)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert not running.cluster.nodes["d0"].requests


async def test_what_each_key_may_do(running: Running):
    opened = {}
    for name, key in {"none": "", "ann": ANN, "eye": EYE, "ops": OPS}.items():
        replies = [
            await running.http.request(method, path, headers=bearer(key) if key else {}, json=body)
            for method, path, body in (
                ("GET", "/health", None),
                ("GET", "/ready", None),
                ("POST", "/v1/completions", {"prompt": "a"}),
                ("GET", "/metrics", None),
                ("GET", "/cluster", None),
                ("POST", "/cluster/nodes/p0/role", {"role": "both"}),
            )
        ]
        opened[name] = [reply.status_code for reply in replies]
    assert opened == {
        "none": [200, 200, 401, 401, 401, 401],
        "ann": [200, 200, 200, 403, 403, 403],
        "eye": [200, 200, 403, 200, 200, 403],
        "ops": [200, 200, 200, 200, 200, 200],
    }


def test_a_route_that_nobody_has_named_needs_a_key():
    assert access_needed("GET", "/v1/responses/resp_1") == "generate"
    assert access_needed("POST", "/tokenize") == "generate"
    assert access_needed("GET", "/healthz") == "generate"
    assert access_needed("POST", "/cluster") == access_needed("DELETE", "/cluster/x") == "operate"


async def test_every_documented_route_but_probes_and_pages_says_that_it_needs_a_key(running: Running):
    paths = (await running.http.get("/openapi.json")).json()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            assert ({"401", "403"} <= operation["responses"].keys()) == (access_needed("GET", path) is not None)


async def test_tenants_share_no_salt_and_keys_of_one_tenant_do(running: Running):
    for key, own in ((ANN, {}), (ANNS_OTHER, {}), (BOB, {}), (ANN, {"salt": "s"}), (BOB, {"salt": "s"})):
        assert (await chat(running, key, **own)).status_code == 200
    ann, other, bob, ann_s, bob_s = salts(running)
    assert ann == other and len({ann, bob, ann_s, bob_s}) == 4


async def test_a_client_cannot_name_anothers_tenant(running: Running):
    for key, salt in ((ANN, ""), (BOB, "tenant acme"), (BOB, "tenant acme\0"), (BOB, "\0tenant acme\0")):
        assert (await chat(running, key, salt=salt)).status_code == 200
    assert len(set(salts(running))) == 4


async def test_a_key_has_its_own_priority(running: Running):
    assert (await chat(running, BOB)).status_code == 200
    reply = await chat(running, BOB, priority=3)
    assert reply.status_code == 400 and "this client may ask for 4 and above" in reply.text
    assert (await chat(running, ANN, priority=0)).status_code == 200


async def test_a_rate_counts_what_was_computed_and_answered(start_router: StartRouter, cluster: FakeCluster):
    """60 tokens a minute: a prompt of which one token was cached, and its answer. Meanwhile none comes back."""
    running = await start_router(cluster, api_keys=KEYS, clock=lambda: 100.0)
    used, reply = 0, await chat(running, BOB)
    while reply.status_code == 200:
        usage = reply.json()["usage"]
        used += usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert used - (usage["total_tokens"] - 1) < 60
        reply = await chat(running, BOB)
    assert used >= 60 - 1
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert abs(int(reply.headers["retry-after"]) - (used - 60 + 1)) <= 2  # a token a second
    assert (await chat(running, ANN)).status_code == 200


async def test_a_request_that_no_node_could_take_costs_nothing(start_router: StartRouter, cluster: FakeCluster):
    running = await start_router(
        cluster, api_keys={"ann": ApiKey(hash_of(ANN), tokens_per_minute=1)}, request_timeout_s=0.05, register=False
    )
    for _ in range(3):
        assert (await chat(running, ANN)).status_code in (503, 504)


async def test_keys_of_a_file_come_and_go_while_the_router_runs(
    start_router: StartRouter, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("router.keys.FILE_CHECK_S", 0.005)
    file = tmp_path / "keys.yaml"
    file.write_text(f"api_keys:\n  ann: {{hash: {hash_of(ANN)}}}\n")
    running = await start_router(cluster, api_keys_file=file)
    assert (await chat(running, ANN)).status_code == 200
    assert (await chat(running, BOB)).status_code == 401
    file.write_text(f"api_keys:\n  bobby: {{hash: {hash_of(BOB)}}}\n")
    async with asyncio.timeout(PATIENCE_S):
        while (await chat(running, ANN)).status_code != 401:
            await asyncio.sleep(0.005)
    assert (await chat(running, BOB)).status_code == 200


async def test_no_key_is_in_a_log_or_an_answer(running: Running, caplog: pytest.LogCaptureFixture):
    wrong = new_key()
    with caplog.at_level(logging.DEBUG):
        replies = [await chat(running, key) for key in (ANN, wrong, EYE)]
    shown = caplog.text + "".join(reply.text + str(reply.headers) for reply in replies)
    assert not any(key in shown for key in (ANN, wrong, EYE))
    assert hash_of(ANN) not in repr(running.server) + shown


@pytest.mark.parametrize(("keys", "says"), [({}, True), (KEYS, False)])
async def test_a_router_without_keys_says_so_once(
    start_router: StartRouter,
    cluster: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    keys: dict[str, ApiKey],
    says: bool,
):
    with caplog.at_level(logging.INFO):
        await start_router(cluster, api_keys=keys)
    assert caplog.text.count("API keys are off at 127.0.0.1: whoever reaches it can use it") == says
