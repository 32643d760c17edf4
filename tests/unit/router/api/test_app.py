"""HTTP apart from answers: protocol errors, pages, metrics, bodies, the router's stop."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from router.text.tokens import ModelTokens
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    return await start_router(
        fake_cluster([*tokens.encode("The code."), 0], eos_id=0, resumed_tokens=1), max_body_bytes=1000
    )


def error_of(reply: httpx.Response) -> dict[str, object]:
    error: dict[str, object] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_unknown_paths_and_methods_get_openai_errors(
    running: Running, method: str, path: str, status: int, code: str
):
    reply = await running.http.request(method, path)
    assert reply.status_code == status
    assert error_of(reply)["code"] == code


async def test_a_wrong_method_is_told_all_methods_of_the_path(running: Running):
    reply = await running.http.put("/v1/responses/resp_1")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET")
    assert error_of(reply)["message"] == "PUT /v1/responses/resp_1: wrong method; use DELETE, GET"


async def test_a_client_without_v1_is_told_its_base_url(running: Running):
    reply = await running.http.post("/chat/completions", json={})
    assert "take http://HOST:PORT/v1 as base_url" in str(error_of(reply)["message"])


async def test_a_body_that_is_no_object_says_so(running: Running):
    reply = await running.http.post("/v1/chat/completions", json=[])
    assert error_of(reply)["message"] == "the body is a list: send a JSON object"


async def test_a_wrong_list_is_not_told_to_be_text(running: Running):
    reply = await running.http.post("/v1/responses", json={"input": []})
    assert str(error_of(reply)["message"]).startswith("input: List should have at least 1 item")


async def test_an_endpoint_that_a_text_model_lacks_says_so(running: Running):
    said = {"embeddings": "no embeddings", "images/generations": "no images", "responses/compact": "compacts no"}
    for path, word in said.items():
        reply = await running.http.post(f"/v1/{path}", json={"input": "x"})
        assert reply.status_code == 404 and word in str(error_of(reply)["message"])


async def test_a_websocket_is_refused_with_what_to_use_instead(running: Running):
    asked = {"connection": "Upgrade", "upgrade": "WebSocket", "sec-websocket-version": "13"}
    reply = await running.http.get("/v1/responses", headers=asked)
    assert reply.status_code == 405 and "POST to /v1/responses with stream" in str(error_of(reply)["message"])
    assert "WebSocket" not in str(error_of(await running.http.get("/v1/responses"))["message"])


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/little", "/metrics"])
async def test_head_is_get_without_its_body(running: Running, path: str):
    head, get = await running.http.head(path), await running.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert "x-request-id" in head.headers
    assert (await running.http.head("/v1/chat/completions")).status_code == 405


async def test_pages_of_other_origins_are_answered_only_where_the_operator_allows_them(
    start_router: StartRouter, tokens: ModelTokens, running: Running
):
    page = {"origin": "https://chat.example"}
    asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert (await running.http.options("/v1/chat/completions", headers=asked)).status_code == 405
    assert "access-control-allow-origin" not in (await running.http.get("/health", headers=page)).headers
    cluster = fake_cluster([*tokens.encode("The code."), 0], eos_id=0)
    open_to = await start_router(cluster, cors_origins=("https://chat.example",))
    preflight = await open_to.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    answer = await open_to.http.post("/v1/chat/completions", json=CHAT, headers=page)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = await open_to.http.get("/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_another_model_is_404(running: Running):
    reply = await running.http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-9"})
    assert reply.status_code == 404
    assert error_of(reply)["code"] == "model_not_found"
    assert "'little'" in str(error_of(reply)["message"])


async def test_a_body_over_the_limit_is_413_without_a_content_length(running: Running):
    async def endless():
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"a" * 100

    reply = await running.http.post("/v1/completions", content=endless())
    assert reply.status_code == 413
    assert error_of(reply)["code"] == "body_too_large"


async def test_bad_utf8_is_400(running: Running):
    reply = await running.http.post("/v1/completions", content=b'{"prompt": "\xff\xfe"}')
    assert reply.status_code == 400
    assert "not valid JSON" in str(error_of(reply)["message"])


async def test_a_bad_request_reaches_no_node(running: Running):
    for body in ({}, {"prompt": ""}, {"prompt": "a", "temperature": -1}, {"prompt": [9999]}):
        assert (await running.http.post("/v1/completions", json=body)).status_code == 400
    assert all(not node.requests for node in running.cluster.nodes.values())


async def test_models_lists_the_served_model_with_its_length(running: Running):
    (model,) = (await running.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("little", "model", 2048)
    assert (await running.http.get("/v1/models/little")).json() == model


async def test_health_and_the_page_answer(running: Running):
    assert (await running.http.get("/health")).json() == {"status": "ok"}
    page = await running.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "static/page.js" in page.text


async def test_cluster_shows_nodes_and_requests(running: Running):
    await running.http.post("/v1/chat/completions", json=CHAT)
    cluster = (await running.http.get("/cluster")).json()
    assert [node["name"] for node in cluster["nodes"]] == ["d0", "p0"]
    assert cluster["nodes"][0]["blocks"] == {"total": 64, "free": 64, "cached": 0, "in_use": 0, "indexed": 0}
    assert cluster["phases"]["done"] == 1
    (request,) = cluster["requests"]
    assert (request["phase"], request["prefill_node"], request["decode_node"]) == ("done", "p0", "d0")


async def test_metrics_count_requests_and_nodes(running: Running, tokens: ModelTokens):
    num_generated = len(tokens.encode("The code.")) + 1.0  # and the end of the answer
    await running.http.post("/v1/chat/completions", json=CHAT)
    text = (await running.http.get("/metrics")).text
    for line in (
        'headrace_requests_total{outcome="completed"} 1.0',
        f'headrace_tokens_total{{kind="generated"}} {num_generated}',
        'headrace_pool_units{node="d0",pool="slots",role="decode",use="free"} 8.0',
        'headrace_node_steps_total{node="p0",role="prefill"} 3.0',
        "headrace_time_to_first_token_seconds_count 1.0",
    ):
        assert line in text.splitlines()


async def test_every_answer_is_counted_with_its_route_status_and_code(running: Running):
    http = running.http
    await http.post("/v1/chat/completions", json=CHAT)
    await http.post("/v1/chat/completions", json=CHAT | {"temperature": 9})
    await http.post("/v1/completions", json={"prompt": "a" * 2000})
    for name in ("a", "b"):
        await http.get(f"/v1/models/{name}")
        await http.get(f"/made/up/{name}")
    lines = (await http.get("/metrics")).text.splitlines()
    for labels, count in (
        ('code="",route="/v1/chat/completions",status="200"', 1),
        ('code="",route="/v1/chat/completions",status="400"', 1),
        ('code="body_too_large",route="/v1/completions",status="413"', 1),
        ('code="model_not_found",route="/v1/models/{name:path}",status="404"', 2),
        ('code="not_found",route="unknown",status="404"', 2),
    ):
        assert f"headrace_http_responses_total{{{labels}}} {count}.0" in lines


async def test_a_broken_upload_leaves_no_traceback_and_is_counted(running: Running, caplog: pytest.LogCaptureFixture):
    address = httpx.URL(running.server.url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\nExpect: 100-continue\r\n\r\n{"
    writer.write(head)
    assert b"100 Continue" in await reader.readline()  # the router waits for the body
    writer.transport.abort()
    counted = 'headrace_http_responses_total{code="client_left",route="/v1/completions",status="499"} 1.0'
    async with asyncio.timeout(PATIENCE_S):
        while counted not in (await running.http.get("/metrics")).text:
            await asyncio.sleep(0.01)
    assert not caplog.records


async def test_a_defect_of_the_router_is_500_in_openais_shape(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ModelTokens, "encode", lambda *args, **options: 1 / 0)
    reply = await running.http.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, error_of(reply)["code"]) == (500, "internal_error")
    assert "ZeroDivisionError" in caplog.text
    text = (await running.http.get("/metrics")).text
    assert 'headrace_http_responses_total{code="internal_error",route="/v1/completions",status="500"} 1.0' in text


async def test_large_prompts_do_not_stop_the_router(start_router: StartRouter, tokens: ModelTokens):
    running = await start_router(fake_cluster(tokens.encode("a")))
    body = json.dumps({"prompt": "the code of June " * 200_000})
    asking = asyncio.gather(*(running.http.post("/v1/completions", content=body) for _ in range(8)))
    answers_meanwhile = 0
    while not asking.done():
        assert (await running.http.get("/health")).status_code == 200
        answers_meanwhile += 1
    for reply in await asking:
        assert (reply.status_code, error_of(reply)["code"]) == (400, "context_length_exceeded")
    assert answers_meanwhile > 10  # a blocked event loop gives one or two


async def test_stop_lets_a_request_end(start_router: StartRouter, tokens: ModelTokens, model_folder: Path):
    cluster = fake_cluster(tokens.encode("a"))
    node = cluster.nodes["d0"]
    node.gate = asyncio.Semaphore(0)  # type: ignore[union-attr]
    running = await start_router(cluster, shutdown_grace_s=PATIENCE_S)
    asking = asyncio.create_task(running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5}))
    async with asyncio.timeout(PATIENCE_S):
        while not node.open_calls:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(running.server.stop())
        for _ in range(5):
            node.gate.release()  # type: ignore[union-attr]
        assert (await asking).status_code == 200
        await stopping
        await running.server.wait_closed()
    assert all(node.closed for node in cluster.nodes.values())


async def test_a_request_that_hangs_does_not_delay_the_stop(start_router: StartRouter, tokens: ModelTokens):
    cluster = fake_cluster(tokens.encode("a"))
    cluster.nodes["d0"].gate = asyncio.Semaphore(0)  # type: ignore[union-attr]
    running = await start_router(cluster, shutdown_grace_s=1)
    asking = asyncio.create_task(running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5}))
    async with asyncio.timeout(PATIENCE_S):
        while not cluster.nodes["d0"].open_calls:
            await asyncio.sleep(0.01)
        await running.server.stop()
        await asyncio.gather(asking, return_exceptions=True)
    assert cluster.nodes["d0"].closed
