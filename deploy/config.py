"""A cluster as one YAML file: its router, its nodes and their placement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headrace.config import (
    ConfigError,
    at_least,
    build,
    can_be_a_file,
    checkpoint_folders,
    error_in,
    override,
    positive,
    read_yaml,
    refuse,
)
from headrace.wire.tls_config import TlsConfig
from node.config import NodeConfig
from router.config import RouterConfig

DAY_S = 86400
LAST_PORT = 65535


@dataclass(frozen=True)
class Placement:
    """Resources that Ray reserves for one node, and the host that it picks.

    num_cpus   logical CPUs; a fraction lets nodes share a core
    num_gpus   GPUs: 1 beside `node.engine.device: cuda` gives each node one of its own; with 0 all nodes of a host
               would share its first one
    resources  custom Ray resources, such as `{prefill_host: 1}`: they keep a role to its hosts
    strategy   pack: fill a host before the next; spread: over as many hosts as possible
    """

    num_cpus: float = 0.25
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Literal["pack", "spread"] = "pack"

    def __post_init__(self) -> None:
        refuse(at_least(self, 0, "num_cpus", "num_gpus"), self._faults())

    def _faults(self) -> Iterator[str]:
        if 1 < self.num_gpus < math.inf and self.num_gpus != int(self.num_gpus):
            yield f"num_gpus {self.num_gpus}: Ray gives whole GPUs above 1; use {int(self.num_gpus)}"
        for name, amount in self.resources.items():
            if not 0 <= amount < math.inf:
                yield f"resources {name}: {amount}: must be at least 0"


@dataclass(frozen=True)
class Routers(RouterConfig):
    """The routers of a cluster, all on the host of `headrace up`: the settings of `RouterConfig`, and their number.

    count  number of routers; the second has port + 1 and control_port + 1, and so on
    """

    count: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(at_least(self, 1, "count"), self._faults())

    def _faults(self) -> Iterator[str]:
        for name in ("port", "control_port"):
            last = getattr(self, name) + self.count - 1
            if getattr(self, name) and last > LAST_PORT:
                yield f"count {self.count}: the last router would have {name} {last}; choose a lower {name}"
        first, control = self.port, self.control_port
        if self.count > 1 and first and control and abs(first - control) < self.count:
            ranges = (
                f"port {first} to {first + self.count - 1} and control_port {control} to {control + self.count - 1}"
            )
            yield f"count {self.count}: {ranges} overlap; set them further apart"


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of a cluster that start in one role: p0, p1, ... prefill, d0, d1, ... decode, n0, n1, ... do both.

    node       settings that all of them share
    count      number of nodes
    placement  resources of each node
    """

    node: NodeConfig
    count: int
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        refuse(at_least(self, 0, "count"))


@dataclass(frozen=True)
class RayConfig:
    """The Ray cluster in which the nodes run.

    address          address of a running Ray cluster, or `auto` on one of its hosts; if left out, a new Ray here
    start_timeout_s  the whole cluster must be ready by then
    join_timeout_s   hosts may still join the Ray cluster until then, as where it scales by itself; after that a cluster
                     that its hosts could not even hold with nothing else on them fails, without start_timeout_s
    stop_timeout_s   nodes get this long to end their requests; after that their processes are killed
    """

    address: str | None = None
    start_timeout_s: float = 180.0
    join_timeout_s: float = 0.0
    stop_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        names = ("start_timeout_s", "stop_timeout_s")
        values = {name: getattr(self, name) for name in (*names, "join_timeout_s")}
        too_long = [
            f"{name} {value}: must be below a day" for name, value in values.items() if DAY_S <= value < math.inf
        ]
        refuse(positive(self, *names), at_least(self, 0, "join_timeout_s"), too_long)


