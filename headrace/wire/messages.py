"""What nodes and router say to each other, as frozen dataclasses.

The protobuf messages of `proto/headrace.proto` exist at the edges only (`headrace/wire/codecs.py`); everything
inside works on these. Token counts are in tokens, durations in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from headrace.cache.layout import CacheLayout
from headrace.request import FinishReason, Request, Token

# ---------------------------------------------------------------- hand-over


@dataclass(frozen=True)
class Reservation:
    """What a decode node has set aside for one request.

    deadline_s   counts from now, on any clock
    secret       whoever knows it may hand over to this reservation: it is in no log, no repr and no report
    """

    nonce: int
    attention_hit_tokens: int
    num_tokens: int
    transfer_address: str
    layout: CacheLayout
    deadline_s: float
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class TransferReport:
    attention_tokens: int
    attention_bytes: int
    state_bytes: int
    seconds: float


# ---------------------------------------------------------------- prefill node


@dataclass(frozen=True)
class FetchSource:
    """A decode node that held the prompt's first `num_tokens` tokens, a multiple of both nodes' block sizes, when
    last heard of: their blocks, and a checkpoint there. A hint: it may be gone by now.

    block_size         its own: the prefix is known to it by keys of such blocks
    """

    node: str
    address: str
    num_tokens: int
    block_size: int


@dataclass(frozen=True)
class PrefillRequest:
    """`reservation` None: nothing to hand over. `first_token`: what the client has already seen.

    `fetch source`: who may hold more of the prompt than the prefill node does; None: nobody is known to.
    """

    request: Request
    reservation: Reservation | None = None
    first_token: int | None = None
    fetch_source: FetchSource | None = None


@dataclass(frozen=True)
class FirstToken:
    token: Token
    finish: FinishReason | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """The prompt's tokens with their logprobs; the first has none."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class PrefillReport:
    """What a prefill node reused and computed; `checkpoints` are the positions it published.

    `fetched_tokens` are those of `resumed_tokens` beyond its own checkpoint, which a decode node sent.
    """

    node: str
    attention_hit_tokens: int
    state_hit_tokens: int
    resumed_tokens: int
    computed_tokens: int
    checkpoints: tuple[int, ...] = ()
    fetched_tokens: int = 0


@dataclass(frozen=True)
class PrefillDone:
    report: PrefillReport


PrefillEvent = FirstToken | PromptLogprobs | PrefillDone

# ---------------------------------------------------------------- decode node


@dataclass(frozen=True)
class Start:
    """First command of a decode call. `may_prefill_remotely` False: no prefill node can hand over to it."""

    request: Request
    may_prefill_remotely: bool = True


@dataclass(frozen=True)
class Renew:
    """The prefill node failed: issue a fresh nonce for the same reservation."""

    failed_nonce: int


@dataclass(frozen=True)
class Stop:
    """The client has enough: finish now, publish and report."""


DecodeCommand = Start | Renew | Stop


@dataclass(frozen=True)
class LocalPrefill:
    """The decode node computes the prompt itself, from its own checkpoint at `resumed_tokens`."""

    resumed_tokens: int


@dataclass(frozen=True)
class SessionFailed:
    nonce: int
    cause: str


@dataclass(frozen=True)
class Tokens:
    """`finish` comes with the last token: the answer is complete, whatever becomes of the node afterwards."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True)
class DecodeReport:
    """`state` says where the request's state came from: received, resumed or computed."""

    node: str
    attention_hit_tokens: int
    state_hit_tokens: int
    state: str
    computed_tokens: int
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True)
class DecodeDone:
    finish: FinishReason
    report: DecodeReport


DecodeEvent = Reservation | LocalPrefill | SessionFailed | TransferReport | Tokens | DecodeDone | PromptLogprobs


@dataclass(frozen=True)
class FetchRequest:
    """Send the prefix `key`, of `reservation.num_tokens` tokens: blocks beyond the hit, and the checkpoint.

    The tenant's salt is hashed into the key: whoever knows it knows the tokens.
    """

    key: bytes
    reservation: Reservation


@dataclass(frozen=True)
class FetchReply:
    """Everything was sent; that it landed is the receiver's to know. `layout` is the fetch source's."""

    layout: CacheLayout


# ---------------------------------------------------------------- nodes


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class NodeInfo:
    """Who a node is. A restarted node has the same name and another incarnation.

    device             "cpu" or "cuda": where its cache lies
    max_message_bytes  equal on all nodes: a message has as many blocks as fit into it
    transfer_version   of what nodes send each other: peers of another one are strangers
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


@dataclass(frozen=True)
class Peer:
    """A node that another one hands messages to, as the router tells it."""

    name: str
    incarnation: int
    transfer_address: str
    device: str


@dataclass(frozen=True)
class LinkStatus:
    """What a node measured of its way to a peer, in that direction.

    lanes         the transports and devices in use, such as `tcp/eth0`
    round_trip_s  of a short message, sent and taken
    bytes_per_s   of long messages
    warning       it works, but not as it should
    error         why there is no measurement; with neither figures nor error there is none yet
    """

    peer: str
    lanes: tuple[str, ...] = ()
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    warning: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Registered:
    """The router's answer: call again within `heartbeat_s`; `peers` are whom this node may have to send to."""

    heartbeat_s: float
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True)
class PoolStatus:
    """free + cached + in_use = total; `indexed` are those that a prompt can find, in use or not."""

    total: int
    free: int
    cached: int
    in_use: int
    indexed: int


@dataclass(frozen=True)
class NodeStatus:
    """`counters` only ever grow; one with labels is named `label=value,.../name`, and `attention/name` is short for
    `group=attention/name`. `links` are to the peers of the last registration."""

    running: int
    waiting: int
    blocks: PoolStatus
    slots: PoolStatus
    counters: Mapping[str, float] = field(default_factory=dict)
    links: tuple[LinkStatus, ...] = ()


def transfer_refusal(device: str, peer_device: str) -> str | None:
    """Why nothing can be handed over between nodes on these kinds of device, either way; None when it can."""
    if (device == "cuda") == (peer_device == "cuda"):
        return None
    return (
        f"a node on {device} and one on {peer_device} cannot hand over: without a GPU a node opens UCX without CUDA, "
        "and UCX then finds no protocol between GPU and host memory; give both pools nodes of one kind"
    )
