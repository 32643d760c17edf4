"""Who may take part in a session: proofs, and the gate that asks for them."""

from dataclasses import fields, replace

import pytest

from tests.support.transfer.transfer_plans import secret_of, small_plan
from transfer.protocol.authentication import SECRET_BYTES, Gate, new_secret, proven, require_secret
from transfer.protocol.envelope import ENVELOPE_BYTES, PROOF_BYTES, Envelope
from transfer.protocol.errors import MalformedEnvelope, NoSecret, Unauthenticated

PLAN = small_plan()
SECRET = secret_of(PLAN.nonce)
ENVELOPE = replace(Envelope.of(PLAN.nonce, 5, PLAN.messages[0], b""), digest=bytes(range(16)))


def claim(envelope: Envelope) -> bytes:
    return envelope.fields() + envelope.digest


DATA = proven(claim(ENVELOPE), SECRET)


def refusal(gate: Gate, data: bytes) -> str:
    with pytest.raises(Unauthenticated) as refused:
        gate.admit_envelope(data)
    return refused.value.cause


def test_who_knows_the_secret_is_admitted():
    assert Gate(SECRET).admit_envelope(DATA) == ENVELOPE


def test_every_flipped_bit_is_refused():
    gate = Gate(SECRET)
    for bit in range(8 * ENVELOPE_BYTES):
        changed = bytearray(DATA)
        changed[bit // 8] ^= 1 << bit % 8
        assert refusal(gate, bytes(changed)) == "wrong_proof"
    gate.admit_envelope(DATA)


@pytest.mark.parametrize("secret", [secret_of(PLAN.nonce + 1), bytes(SECRET_BYTES), bytes([*SECRET[:-1], 8])])
def test_another_secret_proves_nothing(secret):
    assert refusal(Gate(SECRET), proven(claim(ENVELOPE), secret)) == "wrong_proof"


@pytest.mark.parametrize(
    "change", [{"digest": bytes(16)}, {"connection": 6}, {"note": b"!"}, {"index": 1}, {"nonce": 8}, {"state_bytes": 1}]
)
def test_a_proof_speaks_for_every_field_and_for_the_digest(change):
    changed = claim(replace(ENVELOPE, **change)) + DATA[-PROOF_BYTES:]
    assert refusal(Gate(SECRET), changed) == "wrong_proof"
    assert set(change) <= {field.name for field in fields(Envelope)}


def test_an_envelope_of_an_older_release_is_refused_with_the_remedy():
    with pytest.raises(Unauthenticated, match="136 bytes, not 152: run one release on all nodes"):
        Gate(SECRET).admit_envelope(DATA[:-PROOF_BYTES])


def test_a_proven_envelope_of_another_protocol_is_the_sessions_to_judge():
    data = claim(ENVELOPE)
    with pytest.raises(MalformedEnvelope, match="version 9"):
        Gate(SECRET).admit_envelope(proven(data[:4] + b"\x09" + data[5:], SECRET))


def test_a_payload_is_admitted_once_behind_its_envelope():
    gate = Gate(SECRET)
    for _ in range(2):
        for index in (0, 1):
            with pytest.raises(Unauthenticated, match="no_envelope: payload"):
                gate.admit_payload(index)
        gate.admit_envelope(DATA)
        with pytest.raises(Unauthenticated, match="payload 1"):
            gate.admit_payload(1)
        gate.admit_payload(0)


def test_a_refused_envelope_announces_nothing_and_takes_nothing_back():
    gate = Gate(SECRET)
    refusal(gate, proven(claim(ENVELOPE), bytes(SECRET_BYTES)))
    with pytest.raises(Unauthenticated):
        gate.admit_payload(0)
    gate.admit_envelope(DATA)
    refusal(gate, proven(claim(replace(ENVELOPE, index=1)), bytes(SECRET_BYTES)))
    gate.admit_payload(0)


def test_secrets_are_256_bits_and_do_not_repeat():
    drawn = {new_secret() for _ in range(100)}
    assert len(drawn) == 100
    assert {len(secret) for secret in drawn} == {SECRET_BYTES} == {256 // 8}


@pytest.mark.parametrize("secret", [b"", SECRET[:-1], SECRET + b"x"])
def test_a_reservation_without_a_whole_secret_is_refused_with_the_remedy(secret):
    for ask in (require_secret, Gate):
        with pytest.raises(NoSecret, match=f"has {len(secret)} bytes, not 32.*run one release on all nodes"):
            ask(secret)


def test_no_error_and_no_repr_tells_the_secret():
    secret = b"only the two nodes may know this"
    gate = Gate(secret)
    said = [repr(gate), repr(proven(claim(ENVELOPE), secret))]
    for data in (DATA, DATA[1:]):
        with pytest.raises(Unauthenticated) as refused:
            gate.admit_envelope(data)
        said.append(str(refused.value))
    with pytest.raises(NoSecret) as missing:
        require_secret(secret[1:])
    assert not any("two nodes may know" in text for text in [*said, str(missing.value)])
