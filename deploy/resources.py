"""Demands of actors beside the resources of Ray's hosts, pure: what can never be met, and what is missing now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]
SLACK = 1e-6  # sums of fractions
NOT_SHOWN = ("memory", "object_store_memory", "node:")  # Ray's own, which no placement asks for


@dataclass(frozen=True)
class Demand:
    """The resources that one actor asks for; `host_id` is the only host for it, None: any."""

    name: str
    resources: Resources
    host_id: str | None = None

    def __str__(self) -> str:
        return f"{self.name} asks for {amounts(self.resources)}"


@dataclass(frozen=True)
class Host:
    """A live host of the Ray cluster, with all its resources and those that nobody has taken."""

    id: str
    address: str
    total: Resources
    free: Resources

    def __str__(self) -> str:
        shown = {name: amount for name, amount in self.total.items() if not name.startswith(NOT_SHOWN)}
        parts = (f"{amount:g} {name} ({self.free.get(name, 0):g} free)" for name, amount in sorted(shown.items()))
        return f"{self.address}: {', '.join(parts) or 'nothing'}"


def impossible(demands: Sequence[Demand], hosts: Sequence[Host]) -> list[str]:
    """The reasons why these hosts cannot hold all actors, even with nothing else on them; none if they may.

    Demands that fit one by one and in sum, but not side by side, go unnoticed.
    """
    alone = [f"{demand}: no host has that" for demand in demands if not _held(demand, hosts, free=False)]
    if alone:
        return alone
    return [
        f"all nodes and routers together ask for {wanted:g} {name}, all hosts together have {there:g}"
        for name in sorted({name for demand in demands for name in demand.resources})
        if (wanted := _sum(name, (demand.resources for demand in demands)))
        > (there := _sum(name, (host.total for host in hosts))) + SLACK
    ]


def waiting(demands: Iterable[Demand], hosts: Sequence[Host]) -> list[Demand]:
    """The demands for which no host has enough free."""
    return [demand for demand in demands if not _held(demand, hosts, free=True)]


def inventory(hosts: Sequence[Host]) -> Iterator[str]:
    """Lines with what Ray has: in total, then host by host."""
    names = {name for host in hosts for name in host.total}
    total = {name: _sum(name, (host.total for host in hosts)) for name in names}
    free = {name: _sum(name, (host.free for host in hosts)) for name in names}
    yield str(Host("", f"Ray has, on {len(hosts)} host{'s' * (len(hosts) != 1)}", total, free))
    yield from (f"  {host}" for host in sorted(hosts, key=lambda host: host.address))


def amounts(resources: Resources) -> str:
    """`0.25 CPU, 1 GPU`."""
    parts = (f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount)
    return ", ".join(parts) or "nothing"


def _held(demand: Demand, hosts: Iterable[Host], *, free: bool) -> bool:
    return any(
        all(
            amount <= (host.free if free else host.total).get(name, 0) + SLACK
            for name, amount in demand.resources.items()
        )
        for host in hosts
        if demand.host_id in (None, host.id)
    )


def _sum(name: str, resources: Iterable[Resources]) -> float:
    return sum(each.get(name, 0) for each in resources)
