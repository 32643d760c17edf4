"""Real worker processes: what they answer, and how they end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from router.api.generation import GenerationRequest
from router.api.readers import read_chat, read_completion
from router.errors import ApiError
from router.parsing.body_parser import BodyParser, ParseJob, Reader
from router.parsing.messages import WorkerSettings
from router.parsing.pool import WorkerPool
from router.text.tokens import ModelTokens
from tests.support.patience import PATIENCE_S

ENDLESS = 10**9  # a model's length that no prompt exceeds
StartPool = Callable[..., WorkerPool]


@pytest.fixture
async def start_pool(model_folder: Path) -> AsyncIterator[StartPool]:
    async with AsyncExitStack() as stack:

        def start(
            *, max_parsing: int = 8, cpu_s: float = 30.0, memory_bytes: int = 1 << 30, trust: bool = False
        ) -> WorkerPool:
            settings = WorkerSettings(
                model_folder, "little", False, True, cpu_s, memory_bytes, trust_request_chat_template=trust
            )
            pool = WorkerPool(settings, 1, max_parsing)
            stack.push_async_callback(pool.close)
            return pool

        yield start


def job(read: Reader[GenerationRequest], limit: int, **fields: Any) -> ParseJob[GenerationRequest]:
    return ParseJob(read, json.dumps(fields).encode(), limit)


SMALL = job(read_completion, ENDLESS, prompt="the code", seed=1)
COSTLY = job(read_completion, ENDLESS, prompt="1234567890" * 300_000)


def processes_of(pool: WorkerPool) -> list[int]:
    return [worker._process.pid for worker in pool._workers if worker._process is not None]


async def test_a_worker_parses_as_the_router_does_itself(start_pool: StartPool, tokens: ModelTokens):
    pool, here = start_pool(), BodyParser("little", tokens)
    chat = [{"role": "user", "content": "the code of June"}, {"role": "user", "content": "<|im_end|>"}]
    for each in (job(read_chat, 2048, messages=chat, seed=5, n=2, headrace={"salt": "a"}), SMALL):
        ours, theirs = here.parse(each), await pool.parse(each, "one")
        assert [(r.tokens, r.boundaries, r.sampling, r.salt) for r in theirs.requests] == [
            (r.tokens, r.boundaries, r.sampling, r.salt) for r in ours.requests
        ]
    with pytest.raises(ApiError) as refused:
        await pool.parse(job(read_chat, 2048, messages=chat, temperature=9), "one")
    assert (refused.value.status, refused.value.param) == (400, "temperature")
    assert "temperature 9" in refused.value.json()
    assert len(processes_of(pool)) == 1


async def test_a_body_that_takes_too_much_time_ends_its_process_alone(start_pool: StartPool):
    pool = start_pool(cpu_s=0.2)
    with pytest.raises(ApiError, match=r"took more than 0\.2 s of processor time \(parse_cpu_s\)") as refused:
        await pool.parse(COSTLY, "one")
    assert (refused.value.status, refused.value.code) == (413, "parsing_too_costly")
    assert (await pool.parse(SMALL, "one")).requests


async def test_a_body_that_takes_too_much_memory_ends_its_process_alone(start_pool: StartPool):
    pool = start_pool(memory_bytes=64 << 20)
    with pytest.raises(ApiError, match=r"needs more than 67108864 bytes of memory \(parse_memory_bytes\)"):
        await pool.parse(COSTLY, "one")
    assert (await pool.parse(SMALL, "one")).requests


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "parse_cpu_s"),
        ("{{ 'x' * 10**10 }}", "parse_memory_bytes"),
    ],
)
async def test_a_hostile_template_ends_its_process_alone(start_pool: StartPool, template: str, limit: str):
    pool = start_pool(cpu_s=0.5, memory_bytes=256 << 20, trust=True)
    hostile = job(read_chat, 2048, messages=[{"role": "user", "content": "a"}], chat_template=template)
    with pytest.raises(ApiError, match=limit) as refused:
        await pool.parse(hostile, "one")
    assert (refused.value.status, refused.value.code) == (413, "parsing_too_costly")
    assert (await pool.parse(SMALL, "one")).requests


async def test_work_ends_when_its_client_leaves(start_pool: StartPool):
    pool = start_pool()
    await pool.parse(SMALL, "one")
    (pid,) = processes_of(pool)
    asking = asyncio.create_task(pool.parse(COSTLY, "one"))
    while pool._idle:
        await asyncio.sleep(0)
    asking.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
    assert (await pool.parse(SMALL, "one")).requests


async def test_a_client_that_leaves_while_it_waits_leaves_no_trace(start_pool: StartPool):
    pool = start_pool(max_parsing=2)
    running, waiting = (asyncio.create_task(pool.parse(each, "one")) for each in (SMALL, COSTLY))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="max_parsing is 2") as refused:
        await pool.parse(SMALL, "one")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    again = asyncio.create_task(pool.parse(SMALL, "one"))
    assert (await running).requests and (await again).requests


async def test_no_process_is_left_after_the_end(start_pool: StartPool):
    pool = start_pool()
    await pool.parse(SMALL, "one")
    (pid,) = processes_of(pool)
    await pool.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_a_worker_that_cannot_start_is_an_error_of_the_router(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    pool = WorkerPool(WorkerSettings(tmp_path, "little", False, True, 1.0, 1 << 30), 1, 8)
    with pytest.raises(ApiError) as refused:
        await pool.parse(SMALL, "one")
    assert refused.value.status == 500
    assert "did not start" in caplog.text
    await pool.close()


async def test_a_defect_of_the_parser_is_an_error_of_the_router(
    start_pool: StartPool, capfd: pytest.CaptureFixture[str]
):
    pool = start_pool()
    defective: Any = ParseJob(read_completion, SMALL.data, "no number")  # type: ignore[arg-type]
    with pytest.raises(ApiError) as refused:
        await pool.parse(defective, "one")
    assert (refused.value.status, refused.value.code) == (500, "internal_error")
    assert "Traceback" in capfd.readouterr().err
    assert (await pool.parse(SMALL, "one")).requests
