"""Who may take part in a session: MACs, and the verifier that checks them."""

from dataclasses import fields, replace

import pytest

from tests.support.transfer.transfer_plans import secret_of, small_plan
from transfer.protocol.authentication import SECRET_BYTES, Verifier, new_secret, require_secret, sign
from transfer.protocol.envelope import ENVELOPE_BYTES, MAC_BYTES, Envelope
from transfer.protocol.errors import MalformedEnvelope, NoSecret, Unauthenticated

PLAN = small_plan()
SECRET = secret_of(PLAN.nonce)
ENVELOPE = replace(Envelope.of(PLAN.nonce, 5, PLAN.messages[0]), digest=bytes(range(16)))


def header(envelope: Envelope) -> bytes:
    return envelope.fields() + envelope.digest


DATA = sign(header(ENVELOPE), SECRET)


def refusal(verifier: Verifier, data: bytes) -> str:
    with pytest.raises(Unauthenticated) as refused:
        verifier.verify_envelope(data)
    return refused.value.cause


def test_an_envelope_signed_with_the_secret_is_admitted():
    assert Verifier(SECRET).verify_envelope(DATA) == ENVELOPE


def test_every_flipped_bit_is_refused():
    verifier = Verifier(SECRET)
    for bit in range(8 * ENVELOPE_BYTES):
        changed = bytearray(DATA)
        changed[bit // 8] ^= 1 << bit % 8
        assert refusal(verifier, bytes(changed)) == "wrong_mac"
    verifier.verify_envelope(DATA)


@pytest.mark.parametrize("secret", [secret_of(PLAN.nonce + 1), bytes(SECRET_BYTES), bytes([*SECRET[:-1], 8])])
def test_an_envelope_signed_with_another_secret_is_refused(secret):
    assert refusal(Verifier(SECRET), sign(header(ENVELOPE), secret)) == "wrong_mac"


@pytest.mark.parametrize(
    "change",
    [{"digest": bytes(16)}, {"connection": 6}, {"first_token": 0}, {"index": 1}, {"nonce": 8}, {"state_bytes": 1}],
)
def test_the_mac_covers_every_field_and_the_digest(change):
    changed = header(replace(ENVELOPE, **change)) + DATA[-MAC_BYTES:]
    assert refusal(Verifier(SECRET), changed) == "wrong_mac"
    assert set(change) <= {field.name for field in fields(Envelope)}


def test_an_envelope_of_an_older_release_is_refused_with_the_remedy():
    with pytest.raises(Unauthenticated, match="72 bytes, not 88: run one release on all nodes"):
        Verifier(SECRET).verify_envelope(DATA[:-MAC_BYTES])


def test_a_signed_envelope_of_another_protocol_is_the_sessions_to_judge():
    data = header(ENVELOPE)
    with pytest.raises(MalformedEnvelope, match="version 9"):
        Verifier(SECRET).verify_envelope(sign(data[:4] + b"\x09" + data[5:], SECRET))


def test_a_payload_is_admitted_once_behind_its_envelope():
    verifier = Verifier(SECRET)
    for _ in range(2):
        for index in (0, 1):
            with pytest.raises(Unauthenticated, match="no_envelope: payload"):
                verifier.verify_payload(index)
        verifier.verify_envelope(DATA)
        with pytest.raises(Unauthenticated, match="payload 1"):
            verifier.verify_payload(1)
        verifier.verify_payload(0)


def test_a_refused_envelope_announces_nothing_and_takes_nothing_back():
    verifier = Verifier(SECRET)
    refusal(verifier, sign(header(ENVELOPE), bytes(SECRET_BYTES)))
    with pytest.raises(Unauthenticated):
        verifier.verify_payload(0)
    verifier.verify_envelope(DATA)
    refusal(verifier, sign(header(replace(ENVELOPE, index=1)), bytes(SECRET_BYTES)))
    verifier.verify_payload(0)


def test_secrets_are_256_bits_and_do_not_repeat():
    drawn = {new_secret() for _ in range(100)}
    assert len(drawn) == 100
    assert {len(secret) for secret in drawn} == {SECRET_BYTES} == {256 // 8}


@pytest.mark.parametrize("secret", [b"", SECRET[:-1], SECRET + b"x"])
def test_a_reservation_without_a_whole_secret_is_refused_with_the_remedy(secret):
    for ask in (require_secret, Verifier):
        with pytest.raises(NoSecret, match=f"has {len(secret)} bytes, not 32.*run one release on all nodes"):
            ask(secret)


def test_no_error_and_no_repr_tells_the_secret():
    secret = b"only the two nodes may know this"
    verifier = Verifier(secret)
    said = [repr(verifier), repr(sign(header(ENVELOPE), secret))]
    for data in (DATA, DATA[1:]):
        with pytest.raises(Unauthenticated) as refused:
            verifier.verify_envelope(data)
        said.append(str(refused.value))
    with pytest.raises(NoSecret) as missing:
        require_secret(secret[1:])
    assert not any("two nodes may know" in text for text in [*said, str(missing.value)])
