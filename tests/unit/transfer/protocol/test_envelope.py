"""What is on the wire: tags that route, envelopes that describe."""

from dataclasses import replace

import pytest

from tests.support.transfer.transfer_plans import secret_of, small_plan
from transfer.protocol.authentication import sign
from transfer.protocol.envelope import ENVELOPE_BYTES, HEADER_BYTES, Envelope, Tag, new_nonce
from transfer.protocol.errors import LayoutMismatch, MalformedEnvelope
from transfer.protocol.plan import MAX_MESSAGES, NONCE_BITS

PLAN = small_plan()
ENVELOPE = Envelope.of(PLAN.nonce, 0xFEED, PLAN.messages[2], 42)
DIGEST = bytes(range(16))
HEADER = ENVELOPE.fields() + DIGEST


@pytest.mark.parametrize("nonce", [1, (1 << NONCE_BITS) - 1])
@pytest.mark.parametrize("index", [0, 1, MAX_MESSAGES - 1])
@pytest.mark.parametrize("is_payload", [False, True])
def test_a_tag_is_64_bits_and_comes_back(nonce, index, is_payload):
    tag = Tag(nonce, index, is_payload)
    assert int(tag) < 1 << 64
    assert Tag.of(int(tag)) == tag


def test_an_envelope_comes_back_whole_with_its_digest():
    assert len(HEADER) == HEADER_BYTES
    assert Envelope.decode(HEADER) == replace(ENVELOPE, digest=DIGEST)
    assert len(sign(HEADER, secret_of(PLAN.nonce))) == ENVELOPE_BYTES


def test_a_first_token_is_any_of_32_bits_and_zero_is_not_none():
    for first_token in (None, 0, 42, 2**32 - 1):
        fields = Envelope.of(7, 1, PLAN.messages[2], first_token).fields()
        assert Envelope.decode(fields + DIGEST).first_token == first_token


@pytest.mark.parametrize("first_token", [-1, 2**32])
def test_a_first_token_of_more_than_32_bits_is_refused(first_token):
    with pytest.raises(LayoutMismatch, match=f"first_token {first_token} is not in 0"):
        Envelope.of(7, 1, PLAN.messages[2], first_token)


@pytest.mark.parametrize("header", [ENVELOPE.fields(), HEADER[:-1], HEADER + b"0"])
def test_fields_are_never_sent_without_their_digest(header):
    with pytest.raises(MalformedEnvelope, match="it is the fields and the digest"):
        sign(header, secret_of(7))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (HEADER[:-1], f"{HEADER_BYTES - 1} bytes"),
        (b"XXXX" + HEADER[4:], "magic b'XXXX'"),
        (HEADER[:4] + b"\x09" + HEADER[5:], "version 9"),
        (HEADER[:7] + b"\x01" + HEADER[8:], "must be zero"),
        (HEADER[:5] + b"\x00" + HEADER[6:], "must be zero"),  # a first token that it says it has not
        (HEADER[:5] + b"\xff" + HEADER[6:], "has_first_token is 255"),
    ],
    ids=["too short", "magic", "version", "padding", "token without its flag", "flag"],
)
def test_bytes_that_are_no_envelope_of_ours_are_refused(data, said):
    with pytest.raises(MalformedEnvelope, match=said):
        Envelope.decode(data)


def test_nonces_are_in_range_and_do_not_repeat():
    nonces = {new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert all(0 < nonce < 1 << NONCE_BITS for nonce in nonces)
