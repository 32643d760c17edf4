"""Authentication of a session's messages: a MAC in every envelope, keyed with the session's secret.

The receiver draws the secret and issues it in the reservation, over the control plane; it never travels over the data
path. A sender signs each envelope: the MAC covers its fields and the digest in it, and the digest covers the payload.
Reading every message of one session does not help to forge one of another session, or another one of this session.

A part without a right MAC is refused as if it had never come: it neither lands nor ends the session, so guessing a
nonce gains nothing. A signed part that is wrong is the session's to judge. docs/security.md has the threat model.
Source: https://github.com/BLAKE3-team/BLAKE3-specs, keyed hashing, cut to 128 bits.
"""

import hmac
import secrets
from enum import StrEnum

from blake3 import blake3

from transfer.protocol.envelope import ENVELOPE_BYTES, HEADER_BYTES, MAC_BYTES, Envelope
from transfer.protocol.errors import MalformedEnvelope, NoSecret, Unauthenticated

SECRET_BYTES = 32


class RefusalCause(StrEnum):
    """Why a part was refused; the label of the refusal counter."""

    NO_MAC = "no_mac"
    WRONG_MAC = "wrong_mac"
    NO_ENVELOPE = "no_envelope"


def new_secret() -> bytes:
    """256 random bits, for one session."""
    return secrets.token_bytes(SECRET_BYTES)


def require_secret(secret: bytes) -> bytes:
    """Returns `secret`. Raises NoSecret, which does not quote it, when its length is wrong."""
    if len(secret) != SECRET_BYTES:
        raise NoSecret(
            f"the reservation's secret has {len(secret)} bytes, not {SECRET_BYTES}: the node that issued it runs "
            "another release; run one release on all nodes"
        )
    return secret


def sign(header: bytes, secret: bytes) -> bytes:
    """The envelope as it is sent: `header` (`Envelope.fields` and the message's digest), then its MAC."""
    if len(header) != HEADER_BYTES:
        raise MalformedEnvelope(f"a header of {len(header)} bytes, not {HEADER_BYTES}: it is the fields and the digest")
    return header + _mac(secret, header)


class Verifier:
    """Admits one session's parts at its receiving end; raises Unauthenticated for all others.

    A payload has no MAC of its own. One is admitted behind the signed envelope that announces it, and must then match
    the digest in that envelope.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = require_secret(secret)
        self._announced_index: int | None = None

    def check_size(self, num_bytes: int) -> None:
        """Checks an envelope's size before any of its bytes are received."""
        if num_bytes != ENVELOPE_BYTES:
            raise Unauthenticated(
                RefusalCause.NO_MAC,
                f"an envelope of {num_bytes} bytes, not {ENVELOPE_BYTES}: run one release on all nodes",
            )

    def verify_envelope(self, data: bytes) -> Envelope:
        """Decodes an envelope whose MAC is right. Raises MalformedEnvelope when a peer signed what is none of ours."""
        self.check_size(len(data))
        header = data[:HEADER_BYTES]
        if not hmac.compare_digest(_mac(self._secret, header), data[HEADER_BYTES:]):
            raise Unauthenticated(
                RefusalCause.WRONG_MAC, "an envelope from somebody who does not know this session's secret"
            )
        envelope = Envelope.decode(header)
        self._announced_index = envelope.index
        return envelope

    def verify_payload(self, index: int) -> None:
        """Admits one payload for each verified envelope."""
        if index != self._announced_index:
            raise Unauthenticated(RefusalCause.NO_ENVELOPE, f"payload {index}, which no signed envelope announced")
        self._announced_index = None


def _mac(secret: bytes, header: bytes) -> bytes:
    return blake3(header, key=secret).digest(length=MAC_BYTES)
