"""This process's connection to Ray: a new, small Ray on this host, or one that already runs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import ray

from deploy.config import ClusterConfig, DecodeNodes, PrefillNodes
from deploy.errors import StartFailed, StopRequested

ROUTER_CPUS = 0.25
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum: blocks and states do not pass through its object store
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
RAY_SYSTEM_CONFIG = {
    "worker_niceness": 0,  # added to the supervisor's own; Ray's default of 15 starves nodes on a busy host
}
"""Ray's own settings in a Ray of ours. A Ray that runs already has those of its `ray start`."""


@contextlib.contextmanager
def ray_session(config: ClusterConfig, folder: Path, *, show_node_logs: bool) -> Iterator[None]:
    """Connects to Ray inside the block; actors made there end with it. Once a process: Ray reads its settings once.

    A new Ray keeps all its files in `folder`. Raises StartFailed, StopRequested.
    """
    os.environ.update(RAY_ENVIRONMENT)  # Ray reads these when it starts
    if config.ray.address is None:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_write_token(folder / "ray-token"))
    try:
        _connect(config, folder, show_node_logs)
        yield
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
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise StartFailed(f"Ray at {config.ray.address or 'this host'}: {error}") from error


def _write_token(path: Path) -> Path:
    """The token that the processes of this Ray authenticate with. By default Ray makes one and leaves it in ~/.ray."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    return path


def _cpus_wanted(config: ClusterConfig) -> float:
    """Logical CPUs of the router and all nodes: in a new Ray they share the host's cores rather than wait for more."""
    roles: tuple[PrefillNodes | DecodeNodes, ...] = (config.prefill, config.decode)
    return ROUTER_CPUS + sum(role.count * role.placement.num_cpus for role in roles)
