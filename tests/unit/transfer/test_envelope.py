"""What is on the wire: tags that route, envelopes that describe, digests that chain."""

import dataclasses

import numpy as np
import pytest

from tests.support.transfer_plans import contents, small_plan
from transfer.digest import DIGEST_BYTES, message_digest, plan_digest
from transfer.envelope import ENVELOPE_BYTES, MAX_NOTE_BYTES, Envelope, Tag, new_nonce
from transfer.errors import LayoutMismatch, MalformedEnvelope
from transfer.plan import MAX_MESSAGES, NONCE_BITS

PLAN = small_plan()
FIRST = plan_digest(PLAN)
ENVELOPE = Envelope.of(PLAN.nonce, 0xFEED, PLAN.messages[2], b"first token 42").sealed(bytes(range(16)))


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
        envelope = Envelope.of(7, 1, PLAN.messages[2], note).sealed(FIRST)
        assert Envelope.decode(envelope.encode()).note == note


def test_a_note_too_long_is_refused():
    with pytest.raises(LayoutMismatch, match="note of 65 bytes > 64"):
        Envelope.of(7, 1, PLAN.messages[2], b"x" * 65)


def test_an_unsealed_envelope_is_never_sent():
    with pytest.raises(MalformedEnvelope, match="seal it first"):
        Envelope.of(7, 1, PLAN.messages[2], b"").encode()


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


def test_every_flipped_bit_of_envelope_or_payload_changes_the_digest():
    payload = contents(PLAN.messages[2], PLAN.nonce)
    fields = ENVELOPE.fields()
    whole = message_digest(FIRST, fields, payload)
    assert len(whole) == DIGEST_BYTES
    for bit in range(8 * len(fields)):
        flipped = bytearray(fields)
        flipped[bit // 8] ^= 1 << bit % 8
        assert message_digest(FIRST, bytes(flipped), payload) != whole
    for bit in range(8 * len(payload)):
        damaged = payload.copy()
        damaged[bit // 8] ^= np.uint8(1 << bit % 8)
        assert message_digest(FIRST, fields, damaged) != whole


def test_a_digest_speaks_for_all_messages_before_it():
    payload = contents(PLAN.messages[2], PLAN.nonce)
    one = message_digest(FIRST, b"a", payload)
    other = message_digest(FIRST, b"b", payload)
    assert message_digest(one, b"c", payload) != message_digest(other, b"c", payload)


def test_nonces_are_in_range_and_do_not_repeat():
    nonces = {new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert all(0 < nonce < 1 << NONCE_BITS for nonce in nonces)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PLAN)])
def test_plans_that_differ_in_any_number_never_agree_on_a_digest(field):
    other = dataclasses.replace(PLAN, **{field: getattr(PLAN, field) + 1})
    assert plan_digest(other) != plan_digest(PLAN)
