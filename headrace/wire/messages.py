"""Messages between nodes and router, as frozen dataclasses.

All code works with these; the protobuf messages of `proto/headrace.proto` exist only at the edges
(`headrace/wire/codecs.py`). Counts are in tokens, durations in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from headrace.cache.layout import CacheLayout
from headrace.request import FinishReason, PromptLogprobs, Request, Token
from headrace.step_costs import StepCosts

# ---------------------------------------------------------------- transfer


@dataclass(frozen=True)
class Reservation:
    """The terms of one session: what a receiver has reserved for a request, and where to send what is missing.

    nonce                 names the session
    attention_hit_tokens  the receiver has the blocks of these tokens
    num_tokens            length of the prompt that is sent
    layout                of the bytes on the wire
    timeout_s             the longest time without progress, in seconds: at the sender from its first chunk on, at the
                          receiver from the first proven envelope on; both also end with their own calls
    secret                key of the messages' MACs; appears in no log, repr or report
    """

    nonce: int
    attention_hit_tokens: int
    num_tokens: int
    transfer_address: str
    layout: CacheLayout
    timeout_s: float
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class TransferReport:
    """Sizes and duration of a session that landed."""

    attention_tokens: int
    attention_bytes: int
    state_bytes: int
    seconds: float


# ---------------------------------------------------------------- prefill node


@dataclass(frozen=True)
class FetchSource:
    """A node with blocks and a checkpoint of a prompt's prefix; by now it may have evicted them.

    num_tokens  length of the prefix, a multiple of both nodes' block sizes
    block_size  the source's, of which its prefix keys are made
    """

    node: str
    address: str
    num_tokens: int
    block_size: int


@dataclass(frozen=True)
class PrefillRequest:
    """A prompt to prefill.

    reservation   where to send blocks and state; None: nowhere
    first_token   on a retry, the token that the client has already seen
    fetch_source  a node that may hold more of the prompt than the prefill node; None: none is known
    """

    request: Request
    reservation: Reservation | None = None
    first_token: int | None = None
    fetch_source: FetchSource | None = None


@dataclass(frozen=True)
class FirstToken:
    """The first sampled token. `finish` is set if it is also the last."""

    token: Token
    finish: FinishReason | None = None


@dataclass(frozen=True)
class PrefillReport:
    """Tokens that a prefill node reused and computed.

    resumed_tokens  the prefill started after these: from a checkpoint of the node's own, or a fetched one
    checkpoints     positions of the checkpoints that the node published
    fetched_tokens  tokens of `resumed_tokens` beyond the node's own checkpoint, sent by a decode node
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
    """The last event of a prefill call."""

    report: PrefillReport


@dataclass(frozen=True)
class ComputeStarted:
    """The prompt's first chunk is being computed: it stood in the node's line until now, and its transfer begins."""


PrefillEvent = ComputeStarted | FirstToken | PromptLogprobs | PrefillDone

# ---------------------------------------------------------------- decode node


@dataclass(frozen=True)
class Start:
    """First command of a decode call.

    may_prefill_remotely  False: no prefill node can send to this node
    is_handed_over        another decode node sends blocks and state of all these tokens: this one computes none of them
    fetch_source          may hold more of the prompt, for a node that computes it itself; None: none is known
    """

    request: Request
    may_prefill_remotely: bool = True
    is_handed_over: bool = False
    fetch_source: FetchSource | None = None


@dataclass(frozen=True)
class Renew:
    """The prefill node failed: issue a fresh nonce for the same reservation."""

    failed_nonce: int


@dataclass(frozen=True)
class Stop:
    """The client needs no more tokens: finish now, publish and report."""


@dataclass(frozen=True)
class Abandon:
    """The router wants no more of a resumable request, and cancels the call next. Without it a call that ends early
    means that the router is lost: the node keeps the request for another one."""


@dataclass(frozen=True)
class Halt:
    """Sample no more tokens, for the request is to go on elsewhere. HaltReply follows the last token."""


@dataclass(frozen=True)
class HandOver:
    """Send blocks and state of the halted request to another decode node, and end the call with HandedOver.

    reservation  of all its tokens but the last one, which nobody has computed yet: it goes as the first token
    """

    reservation: Reservation


@dataclass(frozen=True)
class GoOn:
    """The halted request stays after all: decode on."""


DecodeCommand = Start | Renew | Stop | Abandon | Halt | HandOver | GoOn


@dataclass(frozen=True)
class TokensRead:
    """The router has read so many more tokens of the call that came by its feed."""

    num_tokens: int


@dataclass(frozen=True)
class LocalPrefill:
    """The decode node prefills the prompt itself, starting from its own checkpoint at `resumed_tokens`."""

    resumed_tokens: int


@dataclass(frozen=True)
class SessionFailed:
    """The transfer of this session failed; the router may renew the reservation."""

    nonce: int
    cause: str


@dataclass(frozen=True)
class Tokens:
    """Generated tokens. `finish` comes with the last one: the answer is complete even if the node fails afterwards."""

    tokens: tuple[Token, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True)
class DecodeReport:
    """Tokens that a decode node reused and computed.

    state           it was received, resumed (from a checkpoint of the node's own, or a fetched one) or computed
    fetched_tokens  tokens beyond the node's own checkpoint that another node sent, for a prompt that it computed itself
    drafted_tokens   tokens drafted for its steps there
    accepted_tokens  of these, those that were the answer's
    """

    node: str
    attention_hit_tokens: int
    state_hit_tokens: int
    state: str
    computed_tokens: int
    checkpoints: tuple[int, ...] = ()
    fetched_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class DecodeDone:
    """The last event of a decode call."""

    finish: FinishReason
    report: DecodeReport


@dataclass(frozen=True)
class HaltReply:
    """The answer to Halt, behind the last token. `is_halted` False: the request holds no state that could be handed
    over, because it was preempted; it goes on by itself."""

    is_halted: bool


@dataclass(frozen=True)
class HandedOver:
    """The last event of a decode call whose request goes on elsewhere: everything was sent."""


DecodeEvent = (
    Reservation | LocalPrefill | SessionFailed | TransferReport | Tokens | DecodeDone | PromptLogprobs
    | HaltReply | HandedOver
)  # fmt: skip


@dataclass(frozen=True)
class FetchRequest:
    """Asks a node to send its checkpoint of a prefix, and the blocks beyond the reservation's hit.

    key  of the prefix of `reservation.num_tokens` tokens. The tenant's salt is hashed into it: only a node that knows
         tokens and salt can compute it
    """

    key: bytes
    reservation: Reservation


@dataclass(frozen=True)
class FetchReply:
    """The source has sent everything; its receiver knows whether it landed. `layout` is the source's."""

    layout: CacheLayout


# ---------------------------------------------------------------- nodes


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
    """The router's answer to a registration: call again within `heartbeat_s`; this node may have to send to `peers`."""

    heartbeat_s: float
    peers: tuple[Peer, ...] = ()


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
