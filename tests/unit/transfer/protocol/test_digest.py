"""What a digest notices: anything that may happen to bytes on their way."""

import dataclasses

import numpy as np
import pytest

from tests.support.transfer.transfer_plans import small_plan
from transfer.protocol.digest import DIGEST_BYTES, PAGE_BYTES, message_digest, page_hashes, plan_digest

PLAN = small_plan()
FIRST = plan_digest(PLAN)
FIELDS = bytes(range(200))
LENGTHS = [0, 1, 300, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 77]


def digest(payload):
    return message_digest(FIRST, FIELDS, page_hashes(payload))


def random_bytes(length):
    return np.random.default_rng(length).integers(0, 256, length, np.uint8)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_summary_is_16_bytes_a_page_and_the_tail(length):
    tail = length % PAGE_BYTES
    payload = random_bytes(length)
    assert len(page_hashes(payload)) == 16 * (length // PAGE_BYTES) + tail
    assert page_hashes(payload).endswith(payload[length - tail :].tobytes())
    assert len(digest(payload)) == DIGEST_BYTES


def test_every_flipped_bit_of_the_envelope_changes_the_digest():
    hashes = page_hashes(random_bytes(300))
    whole = message_digest(FIRST, FIELDS, hashes)
    for bit in range(8 * len(FIELDS)):
        flipped = bytearray(FIELDS)
        flipped[bit // 8] ^= 1 << bit % 8
        assert message_digest(FIRST, bytes(flipped), hashes) != whole


@pytest.mark.parametrize("length", [300, PAGE_BYTES + 40])
def test_every_flipped_bit_of_the_payload_changes_the_digest(length):
    payload = random_bytes(length)
    whole = digest(payload)
    seen = {whole}
    for bit in range(8 * length):
        payload[bit // 8] ^= np.uint8(1 << bit % 8)
        seen.add(digest(payload))
        payload[bit // 8] ^= np.uint8(1 << bit % 8)
    assert digest(payload) == whole
    assert len(seen) == 8 * length + 1


@pytest.mark.parametrize("size", [1, 8, 64, 1024, PAGE_BYTES])
def test_swapped_pieces_change_the_digest(size):
    payload = random_bytes(4 * PAGE_BYTES)
    whole = digest(payload)
    for other in range(size, len(payload), max(size, len(payload) // 64)):
        swapped = payload.copy()
        swapped[:size], swapped[other : other + size] = payload[other : other + size], payload[:size]
        assert np.array_equal(swapped, payload) or digest(swapped) != whole


def test_zeroed_shifted_and_shortened_payloads_change_the_digest():
    payload = random_bytes(4 * PAGE_BYTES + 80)
    damaged = [payload[:-1], payload[1:], payload[: 4 * PAGE_BYTES], np.roll(payload, 8), np.zeros_like(payload)]
    for page in range(4):
        zeroed = payload.copy()
        zeroed[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = 0
        damaged.append(zeroed)
    zeros = [np.zeros(length, np.uint8) for length in LENGTHS]
    assert len({digest(data) for data in [payload, *damaged, *zeros]}) == 1 + len(damaged) + len(zeros)


def test_a_digest_speaks_for_all_messages_before_it():
    hashes = page_hashes(random_bytes(300))
    one = message_digest(FIRST, b"a" * 200, hashes)
    other = message_digest(FIRST, b"b" * 200, hashes)
    assert message_digest(one, FIELDS, hashes) != message_digest(other, FIELDS, hashes)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PLAN)])
def test_plans_that_differ_in_any_number_never_agree_on_a_digest(field):
    other = dataclasses.replace(PLAN, **{field: getattr(PLAN, field) + 1})
    assert plan_digest(other) != plan_digest(PLAN)