@dataclass(frozen=True)
class ClusterConfig:
    """A whole cluster.

    model    the checkpoint's folder; it must be at the same path on every host
    router   the routers' settings, and their number
    prefill  the nodes that start as prefill nodes: one, if the cluster has none that do both
    decode   the nodes that start as decode nodes, likewise
    both     the nodes that start with both roles: none, if left out
    ray      the Ray cluster in which they run
    name     `headrace status`, `chat` and `down` find the cluster by this name
    tls      certificates of the control plane, for the router and every node: each host has its own at these paths
    """

    model: Path
    router: Routers
    prefill: NodeGroup
    decode: NodeGroup
    both: NodeGroup
    ray: RayConfig = field(default_factory=RayConfig)
    name: str = "default"
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        name = []
        if not self.name or not all(letter.isalnum() or letter in "-_" for letter in self.name):
            name = [f"name {self.name!r}: use letters, digits, - and _; it names a file"]
        refuse(name, checkpoint_folders(self, "model"), self._role_faults())

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """All nodes, by the role in which they start."""
        return (self.prefill, self.decode, self.both)

    def _role_faults(self) -> Iterator[str]:
        if any(part is None for part in (self.router, *self.groups)):  # the loader looks for more faults
            return
        if not any(group.count for group in self.groups):
            yield "decode.count 0: a cluster needs a node"
        elif self.router.roles == "fixed" and not self.decode.count + self.both.count:
            yield "decode.count 0: no node would decode; give one here or in both, or make router.roles elastic"


@dataclass(frozen=True)
class Overrides:
    """The command line's values, which override the cluster file; None: the flag is not given."""

    model: Path | None = None
    prefill: int | None = None
    decode: int | None = None
    both: int | None = None
    address: str | None = None
    port: int | None = None
    name: str | None = None
    device: Literal["cpu", "cuda"] | None = None

    def for_host(self, num_gpus: int) -> Overrides:
        """The same for a cluster without a file on a host with so many GPUs: nodes take them, unless `device` is given.

        A single GPU gets a single node, which does both, unless the numbers of nodes are given. Raises ConfigError if
        these are more than the GPUs, and for what makes no cluster.
        """
        if not num_gpus or self.device is not None:
            return self
        is_open = self.prefill is None and self.decode is None and self.both is None
        if is_open and num_gpus == 1:
            return replace(self, device="cuda", both=1)
        num_nodes = sum(group.count for group in cluster_from_options(None, self).groups)
        if num_nodes > num_gpus:
            remedy = f"give --both {num_gpus}, or --device cpu"
            raise ConfigError(f"command line: {num_nodes} nodes, {num_gpus} GPUs here: {remedy}")
        return replace(self, device="cuda")

    def values(self) -> dict[str, object]:
        """Path in the cluster file -> the value that replaces the one there."""
        given = {
            "model": None if self.model is None else str(self.model.resolve()),
            "prefill.count": self.prefill,
            "decode.count": self.decode,
            "both.count": self.both,
            "ray.address": self.address,
            "router.port": self.port,
            "name": self.name,
        }
        return {path: value for path, value in given.items() if value is not None}


def cluster_from_options(file: Path | None, overrides: Overrides) -> ClusterConfig:
    """The cluster of a file, of the command line, or of both. Raises ConfigError.

    A relative path of `model`, `tls`, `router.api_keys_file` or `router.chat_template` is taken from its folder.
    """
    data = {} if file is None else read_yaml(file)
    for path, value in overrides.values().items():
        override(data, path, value)
    if overrides.device is not None:
        for role in _GROUPS:
            _place(data, role, overrides.device)
    source, base = ("command line", Path.cwd()) if file is None else (str(file), file.parent)
    return cluster_config(data, source=source, base=base)


ON_GPU = {"node.engine.max_step_tokens": 8192, "node.engine.max_running": 256, "placement.num_gpus": 1}
"""Settings that `--device cuda` adds, unless the file has them: the engine's own defaults suit a CPU."""


def _place(data: dict[str, Any], role: str, device: str) -> None:
    """Puts the nodes of a role on this device."""
    override(data, f"{role}.node.engine.device", device)
    if device == "cpu":
        override(data, f"{role}.placement.num_gpus", 0)
        return
    for path, value in ON_GPU.items():
        if _value_at(data, (role, *path.split("."))) is None:
            override(data, f"{role}.{path}", value)


