"""The choice of a node for a running request that moves."""

from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate, Load
from router.routing.receivers import choose_receiver
from tests.support.router.candidates import candidate

FREE = Load(free_tokens=1000, free_slots=10)


def chosen(*nodes: Candidate, sent: dict[str, int] | None = None, num_tokens: int = 100) -> str | None:
    node = choose_receiver(nodes, "d0", num_tokens, sent or {})
    return None if node is None else node.name


def test_the_node_with_the_fewest_answers_is_chosen_and_never_the_sender() -> None:
    idle, busy = candidate("d0", load=FREE), candidate("d1", load=FREE._replace(num_decoding=3))
    coming = candidate("d2", load=FREE._replace(num_decoding=1, num_coming=1))
    assert chosen(idle, busy, coming) == "d2"
    assert chosen(idle) is None


def test_requests_that_were_just_sent_count() -> None:
    nodes = candidate("d1", load=FREE), candidate("d2", load=FREE._replace(num_decoding=1))
    assert [chosen(*nodes, sent={"d1": count}) for count in (0, 1, 2)] == ["d1", "d1", "d2"]


def test_a_node_without_room_is_not_asked() -> None:
    full = candidate("d1", load=FREE._replace(free_slots=1))
    small = candidate("d2", load=FREE._replace(free_tokens=150))
    assert chosen(full, small) == "d1"
    assert chosen(full, small, sent={"d1": 1}) == "d2"
    assert chosen(full, small, sent={"d1": 1, "d2": 1}) is None


def test_nodes_that_are_there_to_decode_come_first() -> None:
    prefill = candidate("d1", Role.PREFILL, load=FREE)
    decode = candidate("d2", Role.DECODE, load=FREE._replace(num_decoding=5))
    assert chosen(prefill, decode) == "d2"
    assert chosen(prefill) == "d1"
    assert chosen(prefill._replace(may_decode=False)) is None
