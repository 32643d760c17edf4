"""Messages that describe a node to routers, and what routers tell it, as frozen dataclasses; see `messages.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from headrace.cache.layout import CacheLayout
from headrace.step_costs import StepCosts


class Role(Enum):
    """The work for which the router prefers a node; every node can do all of it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def includes(self, work: Role) -> bool:
        """True if a node of this role does this work."""
        return self in (work, Role.BOTH)


@dataclass(frozen=True)
class NodeInfo:
    """A node's registration.

    role               the one with which it starts
    incarnation        random at start: a restarted node has the same name and another incarnation
    address            host:port of its gRPC service
    transfer_address   where peers connect to send to it
    device             "cpu" or "cuda": where its cache is
    max_message_bytes  equal on nodes that can transfer to each other: a message holds as many blocks as fit
    transfer_version   version of the protocol between nodes: the router refuses a mix
    start_s            how long its start took, mostly to load the model
    max_step_tokens    the most tokens in one of its steps
    host_id            equal on nodes that die together, with their host; empty: not known
    num_packed_slots   of packed checkpoints, beside `num_slots`; 0: checkpoints lie in those
    """

    name: str
    role: Role
    incarnation: int
    address: str
    transfer_address: str
    layout: CacheLayout
    max_model_tokens: int
    num_blocks: int
    num_slots: int
    pid: int
    device: str
    max_message_bytes: int
    transfer_version: int
    start_s: float = 0.0
    max_step_tokens: int = 1024
    host_id: str = ""
    num_packed_slots: int = 0


@dataclass(frozen=True)
class Peer:
    """A node to which another one may send, as the router names it."""

    name: str
    incarnation: int
    transfer_address: str
    device: str


@dataclass(frozen=True)
class LinkStatus:
    """A node's measurement of its link to a peer, in that direction.

    lanes         transports and devices in use, such as `tcp/eth0`
    round_trip_s  time of a short message and its acknowledgement
    bytes_per_s   bandwidth of long messages, later of the transfers that were sent over it
    warning       why the link works worse than it should
    error         why there is no measurement; without figures and error it is still to come
    """

    peer: str
    lanes: tuple[str, ...] = ()
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    warning: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RegisterReply:
    """The router's answer to a registration: call again within `heartbeat_s`; this node may have to send to `peers`.

    abandoned   of the status's orphans: the router has not been lost, and needs these no longer
    """

    heartbeat_s: float
    peers: tuple[Peer, ...] = ()
    abandoned: tuple[str, ...] = ()


@dataclass(frozen=True)
class PoolStatus:
    """Blocks or slots of a pool: free + cached + in_use = total. A prompt can find `indexed` ones, in use or not."""

    total: int
    free: int
    cached: int
    in_use: int
    indexed: int


@dataclass(frozen=True)
class NodeStatus:
    """A node's load and counters, sent with every heartbeat.

    counters              only grow; with labels the name is `label=value,.../name`; `attention/name` is short for
                          `group=attention/name`
    links                 to the peers that the last registration's answer named
    stalled_s             seconds since the engine last ended a turn while it has work; 0: it works, or has none
    waiting_tokens        tokens of prompts that are to be computed: waiting ones, and the rest of running ones
    orphans               ids of running requests whose router was lost, for the router that is asked for one of them
    calls                 open calls of each router, by its name; a request has one on its prefill and its decode node
    costs                 what its steps take, by its own measurement
    num_decoding          sequences that generate, or whose state arrives for that
    context_tokens        tokens of their contexts
    waiting_depths        the positions of the waiting tokens, summed; see `StepShape`
    waiting_lengths       the waiting tokens by how many their prompt has left: at k those of 2**k up to 2**(k + 1) - 1
    role                  the one that it was last switched to; None: the one with which it started
    role_switches         how often that was, since its start: of two reports the one with more switches is the later
    """

    running: int
    waiting: int
    blocks: PoolStatus
    slots: PoolStatus
    counters: Mapping[str, float] = field(default_factory=dict)
    links: tuple[LinkStatus, ...] = ()
    stalled_s: float = 0.0
    waiting_tokens: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    orphans: tuple[str, ...] = ()
    costs: StepCosts = field(default_factory=StepCosts)
    num_decoding: int = 0
    context_tokens: int = 0
    waiting_depths: int = 0
    waiting_lengths: tuple[int, ...] = ()
    role: Role | None = None
    role_switches: int = 0


@dataclass(frozen=True)
class SwitchRoleRequest:
    """Changes the work for which routers prefer a node."""

    role: Role


@dataclass(frozen=True)
class SwitchRoleReply:
    """`role_switches`: since the node's start, this one included."""

    role_switches: int


def transfer_refusal(device: str, peer_device: str) -> str | None:
    """Returns why nodes on these kinds of device cannot transfer to each other, in either direction; None: they can."""
    if (device == "cuda") == (peer_device == "cuda"):
        return None
    return (
        f"a node on {device} and one on {peer_device} cannot transfer to each other: without a GPU a node opens UCX "
        "without CUDA, and UCX then finds no protocol between GPU and host memory; run "
        "prefill and decode nodes on one kind of device"
    )
