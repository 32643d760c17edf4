"""Sessions of HTTP requests: from headers and bodies to the nodes."""

from typing import Any

import pytest
from starlette.datastructures import Headers

from router.api.session_headers import session_of
from router.requests.client import Client
from router.routing.policies.llm_d import LlmD
from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import fake_cluster
from tests.unit.router.conftest import Running, StartRouter

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("headers", "key", "session"),
    [
        ({}, "", ""),
        ({}, "k", "ann\0k"),
        ({"Session-Id": "codex"}, "k", "ann\0codex"),
        ({"x-claude-code-session-id": "cc", "session-id": "codex"}, "", "ann\0cc"),
        ({"x-session-affinity": "gateway", "x-claude-code-session-id": "cc"}, "", "ann\0gateway"),
        ({"x-session-affinity": "", "x-session-id": "other"}, "", "ann\0other"),
        ({"x-session-id": "x" * 5000}, "", "ann\0" + "x" * 256),
    ],
)
def test_a_header_or_the_body_names_the_session(headers: dict[str, str], key: str, session: str):
    assert session_of(Headers(headers).raw, key, Client("ann")) == session


async def served_by(running: Running, headers: dict[str, str] | None = None, **own: Any) -> tuple[str, str]:
    body = CHAT | own | {"headrace": {"report": True}}
    reply = (await running.http.post("/v1/chat/completions", json=body, headers=headers)).json()
    report = reply["usage"]["headrace"]
    return report["prefill"]["node"], report["decode"]["node"]


@pytest.mark.parametrize("named", [{"headers": {"x-session-affinity": "s"}}, {"prompt_cache_key": "s"}])
async def test_a_session_stays_where_it_was_among_equal_nodes(
    start_router: StartRouter, tokens: ModelTokens, named: dict[str, Any]
):
    cluster = fake_cluster([*tokens.encode("The code."), 0], eos_id=0, prefill=3, decode=3)
    running = await start_router(cluster, policy=LlmD())
    of_session, others = set(), set()
    for _ in range(4):
        of_session.add(await served_by(running, **named))
        others.add(await served_by(running))
    assert len(of_session) == 1 and len(others) > 1


async def test_one_client_has_no_part_in_anothers_session(start_router: StartRouter, tokens: ModelTokens):
    cluster = fake_cluster([*tokens.encode("The code."), 0], eos_id=0, prefill=1, decode=3)
    running = await start_router(cluster, policy=LlmD(), client_header="x-tenant")
    sessions = running.server.context.sessions
    await served_by(running, {"session-id": "s", "x-tenant": "ann"})
    assert sessions.nodes_of("x-tenant: ann\0s") and not sessions.nodes_of("x-tenant: bob\0s")
