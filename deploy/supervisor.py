"""The process that owns a cluster: starts it, watches it, and leaves nothing behind when it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ray

from deploy.cluster import RunningCluster, await_registered, start_cluster
from deploy.config import ClusterConfig
from deploy.control import ControlSocket
from deploy.operations import Operations
from deploy.processes import make_folders, run_folder
from deploy.ray_session import ray_session
from deploy.reaper import start_reaper
from deploy.runs import RunDirectory
from deploy.stop_request import StopRequest
from router.keys import ApiKey, hash_of, new_key

log = logging.getLogger(__name__)

OWN_KEY_NAME = "headrace-run"  # in the routers' logs and errors
LOOK_INTERVAL_S = 2.0
ORDER_POLL_S = 0.2  # also how soon a stop is noticed


@contextlib.contextmanager
def running_cluster(
    config: ClusterConfig, runs: RunDirectory, stop: StopRequest, *, show_node_logs: bool
) -> Iterator[RunningCluster]:
    """A ready cluster inside the block; afterwards, and on every failure, none of its processes is left.

    Raises AlreadyRunning, StartFailed, StopRequested.
    """
    deadline_s = time.monotonic() + config.ray.start_timeout_s
    stop.install()
    config, api_key = _with_own_key(config)
    with (
        runs.claim(config.name, secrets.token_hex(4), config.ray.stop_timeout_s, api_key) as record,
        _working_in(record.run_id),
        ray_session(config, run_folder(record.run_id), show_node_logs=show_node_logs),
    ):
        stop.install()
        cluster = start_cluster(config, record.run_id, stop, deadline_s, api_key=api_key)
        try:
            await_registered([member.name for member in cluster.nodes], cluster.apis, stop, deadline_s)
            runs.publish(record, cluster.urls, ray.get_runtime_context().gcs_address)
            yield cluster
        finally:
            cluster.stop(config.ray.stop_timeout_s)


def _with_own_key(config: ClusterConfig) -> tuple[ClusterConfig, str]:
    """The config with a key for this run's own commands, and that key; no key where the routers need none."""
    router = config.router
    if not router.api_keys and router.api_keys_file is None:
        return config, ""
    made = new_key()
    keys = {**router.api_keys, OWN_KEY_NAME: ApiKey(hash_of(made), access="operate")}
    return replace(config, router=replace(router, api_keys=keys)), made


def serve(cluster: RunningCluster, config: ClusterConfig, stop: StopRequest) -> None:
    """Watches the cluster, and obeys the orders of `headrace` commands, until a stop is requested."""
    operations = Operations(config, cluster, stop)
    looked_s = time.monotonic()
    with ControlSocket(cluster.run_id) as control:
        while not stop.is_set:
            control.serve(operations.obey, ORDER_POLL_S)
            if time.monotonic() - looked_s >= LOOK_INTERVAL_S:
                cluster.look()
                looked_s = time.monotonic()


@contextlib.contextmanager
def _working_in(run_id: str) -> Iterator[None]:
    """Processes started inside the block work in the run's folder; all end with the block, or with this process."""
    before = Path.cwd()
    reaper = start_reaper(run_id)
    try:
        os.chdir(make_folders(run_id))
        yield
    finally:
        os.chdir(before)
        reaper.communicate()  # closes its input; the reaper has its own deadline
