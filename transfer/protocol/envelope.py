"""The envelope that travels before each payload, and the tag by which both are routed.

An envelope describes its payload; the receiver compares it with its own plan and trusts nothing else.

    magic 4s | version u8 | has_first_token u8 | pad 2 | nonce u64 | connection u64 | index u32 | first_block u32
    | num_blocks u32 | first_token u32 | attention_bytes u64 | state_bytes u64 | digest 16s | mac 16s
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
TOKEN_BITS = 32

_FIELDS = struct.Struct("<4sBB2xQQIIIIQQ")
MAC_BYTES = 16
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES
"""Bytes that the MAC covers: the fields and the digest."""
ENVELOPE_BYTES = HEADER_BYTES + MAC_BYTES


def new_nonce() -> int:
    """48 random bits, never 0: no peer can guess it, and no session had it before."""
    return secrets.randbelow((1 << NONCE_BITS) - 1) + 1


@dataclass(frozen=True, slots=True)
class Tag:
    """Identifies one part of one message: nonce << 16 | index << 1 | part, 64 bits."""

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
    """One message's description. Raises LayoutMismatch for a first token that is not 32 bits.

    connection    the sender's id of the connection that carries it: lets the receiver notice its loss
    first_token   the token that the prefill node sampled, on the message with the state; None: nothing was sampled
    digest        of this message and all before it; known when it is sent, and so once it has arrived

    On the wire the header, which is the fields and the digest, is followed by its MAC: see
    `transfer.protocol.authentication`.
    """

    nonce: int
    connection: int
    index: int
    first_block: int
    num_blocks: int
    attention_bytes: int
    state_bytes: int
    first_token: int | None = None
    digest: bytes = b""

    def __post_init__(self) -> None:
        if self.first_token is not None:
            require_token(self.first_token)

    @classmethod
    def of(cls, nonce: int, connection: int, message: PlannedMessage, first_token: int | None = None) -> "Envelope":
        return cls(
            nonce=nonce,
            connection=connection,
            index=message.index,
            first_block=message.first_block,
            num_blocks=message.num_blocks,
            attention_bytes=message.attention_bytes,
            state_bytes=message.state_bytes,
            first_token=first_token,
        )

    def describes(self, nonce: int, message: PlannedMessage) -> bool:
        """Returns whether this is exactly the planned message of exactly that session."""
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
            self.first_token is not None,
            self.nonce,
            self.connection,
            self.index,
            self.first_block,
            self.num_blocks,
            self.first_token or 0,
            self.attention_bytes,
            self.state_bytes,
        )

    @classmethod
    def decode(cls, header: bytes) -> "Envelope":
        """Raises `MalformedEnvelope`. Whether the fields fit a plan is the session's question."""
        if len(header) != HEADER_BYTES:
            raise MalformedEnvelope(f"{len(header)} bytes, not {HEADER_BYTES}")
        magic, version, has_token, nonce, connection, index, first_block, num_blocks, token, attention, state = (
            _FIELDS.unpack_from(header)
        )
        if magic != MAGIC or version != VERSION:
            raise MalformedEnvelope(
                f"magic {magic!r} version {version}, not {MAGIC!r} {VERSION}: run one release on all nodes"
            )
        if has_token > 1:
            raise MalformedEnvelope(f"has_first_token is {has_token}, not 0 or 1: not of this protocol")
        first_token = token if has_token else None
        digest = header[_FIELDS.size :]
        envelope = cls(nonce, connection, index, first_block, num_blocks, attention, state, first_token, digest)
        if envelope.fields() != header[: _FIELDS.size]:  # the digest covers the fields, not what pads them
            raise MalformedEnvelope("bytes that must be zero are not")
        return envelope


def require_token(first_token: int) -> None:
    """Raises `LayoutMismatch` when the token does not fit the envelope's field."""
    if not 0 <= first_token < 1 << TOKEN_BITS:
        raise LayoutMismatch(f"first_token {first_token} is not in 0..2^{TOKEN_BITS}-1: token ids are unsigned")
