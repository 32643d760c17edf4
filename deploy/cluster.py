"""The Ray actors of one cluster: started in order, watched, stopped together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError, RayTaskError

from deploy.api import RouterApi
from deploy.config import ClusterConfig, NodeGroup
from deploy.errors import DeployError, StartFailed, first_line
from deploy.plan import LOCALHOST, PlannedActor, planned_node, planned_nodes, planned_routers
from deploy.ray_session import ray_hosts, unplaced_actors
from deploy.resource_watch import ResourceWatch
from deploy.resources import impossible, inventory
from deploy.stop_request import StopRequest

log = logging.getLogger(__name__)

POLL_S = 0.2
RESOURCE_POLL_S = 1.0
LOOK_TIMEOUT_S = 5.0
ANY_HOST = "0.0.0.0"


@dataclass
class Member:
    """One actor, and the pid of its process; None while it does not answer."""

    name: str
    actor: Any
    pid: int | None = None

    @classmethod
    def start(cls, planned: PlannedActor) -> Member:
        actor = ray.remote(planned.actor_class).options(**planned.ray_options())
        return cls(planned.name, actor.remote(*planned.arguments))

    def info(self, timeout_s: float) -> Any:
        """The actor's own description. Raises RayError while it is lost, restarts or does not answer."""
        return ray.get(self.actor.info.remote(), timeout=timeout_s)


class RunningCluster:
    """Started actors. This process owns them: when it ends, even by a crash, they end too.

    urls              the HTTP address of each router
    router_addresses  of the routers' registries
    run_id            names the run's folder
    api_key           opens everything at its routers; empty: they need none
    """

    def __init__(
        self,
        routers: Sequence[Member],
        nodes: Sequence[Member],
        urls: Sequence[str],
        router_addresses: Sequence[str] = (),
        run_id: str = "",
        api_key: str = "",
    ) -> None:
        self.run_id = run_id
        self.api_key = api_key
        self.routers = routers
        self.nodes = list(nodes)
        self.urls = tuple(urls)
        self._router_addresses = tuple(router_addresses)

    @property
    def apis(self) -> list[RouterApi]:
        """A client to each router."""
        return [RouterApi(url, self.api_key) for url in self.urls]

    def add_nodes(self, config: ClusterConfig, added: Sequence[tuple[NodeGroup, int]], stop: StopRequest) -> None:
        """Starts these nodes of groups, by their numbers; returns when every router knows them.

        Raises StartFailed, with none of them left, and what is missing if Ray cannot hold them; StopRequested.
        """
        planned = [planned_node(config, group, number, self._router_addresses) for group, number in added]
        demands, hosts = [each.demand for each in planned], ray_hosts()
        missing = impossible(demands, [replace(host, total=host.free) for host in hosts])
        if missing and not config.ray.join_timeout_s:
            raise StartFailed("\n".join(["Ray has no room for more nodes:", *missing, *inventory(hosts)]))
        now_s = time.monotonic()
        deadline_s = now_s + config.ray.start_timeout_s
        start = _Start(ResourceWatch(demands, now_s, config.ray.join_timeout_s), stop, deadline_s)
        started: list[Member] = []
        try:
            started += [Member.start(each) for each in planned]
            start.await_info(started)
            await_registered([member.name for member in started], self.apis, stop, deadline_s)
        except BaseException:
            kill(started)
            raise
        self.nodes += started

    def require_node(self, name: str) -> Member:
        """The node of this name. Raises DeployError if the cluster has none."""
        for member in self.nodes:
            if member.name == name:
                return member
        names = ", ".join(member.name for member in self.nodes)
        raise DeployError(f"no node {name!r} in this cluster: it has {names}")

    def remove_node(self, name: str, timeout_s: float) -> None:
        """Stops a node, requests in flight first, and keeps Ray from starting it again."""
        member = self.require_node(name)
        self.nodes.remove(member)
        with contextlib.suppress(RayError):
            ray.wait([member.actor.stop.remote()], timeout=timeout_s)
        kill([member])

    def look(self) -> None:
        """Logs actors lost or restarted since the last call; Ray restarts them by itself.

        No error of one actor ends the others, whatever its kind: a worker that could not be made, a host that is gone.
        """
        for member in (*self.routers, *self.nodes):
            try:
                info = member.info(LOOK_TIMEOUT_S)
            except RayError as error:
                if member.pid is not None:
                    log.warning("%s is lost, waiting for its restart: %s", member.name, first_line(error))
                member.pid = None
                continue
            if member.pid != info.pid:
                log.info("%s is back, pid %d", member.name, info.pid)
            member.pid = info.pid

    def stop(self, timeout_s: float) -> None:
        """Stops nodes and routers together, requests in flight first; kills those that are left at the timeout."""
        members = [*self.routers, *self.nodes]
        with contextlib.suppress(RayError):
            endings = [member.actor.stop.remote() for member in members]
            ray.wait(endings, num_returns=len(endings), timeout=timeout_s)
        kill(members)


