"""A part goes to the session of its nonce, or nowhere."""

import pytest

from transfer.protocol.envelope import Tag
from transfer.protocol.errors import IllegalTransition
from transfer.protocol.routing import Routes


def test_a_part_goes_by_its_nonce_whatever_its_index() -> None:
    routes: Routes[str] = Routes()
    routes.expect(7, "seven")
    routes.expect(8, "eight")
    assert [routes.destination(Tag(nonce, 0, False)) for nonce in (7, 8, 9)] == ["seven", "eight", None]
    assert routes.destination(Tag(8, 31, True)) == "eight"


def test_what_comes_after_its_session_ended_goes_nowhere() -> None:
    routes: Routes[str] = Routes()
    routes.expect(7, "seven")
    routes.forget(7)
    assert routes.destination(Tag(7, 0, False)) is None
    routes.forget(7)
    assert len(routes) == 0


def test_a_nonce_is_expected_once_at_a_time() -> None:
    routes: Routes[str] = Routes()
    routes.expect(7, "first")
    with pytest.raises(IllegalTransition, match="fresh one"):
        routes.expect(7, "second")
    assert routes.destination(Tag(7, 0, True)) == "first"
