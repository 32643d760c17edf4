"""One session of `tests.support.transfer.session_world`, both ends, as a value; and what its sender makes of its plan.

Each plan is one attention message and the state. A part is (index, is_payload, bytes), on its own session's connection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from tests.support.transfer.transfer_plans import contents, secret_of, small_plan
from transfer.protocol.authentication import Verifier, sign
from transfer.protocol.digest import message_digest, page_hashes, plan_digest
from transfer.protocol.envelope import Envelope
from transfer.protocol.plan import TransferPlan
from transfer.protocol.session import ReceiverSession, SenderSession

NONCES = (7, 8)
Part = tuple[int, bool, bytes]
Thing = TypeVar("Thing")


@cache
def plan_of(session: int) -> TransferPlan:
    """Alike in all but the nonce: the worst case for whoever confuses them."""
    return small_plan(NONCES[session], num_tokens=4, first_block=0, block_bytes=4, state_bytes=4, max_message_bytes=4)


@cache
def parts_of(session: int) -> tuple[tuple[Part, Part], ...]:
    """(envelope, payload) of each message, as a sender makes them."""
    plan, parts = plan_of(session), []
    digest = plan_digest(plan)
    for message in plan.messages:
        payload = contents(message, plan.nonce)
        fields = Envelope.of(plan.nonce, session, message).fields()
        digest = message_digest(digest, fields, page_hashes(payload))
        envelope = sign(fields + digest, secret_of(plan.nonce))
        parts.append(((message.index, False, envelope), (message.index, True, payload.tobytes())))
    return tuple(parts)


@cache
def digest_after(previous: bytes, fields: bytes, payload: bytes) -> bytes:
    return message_digest(previous, fields, page_hashes(np.frombuffer(payload, np.uint8)))


def shallow(value: Thing) -> Thing:
    """`copy.copy` of a plain object, several times as fast: a world is copied at each of a million steps."""
    other = object.__new__(type(value))
    vars(other).update(vars(value))
    return other


@dataclass
class Attempt:
    """One session, both ends; an end is None before it begins and once its process has died.

    wire       parts under way, in the order sent
    in_staging the sender's buffers: messages that the transport has not let go of
    announced  a payload that the receiver has agreed to and that waits for a staging buffer
    arrived    payloads in the receiver's staging, in order, with the envelope of each; landing: the one being scattered
    """

    sender: SenderSession | None
    receiver: ReceiverSession | None
    verifier: Verifier
    digest: bytes
    wire: tuple[Part, ...] = ()
    in_staging: frozenset[int] = frozenset()
    envelope: Envelope | None = None
    announced: Part | None = None
    arrived: tuple[tuple[Part, Envelope], ...] = ()
    landing: Part | None = None
    prefill_node_lives: bool = True
    has_noticed: bool = False
    known_key: tuple | None = None

    def key(self) -> tuple:
        if self.known_key is None:
            self.known_key = (
                key_of(self.sender), key_of(self.receiver), key_of(self.verifier), self.digest, self.wire,
                self.in_staging, self.envelope and self.envelope.index, self.announced, self.arrived, self.landing,
                self.prefill_node_lives, self.has_noticed,
            )  # fmt: skip
        return self.known_key

    def copied(self) -> "Attempt":
        other = shallow(self)
        other.known_key = None
        return other

    @property
    def is_settled(self) -> bool:
        """The receiving end is over and nothing touches its blocks: they may be given to another."""
        return self.receiver is None or (self.receiver.ended and self.landing is None)

    @property
    def is_over(self) -> bool:
        return self.is_settled and (self.sender is None or self.sender.ended)


def key_of(machine: object) -> tuple | None:
    """All that a machine remembers; what it was told at its start is the same in all states."""
    if machine is None:
        return None
    return tuple(frozenset(v) if isinstance(v, set) else v for k, v in vars(machine).items() if k != "plan")


def copy_of(machine: Thing) -> Thing:
    other = shallow(machine)
    vars(other).update({k: v.copy() for k, v in vars(machine).items() if isinstance(v, set | dict)})
    return other


def new_attempt(session: int, new_verifier: Callable[[bytes], Verifier]) -> Attempt:
    plan = plan_of(session)
    return Attempt(None, None, new_verifier(secret_of(plan.nonce)), plan_digest(plan))