def _value_at(data: object, path: Iterable[str]) -> object:
    """The value of a file at `path`; None if there is none."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


_NODE_KEYS = ("name", "role", "model_path", "router_addresses", "host", "port", "tls")
_GROUPS = {"prefill": "p", "decode": "d", "both": "n"}  # role -> what the names of its nodes begin with
DERIVED: Mapping[tuple[str, ...], Sequence[str]] = {
    ("router",): ("model_path", "tls"),
    **{(role, "node"): _NODE_KEYS for role in _GROUPS},
}
"""Settings, by the path of their section, that follow from the rest of the file."""


def cluster_config(data: Mapping[str, Any], *, source: str, base: Path) -> ClusterConfig:
    """`data` (a cluster file's mapping) as a config; the model and `tls` are copied to the router and every node.

    Raises ConfigError with every fault.
    """
    model, tls = _absolute(data.get("model"), base), _resolved(data.get("tls"), base)
    num_both = _count(data.get("both"), 0)
    defaults = {"prefill": int(not num_both), "decode": int(not num_both), "both": 0}
    whole = {
        **data,
        "model": model,
        "tls": tls,
        # Nodes get the registry's address from the router, so any free port will do.
        "router": _with({"control_port": 0}, _router_files(data.get("router"), base), model_path=model, tls=tls),
    } | {
        role: _group(data.get(role), defaults[role], name=name, role=role, model_path=model, tls=tls)
        for role, name in _GROUPS.items()
    }
    config, faults = build(ClusterConfig, whole)
    faults = [*_derived_faults(data), *(fault for fault in faults if not _is_copy(fault))]
    if config is None or faults:
        raise error_in(source, faults)
    return config


def _derived_faults(data: Mapping[str, Any]) -> Iterator[str]:
    """Faults of settings that follow from the rest of the file: no model, or a derived key that the file sets too."""
    if data.get("model") is None:
        yield "model is missing: give the checkpoint's folder, in the cluster file or as --model"
    for section, keys in DERIVED.items():
        inner = _value_at(data, section)
        for key in keys:
            if isinstance(inner, Mapping) and key in inner:
                remedy = (
                    "set it once, for the whole cluster" if key == "tls" else "set at start for each node; remove it"
                )
                yield f"{'.'.join((*section, key))}: {remedy}"


def _is_copy(fault: str) -> bool:
    """True if a fault is about a derived value: it repeats the fault of `model` or `tls`."""
    path = fault.split()[0]
    copies = [".".join((*section, key)) for section, keys in DERIVED.items() for key in keys]
    return fault.startswith("model None") or any(path == copy or path.startswith(f"{copy}.") for copy in copies)


def _absolute(model: object, base: Path) -> object:
    """`model` as an absolute path, its links followed; the loader refuses anything but a text that can be one."""
    can_be_one = isinstance(model, str) and can_be_a_file(base / model)
    return str((base / model).resolve()) if can_be_one else model  # type: ignore[operator]


def _resolved(tls: object, base: Path) -> object:
    """`tls` with absolute paths; the loader refuses anything but a mapping of texts.

    Links are not followed: their targets may differ from host to host, and from one day to the next.
    """
    if not isinstance(tls, Mapping):
        return tls
    files = {name: tls[name] for name in ("ca", "cert", "key") if isinstance(tls.get(name), str)}
    return {**tls, **{name: str((base / path).absolute()) for name, path in files.items()}}


def _router_files(router: object, base: Path) -> object:
    """The routers' section with absolute paths. Links are not followed: a mounted secret is swapped so."""
    if not isinstance(router, Mapping):
        return router
    given = [name for name in ("api_keys_file", "chat_template") if isinstance(router.get(name), str)]
    return {**router, **{name: str((base / router[name]).absolute()) for name in given}}


def _count(group: object, default: int) -> object:
    return group.get("count", default) if isinstance(group, Mapping) else default


def _group(data: object, count: int, **derived: object) -> object:
    if data is None or isinstance(data, Mapping):
        return {"count": count, **(data or {}), "node": _with({}, (data or {}).get("node"), **derived)}
    return data


def _with(defaults: Mapping[str, object], data: object, **derived: object) -> object:
    """A section of the file between its defaults and the derived values; the loader refuses anything but a mapping."""
    if data is None or isinstance(data, Mapping):
        return {**defaults, **(data or {}), **derived}
    return data
