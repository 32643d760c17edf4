"""The live page, in a real browser (Debian's chromium, where it is installed)."""

import asyncio
import re
import shutil
from pathlib import Path

import httpx
import pytest

from router.keys import ApiKey, hash_of, new_key
from router.text.tokens import ModelTokens
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture
async def running(start_router: StartRouter, tokens: ModelTokens) -> Running:
    running = await start_router(fake_cluster([*tokens.encode("The code."), 0], eos_id=0, decode=2))
    (await running.http.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    return running


async def shown(url: str, profile: Path) -> tuple[str, str]:
    """The page after three seconds of its own time, and what the browser's console said."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, said = await browser.communicate()
    console = [line for line in said.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return out.decode(), "\n".join(console)


def part(page: str, element: str) -> str:
    found = re.search(rf'id="{element}"[^>]*>(.*?)</(?:svg|tbody|span)>', page, re.S)
    assert found, element
    return found[1]


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
