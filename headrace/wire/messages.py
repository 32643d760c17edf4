"""Messages between nodes and router, as frozen dataclasses.

All code works with these; the protobuf messages of `proto/headrace.proto` exist only at the edges
(`headrace/wire/codecs.py`). Counts are in tokens, durations in seconds, sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.cache.layout import CacheLayout
from headrace.request import FinishReason, PromptLogprobs, Request, Token

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
