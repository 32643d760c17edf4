"""Who takes part in a session: whoever shows with every message that it knows the session's secret.

The receiver draws the secret and issues it in the reservation, over the control plane. Over the data path it never
travels: each envelope carries a proof instead, a keyed hash of its fields and of the digest in it, which speaks for the
payload. Who reads all of one session's messages can prove nothing in another, nor another word in this one.

What comes without a proof is refused as if it had never come: it neither lands nor ends the session, so that whoever
guesses a nonce gains nothing by it. What is proven is the session's to judge. docs/security.md has the threat model.
Source: https://github.com/BLAKE3-team/BLAKE3-specs, keyed hashing, cut to 128 bits.
"""

import hmac
import secrets
from enum import StrEnum

from blake3 import blake3

from transfer.protocol.envelope import CLAIM_BYTES, ENVELOPE_BYTES, PROOF_BYTES, Envelope
from transfer.protocol.errors import MalformedEnvelope, NoSecret, Unauthenticated

SECRET_BYTES = 32


class Refusal(StrEnum):
    """Why a part was refused; the label of the refusal counter."""

    NO_PROOF = "no_proof"
    WRONG_PROOF = "wrong_proof"
    NO_ENVELOPE = "no_envelope"


def new_secret() -> bytes:
    """256 random bits, for one session."""
    return secrets.token_bytes(SECRET_BYTES)


def require_secret(secret: bytes) -> bytes:
    """`secret`. Raises NoSecret, without quoting it."""
    if len(secret) != SECRET_BYTES:
        raise NoSecret(
            f"the reservation's secret has {len(secret)} bytes, not {SECRET_BYTES}: the node that issued it runs "
            "another release; run one release on all nodes"
        )
    return secret


def proven(claim: bytes, secret: bytes) -> bytes:
    """An envelope as it is sent: `Envelope.fields`, the message's digest, and their proof."""
    if len(claim) != CLAIM_BYTES:
        raise MalformedEnvelope(f"a claim of {len(claim)} bytes, not {CLAIM_BYTES}: it holds the fields and the digest")
    return claim + _proof(secret, claim)


class Gate:
    """The receiving end of one session: raises Unauthenticated for what the secret's holder did not send.

    A payload shows no proof of its own. It is let through once behind the proven envelope that announces it, and must
    then fit the digest there.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = require_secret(secret)
        self._awaited: int | None = None

    def admit_size(self, num_bytes: int) -> None:
        """Before any byte of an envelope is received."""
        if num_bytes != ENVELOPE_BYTES:
            raise Unauthenticated(
                Refusal.NO_PROOF,
                f"an envelope of {num_bytes} bytes, not {ENVELOPE_BYTES}: run one release on all nodes",
            )

    def admit_envelope(self, data: bytes) -> Envelope:
        """Raises MalformedEnvelope, too: a peer that knows the secret, and writes what is not of this protocol."""
        self.admit_size(len(data))
        claim = data[:CLAIM_BYTES]
        if not hmac.compare_digest(_proof(self._secret, claim), data[CLAIM_BYTES:]):
            raise Unauthenticated(
                Refusal.WRONG_PROOF, "an envelope from somebody who does not know this session's secret"
            )
        envelope = Envelope.decode(claim)
        self._awaited = envelope.index
        return envelope

    def admit_payload(self, index: int) -> None:
        if index != self._awaited:
            raise Unauthenticated(Refusal.NO_ENVELOPE, f"payload {index}, which no proven envelope announced")
        self._awaited = None


def _proof(secret: bytes, claim: bytes) -> bytes:
    return blake3(claim, key=secret).digest(length=PROOF_BYTES)
