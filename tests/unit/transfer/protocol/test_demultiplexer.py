"""A part goes to the session of its nonce, or nowhere."""

import pytest

from transfer.protocol.demultiplexer import Demultiplexer
from transfer.protocol.envelope import Tag
from transfer.protocol.errors import IllegalTransition


def test_a_part_goes_by_its_nonce_whatever_its_index() -> None:
    demultiplexer: Demultiplexer[str] = Demultiplexer()
    demultiplexer.expect(7, "seven")
    demultiplexer.expect(8, "eight")
    assert [demultiplexer.destination(Tag(nonce, 0, False)) for nonce in (7, 8, 9)] == ["seven", "eight", None]
    assert demultiplexer.destination(Tag(8, 31, True)) == "eight"


def test_what_comes_after_its_session_ended_goes_nowhere() -> None:
    demultiplexer: Demultiplexer[str] = Demultiplexer()
    demultiplexer.expect(7, "seven")
    demultiplexer.forget(7)
    assert demultiplexer.destination(Tag(7, 0, False)) is None
    demultiplexer.forget(7)
    assert len(demultiplexer) == 0


def test_a_nonce_is_expected_once_at_a_time() -> None:
    demultiplexer: Demultiplexer[str] = Demultiplexer()
    demultiplexer.expect(7, "first")
    with pytest.raises(IllegalTransition, match="fresh one"):
        demultiplexer.expect(7, "second")
    assert demultiplexer.destination(Tag(7, 0, True)) == "first"
