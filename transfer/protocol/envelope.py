"""What travels before each payload, and the tag that routes both.

An envelope says what the payload is; the receiver compares it with its own plan and believes nothing else.

    magic 4s | version u8 | note length u8 | pad 2 | nonce u64 | connection u64 | index u32 | first_block u32
    | num_blocks u32 | pad 4 | attention_bytes u64 | state_bytes u64 | note 64s | digest 16s | proof 16s
    (little endian)
"""

import secrets
import struct
from dataclasses import dataclass

from transfer.protocol.digest import DIGEST_BYTES
from transfer.protocol.errors import LayoutMismatch, MalformedEnvelope
from transfer.protocol.plan import MAX_MESSAGES, NONCE_BITS, PlannedMessage

MAGIC = b"HRHO"
VERSION = 5
MAX_NOTE_BYTES = 64

_FIELDS = struct.Struct(f"<4sBB2xQQIII4xQQ{MAX_NOTE_BYTES}s")
PROOF_BYTES = 16
CLAIM_BYTES = _FIELDS.size + DIGEST_BYTES
ENVELOPE_BYTES = CLAIM_BYTES + PROOF_BYTES


def new_nonce() -> int:
    """A nonce that no peer can guess and none has seen: 48 random bits, never 0."""
    return secrets.randbelow((1 << NONCE_BITS) - 1) + 1


@dataclass(frozen=True, slots=True)
class Tag:
    """Routes one part of one message: nonce << 16 | index << 1 | part, 64 bits."""

    nonce: int
    index: int
    is_payload: bool

    def __int__(self) -> int:
        return self.nonce << 16 | self.index << 1 | self.is_payload

    @classmethod
    def of(cls, value: int) -> "Tag":
        return cls(value >> 16, value >> 1 & MAX_MESSAGES - 1, bool(value & 1))


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message's description.

    connection   the sender's name for the connection that carries it: lets the receiver notice its loss
    note         up to 64 bytes of the nodes' own; rides on the last message, empty elsewhere
    digest       of this message and all before it; known when it is sent, and so once it has arrived

    On the wire it is a claim, the fields and the digest, and the proof that its sender knows the session's secret: see
    `transfer.protocol.authentication`.
    """

    nonce: int
    connection: int
    index: int
    first_block: int
    num_blocks: int
    attention_bytes: int
    state_bytes: int
    note: bytes = b""
    digest: bytes = b""

    def __post_init__(self) -> None:
        if len(self.note) > MAX_NOTE_BYTES:
            raise LayoutMismatch(f"note of {len(self.note)} bytes > {MAX_NOTE_BYTES}: send it over gRPC instead")

    @classmethod
    def of(cls, nonce: int, connection: int, message: PlannedMessage, note: bytes) -> "Envelope":
        return cls(
            nonce=nonce,
            connection=connection,
            index=message.index,
            first_block=message.first_block,
            num_blocks=message.num_blocks,
            attention_bytes=message.attention_bytes,
            state_bytes=message.state_bytes,
            note=note,
        )

    def describes(self, nonce: int, message: PlannedMessage) -> bool:
        """Is this exactly the planned message of exactly that session?"""
        return (
            self.nonce, self.index, self.first_block, self.num_blocks, self.attention_bytes, self.state_bytes
        ) == (
            nonce, message.index, message.first_block, message.num_blocks, message.attention_bytes, message.state_bytes
        )  # fmt: skip

    def fields(self) -> bytes:
        """Everything but the digest: what the digest covers."""
        return _FIELDS.pack(
            MAGIC,
            VERSION,
            len(self.note),
            self.nonce,
            self.connection,
            self.index,
            self.first_block,
            self.num_blocks,
            self.attention_bytes,
            self.state_bytes,
            self.note,
        )

    @classmethod
    def decode(cls, claim: bytes) -> "Envelope":
        """Raises `MalformedEnvelope`; whether the fields fit a plan is the session's question."""
        if len(claim) != CLAIM_BYTES:
            raise MalformedEnvelope(f"{len(claim)} bytes, not {CLAIM_BYTES}")
        magic, version, note_bytes, nonce, connection, index, first, num_blocks, attention, state, note = (
            _FIELDS.unpack_from(claim)
        )
        if magic != MAGIC or version != VERSION:
            raise MalformedEnvelope(
                f"magic {magic!r} version {version}, not {MAGIC!r} {VERSION}: run one release on all nodes"
            )
        if note_bytes > MAX_NOTE_BYTES:
            raise MalformedEnvelope(f"note of {note_bytes} bytes: not of this protocol")
        envelope = cls(
            nonce, connection, index, first, num_blocks, attention, state,
            note[:note_bytes], claim[_FIELDS.size :],
        )  # fmt: skip
        if envelope.fields() != claim[: _FIELDS.size]:  # the digest covers the fields, not what pads them
            raise MalformedEnvelope("bytes that must be zero are not")
        return envelope
