"""The Ray actors of one cluster: started in order, watched, stopped together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from decode_node.actor import DecodeActor
from deploy.config import ClusterConfig, DecodeNodes, Placement, PrefillNodes
from deploy.errors import StartFailed
from deploy.ports import free_ports
from deploy.ray_session import ROUTER_CPUS
from deploy.stop_request import StopRequest
from headrace.host_process import own_niceness
from prefill_node.actor import PrefillActor
from router.actor import RouterActor

log = logging.getLogger(__name__)

POLL_S = 0.2
LOOK_TIMEOUT_S = 5.0
LOCALHOST = "127.0.0.1"
ANY_HOST = "0.0.0.0"
ALL_GPUS_VISIBLE = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
STRATEGIES = {"pack": "DEFAULT", "spread": "SPREAD"}


@dataclass
class Member:
    """One actor, and the pid of its process; None while it does not answer."""

    name: str
    actor: Any
    pid: int | None = None

    def info(self, timeout_s: float) -> Any:
        """The actor's own description. Raises RayError while it is lost, restarts or does not answer."""
        return ray.get(self.actor.info.remote(), timeout=timeout_s)


class RunningCluster:
    """Started actors. This process owns them: when it ends, even by a crash, they end too."""

    def __init__(self, router: Member, nodes: Sequence[Member], url: str) -> None:
        self.router = router
        self.nodes = nodes
        self.url = url

    def look(self) -> None:
        """Logs actors lost or restarted since the last call; Ray restarts them by itself.

        No error of one actor ends the others, whatever its kind: a worker that could not be made, a host that is gone.
        """
        for member in (self.router, *self.nodes):
            try:
                info = member.info(LOOK_TIMEOUT_S)
            except RayError as error:
                if member.pid is not None:
                    log.warning("%s is lost, waiting for its restart: %s", member.name, _first_line(error))
                member.pid = None
                continue
            if member.pid != info.pid:
                log.info("%s is back, pid %d", member.name, info.pid)
            member.pid = info.pid

    def stop(self, timeout_s: float) -> None:
        """Stops nodes and router together, requests in flight first; kills those that are left at the timeout."""
        members = [self.router, *self.nodes]
        with contextlib.suppress(RayError):
            endings = [member.actor.stop.remote() for member in members]
            ray.wait(endings, num_returns=len(endings), timeout=timeout_s)
        kill(members)


def start_cluster(config: ClusterConfig, stop: StopRequest, deadline_s: float) -> RunningCluster:
    """Starts the router, then every node with the router's address.

    Returns when all of them serve. Raises StartFailed (at `deadline_s`, monotonic, at the latest) or
    StopRequested, with no actor left.
    """
    started: list[Member] = []
    try:
        router = _start_router(config)
        started.append(router)
        (addresses,) = _await_info([router], stop, deadline_s)
        nodes = _start_nodes(config, addresses.control_address)
        started.extend(nodes)
        _await_info(nodes, stop, deadline_s)
        return RunningCluster(router, nodes, addresses.url.replace(ANY_HOST, LOCALHOST))
    except BaseException:
        kill(started)
        raise


def kill(members: Sequence[Member]) -> None:
    for member in members:
        with contextlib.suppress(RayError):
            ray.kill(member.actor, no_restart=True)


def _start_router(config: ClusterConfig) -> Member:
    """Starts the router on this host, and restarts it only here: clients and nodes know its addresses."""
    here = ray.get_runtime_context().get_node_id()
    router = config.router
    if config.ray.address is not None:
        router = replace(router, control_host=ray.util.get_node_ip_address())
    # A restarted router must come back where clients and nodes look for it, so its ports are chosen once.
    wanted = ((router.host, router.port), (router.control_host, router.control_port))
    chosen = iter(free_ports(*(host for host, port in wanted if not port)))
    router = replace(router, port=router.port or next(chosen), control_port=router.control_port or next(chosen))
    actor = ray.remote(RouterActor).options(
        name="router",
        num_cpus=ROUTER_CPUS,
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
    return Member("router", actor.remote(router, own_niceness()))


def _start_nodes(config: ClusterConfig, router_address: str) -> list[Member]:
    host = LOCALHOST if config.ray.address is None else None
    roles: tuple[tuple[type, PrefillNodes | DecodeNodes], ...] = (
        (PrefillActor, config.prefill),
        (DecodeActor, config.decode),
    )
    members = []
    for actor_class, role in roles:
        for index in range(role.count):
            node = replace(role.node, name=f"{role.node.name}{index}", router_addresses=(router_address,))
            actor = ray.remote(actor_class).options(name=node.name, max_restarts=-1, **_placed(role.placement))
            members.append(Member(node.name, actor.remote(node, host, own_niceness())))
    return members


def _placed(placement: Placement) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": placement.num_cpus,
        "num_gpus": placement.num_gpus,
        "resources": dict(placement.resources),
        "scheduling_strategy": STRATEGIES[placement.strategy],
    }
    if placement.num_gpus:
        options["runtime_env"] = ALL_GPUS_VISIBLE
    return options


def _await_info(members: Sequence[Member], stop: StopRequest, deadline_s: float) -> list[Any]:
    """Each actor's info, which it returns once it serves. Raises StartFailed for the first that fails."""
    names = {member.actor.info.remote(): member.name for member in members}
    infos: dict[Any, Any] = {}
    pending = list(names)
    while pending:
        stop.check()
        done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
        for ref in done:
            try:
                infos[ref] = ray.get(ref)
            except RayError as error:
                raise StartFailed(f"{names[ref]} did not start: {_cause(error)}") from error
        if pending and time.monotonic() >= deadline_s:
            late = ", ".join(names[ref] for ref in pending)
            raise StartFailed(
                f"not ready in time: {late}. Raise ray.start_timeout_s, or ask for less: Ray has "
                f"{ray.available_resources()} left"
            )
    for member, ref in zip(members, names, strict=True):
        member.pid = infos[ref].pid
    return [infos[ref] for ref in names]


def _cause(error: BaseException) -> str:
    """The last line of the actor's own traceback, which Ray passes as text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