def start_cluster(
    config: ClusterConfig, run_id: str, stop: StopRequest, deadline_s: float, *, api_key: str = ""
) -> RunningCluster:
    """Starts the routers, then every node with the routers' addresses. `api_key` is one that the routers know.

    Returns when all of them serve. Raises StartFailed (at `deadline_s`, monotonic, at the latest) or
    StopRequested, with no actor left.
    """
    here = ray.get_runtime_context().get_node_id()
    routers = planned_routers(config, here, ray.util.get_node_ip_address())
    demands = [planned.demand for planned in (*routers, *planned_nodes(config, ()))]
    start = _Start(ResourceWatch(demands, time.monotonic(), config.ray.join_timeout_s), stop, deadline_s)
    started: list[Member] = []
    try:
        start.check_resources(())  # before anything is started in vain
        started += [Member.start(planned) for planned in routers]
        infos = start.await_info(started)
        nodes = [Member.start(planned) for planned in planned_nodes(config, [info.control_address for info in infos])]
        started += nodes
        start.await_info(nodes)
        urls = [info.url.replace(ANY_HOST, LOCALHOST) for info in infos]
        addresses = [info.control_address for info in infos]
        return RunningCluster(started[: len(routers)], nodes, urls, addresses, run_id, api_key)
    except BaseException:
        kill(started)
        raise


def await_registered(names: Collection[str], apis: Sequence[RouterApi], stop: StopRequest, deadline_s: float) -> None:
    """Waits until every router knows these nodes. Raises StartFailed at `deadline_s` (monotonic), StopRequested."""
    for api in apis:
        while missing := set(names) - api.registered_nodes():
            stop.check()
            if time.monotonic() >= deadline_s:
                late = ", ".join(sorted(missing))
                raise StartFailed(f"nodes did not register with the router at {api.url} in time: {late}")
            time.sleep(POLL_S)


def kill(members: Sequence[Member]) -> None:
    for member in members:
        with contextlib.suppress(RayError):
            ray.kill(member.actor, no_restart=True)


class _Start:
    """The wait for started actors, until `deadline_s`."""

    def __init__(self, watch: ResourceWatch, stop: StopRequest, deadline_s: float) -> None:
        self._watch = watch
        self._stop = stop
        self._deadline_s = deadline_s
        self._next_look_s = 0.0

    def await_info(self, members: Sequence[Member]) -> list[Any]:
        """Each actor's info, which it returns once it serves. Raises StartFailed for the first that fails."""
        names = {member.actor.info.remote(): member.name for member in members}
        infos: dict[Any, Any] = {}
        pending = list(names)
        while pending:
            self._stop.check()
            self.check_resources([names[ref] for ref in pending])
            done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            for ref in done:
                try:
                    infos[ref] = ray.get(ref)
                except RayError as error:
                    raise StartFailed(f"{names[ref]} did not start: {_cause(error)}") from error
        for member, ref in zip(members, names, strict=True):
            member.pid = infos[ref].pid
        return [infos[ref] for ref in names]

    def check_resources(self, pending: Sequence[str]) -> None:
        """Raises StartFailed if what Ray has will not do, or if actors are still pending at the deadline."""
        now_s = time.monotonic()
        is_late = bool(pending) and now_s >= self._deadline_s
        if now_s < self._next_look_s and not is_late:
            return
        self._next_look_s = now_s + RESOURCE_POLL_S
        hosts, unplaced = ray_hosts(), unplaced_actors() & set(pending)
        note = self._watch.look(hosts, unplaced, now_s)
        if is_late:
            raise StartFailed(self._watch.late(hosts, unplaced, pending))
        if note is not None:
            log.warning(note)


def _cause(error: BaseException) -> str:
    """The actor's own error; without one, the last line of what Ray says."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return str(error.cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
