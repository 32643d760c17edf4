"""The router changes roles as its planner advises."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from headrace.wire.node_messages import Role
from router.config import RouterConfig
from tests.support.patience import PATIENCE_S
from tests.support.router.fake_nodes import fake_cluster, node_status
from tests.unit.router.conftest import Running, StartRouter

PLANNED = {"role_planner": True, "role_window_s": 0.1, "heartbeat_s": 0.02}


async def until_role(running: Running, name: str, role: Role) -> None:
    """Reports that p0 is busy and all others idle until the router has changed the role."""
    async with asyncio.timeout(PATIENCE_S):
        while running.server.nodes.named(name).role is not role:  # type: ignore[union-attr]
            for info in running.cluster.infos():
                tokens = 900 if info.name == "p0" else 0
                running.server.nodes.register(info, replace(node_status(), waiting_tokens=tokens))
            await asyncio.sleep(0.01)


async def test_a_decode_node_changes_over_when_prompts_wait(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.cluster.role_changes")
    running = await start_router(fake_cluster([1], prefill=1, decode=2), **PLANNED)
    await until_role(running, "d0", Role.PREFILL)
    metrics = (await running.http.get("/metrics")).text
    assert 'headrace_role_changes_total{role="prefill"} 1.0' in metrics
    assert "d0 becomes a prefill node: prefill nodes are used by 100%" in caplog.text


async def test_without_the_setting_roles_stay(start_router: StartRouter) -> None:
    running = await start_router(fake_cluster([1], prefill=1, decode=2), **PLANNED | {"role_planner": False})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await until_role(running, "d0", Role.PREFILL)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [({"role_window_s": 9.0}, "role_window_s 9.0: must be at least 5 heartbeats"), ({"roles": "elastic"}, "elastic")],
)
def test_a_planner_that_could_not_work_is_refused(model_folder, settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        RouterConfig(model_folder, **{"role_planner": True, "roles": "fixed"} | settings)
