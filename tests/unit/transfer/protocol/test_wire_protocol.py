"""docs/wire-protocol.md has a peer's envelope in a few lines of its own: it must be ours, to the last byte."""

import re
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer.protocol.authentication import Verifier, sign
from transfer.protocol.digest import message_digest, page_hashes, plan_digest
from transfer.protocol.envelope import ENVELOPE_BYTES, Envelope
from transfer.protocol.plan import TransferPlan

DOCUMENT = Path(__file__).parents[4] / "docs" / "wire-protocol.md"
CONNECTION, SECRET = 0x0123456789ABCDEF, bytes(range(32))


@pytest.fixture(scope="module")
def documented() -> Callable[..., bytes]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["envelope"]


@pytest.mark.parametrize(("first_block", "first_token"), [(0, 7), (3, None)], ids=["blocks and state", "a state alone"])
def test_the_documented_envelope_is_the_one_that_is_sent(documented, first_block: int, first_token: int | None) -> None:
    plan = TransferPlan(77, 40, first_block, 16, 6000, 5001, 1 << 20)
    (message,) = plan.messages
    payload = np.random.default_rng(0).integers(0, 256, message.num_bytes, np.uint8)
    theirs = documented(astuple(plan), CONNECTION, payload.tobytes(), first_token, SECRET)
    fields = Envelope.of(plan.nonce, CONNECTION, message, first_token).fields()
    assert theirs == sign(fields + message_digest(plan_digest(plan), fields, page_hashes(payload)), SECRET)
    admitted = Verifier(SECRET).verify_envelope(theirs)
    assert (
        admitted.describes(plan.nonce, message)
        and admitted.first_token == first_token
        and len(theirs) == ENVELOPE_BYTES
    )


def test_the_documented_table_has_every_byte_of_an_envelope() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    ends = [int(offset) + int(size) for offset, size in rows]
    assert [int(offset) for offset, _ in rows] == [0, *ends[:-1]]
    assert ends[-1] == ENVELOPE_BYTES
