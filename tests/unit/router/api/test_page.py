"""The live page: what a browser draws of fake nodes, and what the router serves for it."""

import re
from pathlib import Path

import httpx
import pytest

from router.keys import ApiKey, hash_of, new_key
from router.text.tokens import ModelTokens
from tests.support.browser import in_browser, part, shown
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    running = await start_router(fake_cluster([*tokens.encode("The code."), 0], eos_id=0, decode=2))
    (await running.http.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    return running


@in_browser
async def test_a_browser_draws_nodes_and_the_way_of_a_request(running: Running, tmp_path: Path):
    page, console = await shown(running.server.url, tmp_path)
    assert console == ""
    assert "ready" in part(page, "summary") and "little" in part(page, "summary")
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert {text for text in drawn if "(" in text} == {"p0 (prefill, live)", "d0 (decode, live)", "d1 (decode, live)"}
    for stage in ("queue", "prefill", "decode"):
        assert re.search(rf'<rect class="{stage}"', page), stage
    assert "polyline" in part(page, "tokens") and part(page, "tokens-now")


@in_browser
async def test_with_keys_the_page_asks_for_one(start_router: StartRouter, tokens: ModelTokens, tmp_path: Path):
    keys = {"ops": ApiKey(hash_of(new_key()), access="operate")}
    running = await start_router(fake_cluster(tokens.encode("The code.")), api_keys=keys)
    page, _ = await shown(running.server.url, tmp_path)
    assert re.search(r'<form id="key">', page) and "no API key" in part(page, "summary")


async def test_the_page_takes_nothing_from_elsewhere(running: Running):
    page = await running.http.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert not re.search(r"<style|<script>|\son\w+=|style=", page.text)
    for path in re.findall(r'(?:src|href)="([^"]+\.(?:js|css))"', page.text):
        assert (await running.http.get(f"/{path}")).status_code == 200
        assert "http" not in httpx.URL(path).scheme


async def test_cluster_has_the_stages_of_each_request(running: Running):
    (row,) = (await running.http.get("/cluster")).json()["requests"]
    starts = [stage["start_s"] for stage in row["stages"]]
    assert row["stages"][0]["stage"] == "queue" and starts == sorted(starts) and starts[0] == 0.0
    assert {stage["node"] for stage in row["stages"]} >= {"p0", None}
