"""What is on the wire: tags that route, envelopes that describe."""

from dataclasses import replace

import pytest

from tests.support.transfer.transfer_plans import secret_of, small_plan
from transfer.protocol.authentication import proven
from transfer.protocol.envelope import CLAIM_BYTES, ENVELOPE_BYTES, MAX_NOTE_BYTES, Envelope, Tag, new_nonce
from transfer.protocol.errors import LayoutMismatch, MalformedEnvelope
from transfer.protocol.plan import MAX_MESSAGES, NONCE_BITS

PLAN = small_plan()
ENVELOPE = Envelope.of(PLAN.nonce, 0xFEED, PLAN.messages[2], b"first token 42")
DIGEST = bytes(range(16))
CLAIM = ENVELOPE.fields() + DIGEST


@pytest.mark.parametrize("nonce", [1, (1 << NONCE_BITS) - 1])
@pytest.mark.parametrize("index", [0, 1, MAX_MESSAGES - 1])
@pytest.mark.parametrize("is_payload", [False, True])
def test_a_tag_is_64_bits_and_comes_back(nonce, index, is_payload):
    tag = Tag(nonce, index, is_payload)
    assert int(tag) < 1 << 64
    assert Tag.of(int(tag)) == tag


def test_an_envelope_comes_back_whole_with_its_digest():
    assert len(CLAIM) == CLAIM_BYTES
    assert Envelope.decode(CLAIM) == replace(ENVELOPE, digest=DIGEST)
    assert len(proven(CLAIM, secret_of(PLAN.nonce))) == ENVELOPE_BYTES


def test_a_note_may_end_in_zero_bytes_and_be_full():
    for note in (b"", b"\0\0", b"x" * MAX_NOTE_BYTES):
        fields = Envelope.of(7, 1, PLAN.messages[2], note).fields()
        assert Envelope.decode(fields + DIGEST).note == note


def test_a_note_too_long_is_refused():
    with pytest.raises(LayoutMismatch, match="note of 65 bytes > 64"):
        Envelope.of(7, 1, PLAN.messages[2], b"x" * 65)


@pytest.mark.parametrize("claim", [ENVELOPE.fields(), CLAIM[:-1], CLAIM + b"0"])
def test_fields_are_never_sent_without_their_digest(claim):
    with pytest.raises(MalformedEnvelope, match="it holds the fields and the digest"):
        proven(claim, secret_of(7))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (CLAIM[:-1], f"{CLAIM_BYTES - 1} bytes"),
        (b"XXXX" + CLAIM[4:], "magic b'XXXX'"),
        (CLAIM[:4] + b"\x09" + CLAIM[5:], "version 9"),
        (CLAIM[:119] + b"\x01" + CLAIM[120:], "must be zero"),
        (CLAIM[:5] + b"\xff" + CLAIM[6:], "note of 255 bytes"),
    ],
)
def test_bytes_that_are_no_envelope_of_ours_are_refused(data, said):
    with pytest.raises(MalformedEnvelope, match=said):
        Envelope.decode(data)


def test_nonces_are_in_range_and_do_not_repeat():
    nonces = {new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert all(0 < nonce < 1 << NONCE_BITS for nonce in nonces)
