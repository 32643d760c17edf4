"""This process's connection to Ray: a new, small Ray on this host, or one that already runs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private import state  # its public twin, ray.util.state, needs Ray's dashboard
from ray.exceptions import RayError

from deploy.config import ClusterConfig
from deploy.errors import RayFailed, StartFailed, StopRequested, first_line
from deploy.plan import ROUTER_CPUS
from deploy.resources import Host

CONNECT_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum: blocks and states do not pass through its object store
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
RAY_SYSTEM_CONFIG = {
    "worker_niceness": 0,  # added to the supervisor's own; Ray's default of 15 starves nodes on a busy host
}
"""Ray's own settings in a Ray of ours. A Ray that runs already has those of its `ray start`."""


@contextlib.contextmanager
def ray_session(config: ClusterConfig, folder: Path, *, show_node_logs: bool) -> Iterator[None]:
    """Connects to Ray inside the block; actors made there end with it. Once a process: Ray reads its settings once.

    A new Ray keeps all its files in `folder`. Raises StartFailed, StopRequested; a RayError inside the block leaves it
    as a RayFailed.
    """
    os.environ.update(RAY_ENVIRONMENT)  # Ray reads these when it starts
    if config.ray.address is None:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_write_token(folder / "ray-token"))
    try:
        _connect(config, folder, show_node_logs)
        yield
    except RayError as error:
        raise RayFailed(f"Ray at {_where(config)}: {first_line(error)}") from error
    finally:
        ray.shutdown()


def _connect(config: ClusterConfig, folder: Path, show_node_logs: bool) -> None:
    common = {
        "namespace": f"headrace-{config.name}",  # actor names are unique in a namespace
        "log_to_driver": show_node_logs,
        "logging_level": logging.ERROR,
    }
    try:
        if config.ray.address is not None:
            _require_listener(config.ray.address)
            ray.init(address=config.ray.address, **common)
        else:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, math.ceil(_cpus_wanted(config))),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                _system_config=RAY_SYSTEM_CONFIG,
                **common,
            )
    except SystemExit:  # from Ray's own SIGTERM handler, which ray.init installs before it is done
        raise StopRequested from None
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise StartFailed(f"Ray at {_where(config)}: {first_line(error)}") from error


def _require_listener(address: str) -> None:
    """Raises OSError at once where nothing listens: Ray itself would try for three minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return  # auto, or something for Ray to refuse
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"nothing listens there ({getattr(error, 'strerror', None) or error}); give the address of "
            "`ray start --head --port`"
        ) from None


def _where(config: ClusterConfig) -> str:
    return config.ray.address or "this host"


def ray_hosts() -> list[Host]:
    """The live hosts of the Ray cluster."""
    free = state.available_resources_per_node()
    return [
        Host(host["NodeID"], host["NodeManagerAddress"], host["Resources"], free.get(host["NodeID"], {}))
        for host in ray.nodes()
        if host["Alive"]
    ]


def unplaced_actors() -> set[str]:
    """Names of this process's actors for which Ray has found no host yet."""
    actors = state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
    return {actor["Name"] for actor in actors.values() if actor["State"] == "PENDING_CREATION" and not actor["Pid"]}


def _write_token(path: Path) -> Path:
    """The token that the processes of this Ray authenticate with. By default Ray makes one and leaves it in ~/.ray."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    return path


def _cpus_wanted(config: ClusterConfig) -> float:
    """Logical CPUs of the router and all nodes: in a new Ray they share the host's cores rather than wait for more."""
    of_nodes = sum(group.count * group.placement.num_cpus for group in config.groups)
    return config.router.count * ROUTER_CPUS + of_nodes
