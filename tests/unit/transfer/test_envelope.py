"""What is on the wire: tags that route, envelopes that describe."""

import pytest

from tests.support.transfer_plans import secret_of, small_plan
from transfer.admission import proven
from transfer.digest import plan_digest
from transfer.envelope import ENVELOPE_BYTES, MAX_NOTE_BYTES, Envelope, Tag, new_nonce
from transfer.errors import LayoutMismatch, MalformedEnvelope
from transfer.plan import MAX_MESSAGES, NONCE_BITS

PLAN = small_plan()
FIRST = plan_digest(PLAN)
SEALED = Envelope.of(PLAN.nonce, 0xFEED, PLAN.messages[2], b"first token 42").sealed(bytes(range(16)))
ENVELOPE = proven(SEALED, secret_of(PLAN.nonce))


@pytest.mark.parametrize("nonce", [1, (1 << NONCE_BITS) - 1])
@pytest.mark.parametrize("index", [0, 1, MAX_MESSAGES - 1])
@pytest.mark.parametrize("is_payload", [False, True])
def test_a_tag_is_64_bits_and_comes_back(nonce, index, is_payload):
    tag = Tag(nonce, index, is_payload)
    assert int(tag) < 1 << 64
    assert Tag.of(int(tag)) == tag


def test_an_envelope_comes_back_whole():
    data = ENVELOPE.encode()
    assert len(data) == ENVELOPE_BYTES
    assert Envelope.decode(data) == ENVELOPE


def test_a_note_may_end_in_zero_bytes_and_be_full():
    for note in (b"", b"\0\0", b"x" * MAX_NOTE_BYTES):
        envelope = proven(Envelope.of(7, 1, PLAN.messages[2], note).sealed(FIRST), secret_of(7))
        assert Envelope.decode(envelope.encode()).note == note


def test_a_note_too_long_is_refused():
    with pytest.raises(LayoutMismatch, match="note of 65 bytes > 64"):
        Envelope.of(7, 1, PLAN.messages[2], b"x" * 65)


def test_an_envelope_is_never_sent_unsealed_or_unproven():
    unsealed = Envelope.of(7, 1, PLAN.messages[2], b"")
    with pytest.raises(MalformedEnvelope, match="seal it first"):
        proven(unsealed, secret_of(7))
    with pytest.raises(MalformedEnvelope, match="prove it first"):
        unsealed.sealed(FIRST).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (ENVELOPE.encode()[:-1], f"{ENVELOPE_BYTES - 1} bytes"),
        (b"XXXX" + ENVELOPE.encode()[4:], "magic b'XXXX'"),
        (ENVELOPE.encode()[:4] + b"\x09" + ENVELOPE.encode()[5:], "version 9"),
        (ENVELOPE.encode()[:5] + b"\x07" + ENVELOPE.encode()[6:], "kind 7"),
        (ENVELOPE.encode()[:111] + b"\x01" + ENVELOPE.encode()[112:], "must be zero"),
        (ENVELOPE.encode()[:6] + b"\xff" + ENVELOPE.encode()[7:], "note of 255 bytes"),
    ],
)
def test_bytes_that_are_no_envelope_of_ours_are_refused(data, said):
    with pytest.raises(MalformedEnvelope, match=said):
        Envelope.decode(data)


def test_nonces_are_in_range_and_do_not_repeat():
    nonces = {new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert all(0 < nonce < 1 << NONCE_BITS for nonce in nonces)
