"""A cluster as one YAML file: what runs, how many of it, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from decode_node.config import DecodeNodeConfig
from deploy.errors import ConfigError
from headrace.engine.config import ConfigError as NodeConfigError
from headrace.wire.tls import TlsConfig
from node_runtime.loading import load_dataclass
from prefill_node.config import PrefillNodeConfig
from router.config import RouterConfig
from router.errors import RouterError
from transfer.protocol.errors import TransferError


@dataclass(frozen=True)
class Placement:
    """What Ray sets aside for one node, and where it puts it.

    num_cpus   logical CPUs; a fraction lets nodes share a core
    num_gpus   GPUs; with `node.engine.device: cuda` each node gets one of its own
    resources  custom Ray resources, such as `{prefill_host: 1}`: how a role is kept to its hosts
    strategy   pack: fill a host before the next; spread: over as many hosts as possible
    """

    num_cpus: float = 0.25
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: Literal["pack", "spread"] = "pack"

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: must not be negative")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus {self.num_gpus}: Ray gives whole GPUs above 1; use {int(self.num_gpus)}")


@dataclass(frozen=True)
class PrefillRole:
    """`count` prefill nodes p0, p1, ... that share `node`'s settings, each placed by `placement`."""

    node: PrefillNodeConfig
    count: int = 1
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        _check_count(self.count)


@dataclass(frozen=True)
class DecodeRole:
    """`count` decode nodes d0, d1, ... that share `node`'s settings, each placed by `placement`."""

    node: DecodeNodeConfig
    count: int = 1
    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        _check_count(self.count)


@dataclass(frozen=True)
class RayConfig:
    """Which Ray the nodes run in.

    address          of a running Ray cluster, or `auto` on one of its hosts; None: a Ray of our own, on this host
    start_timeout_s  the whole cluster must be ready by then
    stop_timeout_s   nodes get this long to end their requests; after that their processes are killed
    """

    address: str | None = None
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "stop_timeout_s"):
            if not 0 < getattr(self, name) < 86400:
                raise ValueError(f"{name} {getattr(self, name)}: must be above 0 and below a day")


@dataclass(frozen=True)
class ClusterConfig:
    """A whole cluster.

    name   of the cluster: `headrace status`, `chat` and `down` find it by this name
    model  the checkpoint's folder; it must be at the same path on every host
    tls    certificates of the control plane, for the router and every node: each host has its own at these paths
    """

    model: Path
    router: RouterConfig
    prefill: PrefillRole
    decode: DecodeRole
    ray: RayConfig = field(default_factory=RayConfig)
    name: str = "default"
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        if not self.name or not all(letter.isalnum() or letter in "-_" for letter in self.name):
            raise ValueError(f"name {self.name!r}: use letters, digits, - and _; it names a file")


def _check_count(count: int) -> None:
    if count < 1:
        raise ValueError(f"count {count}: each role needs at least 1 node")


@dataclass(frozen=True)
class Overrides:
    """What the command line says; it wins over the cluster file. None: not said."""

    model: Path | None = None
    prefill: int | None = None
    decode: int | None = None
    address: str | None = None
    port: int | None = None
    name: str | None = None

    def keys(self) -> dict[tuple[str, ...], object]:
        """Path in the cluster file to the value that stands there instead."""
        said: dict[tuple[str, ...], object] = {
            ("model",): None if self.model is None else str(self.model.resolve()),
            ("prefill", "count"): self.prefill,
            ("decode", "count"): self.decode,
            ("ray", "address"): self.address,
            ("router", "port"): self.port,
            ("name",): self.name,
        }
        return {path: value for path, value in said.items() if value is not None}


def cluster_from_options(file: Path | None, overrides: Overrides) -> ClusterConfig:
    """The cluster of a file, of the command line, or of both. Raises ConfigError.

    A relative path in a file, of `model` and in `tls`, is taken from the file's folder.
    """
    if file is None:
        return cluster_config(_overridden({}, overrides), source="command line", base=Path.cwd())
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {error}") from None
    return cluster_config(_overridden(data, overrides), source=str(file), base=file.parent)


def _overridden(data: Any, overrides: Overrides) -> Any:
    for (*sections, key), value in overrides.keys().items():
        inner = data
        for section in sections:
            if isinstance(inner, dict) and inner.get(section) is None:  # not there, or empty in the file
                inner[section] = {}
            inner = inner[section] if isinstance(inner, dict) else None
        if isinstance(inner, dict):  # anything else is left for the type check to refuse
            inner[key] = value
    return data


def cluster_config(data: object, *, source: str, base: Path) -> ClusterConfig:
    """`data` (a cluster file's mapping) as a config; what one place knows is filled in everywhere.

    Raises ConfigError.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {data!r} is not a mapping of keys to values")
    if not isinstance(data.get("model"), str):
        raise ConfigError(f"{source}: model: {data.get('model')!r}: give the checkpoint's folder")
    _refuse_derived(data, source)
    model, tls = str((base / data["model"]).resolve()), _resolved(data.get("tls"), base)
    try:
        return load_dataclass(
            ClusterConfig,
            {
                **data,
                "model": model,
                "tls": tls,
                "router": _router(data.get("router"), model, tls),
                "prefill": _role(data.get("prefill"), name="p", model_path=model, tls=tls),
                "decode": _role(data.get("decode"), name="d", model_path=model, tls=tls),
                "ray": _with(data.get("ray")),
            },
            source,
        )
    except NodeConfigError as error:
        raise ConfigError(str(error)) from None
    except (RouterError, TransferError) as error:  # not all ValueErrors, so pydantic lets them through
        raise ConfigError(f"{source}: {error}") from None


_DERIVED_OF_NODES = ("name", "model_path", "router_address", "host", "port", "tls")


def _refuse_derived(data: Mapping[str, Any], source: str) -> None:
    """What follows from the rest of the file must not be said twice."""
    for section, keys in (
        (("router",), ("model_path", "tls")),
        (("prefill", "node"), _DERIVED_OF_NODES),
        (("decode", "node"), _DERIVED_OF_NODES),
    ):
        inner: Any = data
        for part in section:
            inner = inner.get(part) if isinstance(inner, Mapping) else None
        for key in keys:
            if isinstance(inner, Mapping) and key in inner:
                once = "say it once, for the whole cluster"
                remedy = once if key == "tls" else "set for each node at start; remove it"
                raise ConfigError(f"{source}: {'.'.join(section)}.{key}: {remedy}")


def _resolved(tls: object, base: Path) -> object:
    """`tls` with absolute paths; anything but a mapping of texts is left for the type check to refuse.

    Links are not followed: where they lead may differ from host to host, and from one day to the next.
    """
    if not isinstance(tls, Mapping):
        return tls
    files = {name: tls[name] for name in ("ca", "cert", "key") if isinstance(tls.get(name), str)}
    return {**tls, **{name: str((base / path).absolute()) for name, path in files.items()}}


def _router(data: object, model: str, tls: object) -> object:
    """Nodes are told the registry's port, so any free one will do."""
    if data is None or isinstance(data, Mapping):
        return {"control_port": 0, **(data or {}), "model_path": model, "tls": tls}
    return data


def _role(data: object, **derived: object) -> object:
    if data is None or isinstance(data, Mapping):
        return _with(data, node=_with((data or {}).get("node"), **derived))
    return data


def _with(data: object, **derived: object) -> object:
    """A section with what is derived added; anything but a mapping is left for the type check to refuse."""
    if data is None or isinstance(data, Mapping):
        return {**(data or {}), **derived}
    return data
