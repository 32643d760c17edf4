"""A decode node's lifecycle in each of its states, and the literals that its tests share."""

from itertools import count

from decode_node.events import (
    DecodeState,
    HandingOver,
    Interrupted,
    Receiving,
    Renewing,
    Running,
    Standing,
)
from decode_node.lifecycle import DecodeLifecycle
from headrace.cache.hits import PrefixHit
from headrace.cache.layout import AttentionGroup, CacheLayout, StateGroup
from headrace.engine.sequence import Admitted, Computed
from headrace.request import FinishReason, Token
from headrace.wire.messages import (
    Reservation,
    Tokens,
    TransferReport,
)
from node_runtime.lifecycle import (
    Admitting,
    Done,
    Fetching,
    Readmitting,
    Released,
)

REMOTE = Admitted(PrefixHit(64, 16, 16), reused_tokens=64, state_arrives=True)
LOCAL = Admitted(PrefixHit(64, 48, 48), reused_tokens=48, state_arrives=False)
MOVED = TransferReport(attention_tokens=36, attention_bytes=12_288, state_bytes=744, seconds=0.002)
COMPUTED = Computed(100)
LAYOUT = CacheLayout("f", "float32", "float32", 16, (AttentionGroup(2, 2, 8),), (StateGroup(3, (10, 3), (2, 4, 4)),))
RESERVED = Reservation(9, 64, 100, "there", LAYOUT, 60.0, b"secret")
UNREADABLE = ValueError("another version")
SECOND, THIRD = Tokens((Token(7),)), Tokens((Token(9),), FinishReason.LENGTH)

STATES: dict[str, DecodeState] = {
    "admitting": Admitting(),
    "fetching": Fetching(REMOTE),
    "readmitting": Readmitting(),
    "receiving": Receiving(REMOTE, 1),
    "interrupted": Interrupted(REMOTE, 1),
    "renewing": Renewing(REMOTE, 1),
    "running": Running(REMOTE),
    "standing": Standing(REMOTE, COMPUTED),
    "handing over": HandingOver(),
    "done": Done(),
    "released": Released(),
}


def new_lifecycle(state: DecodeState | None = None) -> DecodeLifecycle:
    """Its first session has nonce 1; one that is put into a later state continues with nonce 2."""
    lifecycle = DecodeLifecycle(count(1 if state is None else 2).__next__)
    if state is not None:
        lifecycle.state = state
    return lifecycle
