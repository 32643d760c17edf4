"""Pages that many ask for: rendered once for all of them, and in a bounded share of the time."""

import asyncio
import time

import pytest

from router.api.shared_page import SHARE, SharedPage
from tests.support.loop_clock import leap, turns
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import StartRouter

LONG_S = 5.0


async def test_all_who_ask_at_once_get_one_rendering():
    began = []
    page = SharedPage(lambda: began.append(0) or b"%d" % len(began))  # type: ignore[func-returns-value]
    assert await asyncio.gather(*(page.get() for _ in range(100))) == [b"1"] * 100
    assert await page.get() == b"2", "a rendering is not kept"


async def test_renderings_take_a_bounded_share_of_the_time_however_many_ask():
    began_s, ended_s = [], []

    def render() -> bytes:
        began_s.append(time.monotonic())
        time.sleep(0.01)
        ended_s.append(time.monotonic())
        return b""

    async def ask() -> None:
        for _ in range(3):
            await page.get()

    page = SharedPage(render)
    await asyncio.gather(*(ask() for _ in range(50)))
    assert len(began_s) == 3
    for began, ended, after in zip(began_s, ended_s, began_s[1:], strict=False):
        assert after - ended >= 0.99 * (ended - began) * (1 / SHARE - 1)


async def test_whoever_asks_while_a_page_is_due_gets_what_is_true_then():
    now, now_s = [b"before"], 100.0

    def render() -> bytes:
        nonlocal now_s
        now_s += LONG_S
        return now[0]

    page = SharedPage(render, lambda: now_s)
    await page.get()
    asked = asyncio.create_task(page.get())
    await turns()  # its rendering waits: the last one took long
    now[0] = b"after"
    later = asyncio.create_task(page.get())
    await turns()
    assert not asked.done()
    leap((1 / SHARE - 1) * LONG_S)
    async with asyncio.timeout(PATIENCE_S):
        assert await later == await asked == b"after"


async def test_an_error_reaches_all_who_asked_and_nobody_after_them():
    pages = [b"whole"]

    def render() -> bytes:
        if not pages[1:]:
            pages.append(b"")
            raise ValueError("torn")
        return pages[0]

    page = SharedPage(render)
    errors = await asyncio.gather(page.get(), page.get(), return_exceptions=True)
    assert [str(error) for error in errors] == ["torn", "torn"]
    assert await page.get() == b"whole"


async def test_a_client_that_leaves_does_not_take_the_page_from_others():
    page = SharedPage(lambda: b"page")
    leaving, staying = asyncio.create_task(page.get()), asyncio.create_task(page.get())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"page"
    with pytest.raises(asyncio.CancelledError):
        await leaving


@pytest.mark.parametrize("path", ["/metrics", "/cluster", "/openapi.json"])
async def test_pages_that_cost_the_loop_much_are_as_before(start_router: StartRouter, path: str):
    http = (await start_router(fake_cluster([5, 0]))).http
    replies = await asyncio.gather(*(http.get(path) for _ in range(5)))
    assert {reply.status_code for reply in replies} == {200}
    assert replies[0].headers["content-type"].startswith("text/plain" if path == "/metrics" else "application/json")
